"""Prints the demo: a live table, lines for a log, or one JSON document at the end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pxrs.cli.demo.play import PARTITIONS, Moment, Outcome, Proof, State, View
from pxrs.cli.show import console, print_json, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {"A": "cyan", "B": "magenta", "C": "yellow", "D": "green"}
_STATES: dict[State, str] = {
    "starting": "dim",
    "up": "",
    "holding": "",
    "frozen": "bold blue",
    "killed": "bold red",
    "left": "dim",
}
# Seconds for which a partition that has changed hands is marked.
_MARKED = 2.0


def choose_view(*, as_json: bool, plain: bool) -> View:
    if as_json or plain or not sys.stdout.isatty():
        return PlainView(quiet=as_json)
    return LiveView()


class PlainView:
    """Prints a line a second, and one for every scene and every proof. `quiet` prints nothing."""

    every = 1.0

    def __init__(self, *, quiet: bool = False) -> None:
        self._out = console(quiet=quiet)

    def open(self, where: str, *, once: bool) -> None:
        _print_introduction(self._out, where, once=once)

    def scene(self, title: str) -> None:
        self._out.print(f"── {title}", soft_wrap=True)

    def show(self, moment: Moment) -> None:
        owners = "".join(owner or "·" for owner in moment.owners)
        epochs = " ".join(str(part.epoch) for part in moment.picture.partitions)
        self._out.print(
            f"{moment.seconds:5.1f} s  owners {owners}  epochs {epochs}  "
            f"{moment.picture.handled:>8,} handled  lag {moment.picture.lag:,}",
            soft_wrap=True,
        )

    def proof(self, proof: Proof) -> None:
        _print_proof(self._out, proof)

    def close(self) -> None: ...


class LiveView:
    """Shows a table that moves; proofs pile up above it."""

    every = 0.125

    def __init__(self) -> None:
        self._out = console()
        self._live = Live(console=self._out, auto_refresh=False)
        self._owners: list[str | None] = [None] * PARTITIONS
        # By partition: who had it before, and until when that is marked.
        self._moves: dict[int, tuple[str, float]] = {}

    def open(self, where: str, *, once: bool) -> None:
        _print_introduction(self._out, where, once=once)
        self._out.print()
        self._live.start()

    def scene(self, title: str) -> None: ...

    def show(self, moment: Moment) -> None:
        for number, owner in enumerate(moment.owners):
            before = self._owners[number]
            if owner is not None and owner != before:
                self._owners[number] = owner
                if before is not None:
                    self._moves[number] = (before, moment.seconds + _MARKED)
        self._live.update(self._picture(moment), refresh=True)

    def proof(self, proof: Proof) -> None:
        _print_proof(self._out, proof)

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()
            self._out.print()

    def _picture(self, moment: Moment) -> RenderableType:
        picture = moment.picture
        rows = table(
            "partition", "owner", "", "epoch", "checkpoint", "end", "lag", left=("owner", "")
        )
        for part, owner in zip(picture.partitions, moment.owners, strict=True):
            before, until = self._moves.get(part.partition, ("", 0.0))
            mark = f"from {before}" if moment.seconds < until else ""
            rows.add_row(
                str(part.partition),
                Text(owner or "–", f"bold {_COLOURS.get(owner or '', 'dim')}"),
                Text(f"{mark:<6}", "dim"),
                str(part.epoch),
                f"{part.checkpoint or 0:,}",
                f"{part.end:,}",
                Text(f"{part.lag:,}", "" if part.lag else "dim"),
            )
        end = sum(part.end for part in picture.partitions)
        rows.add_row(
            "all", "", "", "", f"{picture.handled:,}", f"{end:,}", f"{picture.lag:,}", style="bold"
        )
        status = Text(f"{moment.seconds:.0f} s   {moment.rate:,.0f} msg/s   ", "dim")
        for letter, state in moment.states.items():
            words = f"has {moment.owners.count(letter)}" if state == "up" else state
            status += Text(f"{letter} ", f"bold {_COLOURS.get(letter, '')}")
            status += Text(f"{words}   ", _STATES[state])
        return Group("", Text(moment.title, "bold"), "", rows, "", status)


def _print_introduction(out: Console, where: str, *, once: bool) -> None:
    how = "in one transaction with its checkpoint" if once else "then commits its checkpoint"
    out.print(f"store {where}", style="dim", soft_wrap=True)
    out.print(f"{PARTITIONS} partitions, one producer, a group of consumers; each is a process.")
    out.print(f"A consumer enters messages in a ledger, {how}.")


def _print_proof(out: Console, proof: Proof) -> None:
    good, bad = ("✓", "✗") if out.encoding.startswith("utf") else ("ok", "FAILED")
    mark = Text(f"{good} ", "green") if proof.holds else Text(f"{bad} ", "bold red")
    out.print(mark + proof.text)


def print_outcome(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print_json(outcome)
        return
    out = console()
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
