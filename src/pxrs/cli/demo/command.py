"""The demo's command; everything else is loaded when it runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from pxrs.cli.options import FAILED, Settings, shared


@click.command(short_help="Kill, freeze and add consumers, then check every message.")
@click.option(
    "--engine",
    metavar="URL",
    help="Where to run; what it does not keep goes to a file.  [default: SQLite in a temp folder]",
)
@click.option("--plain", is_flag=True, help="Lines for a log instead of a live table.")
@click.option(
    "--at-least-once",
    is_flag=True,
    help="Commit checkpoints apart from the ledger, as a store without transactions has to.",
)
@click.option("--pace", type=click.FloatRange(0, 5), default=2.5, hidden=True)
@click.option("--burst", type=click.IntRange(1, 1_000_000), default=60_000, hidden=True)
@click.option("--round", "round_size", type=click.IntRange(1, 1000), default=64, hidden=True)
@shared
def demo(
    settings: Settings,
    engine: str | None,
    plain: bool,
    at_least_once: bool,
    pace: float,
    burst: int,
    round_size: int,
) -> None:
    """Three consumers, a kill -9, a join, a frozen one, and a check of every message.

    About 25 seconds; asks nothing and leaves nothing behind. Exit code 1 if anything was not
    proved.
    """
    from pxrs.cli.demo.perform import Plan, perform
    from pxrs.cli.demo.scenes import Pace
    from pxrs.cli.demo.views import choose_view

    view = choose_view(as_json=settings.json, plain=plain)
    with _cleaning_up():
        outcome = perform(
            Plan(engine or settings.url, not at_least_once, Pace(pace, burst, round_size)), view
        )
    view.finish(outcome)
    if not outcome.proved:
        sys.exit(FAILED)


@contextmanager
def _cleaning_up() -> Iterator[None]:
    """A closed terminal or a SIGTERM ends it like Ctrl-C does: nothing is left behind."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
