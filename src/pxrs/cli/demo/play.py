"""The demo from start to end: a store, a topic and a ledger; the scenes; the check."""

from __future__ import annotations

import secrets
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from pxrs.app import Pxrs, connect
from pxrs.cli.demo.judge import KEYS, Findings, Ledger, Observer, Picture, check, new_ledger
from pxrs.cli.demo.processes import SESSION_TTL, Cast, DemoFailed, Nodes, Report
from pxrs.cli.show import count
from pxrs.config import parse_url, split_url
from pxrs.core.records import claims_prefix, head_key, history_prefix
from pxrs.errors import InvalidRequest
from pxrs.types import Delete, Topic
from pxrs.urls import public

PARTITIONS = 8
PRODUCER = "producer"
# Long enough for a loaded machine to start a few interpreters.
_PATIENCE = 60.0
_LOOK = 0.05

State = Literal["starting", "up", "holding", "frozen", "killed", "left"]


class Proof(msgspec.Struct, frozen=True):
    """A promise that was to be shown, and whether it held."""

    name: str
    holds: bool
    text: str


class Figures(msgspec.Struct):
    """Measured values; times are seconds."""

    seconds: float = 0.0
    messages: int = 0
    takeover_after_kill: float | None = None
    takeover_after_leave: float | None = None
    takeover_after_freeze: float | None = None
    node_failover: float | None = None
    moved_by_join: int | None = None
    refused: int | None = None
    burst_per_second: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the demo. `proved` if all proofs held."""

    proved: bool
    effectively_once: bool
    proofs: list[Proof]
    figures: Figures
    ledger: Findings | None


class Pace(NamedTuple):
    """Seconds per scene, messages in the burst, and messages per round: 50 rounds a second."""

    seconds: float
    burst: int
    round: int = KEYS


class Moment(NamedTuple):
    """The state that a view shows. Consumers go by a letter."""

    seconds: float
    title: str
    picture: Picture
    owners: list[str | None]
    states: dict[str, State]
    rate: float


class View(Protocol):
    """Shows the play while it runs."""

    @property
    def every(self) -> float:
        """Seconds between two moments."""
        ...

    def open(self, where: str, *, once: bool) -> None: ...

    def scene(self, title: str) -> None: ...

    def show(self, moment: Moment) -> None: ...

    def proof(self, proof: Proof) -> None: ...

    def close(self) -> None: ...


class Stage:
    """Gives scenes the processes, and the group as it is now.

    Waiting shows what goes on meanwhile, and fails with `DemoFailed` when it takes too long.
    """

    def __init__(
        self,
        cast: Cast,
        observer: Observer,
        view: View,
        pace: Pace,
        kill_node: Callable[[], None] | None = None,
    ) -> None:
        self.cast = cast
        self.kill_node = kill_node
        self.pace = pace
        self.figures = Figures()
        self._observer = observer
        self._view = view
        self._letters: dict[str, str] = {}
        self._said: dict[str, dict[str, Any]] = {PRODUCER: {}}
        self._states: dict[str, State] = {}
        self._past: deque[tuple[float, int]] = deque()
        self._started = time.monotonic()
        self._show_at = 0.0
        self._title = ""
        self.picture = observer.look()

    @property
    def sent(self) -> int:
        """Messages that were acknowledged to the producer."""
        return int(self._said[PRODUCER].get("acked", 0))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def begin(self, title: str) -> None:
        self._title = title
        self._view.scene(title)

    def start_consumer(self, letter: str) -> None:
        self._states[letter] = "starting"
        self._said[letter] = {}
        self.cast.start(letter, "consume")

    def signal(self, letter: str, number: signal.Signals, state: State) -> None:
        self._states[letter] = state
        self.cast.send_signal(letter, number)

    def said(self, who: str, word: str) -> Any:
        """The value a process last reported under this word, or None."""
        return self._said[who].get(word)

    def member(self, letter: str) -> str:
        """The name of a consumer in its group; empty before it has joined."""
        return str(self._said[letter].get("member", ""))

    def partitions_of(self, letter: str) -> list[int]:
        return self.picture.owned_by(self.member(letter))

    def settled(self, letters: str) -> bool:
        """Whether exactly these are members, and each owns what it should."""
        names = {self.member(letter) for letter in letters}
        return self.picture.state == "STABLE" and self.picture.members == names

    def taken_over(self, partitions: list[int], former: str) -> bool:
        """Whether other members own all of these partitions."""
        owners = {self.picture.partitions[number].owner for number in partitions}
        return owners <= self.picture.members - {self.member(former)}

    def handled_up_to(self, ends: dict[int, int]) -> bool:
        """Whether the checkpoints of these partitions have reached these offsets."""
        parts = self.picture.partitions
        return all((parts[number].checkpoint or 0) >= end for number, end in ends.items())

    def wait(self, what: str, condition: Callable[[], bool]) -> float:
        """Waits until the condition holds, and returns how many seconds that took."""
        began = time.monotonic()
        while True:
            self.look()
            if condition():
                return time.monotonic() - began
            if time.monotonic() - began > _PATIENCE:
                raise DemoFailed(f"{what}: not within {_PATIENCE:g} s")
            self._observer.wait(_LOOK)

    def play(self, seconds: float) -> None:
        """Lets the processes go on for this time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for report in self.cast.reports(min(left, _LOOK)):
                self._hear(report)
            if time.monotonic() >= self._show_at:
                self.look()

    def look(self) -> None:
        """Reads the group and what the processes reported, and shows both when it is time."""
        self.picture = self._observer.look()
        for report in self.cast.reports():
            self._hear(report)
        now = time.monotonic()
        if now >= self._show_at:
            self._show_at = now + self._view.every
            self.show()

    def show(self) -> None:
        owners = [
            self._letters.get(part.owner, "?") if part.owner else None
            for part in self.picture.partitions
        ]
        states, rate = dict(self._states), self._rate()
        self._view.show(Moment(self.seconds, self._title, self.picture, owners, states, rate))

    def _rate(self) -> float:
        """Messages handled per second, over the last second."""
        now, handled = time.monotonic(), self.picture.handled
        self._past.append((now, handled))
        while self._past[0][0] < now - 1.0 and len(self._past) > 2:
            self._past.popleft()
        then, before = self._past[0]
        return (handled - before) / max(now - then, 1e-9)

    def _hear(self, report: Report) -> None:
        who, words = report
        if words is None:
            if "done" not in self._said[who] and self._states.get(who) != "killed":
                raise self.cast.failure(who)
            return
        self._said[who].update(words)
        if "member" in words:
            self._letters[words["member"]] = who
            self._states[who] = "up"
        elif "holding" in words:
            self._states[who] = "holding"
        elif "leaving" in words:
            self._states[who] = "left"


