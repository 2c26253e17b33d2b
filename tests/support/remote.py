"""Clients of several nodes under load, and the history that they leave to be judged.

Each goes to the next node when one does not answer or says "try again": that is all a client has
to do. What it was told is written down; `History.check` compares it with what the store holds.
"""

from __future__ import annotations

import http.client
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any, NamedTuple

import pxrs
from pxrs import Position, Pxrs
from pxrs.core.records import Claim, decode
from pxrs.server.settings import Endpoint
from support.child import PATIENCE
from support.node import Client, Reply
from support.reading import read_all

TOPIC, APP = "orders", "app"
GROUP = f"G_{TOPIC}_{APP}"
PARTITIONS = 8
_PACE = 0.02
_AT_ONCE = 5
# A client waits so long for a node; a frozen one never answers.
_ANSWER_WITHIN = 1.0
_TRY_AGAIN = (503, 504)


class AnyNode:
    """Requests to one node after the other until one answers them."""

    def __init__(self, endpoints: Sequence[Endpoint], first: int = 0) -> None:
        self._endpoints = endpoints
        self._at = first % len(endpoints)
        self._client: Client | None = None

    def try_once(self, method: str, path: str, body: Any = None) -> Reply | None:
        """The answer; None if there was none, or another node should be asked."""
        if self._client is None:
            self._client = Client(self._endpoints[self._at], _ANSWER_WITHIN)
        try:
            reply = self._client(method, path, body)
        except (OSError, http.client.HTTPException):
            self._next()
            return None
        if reply.status in _TRY_AGAIN:
            assert reply.json["retryable"], reply.body
            self._next()
            return None
        assert reply.status < 500, reply.body
        return reply

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _next(self) -> None:
        self.close()
        self._at = (self._at + 1) % len(self._endpoints)


class Taken(NamedTuple):
    """How far a partition was when an owner was first seen, and when that was."""

    checkpoint: int
    at: float


class Done(NamedTuple):
    """A commit that was accepted, and when it was asked for."""

    partition: int
    epoch: int
    offset: int
    began: float


class History:
    """What clients were told. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        # Messages sent by producers that try again until they hear, and by those that do not.
        self.sent_once: dict[bytes, Position] = {}
        self.sent: dict[bytes, Position] = {}
        self.handled: set[tuple[int, int]] = set()
        # By partition and epoch.
        self.taken: dict[tuple[int, int], Taken] = {}
        self.commits: list[Done] = []
        self.rounds: defaultdict[str, int] = defaultdict(int)
        self.failures: list[BaseException] = []

    def note(self, change: Callable[[], object]) -> None:
        with self.changed:
            change()
            self.changed.notify_all()

    def note_owner(self, partition: int, epoch: int, checkpoint: int | None) -> None:
        """An owner was seen: it has begun by now."""
        with self.changed:
            self.taken.setdefault((partition, epoch), Taken(checkpoint or 0, monotonic()))

    def await_that(self, condition: Callable[[], bool], what: str) -> None:
        """Until the condition holds; it is looked at whenever something was noted."""
        with self.changed:
            done = self.changed.wait_for(lambda: bool(self.failures) or condition(), PATIENCE)
        assert not self.failures, self.failures
        assert done, f"not in {PATIENCE} s: {what}"

    def await_progress(self, members: Sequence[str], messages: int) -> None:
        """Until each member has committed, and so many more messages were acknowledged."""
        with self.changed:
            before = dict(self.rounds)
            wanted = len(self.sent_once) + messages
        self.await_that(
            lambda: (
                len(self.sent_once) >= wanted
                and all(self.rounds[name] >= before.get(name, 0) + 2 for name in members)
            ),
            f"{messages} messages, and commits of {members}",
        )

    def check(self, px: Pxrs) -> None:
        """Compares what was told with what is there."""
        found = read_all(px, TOPIC)
        values = [message.value for message in found]
        assert len(values) == len(set(values)), "a message stands in the log twice"
        places = {m.value: Position(TOPIC, m.partition, m.offset) for m in found}
        for told in (self.sent_once, self.sent):
            lost = {value for value, place in told.items() if places.get(value) != place}
            assert not lost, f"acknowledged, and not there: {sorted(lost)[:5]} of {len(lost)}"
        by_key: defaultdict[bytes, list[int]] = defaultdict(list)
        for message in found:
            # One whose producer heard nothing and went on may come late.
            if message.value in self.sent_once or message.value in self.sent:
                by_key[message.key].append(int(message.value.rpartition(b"/")[2]))
        for key, numbers in by_key.items():
            assert numbers == sorted(numbers), f"key {key!r} is out of order"
        passed_over = {(m.partition, m.offset) for m in found} - self.handled
        assert not passed_over, f"{len(passed_over)} were committed and never handled"
        self._check_commits()

    def _check_commits(self) -> None:
        """No owner commits after the next one has begun, and that one goes on from all of it."""
        for done in self.commits:
            for (partition, epoch), taken in self.taken.items():
                if partition == done.partition and epoch > done.epoch:
                    assert done.offset <= taken.checkpoint, ("a stale commit landed", done, taken)
                    assert done.began <= taken.at, ("a stale commit was accepted", done, taken)


class Actor(ABC):
    """A thread that does its round again and again until it is stopped."""

    def __init__(self, history: History, name: str, node: AnyNode) -> None:
        self.name = name
        self._history = history
        self._node = node
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when it has ended, within its patience."""
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), f"{self.name} hangs"

    def _run(self) -> None:
        try:
            while not self._stop.wait(_PACE):
                self.round()
            self.end()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            error.add_note(self.name)
            self._history.note(lambda error=error: self._history.failures.append(error))  # type: ignore[misc]
        finally:
            self._node.close()

    @abstractmethod
    def round(self) -> None: ...

    def end(self) -> None:  # noqa: B027 - most have nothing left
        """Do what is left when it is stopped."""


