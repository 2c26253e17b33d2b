"""`pxrs doctor`: finds what is wrong with a store, and says how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pxrs.cli.options import FAILED, Settings, shared
from pxrs.cli.show import console, print_json

if TYPE_CHECKING:
    from pxrs.operations.doctor import Examined

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


@click.command(short_help="Examine the store at URL, and say how to fix it.")
@click.argument("place", metavar="[URL]", required=False)
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings, too.")
@shared
def doctor(settings: Settings, place: str | None, strict: bool) -> None:
    """Examine the store at URL: version, permissions, clock, durability, wake-ups, transactions.

    It writes a few records, a log and a queue of its own, and removes them again. Exit code 0: the
    store works, maybe with warnings; 1: it has a problem.
    """
    from pxrs.operations.doctor import examine

    diagnosis = examine(place or settings.place, create=False)
    if settings.json:
        print_json({"worst": diagnosis.worst, "places": diagnosis.places})
    else:
        for examined in diagnosis.places:
            _show(examined)
    failing = ("warning", "problem") if strict else ("problem",)
    if diagnosis.worst in failing:
        raise SystemExit(FAILED)


def _show(examined: Examined) -> None:
    out = console()
    out.print(examined.place, style="bold")
    for finding in examined.findings:
        out.print(f"  {finding.level:8}", style=_STYLES[finding.level], end="")
        out.print(f"{finding.check:20}{finding.says}")
        if finding.mend:
            out.print(f"{'':30}→ {finding.mend}")
