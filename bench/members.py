"""Members of a group, each in a process of its own, and what the parent sees of the group."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from itertools import islice, repeat
from multiprocessing.connection import Connection
from time import monotonic, monotonic_ns, perf_counter_ns, process_time
from typing import NamedTuple

import pxrs
from bench.children import Child
from bench.ours import Px
from bench.workload import PARTITIONS, TOPIC, ends
from pxrs.core.group import group_state
from pxrs.core.records import (
    Claim,
    Head,
    MemberRecord,
    claims_prefix,
    decode,
    head_key,
    members_prefix,
)
from pxrs.types import TopicPartition

SETTLE_TIMEOUT = 30.0
TICK = 0.005


class Snapshot(NamedTuple):
    """A message that a member handled, and when."""

    partition: int
    offset: int
    at: int


class Farewell(NamedTuple):
    """What a member that left on request says: when it began to leave, and what it handled."""

    at: int
    seen: list[Snapshot]


class Member:
    """A process that joins when told, handles messages until told to leave, and reports."""

    def __init__(self, stack: ExitStack, where: str, group: str) -> None:
        self._child = stack.enter_context(Child(_member, where, group))
        self.name = ""

    def ready(self) -> None:
        self._child.hear()

    def join(self) -> int:
        """Let it join; when it was told."""
        at = monotonic_ns()
        self._child.tell("join")
        self.name = self._child.hear()
        return at

    def leave(self) -> Farewell:
        self._child.tell("leave")
        return Farewell(*self._child.hear())

    def kill(self) -> int:
        """SIGKILL; when it was sent."""
        at = monotonic_ns()
        self._child.kill()
        return at


def _member(line: Connection, where: str, group: str) -> None:
    with pxrs.connect(where) as px:
        line.send("ready")
        line.recv()
        consumer = px.consumer(TOPIC, group=group)
        line.send(consumer.member)
        told = threading.Event()
        threading.Thread(target=_listen, args=(line, told), daemon=True).start()
        seen: list[tuple[int, int, int]] = []
        for message in consumer:
            seen.append((message.partition, message.offset, monotonic_ns()))
            if told.is_set():
                break
        at = monotonic_ns()
        consumer.close()
        line.send((at, [Snapshot(*each) for each in seen]))


def _listen(line: Connection, told: threading.Event) -> None:
    line.recv()
    told.set()


class Load:
    """One message to every partition every few milliseconds, until the block is left."""

    def __init__(self, px: Px, partitions: int) -> None:
        self._px = px
        self._partitions = partitions
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with self._px.producer(linger=0.0) as producer:
            while not self._stop.wait(TICK):
                for partition in range(self._partitions):
                    producer.send(TOPIC, b"tick", partition=partition)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Watched:
    """A group as its records tell it."""

    def __init__(self, px: Px, group: str) -> None:
        self._coord = px.stores.coord
        self._group = group

    def settle(self, members: int) -> Head:
        """Wait until so many members own what they should."""
        deadline = monotonic() + SETTLE_TIMEOUT
        while monotonic() < deadline:
            head, found, claims = self._read()
            if head and len(found) == members and group_state(head, found, claims) == "STABLE":
                return head
            time.sleep(TICK)
        raise TimeoutError(f"{self._group} had no {members} settled members in {SETTLE_TIMEOUT} s")

    def _read(self) -> tuple[Head | None, dict[str, MemberRecord], dict[TopicPartition, Claim]]:
        found = self._coord.get(head_key(self._group))
        members = members_prefix(self._group)
        return (
            decode(found, Head) if found else None,
            {
                record.key.removeprefix(members): decode(record, MemberRecord)
                for record in self._coord.list(members)
            },
            {
                TopicPartition(TOPIC, int(record.key.rpartition("/")[2])): decode(record, Claim)
                for record in self._coord.list(claims_prefix(self._group))
            },
        )


def spin(turns: int) -> None:
    """Work: so many turns of an empty loop."""
    for _ in repeat(None, turns):
        pass


def turns_in(microseconds: float) -> int:
    """How many turns `spin` makes in that time when nobody disturbs it."""
    sample = 2_000
    best = min(_timed_spin(sample) for _ in range(200))
    return round(1000 * microseconds * sample / best)


def _timed_spin(turns: int) -> int:
    started = perf_counter_ns()
    spin(turns)
    return perf_counter_ns() - started


class Done(NamedTuple):
    """What consuming took: from the first start to the last end, and of all processors."""

    seconds: float
    cpu: float


def consume_together(px: Px, group: str, processes: int, messages: int, turns: int) -> Done:
    """Consume the whole topic in so many processes."""
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(_consume, px.url, group, PARTITIONS // processes, messages, turns)
            )
            for _ in range(processes)
        ]
        for child in children:
            child.hear()
        parts = _start_all(children)
    handled = sum(part.handled for part in parts)
    if handled != messages:
        raise RuntimeError(f"{handled} of {messages} messages were handled")
    return Done(_span(parts), sum(part.cpu for part in parts))


def work_together(processes: int, messages: int, turns: int) -> float:
    """The same work in so many processes, without any messages; the seconds it took."""
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(_work, messages // processes, turns))
            for _ in range(processes)
        ]
        for child in children:
            child.hear()
        return _span(_start_all(children))


class _Part(NamedTuple):
    started: float
    ended: float
    cpu: float
    handled: int


def _start_all(children: list[Child]) -> list[_Part]:
    for child in children:
        child.tell("go")
    return [child.hear() for child in children]


def _span(parts: list[_Part]) -> float:
    return max(part.ended for part in parts) - min(part.started for part in parts)


def await_share(consumer: pxrs.Consumer, partitions: int) -> None:
    """Wait until the consumer owns so many partitions."""
    deadline = monotonic() + SETTLE_TIMEOUT
    while len(consumer.assignment) != partitions:
        if monotonic() > deadline:
            raise TimeoutError(f"a member owns {len(consumer.assignment)}, not {partitions}")
        time.sleep(TICK)


def _consume(
    line: Connection, where: str, group: str, share: int, messages: int, turns: int
) -> None:
    with pxrs.connect(where) as px, px.consumer(TOPIC, group=group) as consumer:
        await_share(consumer, share)
        line.send("ready")
        line.recv()
        count = sum(ends(messages)[part.partition] for part in consumer.assignment)
        handled = 0
        started, cpu = monotonic(), process_time()
        for message in islice(consumer, count):
            _key, _value, _offset = message.key, message.value, message.offset
            spin(turns)
            handled += 1
        consumer.commit()
        line.send(_Part(started, monotonic(), process_time() - cpu, handled))


def _work(line: Connection, messages: int, turns: int) -> None:
    line.send("ready")
    line.recv()
    started, cpu = monotonic(), process_time()
    for _ in range(messages):
        spin(turns)
    line.send(_Part(started, monotonic(), process_time() - cpu, messages))
