"""The demo itself: sets the stage, lets the processes run, kills one, and checks."""

from __future__ import annotations

import random
import secrets
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from pxrs.cli.demo.cast import Cast, Report
from pxrs.cli.demo.check import Findings, check
from pxrs.cli.demo.script import END, PARTITIONS, PING, PRODUCERS
from pxrs.config import parse_url
from pxrs.errors import InvalidRequest
from pxrs.runtime.app import Pxrs, connect
from pxrs.runtime.topics import PartitionInfo

FOLLOWER = "follower"
VICTIM = 1
_PINGS = 60
_PATIENCE = 30.0
_KILL_WITHIN = 0.02
# The victim would never finish by itself, so it is always killed in the middle.
_ENDLESS = 10**12


class Plan(NamedTuple):
    """Where, and how much at most: messages per producer, seconds for all of them."""

    engine: str | None
    messages: int
    seconds: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `proved` if everything promised holds."""

    proved: bool
    acknowledged: int
    in_log: int
    lost: int
    repeated: int
    out_of_order: int
    torn: int
    follower_saw: int
    follower_saw_the_same: bool
    killed_after: int
    killed_with_under_way: int
    others_after_kill: int
    seconds: float
    messages_per_second: float
    bytes: int
    checked_per_second: float
    wakeup_ms_median: float
    wakeup_ms_p99: float


class Scene(NamedTuple):
    """A moment of it, for the view."""

    seconds: float
    partitions: list[PartitionInfo]
    rates: list[float]
    acked: list[int]
    killed: bool
    seen: int


class View(Protocol):
    """Shows what goes on."""

    @property
    def every(self) -> float:
        """Seconds between two scenes."""
        ...

    def open(self, where: str) -> None: ...

    def show(self, scene: Scene) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...

    def finish(self, outcome: Outcome) -> None: ...


def producer_name(number: int) -> str:
    return f"producer {number + 1}"


def perform(plan: Plan, view: View) -> Outcome:
    """Run it all."""
    with _store(plan.engine) as px, _topic(px) as topic, Cast() as cast:
        view.open(px.url)
        try:
            cast.start(FOLLOWER, "follow", px.url, topic)
            cast.wait_for(FOLLOWER, "ready", _PATIENCE)
            act = Act(px, topic, plan, cast, view)
            act.run()
            view.show(act.scene._replace(seen=_catch_up(px, topic, cast)))
            view.say("measuring how soon the sleeping follower sees a message")
            wakeups = _ping(px, topic, cast)
            words = _end(px, topic, cast)
            view.say("reading the whole log again and checking every message")
            findings = check(px.reader(topic), act.acked)
        finally:
            view.close()
        return _judge(act, findings, words["seen"], words["digests"], wakeups)


class Act:
    """Three producers write; one is killed half-way."""

    def __init__(self, px: Pxrs, topic: str, plan: Plan, cast: Cast, view: View) -> None:
        self._px = px
        self._topic = topic
        self._plan = plan
        self._cast = cast
        self._view = view
        self._numbers = {producer_name(number): number for number in range(PRODUCERS)}
        self._running = set(self._numbers)
        self._past: deque[tuple[float, list[int]]] = deque(maxlen=max(2, round(1 / view.every) + 1))
        self.sending = [0] * PRODUCERS
        self.acked = [0] * PRODUCERS
        self.seen = 0
        self.killed_at: list[int] | None = None
        self._kill_at = inf
        self._first_send: float | None = None
        self.seconds = 0.0
        self.bytes = 0
        self.scene: Scene = self._look(0.0)

    def run(self) -> None:
        """Until no producer runs any more."""
        for who, number in self._numbers.items():
            most = _ENDLESS if number == VICTIM else self._plan.messages
            self._cast.start(who, "produce", self._px.url, self._topic, str(number), str(most))
        started = time.monotonic()
        scene_at, stop_at = started, started + self._plan.seconds
        while self._running:
            now = time.monotonic()
            if now >= scene_at:
                self._view.show(self._look(now - started))
                scene_at = now + self._view.every
            if now >= stop_at:
                self._stop_all()
                stop_at = now + _PATIENCE
            if now >= self._kill_at and self.sending[VICTIM] > self.acked[VICTIM]:
                self._kill()
            report = self._cast.next_report(min(scene_at, stop_at, self._kill_at) - now)
            if report is not None:
                self._hear(report)
            if self.killed_at is None and self._kill_at == inf and self._half_way(now - started):
                # Right after an acknowledgement it would be between two commits every time.
                self._kill_at = now + random.uniform(0, _KILL_WITHIN)
        ended = time.monotonic()
        self.seconds = ended - (self._first_send or started)
        self.scene = self._look(ended - started)

    def _hear(self, report: Report) -> None:
        number = self._numbers.get(report.who)
        if report.words is None:
            finished = number is not None and report.who not in self._running
            killed = number == VICTIM and self.killed_at is not None
            if not finished and not killed:
                raise self._cast.failure(report.who)
            self._running.discard(report.who)
        elif number is None:
            self.seen = report.words.get("seen", self.seen)
        elif "done" in report.words:
            self._running.discard(report.who)
        elif "acked" in report.words:
            self.acked[number] = report.words["acked"]
        else:
            # Figures leave out how long processes take to start.
            self._first_send = self._first_send or time.monotonic()
            self.sending[number] = report.words["sending"]

    def _half_way(self, seconds: float) -> bool:
        enough = seconds >= self._plan.seconds / 2 and self.acked[VICTIM] > 0
        return enough or self.acked[VICTIM] >= self._plan.messages / 2

    def _kill(self) -> None:
        self._cast.kill(producer_name(VICTIM))
        self.killed_at = self.acked.copy()
        self._kill_at = inf
        self._view.say(
            f"{producer_name(VICTIM)} killed (SIGKILL) after {self.acked[VICTIM]:,} "
            "acknowledged messages"
        )

    def _stop_all(self) -> None:
        for who in self._running:
            self._cast.ask_to_stop(who)

    def _look(self, seconds: float) -> Scene:
        info = self._px.describe_topic(self._topic)
        self.bytes = info.size
        ends = [part.end for part in info.partitions]
        self._past.append((seconds, ends))
        then, before = self._past[0]
        passed = max(seconds - then, 1e-9)
        rates = [(end - old) / passed for end, old in zip(ends, before, strict=True)]
        killed = self.killed_at is not None
        return Scene(seconds, info.partitions, rates, self.acked.copy(), killed, self.seen)


def _catch_up(px: Pxrs, topic: str, cast: Cast) -> int:
    """Wait until the follower has seen all there is; how much that was."""
    with px.producer() as producer:
        for number in range(PARTITIONS):
            producer.send(topic, b"%d" % number, PING, partition=number)
    pings = [cast.wait_for(FOLLOWER, "ping", _PATIENCE) for _ in range(PARTITIONS)]
    return int(pings[-1]["seen"])


@dataclass(frozen=True)
class Wakeups:
    """Milliseconds from `send` to the follower."""

    median: float
    p99: float


def _ping(px: Pxrs, topic: str, cast: Cast) -> Wakeups:
    """One message at a time, each sent when the follower has nothing left to do."""
    took = []
    with px.producer() as producer:
        for number in range(_PINGS):
            sent_at = time.monotonic_ns()
            producer.send(topic, b"%d" % number, PING, partition=number % PARTITIONS).result()
            words = cast.wait_for(FOLLOWER, "ping", _PATIENCE)
            took.append((words["at"] - sent_at) / 1e6)
    took.sort()
    return Wakeups(statistics.median(took), took[int(len(took) * 0.99)])


def _end(px: Pxrs, topic: str, cast: Cast) -> dict[str, object]:
    with px.producer() as producer:
        for number in range(PARTITIONS):
            producer.send(topic, b"", END, partition=number)
    return cast.wait_for(FOLLOWER, "digests", _PATIENCE)


def _judge(act: Act, findings: Findings, saw: object, digests: object, wakeups: Wakeups) -> Outcome:
    same = digests == findings.digests
    wrong = findings.lost + findings.repeated + findings.out_of_order + findings.torn
    killed_at = act.killed_at or [0] * PRODUCERS
    after = sum(act.acked) - act.acked[VICTIM] - sum(killed_at) + killed_at[VICTIM]
    return Outcome(
        proved=wrong == 0 and same and findings.messages > 0,
        acknowledged=sum(act.acked),
        in_log=findings.messages,
        lost=findings.lost,
        repeated=findings.repeated,
        out_of_order=findings.out_of_order,
        torn=findings.torn,
        follower_saw=int(str(saw)),
        follower_saw_the_same=same,
        killed_after=act.acked[VICTIM],
        killed_with_under_way=act.sending[VICTIM] - act.acked[VICTIM],
        others_after_kill=after,
        seconds=round(act.seconds, 3),
        messages_per_second=round(findings.messages / act.seconds, 1),
        bytes=act.bytes,
        checked_per_second=round(findings.messages / findings.seconds, 1),
        wakeup_ms_median=round(wakeups.median, 3),
        wakeup_ms_p99=round(wakeups.p99, 3),
    )


@contextmanager
def _store(engine: str | None) -> Iterator[Pxrs]:
    if engine is not None:
        if parse_url(engine).scheme == "memory":
            raise InvalidRequest(
                f"the demo runs in several processes, {engine} lives in one; "
                "leave --engine out, or name a file: sqlite:///demo.db"
            )
        with connect(engine) as px:
            yield px
        return
    with (
        tempfile.TemporaryDirectory(prefix="pxrs-demo-") as folder,
        connect(f"sqlite:///{folder}/demo.db") as px,
    ):
        yield px


@contextmanager
def _topic(px: Pxrs) -> Iterator[str]:
    name = f"demo-{secrets.token_hex(4)}"
    px.create_topic(name, PARTITIONS)
    try:
        yield name
    finally:
        px.delete_topic(name)
