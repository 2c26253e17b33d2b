"""`pxrs demo`: shows the promises of a consumer group with real processes on a real store.

This module holds the command; the rest is loaded when it runs. `play` has the scenes, `processes`
the producer and the consumers, `judge` what is checked, `screen` what is printed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from pxrs.cli.options import FAILED, SIGNALLED, Settings, shared


@click.command(short_help="Kill, freeze and add consumers, then check every message.")
@click.option(
    "--engine",
    metavar="URL",
    help="The store; a file keeps what it can't.  [default: SQLite in a temp folder]",
)
@click.option(
    "--nodes",
    type=click.IntRange(2, 5),
    help="Serve the store by so many nodes, reach it through them, and kill one.",
)
@click.option("--plain", is_flag=True, help="Print lines for a log instead of a live table.")
@click.option(
    "--at-least-once",
    is_flag=True,
    help="Commit checkpoints after the ledger, as a store without transactions must.",
)
@click.option("--pace", type=click.FloatRange(0, 5), default=2.5, hidden=True)
@click.option("--burst", type=click.IntRange(1, 1_000_000), default=60_000, hidden=True)
@click.option("--round", "round_size", type=click.IntRange(1, 1000), default=64, hidden=True)
@shared
def demo(
    settings: Settings,
    engine: str | None,
    nodes: int | None,
    plain: bool,
    at_least_once: bool,
    pace: float,
    burst: int,
    round_size: int,
) -> None:
    """Kill, freeze and add consumers, then check every message.

    It takes about 25 seconds, asks nothing and leaves nothing behind. The exit code is 1 if
    anything was not proved.
    """
    from pxrs.cli.demo.play import Pace, perform
    from pxrs.cli.demo.screen import choose_view, print_outcome

    view = choose_view(as_json=settings.json, plain=plain)
    with _cleaning_up():
        outcome = perform(
            view,
            Pace(pace, burst, round_size),
            engine=engine or settings.url,
            transactions=not at_least_once,
            nodes=nodes or 0,
        )
    print_outcome(outcome, as_json=settings.json)
    if not outcome.proved:
        sys.exit(FAILED)


@contextmanager
def _cleaning_up() -> Iterator[None]:
    """Lets SIGTERM and a closed terminal end the demo as Ctrl-C does: with everything removed."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(SIGNALLED + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