class OnceProducer(Actor):
    """Sends with a producer id and sequences, again until it hears: each message comes once."""

    def __init__(self, history: History, number: int, node: AnyNode) -> None:
        super().__init__(history, f"once-{number}", node)
        self._id = 1000 + number
        self._sequences = [0] * PARTITIONS
        self._partitions = count(number)
        self._pending: tuple[int, list[str]] | None = None

    def round(self) -> None:
        if self._pending is None:
            partition = next(self._partitions) % PARTITIONS
            first = self._sequences[partition]
            key = f"{self.name}-{partition}"
            self._pending = partition, [f"{key}/{first + n}" for n in range(_AT_ONCE)]
        partition, values = self._pending
        reply = self._node.try_once(
            "POST",
            f"/v1/topics/{TOPIC}/partitions/{partition}/messages",
            {
                "messages": [{"key": value.rpartition("/")[0], "value": value} for value in values],
                "producer": {"id": self._id, "epoch": 0, "sequence": self._sequences[partition]},
            },
        )
        if reply is None:
            return
        assert reply.status == 200, reply.body
        base = reply.json["offset"]
        places = {
            value.encode(): Position(TOPIC, partition, base + number)
            for number, value in enumerate(values)
        }
        self._history.note(lambda: self._history.sent_once.update(places))
        self._sequences[partition] += _AT_ONCE
        self._pending = None

    def end(self) -> None:
        while self._pending is not None:
            self.round()


class PlainProducer(Actor):
    """Sends by key and goes on with the next message when it hears nothing."""

    def __init__(self, history: History, node: AnyNode) -> None:
        super().__init__(history, "plain", node)
        self._numbers = count()

    def round(self) -> None:
        number = next(self._numbers)
        key = f"plain-{number % 4}"
        value = f"{key}/{number}"
        reply = self._node.try_once(
            "POST", f"/v1/topics/{TOPIC}/messages", {"messages": [{"key": key, "value": value}]}
        )
        if reply is None:
            return
        assert reply.status == 200, reply.body
        (place,) = reply.json["positions"]
        position = Position(TOPIC, place["partition"], place["offset"])
        self._history.note(lambda: self._history.sent.update({value.encode(): position}))


class RestMember(Actor):
    """Fetches what it owns through any node and notes what it has handled."""

    def __init__(self, history: History, name: str, node: AnyNode) -> None:
        super().__init__(history, name, node)
        self._positions: dict[int, int] = {}

    def _fetch(self, partition: int) -> bool:
        """Handle what comes next in the partition; whether anything has."""
        at = self._positions[partition]
        reply = self._node.try_once(
            "GET", f"/v1/topics/{TOPIC}/partitions/{partition}/messages?offset={at}&max=100"
        )
        if reply is None:
            return False
        assert reply.status == 200, reply.body
        handled = {(partition, message["offset"]) for message in reply.json["messages"]}
        self._positions[partition] = reply.json["next"]
        self._history.note(lambda: self._history.handled.update(handled))
        return bool(handled)

    def _has_committed(self) -> None:
        def change() -> None:
            self._history.rounds[self.name] += 1

        self._history.note(change)


