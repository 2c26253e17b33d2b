"""What is played, and what each scene shows if it goes well."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pxrs.cli.demo.script import KEYS, PARTITIONS, SESSION_TTL
from pxrs.cli.demo.stage import PRODUCER, Proof, Stage
from pxrs.cli.show import count


class Figures(msgspec.Struct):
    """What was measured. Seconds."""

    seconds: float = 0.0
    messages: int = 0
    takeover_after_kill: float | None = None
    takeover_after_leave: float | None = None
    takeover_after_freeze: float | None = None
    moved_by_join: int | None = None
    refused: int | None = None
    burst_per_second: float | None = None


class Pace(NamedTuple):
    """How long a scene is shown, in seconds; how many messages the burst has, and a round.

    50 rounds are sent in a second.
    """

    seconds: float
    burst: int
    round: int = KEYS


Play = Callable[[Stage, Figures, Pace], tuple[bool, str]]


class Scene(NamedTuple):
    """`promise` is what is not proved if the scene does not come to its end."""

    name: str
    title: str
    promise: str
    play: Play


def steady(stage: Stage, figures: Figures, pace: Pace) -> tuple[bool, str]:
    for letter in "ABC":
        stage.start_consumer(letter)
    stage.wait("three consumers share the partitions", lambda: stage.settled("A", "B", "C"))
    stage.start_producer()
    stage.wait("the first messages are handled", lambda: stage.picture.handled > 0)
    stage.play(pace.seconds)
    shares = sorted((len(stage.partitions_of(letter)) for letter in "ABC"), reverse=True)
    fair = shares == _fair_shares(3)
    return fair, f"each partition has one owner; shares are {', '.join(map(str, shares))}"


def killed(stage: Stage, figures: Figures, pace: Pace) -> tuple[bool, str]:
    orphans = stage.partitions_of("A")
    stage.kill("A")
    took = stage.wait("B and C own what A had", lambda: stage.taken_over(orphans, "A"))
    figures.takeover_after_kill = took
    stage.wait("the group settles", lambda: stage.settled("B", "C"))
    stage.play(pace.seconds)
    return (
        True,
        f"killed: its {count(len(orphans), 'partition')} taken over in {took * 1000:.0f} ms",
    )


def joined(stage: Stage, figures: Figures, pace: Pace) -> tuple[bool, str]:
    before = stage.picture.rows
    stage.start_consumer("D")
    stage.wait("the group settles with D", lambda: stage.settled("B", "C", "D"))
    after = stage.picture.rows
    moved = [n for n in range(PARTITIONS) if before[n].owner != after[n].owner]
    stopped = [n for n in range(PARTITIONS) if before[n].epoch != after[n].epoch]
    figures.moved_by_join = len(moved)
    stage.play(pace.seconds)
    only = moved == stopped == stage.partitions_of("D") and len(moved) == PARTITIONS // 3
    return only, (
        f"joined: {len(moved)} of {PARTITIONS} partitions moved, "
        f"{PARTITIONS - len(stopped)} never stopped"
    )


def frozen(stage: Stage, figures: Figures, pace: Pace) -> tuple[bool, str]:
    stage.order("B", "hold")
    stage.wait("B has a batch in hand", lambda: stage.said("B", "holding") is not None)
    orphans = stage.partitions_of("B")
    upto = {int(number): offset for number, offset in stage.said("B", "upto").items()}
    stage.freeze("B")
    took = stage.wait("others own what B had", lambda: stage.taken_over(orphans, "B"))
    figures.takeover_after_freeze = took
    stage.wait(
        "others have handled what B has in hand",
        lambda: all(stage.picture.rows[n].checkpoint >= end for n, end in upto.items()),
    )
    stage.play(pace.seconds / 2)
    stage.wake("B")
    stage.order("B", "go on")
    stage.wait("B tells how its commit went", lambda: stage.said("B", "refused") is not None)
    refused = stage.said("B", "refused") is True
    figures.refused = stage.said("B", "holding") if refused else 0
    stage.wait("B is a member again", lambda: stage.settled("B", "C", "D"))
    stage.play(pace.seconds)
    return refused, (
        f"frozen: taken over in {took:.1f} s (lease {SESSION_TTL:g} s); woken: "
        f"its commit {'is refused (Fenced)' if refused else 'WAS TAKEN'}"
    )


def burst(stage: Stage, figures: Figures, pace: Pace) -> tuple[bool, str]:
    before = stage.sent
    stage.order(PRODUCER, f"burst {pace.burst}")
    took = stage.wait("the burst is sent", lambda: stage.sent >= before + pace.burst)
    done = stage.sent - before
    # The producer goes on: by then there is always something that is not handled yet.
    ends = stage.ends()
    took += stage.wait(
        "the burst is handled",
        lambda: all(
            row.checkpoint >= end for row, end in zip(stage.picture.rows, ends, strict=True)
        ),
    )
    figures.burst_per_second = done / took
    return True, f"burst: {done:,} messages sent and handled, {done / took:,.0f} a second"


def left(stage: Stage, figures: Figures, pace: Pace) -> tuple[bool, str]:
    orphans = stage.partitions_of("C")
    stage.order("C", "leave")
    stage.wait("C leaves", lambda: stage.said("C", "leaving") is not None)
    stage.wait("B and D own what C had", lambda: stage.taken_over(orphans, "C"))
    took = time.monotonic() - stage.said("C", "leaving")
    figures.takeover_after_leave = took
    stage.play(pace.seconds)
    return True, f"left: its {count(len(orphans), 'partition')} taken over in {took * 1000:.0f} ms"


def drain(stage: Stage) -> None:
    """No more messages, and all of them handled."""
    stage.order(PRODUCER, "stop")
    stage.wait("the producer ends", lambda: stage.said(PRODUCER, "done") is not None)
    stage.wait("everything is handled", lambda: stage.picture.handled >= stage.sent)
    stage.show()


SCENES = (
    Scene("shares", "three consumers share eight partitions", "fair shares", steady),
    Scene("killed", "A is killed (SIGKILL)", "a killed consumer is replaced", killed),
    Scene("joined", "D joins", "a join moves only what must move", joined),
    Scene(
        "fenced",
        "B is frozen (SIGSTOP) with a batch in hand, past its lease; then woken",
        "a frozen consumer that wakes is refused",
        frozen,
    ),
    Scene("burst", "a burst of messages", "a burst is handled", burst),
    Scene("left", "C leaves", "a leaving consumer hands over", left),
)

LEDGER_PROMISES = {
    "complete": f"every message is in the ledger, for all {KEYS} keys",
    "ordered": "order is kept for each key",
    "forward": "no checkpoint and no epoch goes back",
}


def not_reached(scenes: tuple[Scene, ...]) -> list[Proof]:
    """What remains unproved when a scene has failed."""
    rest = {scene.name: scene.promise for scene in scenes} | LEDGER_PROMISES
    return [Proof(name, False, f"not reached: {promise}") for name, promise in rest.items()]


def _fair_shares(members: int) -> list[int]:
    base, more = divmod(PARTITIONS, members)
    return [base + (number < more) for number in range(members)]
