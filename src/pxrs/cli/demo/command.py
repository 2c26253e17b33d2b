"""The demo's command; everything else is loaded when it runs."""

from __future__ import annotations

import sys

import click

from pxrs.cli.failures import FAILED
from pxrs.cli.options import Settings, shared


@click.command()
@click.option("--engine", metavar="URL", help="Where to run.  [default: SQLite in a temp folder]")
@click.option("--plain", is_flag=True, help="Lines for a log instead of a live table.")
@click.option("--messages", type=click.IntRange(min=200), default=400_000, hidden=True)
@click.option("--seconds", type=click.FloatRange(min=0.5, max=30), default=10.0, hidden=True)
@shared
@click.pass_obj
def demo(
    settings: Settings, engine: str | None, plain: bool, messages: int, seconds: float
) -> None:
    """Three producers, a follower, a kill -9, and a check of every message. About 15 seconds.

    Asks nothing and leaves nothing behind.
    """
    from pxrs.cli.demo.stage import Plan, perform
    from pxrs.cli.demo.views import choose_view

    view = choose_view(as_json=settings.json, plain=plain)
    outcome = perform(Plan(engine or settings.url, messages, seconds), view)
    view.finish(outcome)
    if not outcome.proved:
        sys.exit(FAILED)
