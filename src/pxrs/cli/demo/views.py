"""How the demo looks: a live table, lines for a log, or one JSON document."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from pxrs.cli.demo.script import KEYS, PARTITIONS, PRODUCERS
from pxrs.cli.demo.stage import VICTIM, Outcome, Scene, View, producer_name
from pxrs.cli.output import console, human_size, print_json, table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

INTRODUCTION = (
    f"{PRODUCERS} processes write keyed, numbered messages to a topic of {PARTITIONS} partitions, "
    "another follows it; one writer is killed half-way"
)


def choose_view(*, as_json: bool, plain: bool) -> View:
    if as_json:
        return JsonView()
    return PlainView() if plain or not sys.stdout.isatty() else LiveView()


class JsonView:
    """Silent until the end."""

    every = 1.0

    def open(self, where: str) -> None: ...

    def show(self, scene: Scene) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...

    def finish(self, outcome: Outcome) -> None:
        print_json(outcome)


class PlainView:
    """A line a second."""

    every = 1.0

    def open(self, where: str) -> None:
        click.echo(f"store {where}")
        click.echo(INTRODUCTION)

    def show(self, scene: Scene) -> None:
        click.echo(
            f"{scene.seconds:5.1f} s  {_total(scene):>9,} messages  "
            f"{sum(scene.rates):>9,.0f} msg/s  {human_size(_bytes(scene)):>9}  "
            f"follower at {scene.seen:,}"
        )

    def say(self, text: str) -> None:
        click.echo(text)

    def close(self) -> None: ...

    def finish(self, outcome: Outcome) -> None:
        _print_outcome(console(), outcome)


class LiveView:
    """A table that moves, then what was proved."""

    every = 0.25

    def __init__(self) -> None:
        self._console = console()
        self._live: Live | None = None
        self._notes: list[str] = []
        self._scene: Scene | None = None

    def open(self, where: str) -> None:
        from rich.live import Live

        self._console.print(f"store {where}", style="dim")
        self._console.print(INTRODUCTION)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def show(self, scene: Scene) -> None:
        self._scene = scene
        self._refresh()

    def say(self, text: str) -> None:
        self._notes.append(text)
        self._refresh()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def finish(self, outcome: Outcome) -> None:
        _print_outcome(self._console, outcome)

    def _refresh(self) -> None:
        if self._live is not None and self._scene is not None:
            self._live.update(self._picture(self._scene), refresh=True)

    def _picture(self, scene: Scene) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        rows = table("partition", "end offset", "bytes", "msg/s")
        for part, rate in zip(scene.partitions, scene.rates, strict=True):
            rows.add_row(
                str(part.partition), f"{part.end:,}", human_size(part.size), f"{rate:,.0f}"
            )
        rows.add_section()
        rows.add_row(
            "all", f"{_total(scene):,}", human_size(_bytes(scene)), f"{sum(scene.rates):,.0f}",
            style="bold",
        )  # fmt: skip
        who = table("process", "messages", "", left=("process", ""))
        for number, acked in enumerate(scene.acked):
            dead = scene.killed and number == VICTIM
            state = Text("killed", style="red") if dead else Text("acked", style="dim")
            who.add_row(producer_name(number), f"{acked:,}", state)
        who.add_row("follower", f"{scene.seen:,}", Text("seen", style="dim"))
        side = table("", "", left=("", ""))
        side.show_header = False
        side.add_row(rows, who)
        notes = [Text(f"· {note}", style="dim") for note in self._notes]
        return Group(Text(f"{scene.seconds:.1f} s", style="dim"), side, *notes)


def _total(scene: Scene) -> int:
    return sum(part.end - part.start for part in scene.partitions)


def _bytes(scene: Scene) -> int:
    return sum(part.size for part in scene.partitions)


def _print_outcome(out: Console, outcome: Outcome) -> None:
    from rich.text import Text

    good, bad = ("✓", "✗") if out.encoding.startswith("utf") else ("ok", "FAILED")
    claims = (
        (
            outcome.lost + outcome.repeated == 0,
            "every acknowledged message is in the log exactly once",
            (
                f"{outcome.acknowledged:,} acknowledged, {outcome.in_log:,} in the log; "
                f"{outcome.lost:,} lost, {outcome.repeated:,} repeated"
            ),
        ),
        (
            outcome.out_of_order == 0,
            "in order for each key",
            f"{PRODUCERS * KEYS} keys, {outcome.out_of_order:,} out of order",
        ),
        (
            outcome.torn == 0,
            "nothing torn, though a writer was killed",
            (
                f"killed with {outcome.killed_with_under_way:,} under way ("
                f"{outcome.in_log - outcome.acknowledged:,} got in); the others wrote "
                f"{outcome.others_after_kill:,} more; {outcome.torn:,} torn"
            ),
        ),
        (
            outcome.follower_saw_the_same,
            "the follower, another process, saw the same log",
            f"{outcome.follower_saw:,} messages, compared by a digest of each partition",
        ),
    )
    out.print()
    for holds, claim, detail in claims:
        out.print(Text(f"{good if holds else bad} ", "green" if holds else "bold red") + claim)
        out.print(Text(f"  {detail}", "dim"))
    out.print()
    out.print(
        f"{outcome.messages_per_second:,.0f} msg/s durable, {human_size(outcome.bytes)} in "
        f"{outcome.seconds:.1f} s; checked at {outcome.checked_per_second:,.0f} msg/s"
    )
    out.print(
        f"follower woken in {outcome.wakeup_ms_median:.1f} ms (median; 99 %: "
        f"{outcome.wakeup_ms_p99:.1f} ms), from send to seen, durable commit included"
    )
    out.print(Text("consumer groups are not part of this yet: they come next", "dim"))