# Scenes: each returns whether its promise held, and a sentence about it.


class Scene(NamedTuple):
    """`promise`: the proof that fails if the scene does not come to its end."""

    name: str
    title: str
    promise: str
    play: Callable[[Stage], tuple[bool, str]]


def steady(stage: Stage) -> tuple[bool, str]:
    for letter in "ABC":
        stage.start_consumer(letter)
    stage.wait("three consumers share the partitions", lambda: stage.settled("ABC"))
    stage.cast.start(PRODUCER, "produce")
    stage.wait("the first messages are handled", lambda: stage.picture.handled > 0)
    stage.play(stage.pace.seconds)
    shares = sorted((len(stage.partitions_of(letter)) for letter in "ABC"), reverse=True)
    # Fair: the largest and the smallest differ by one at most.
    fair = sum(shares) == PARTITIONS and shares[0] - shares[-1] <= 1
    return fair, f"each partition has one owner; shares are {', '.join(map(str, shares))}"


def killed(stage: Stage) -> tuple[bool, str]:
    orphans = stage.partitions_of("A")
    stage.signal("A", signal.SIGKILL, "killed")
    took = stage.wait("B and C own what A had", lambda: stage.taken_over(orphans, "A"))
    stage.figures.takeover_after_kill = took
    stage.wait("the group settles", lambda: stage.settled("BC"))
    stage.play(stage.pace.seconds)
    return True, f"killed: {_taken_over(orphans, took)}"


def joined(stage: Stage) -> tuple[bool, str]:
    before = stage.picture.partitions
    stage.start_consumer("D")
    stage.wait("the group settles with D", lambda: stage.settled("BCD"))
    after = stage.picture.partitions
    moved = [n for n in range(PARTITIONS) if before[n].owner != after[n].owner]
    stopped = [n for n in range(PARTITIONS) if before[n].epoch != after[n].epoch]
    stage.figures.moved_by_join = len(moved)
    stage.play(stage.pace.seconds)
    only = moved == stopped == stage.partitions_of("D") and len(moved) == PARTITIONS // 3
    return only, (
        f"joined: {len(moved)} of {PARTITIONS} partitions moved, "
        f"{PARTITIONS - len(stopped)} never stopped"
    )


