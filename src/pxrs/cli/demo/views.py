"""How the demo looks: a live table, lines for a log, or one JSON document."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

import click

from pxrs.cli.demo.perform import Outcome
from pxrs.cli.demo.script import PARTITIONS
from pxrs.cli.demo.stage import Moment, Proof, State, View
from pxrs.cli.show import console, print_json, table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

_COLOURS = {"A": "cyan", "B": "magenta", "C": "yellow", "D": "green"}
_STATES: dict[State, str] = {
    "starting": "dim",
    "up": "",
    "holding": "",
    "frozen": "bold blue",
    "killed": "bold red",
    "left": "dim",
}
# How long a partition that has changed hands is marked, in seconds.
_MARKED = 2.0


class DemoView(View, Protocol):
    def finish(self, outcome: Outcome) -> None: ...


def introduction(*, once: bool) -> str:
    """What is going to be seen."""
    how = "in one transaction with its checkpoint" if once else "then commits its checkpoint"
    return (
        f"{PARTITIONS} partitions, one producer, a group of consumers; each is a process.\n"
        f"A consumer enters messages in a ledger, {how}."
    )


def choose_view(*, as_json: bool, plain: bool) -> DemoView:
    if as_json:
        return JsonView()
    return PlainView() if plain or not sys.stdout.isatty() else LiveView()


class JsonView:
    """Silent until the end."""

    every = 1.0

    def open(self, where: str, *, once: bool) -> None: ...

    def show(self, moment: Moment) -> None: ...

    def scene(self, title: str) -> None: ...

    def proof(self, proof: Proof) -> None: ...

    def close(self) -> None: ...

    def finish(self, outcome: Outcome) -> None:
        print_json(outcome)


class PlainView:
    """A line a second, and one for every scene and what it showed."""

    every = 1.0

    def __init__(self) -> None:
        self._console = console()

    def open(self, where: str, *, once: bool) -> None:
        click.echo(f"store {where}")
        click.echo(introduction(once=once))

    def show(self, moment: Moment) -> None:
        owners = "".join(owner or "·" for owner in moment.owners)
        epochs = " ".join(str(row.epoch) for row in moment.picture.rows)
        click.echo(
            f"{moment.seconds:5.1f} s  owners {owners}  epochs {epochs}  "
            f"{moment.picture.handled:>8,} handled  lag {moment.picture.lag:,}"
        )

    def scene(self, title: str) -> None:
        click.echo(f"── {title}")

    def proof(self, proof: Proof) -> None:
        _print_proof(self._console, proof)

    def close(self) -> None: ...

    def finish(self, outcome: Outcome) -> None:
        _print_outcome(self._console, outcome)


class LiveView:
    """A table that moves; what was shown piles up above it."""

    every = 0.125

    def __init__(self) -> None:
        self._console = console()
        self._live: Live | None = None
        self._owners: list[str | None] = [None] * PARTITIONS
        self._moves: dict[int, tuple[float, str]] = {}

    def open(self, where: str, *, once: bool) -> None:
        from rich.live import Live

        self._console.print(f"store {where}", style="dim")
        self._console.print(introduction(once=once))
        self._console.print()
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def show(self, moment: Moment) -> None:
        for number, owner in enumerate(moment.owners):
            before = self._owners[number]
            if owner is not None and owner != before:
                self._owners[number] = owner
                if before is not None:
                    self._moves[number] = (moment.seconds + _MARKED, before)
        if self._live is not None:
            self._live.update(self._picture(moment), refresh=True)

    def scene(self, title: str) -> None: ...

    def proof(self, proof: Proof) -> None:
        _print_proof(self._console, proof)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._console.print()

    def finish(self, outcome: Outcome) -> None:
        _print_outcome(self._console, outcome)

    def _picture(self, moment: Moment) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        rows = table(
            "partition", "owner", "", "epoch", "checkpoint", "end", "lag", left=("owner", "")
        )
        for number, (row, owner) in enumerate(zip(moment.picture.rows, moment.owners, strict=True)):
            rows.add_row(
                str(number),
                Text(owner or "–", f"bold {_COLOURS.get(owner or '', 'dim')}"),
                self._mark(number, moment.seconds),
                str(row.epoch),
                f"{row.checkpoint:,}",
                f"{row.end:,}",
                Text(f"{row.lag:,}", "" if row.lag else "dim"),
            )
        rows.add_row(
            "all", "", "", "", f"{moment.picture.handled:,}", f"{moment.picture.end:,}",
            f"{moment.picture.lag:,}", style="bold",
        )  # fmt: skip
        title = Text(f"{moment.title}", "bold")
        clock = Text(f"{moment.seconds:.0f} s   {moment.rate:,.0f} msg/s   ", "dim")
        return Group("", title, "", rows, "", clock + _members(moment))

    def _mark(self, number: int, now: float) -> Text:
        from rich.text import Text

        until, before = self._moves.get(number, (0.0, ""))
        text = f"from {before}" if now < until else ""
        return Text(f"{text:<6}", "dim")


def _members(moment: Moment) -> Text:
    """Who is there, and in what state."""
    from rich.text import Text

    line = Text()
    for letter, state in moment.states.items():
        owned = moment.owners.count(letter)
        words = f"has {owned}" if state == "up" else state
        line += Text(f"{letter} ", f"bold {_COLOURS.get(letter, '')}")
        line += Text(f"{words}   ", _STATES[state])
    return line


def _print_proof(out: Console, proof: Proof) -> None:
    from rich.text import Text

    good, bad = ("✓", "✗") if out.encoding.startswith("utf") else ("ok", "FAILED")
    mark = Text(f"{good} ", "green") if proof.holds else Text(f"{bad} ", "bold red")
    out.print(mark + proof.text)


def _print_outcome(out: Console, outcome: Outcome) -> None:
    from rich.text import Text

    figures = outcome.figures
    out.print()
    if not outcome.proved:
        missing = [proof for proof in outcome.proofs if not proof.holds]
        out.print(Text(f"NOT proved, {len(missing)} of {len(outcome.proofs)}:", "bold red"))
        for proof in missing:
            out.print(f"  {proof.text}")
        return
    often = "effectively once" if outcome.effectively_once else "at least once"
    out.print(
        Text(f"All {len(outcome.proofs)} held. ", "bold green")
        + f"{figures.messages:,} messages handled {often}, in {figures.seconds:.0f} s."
    )
    out.print(
        f"Take-over: {_ms(figures.takeover_after_kill)} after SIGKILL, "
        f"{_ms(figures.takeover_after_leave)} after a leave. "
        f"Burst: {figures.burst_per_second or 0:,.0f} messages/s."
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.0f} ms"
