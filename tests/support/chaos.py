"""`./run chaos`: a group while the three nodes of an engine are split, frozen and killed.

`etcd`: it has the group's records. `nats`: it has the messages, and there are three producers, too.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from support import split_group, split_log


class Site(NamedTuple):
    """What is broken, in which ways, and what is to hold all the same."""

    build: Callable[[Path], Any]
    faults: Sequence[Callable[[Any, Random], None]]
    verdict: str


SITES = {
    "etcd": Site(
        lambda folder: split_group.SplitGroup(folder, to_be_killed=True),
        split_group.FAULTS,
        "none lost, one owner per epoch, no checkpoint went back",
    ),
    "nats": Site(
        split_log.SplitLog,
        split_log.FAULTS,
        "each where it was said to be, once and in order; none lost, one owner per epoch, no "
        "checkpoint went back",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints what happens; ends with an AssertionError that says what was broken."""
    parser = argparse.ArgumentParser(prog="./run chaos", description=__doc__)
    parser.add_argument("--engine", choices=SITES, help="only this one")
    parser.add_argument("--rounds", type=int, default=20, help="faults, one after the other")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    given = parser.parse_args(argv)
    for name in [given.engine] if given.engine else SITES:
        run(name, given.rounds, given.seed)


def run(name: str, rounds: int, seed: int) -> None:
    site, random = SITES[name], Random(seed)
    print(f"{name}: seed {seed}, {rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        group = site.build(Path(folder))
        try:
            for number in range(rounds):
                group.settle()
                fault = random.choice(site.faults)
                began = time.monotonic()
                fault(group, random)
                group.network.heal(reset=random.random() < 0.5)
                took = time.monotonic() - began
                print(
                    f"{number + 1:4} {fault.__name__:15} {took:5.1f} s  {group.sent} sent",
                    flush=True,
                )
            group.settle()
            group.finish()
            group.judge()
        except BaseException:
            print(f"failed; again: ./run chaos --engine {name} --seed {seed} --rounds {rounds}")
            raise
        finally:
            group.close()
    print(f"{group.sent} messages: {site.verdict}")


if __name__ == "__main__":
    main()