def node_killed(stage: Stage) -> tuple[bool, str]:
    before = stage.picture
    assert stage.kill_node is not None
    stage.kill_node()
    handled = stage.picture.handled
    took = stage.wait(
        "messages are handled through another node", lambda: stage.picture.handled > handled
    )
    stage.figures.node_failover = took
    stage.wait("the group is as it was", lambda: stage.settled("BCD"))
    stage.play(stage.pace.seconds)
    owners, now = ([part.owner for part in it.partitions] for it in (before, stage.picture))
    moved = sum(one != other for one, other in zip(owners, now, strict=True))
    return not moved, (
        f"node killed: all go on through another in {took * 1000:.0f} ms, "
        f"{count(moved, 'partition')} changed hands"
    )


def frozen(stage: Stage) -> tuple[bool, str]:
    stage.cast.order("B", "hold")
    stage.wait("B has a batch in hand", lambda: stage.said("B", "holding") is not None)
    orphans = stage.partitions_of("B")
    in_hand = {int(number): offset for number, offset in stage.said("B", "upto").items()}
    stage.signal("B", signal.SIGSTOP, "frozen")
    took = stage.wait("others own what B had", lambda: stage.taken_over(orphans, "B"))
    stage.figures.takeover_after_freeze = took
    stage.wait("others have handled what B has in hand", lambda: stage.handled_up_to(in_hand))
    stage.play(stage.pace.seconds / 2)
    stage.signal("B", signal.SIGCONT, "up")
    stage.cast.order("B", "go on")
    stage.wait("B reports how its commit went", lambda: stage.said("B", "refused") is not None)
    refused = stage.said("B", "refused") is True
    stage.figures.refused = stage.said("B", "holding") if refused else 0
    stage.wait("B is a member again", lambda: stage.settled("BCD"))
    stage.play(stage.pace.seconds)
    return refused, (
        f"frozen: taken over in {took:.1f} s (lease {SESSION_TTL:g} s); woken: "
        f"its commit {'is refused (Fenced)' if refused else 'WAS TAKEN'}"
    )


def burst(stage: Stage) -> tuple[bool, str]:
    before = stage.sent
    stage.cast.order(PRODUCER, f"burst {stage.pace.burst}")
    took = stage.wait("the burst is sent", lambda: stage.sent >= before + stage.pace.burst)
    done = stage.sent - before
    # The producer goes on, so there is always something not handled yet: wait for this end.
    stage.look()
    ends = {part.partition: part.end for part in stage.picture.partitions}
    took += stage.wait("the burst is handled", lambda: stage.handled_up_to(ends))
    stage.figures.burst_per_second = done / took
    return True, f"burst: {done:,} messages sent and handled, {done / took:,.0f} a second"


def left(stage: Stage) -> tuple[bool, str]:
    orphans = stage.partitions_of("C")
    stage.cast.order("C", "leave")
    stage.wait("C leaves", lambda: stage.said("C", "leaving") is not None)
    stage.wait("B and D own what C had", lambda: stage.taken_over(orphans, "C"))
    took = time.monotonic() - stage.said("C", "leaving")
    stage.figures.takeover_after_leave = took
    stage.play(stage.pace.seconds)
    return True, f"left: {_taken_over(orphans, took)}"


def _taken_over(partitions: list[int], seconds: float) -> str:
    return f"its {count(len(partitions), 'partition')} taken over in {seconds * 1000:.0f} ms"


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

# With nodes between the consumers and the store; after a consumer has joined.
NODE_SCENE = Scene(
    "node",
    "a node is killed (SIGKILL): the one that all talk to",
    "consumers go on through another node",
    node_killed,
)


def _scenes(stage: Stage) -> tuple[Scene, ...]:
    return SCENES if stage.kill_node is None else (*SCENES[:3], NODE_SCENE, *SCENES[3:])


# What is checked when all scenes are over.
_CHECKED = {
    "complete": "every message is in the ledger",
    "ordered": f"order is kept for each of {KEYS} keys",
    "forward": "no checkpoint and no epoch went back",
}


# The performance