class FencedMember(RestMember):
    """A member under `/v1`: its commits carry fences."""

    def __init__(self, history: History, name: str, node: AnyNode) -> None:
        super().__init__(history, name, node)
        self._epochs: dict[int, int] = {}
        self.fences: dict[int, str] = {}

    def round(self) -> None:
        told = self._node.try_once("GET", f"/v1/groups/{GROUP}/members/{self.name}")
        if told is None:
            return
        if told.status == 404:
            body = {"member": self.name, "topics": [TOPIC], "session_timeout": 20}
            self._node.try_once("POST", f"/v1/groups/{GROUP}/members", body)
            return
        assert told.status == 200, told.body
        self._take_over(told.json)
        offsets = {part: self._positions[part] for part in self._epochs if self._fetch(part)}
        if not offsets:
            return
        body = {"commits": [{"fence": self.fences[p], "offset": at} for p, at in offsets.items()]}
        epochs, began = dict(self._epochs), monotonic()
        reply = self._node.try_once("POST", f"/v1/groups/{GROUP}/commits", body)
        if reply is None:
            return
        assert reply.status == 200, reply.body
        accepted = [
            Done(part, epochs[part], offsets[part], began)
            for each in reply.json["commits"]
            if not each["fenced"] and (part := each["partition"]) in offsets
        ]
        self._history.note(lambda: self._history.commits.extend(accepted))
        if accepted:
            self._has_committed()

    def _take_over(self, told: Any) -> None:
        parts = told["partitions"]
        for part in parts:
            number, epoch, checkpoint = part["partition"], part["epoch"], part["checkpoint"]
            self._history.note_owner(number, epoch, checkpoint)
            if self._epochs.get(number) != epoch:
                self._positions[number] = checkpoint or 0
        self._epochs = {part["partition"]: part["epoch"] for part in parts}
        self.fences = {part["partition"]: part["fence"] for part in parts}


class DmqMember(RestMember):
    """A member of the documented DMQ API: it commits by its name."""

    _PATH = "/api/v1/consumer-group"

    def __init__(self, history: History, name: str, node: AnyNode) -> None:
        super().__init__(history, name, node)
        self._member = ""
        self._generation = -1

    def round(self) -> None:
        if not self._member:
            body = {"groupId": GROUP, "consumerId": self.name}
            reply = self._node.try_once("POST", f"{self._PATH}/join", body)
            if reply is not None:
                assert reply.status == 200, reply.body
                self._member = reply.json["memberId"]
            return
        told = self._node.try_once("GET", f"{self._PATH}/assignment/{self._member}?wait=0.5")
        if told is None:
            return
        if told.status == 404:
            self._member = ""
            return
        assert told.status == 200, told.body
        assignment = told.json
        owned = {int(part): offset for part, offset in assignment["offsets"].items()}
        if assignment["generation"] != self._generation:
            self._positions = {}
            self._generation = assignment["generation"]
        for part, offset in owned.items():
            self._positions[part] = max(self._positions.get(part, 0), offset)
        offsets = {str(part): self._positions[part] for part in owned if self._fetch(part)}
        if not offsets:
            return
        commit = {
            "groupId": GROUP, "memberId": self._member, "offsets": offsets,
            "generation": self._generation,
        }  # fmt: skip
        reply = self._node.try_once("POST", f"{self._PATH}/commit-offsets", commit)
        if reply is None:
            return
        assert reply.status in (200, 404, 409), reply.body
        if reply.status == 200:
            self._has_committed()


class EmbeddedMember(Actor):
    """A member of the same group in this process, without a node."""

    def __init__(self, history: History, node: AnyNode, px: Pxrs) -> None:
        self._consumer = px.consumer(TOPIC, GROUP, auto_commit=False, session_ttl=20.0)
        super().__init__(history, self._consumer.member, node)

    def round(self) -> None:
        messages = self._consumer.poll(max_records=100, timeout=0.2)
        if not messages:
            return
        handled = {(message.partition, message.offset) for message in messages}
        self._history.note(lambda: self._history.handled.update(handled))
        ends = {message.partition: message for message in messages}
        began = monotonic()
        try:
            self._consumer.commit()
        except pxrs.Fenced:
            return
        done = [Done(p, m.fence.epoch, m.offset + 1, began) for p, m in ends.items()]

        def change() -> None:
            self._history.commits += done
            self._history.rounds[self.name] += 1

        self._history.note(change)

    def end(self) -> None:
        with suppress(pxrs.Fenced):
            self._consumer.close()


class Observer(Actor):
    """Reads the group's claims: epochs and checkpoints never go back, whoever writes them."""

    def __init__(self, history: History, node: AnyNode, px: Pxrs) -> None:
        super().__init__(history, "observer", node)
        self._coord = px.stores.coord
        self._last: dict[str, tuple[int, Claim]] = {}

    def round(self) -> None:
        for record in self._coord.list(f"claims/{GROUP}/"):
            claim = decode(record, Claim)
            version, before = self._last.get(record.key, (0, Claim()))
            assert record.version >= version
            assert claim.epoch >= before.epoch, (before, claim)
            assert (claim.checkpoint or 0) >= (before.checkpoint or 0), (before, claim)
            self._last[record.key] = record.version, claim
            if claim.owner is not None:
                number = int(record.key.rpartition("/")[2])
                self._history.note_owner(number, claim.epoch, claim.checkpoint)
