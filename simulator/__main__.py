"""`./run sim`: many seeds, or one of them with all that happened."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import click

from simulator import failures, groups, producers, queues, words

_CHUNK = 20

Simulation = Callable[..., None]
_SIMULATIONS: dict[str, Simulation] = {
    "groups": groups.simulate,
    "queues": queues.simulate,
    "producers": producers.simulate,
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", default=1000, show_default=True, help="How many seeds to run.")
@click.option("--start", default=0, show_default=True, help="The first of them.")
@click.option("--only", type=click.Choice(list(_SIMULATIONS)), help="Only one of the three.")
@click.option("--members", type=int, help="How many members groups start with, always.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="Processes.")
@click.option("--seed", type=int, help="Run only this one.")
@click.option("--trace", is_flag=True, help="With --seed: print everything that happens.")
def main(
    seeds: int,
    start: int,
    only: str | None,
    members: int | None,
    jobs: int,
    seed: int | None,
    trace: bool,
) -> None:
    """Simulate groups, queues and producers: processes crash and freeze, and the store fails.

    The same seed is the same run, everywhere. Ends with 1 if a promise was broken.
    """
    failed = False
    for what in (only,) if only else _SIMULATIONS:
        simulation = _SIMULATIONS[what]
        if what == "groups":
            simulation = partial(simulation, members=members)
        if seed is not None:
            failed |= _one(what, simulation, seed, trace=trace)
        else:
            option = f" --members {members}" if members is not None and what == "groups" else ""
            failed |= _many(what, simulation, range(start, start + seeds), jobs, option)
    sys.exit(1 if failed else 0)


def _one(what: str, simulation: Simulation, seed: int, *, trace: bool) -> bool:
    try:
        simulation(seed, trace=click.echo if trace else None)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was looked for
        if trace and not isinstance(error, AssertionError):
            traceback.print_exc()
        click.echo(f"{what}, seed {seed}: {words(error)}")
        return True
    click.echo(f"{what}, seed {seed}: fine")
    return False


def _many(what: str, simulation: Simulation, seeds: range, jobs: int, option: str) -> bool:
    began, done, broken = time.monotonic(), 0, 0
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for chunk, failed in zip(
            chunks, pool.map(failures, chunks, [simulation] * len(chunks)), strict=True
        ):
            done += len(chunk)
            broken += len(failed)
            for seed, why in failed:
                _progress("")
                click.echo(f"{what}, seed {seed}: {why}")
                click.echo(f"  ./run sim --only {what} --seed {seed} --trace{option}")
            rate = done / (time.monotonic() - began)
            _progress(f"{what}: {done} of {len(seeds)} seeds, {broken} failed, {rate:.0f} seeds/s")
    _progress("")
    rate = done / (time.monotonic() - began)
    click.echo(f"{what}: {done} seeds from {seeds.start} on, {broken} failed, {rate:.0f} seeds/s")
    return broken > 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


if __name__ == "__main__":
    main()