def perform(
    view: View, pace: Pace, *, engine: str | None = None, transactions: bool = True, nodes: int = 0
) -> Outcome:
    """Runs the demo. The outcome has what failed; nothing is left behind.

    With `nodes`, that many serve the store, and all others reach it through these.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pxrs-demo-") as folder,
        _served(_store_url(engine, folder), nodes) as (url, kill_node),
        connect(url) as px,
        _topic(px) as topic,
        new_ledger(px, topic.name.replace("-", "_"), folder, transactions=transactions) as ledger,
        Cast(
            px.url,
            {
                "produce": (topic.name, str(pace.round)),
                "consume": (topic.name, topic.name, ledger.address),
            },
        ) as cast,
        closing(Observer(px, topic, topic.name)) as observer,
    ):
        view.open(public(px.url), once=ledger.once)
        try:
            stage = Stage(cast, observer, view, pace, kill_node)
            return _play(stage, observer, ledger, view)
        finally:
            view.close()


def _play(stage: Stage, observer: Observer, ledger: Ledger, view: View) -> Outcome:
    proofs: list[Proof] = []
    findings: Findings | None = None
    scenes = _scenes(stage)

    def note(name: str, holds: bool, text: str) -> None:
        proofs.append(Proof(name, holds, text))
        view.proof(proofs[-1])

    try:
        for number, scene in enumerate(scenes, 1):
            stage.begin(f"{number}/{len(scenes)}  {scene.title}")
            note(scene.name, *scene.play(stage))
        stage.begin("checking every message")
        _drain(stage)
        view.close()
        findings = check(ledger.entries(), stage.sent, once=ledger.once)
        for name, (holds, text) in _verdicts(findings, observer, stage.sent, ledger.once).items():
            note(name, holds, f"{_CHECKED[name]}{text}")
    except DemoFailed as error:
        promises = {scene.name: scene.promise for scene in scenes} | _CHECKED
        failed, *later = list(promises)[len(proofs) :]
        note(failed, False, f"not proved: {promises[failed]} ({error})")
        proofs += [Proof(name, False, f"not reached: {promises[name]}") for name in later]
    stage.figures.seconds, stage.figures.messages = round(stage.seconds, 3), stage.sent
    return Outcome(
        proved=all(proof.holds for proof in proofs),
        effectively_once=ledger.once,
        proofs=proofs,
        figures=stage.figures,
        ledger=findings,
    )


def _drain(stage: Stage) -> None:
    """Stops the producer, and waits until every message is handled."""
    stage.cast.order(PRODUCER, "stop")
    stage.wait("the producer ends", lambda: stage.said(PRODUCER, "done") is not None)
    stage.wait("everything is handled", lambda: stage.picture.handled >= stage.sent)
    stage.show()


def _verdicts(
    found: Findings, observer: Observer, sent: int, once: bool
) -> dict[str, tuple[bool, str]]:
    complete = found.lost == found.unknown == 0 and not (once and found.repeated)
    often = "once" if once else "at least once"
    return {
        "complete": (
            complete,
            f" {often}: {sent:,} sent, {found.lost:,} lost, {found.repeated:,} repeated",
        ),
        "ordered": (found.out_of_order == 0, f": {found.out_of_order:,} out of order"),
        "forward": (
            observer.went_back == 0,
            f": {observer.looks:,} looks, {observer.went_back:,} steps back",
        ),
    }


def _store_url(engine: str | None, folder: str) -> str:
    """The engine; a file in the folder keeps what it can't (etcd: messages, NATS: groups)."""
    file = f"sqlite:///{folder}/demo.db"
    parts = split_url(engine or file)
    if any(parse_url(place).scheme == "memory" for place in parts.urls()):
        raise InvalidRequest(
            f"the demo runs in several processes, and {public(engine or file)} exists in one only; "
            "leave --engine out, or name a file: sqlite:///demo.db"
        )
    return parts.completed(file).whole


@contextmanager
def _served(url: str, count: int) -> Iterator[tuple[str, Callable[[], None] | None]]:
    """The URL of the store through nodes, and how to kill one; the store's own without nodes."""
    if not count:
        yield url, None
        return
    with Nodes(url, count) as nodes:
        yield nodes.url, nodes.kill_first


@contextmanager
def _topic(px: Pxrs) -> Iterator[Topic]:
    """Creates a topic for the block, and removes it and the group of the same name after it."""
    topic = px.topics.create(f"demo-{secrets.token_hex(4)}", PARTITIONS)
    try:
        yield topic
    finally:
        px.topics.delete(topic.name)
        coord = px.stores.coord
        for prefix in (claims_prefix(topic.name), history_prefix(topic.name)):
            for record in coord.list(prefix):
                coord.commit([], [Delete(record.key)])
        coord.commit([], [Delete(head_key(topic.name))])
