"""One run of a copy: checks both stores, copies what is missing, compares, reports."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.core.records import decode, encode
from pxrs.errors import CopyRefused, OutcomeUnknown, TopicExists, TopicNotFound
from pxrs.operations.copy import messages, records
from pxrs.operations.copy.messages import PartitionSum
from pxrs.stores.api import CoordStore, KeepsOwners, Stores
from pxrs.topics import Topics
from pxrs.types import Check, Committed, Put, Topic
from pxrs.urls import public

_STATE_KEY = records.COPY_FOLDER + "state"
_NAMED = 5


class Phase(enum.StrEnum):
    """The phases of a copy, in this order."""

    MESSAGES = "messages"
    ITEMS = "items"
    RECORDS = "records"
    VERIFY = "verify"


class Count(NamedTuple):
    """The progress of a phase; the total is an estimate. `VERIFY` counts messages."""

    phase: Phase
    done: int
    total: int


OnProgress = Callable[[Count], None]


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, and what the target holds at its end.

    `differences` describes what is not equal; a complete copy has none. `copied` counts what
    this run copied. A copy that was complete before is only verified again.
    """

    source: str
    target: str
    complete: bool
    resumed: bool
    only_verified: bool
    topics: int
    groups: int
    claims: int
    records: int
    queues: int
    items: int
    copied: dict[str, int]
    partitions: tuple[PartitionSum, ...]
    differences: tuple[str, ...]

    @property
    def messages(self) -> int:
        return sum(part.end - part.start for part in self.partitions)


class CopyState(msgspec.Struct, frozen=True, kw_only=True):
    """The record in the target of the source whose copy it holds, and whether it is complete.

    `topics` are the ids of all logs that the copy may have created: a later run drops those whose
    topics were deleted meanwhile.
    """

    source: str
    topics: tuple[str, ...] = ()
    complete: bool = False
    schema: int = 1


def copy_store(
    source: Stores,
    target: Stores,
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> CopyReport:
    """Copies everything, or the rest of it, and verifies. If it was stopped, run it again.

    The target must be empty, or hold what an earlier run copied. With `force` a source is copied
    that is in use: the verification finds what changes meanwhile, and the next run copies it.
    Producers can't be seen; stop them, too.
    """
    copier = _Copier(source, target, on_progress or (lambda _: None), clock)
    state, resumed = copier.begin(force)
    if not state.complete:
        state = copier.copy(state)
    report = copier.verify(state, resumed)
    if report.complete:
        _write_state(target.coord, state, msgspec.structs.replace(state, complete=True))
    return report


class _Copier:
    def __init__(
        self, source: Stores, target: Stores, on_progress: OnProgress, clock: Clock
    ) -> None:
        self._source = source
        self._target = target
        self._queues = records.queues_of(source)
        self._target_queues = records.queues_of(target)
        self._topics = Topics(source.coord, source.log, clock)
        self._clock = clock
        self._tell = on_progress
        self._done = dict.fromkeys(Phase, 0)

    def begin(self, force: bool) -> tuple[CopyState, bool]:
        """Checks that both stores allow a copy, and takes an empty target.

        Returns the target's state, and whether an earlier run has begun.
        """
        source, target = self._source, self._target
        if public(source.url) == public(target.url):
            raise CopyRefused(f"{public(source.url)} can't be copied into itself")
        found = _read_state(target.coord)
        if found is None:
            self._refuse_occupied()
        elif found.source != public(source.url):
            raise CopyRefused(
                f"the target holds {'a' if found.complete else 'an unfinished'} copy of "
                f"{found.source}; copy into an empty store"
            )
        elif found.complete:
            return found, True
        if not force and (use := self._use_of_source()) is not None:
            raise CopyRefused(
                f"{use}; stop its consumers, workers and producers, or copy with --force now and "
                "again when they have stopped"
            )
        records.refuse_items(self._queues, self._target_queues)
        records.refuse_too_large(source.coord, target.coord)
        state = found or CopyState(source=public(source.url))
        _write_state(target.coord, found, state)
        if active := records.members(target.coord):
            raise CopyRefused(
                f"the target is in use before it is complete: {_some(active)}; stop its consumers"
            )
        return state, found is not None

    def _refuse_occupied(self) -> None:
        queues = self._target_queues.all() if self._target_queues else []
        found = [f"record {key!r}" for key in records.lasting(self._target.coord)]
        found += [f"queue {queue.name!r}" for queue in queues]
        if isinstance(self._target.log, KeepsOwners):
            found += [f"messages of topic {topic_id!r}" for topic_id in self._target.log.held()]
        else:
            found += [
                f"messages of topic {topic.name!r}"
                for topic in self._kept_topics()
                if self._has_log(topic)
            ]
        if found:
            raise CopyRefused(
                f"the target is not empty: it holds {_some(found)}; copy into an empty store"
            )

    def _has_log(self, topic: Topic) -> bool:
        try:
            self._target.log.bounds(topic.id)
        except TopicNotFound:
            return False
        return True

    def _use_of_source(self) -> str | None:
        """Describes the visible use of the source; None if there is none."""
        if active := records.members(self._source.coord):
            return f"the source is in use: {_some(active)}"
        if held := records.held_items(self._queues):
            return f"the source is in use, items are held: {_some(held)}"
        return None

    def copy(self, state: CopyState) -> CopyState:
        """Copies what is missing. Returns the new state of the target."""
        source, target = self._source, self._target
        topics = self._kept_topics()
        # An earlier run noted a topic before it made the log. If it was killed in between, another
        # copy may have made one under the same id.
        for gone in sorted(set(state.topics) - {topic.id for topic in topics}):
            if self._is_own(gone):
                target.log.drop(gone)
        now = msgspec.structs.replace(state, topics=tuple(sorted(topic.id for topic in topics)))
        _write_state(target.coord, state, now)
        for topic in topics:
            self._create(topic)
        missing = sum(messages.missing_messages(source.log, target.log, topic) for topic in topics)
        advance = self._start(Phase.MESSAGES, missing)
        for topic in topics:
            messages.copy_topic(source.log, target.log, topic, advance)
        missing = max(
            0, records.count_items(self._queues) - records.count_items(self._target_queues)
        )
        advance = self._start(Phase.ITEMS, missing)
        records.copy_queues(self._queues, self._target_queues, advance, self._clock)
        missing = len(records.missing_writes(source.coord, target.coord))
        records.copy_records(source.coord, target.coord, self._start(Phase.RECORDS, missing))
        return now

    def _is_own(self, topic_id: str) -> bool:
        log = self._target.log
        if not isinstance(log, KeepsOwners):
            return True
        return log.held().get(topic_id) == log.owner()

    def _create(self, topic: Topic) -> None:
        try:
            self._target.log.create(topic.id, topic.partitions)
        except TopicExists as error:
            raise CopyRefused(
                f"topic {topic.name!r} can't be made in the target: {error}; copy into an empty "
                "store"
            ) from error

    def _kept_topics(self) -> list[Topic]:
        """Topics whose messages the store keeps; of virtual ones only the record is copied."""
        return [topic for topic in self._topics.list() if topic.source is None]

    def verify(self, state: CopyState, resumed: bool) -> CopyReport:
        """Compares both stores, down to the bytes of the batches."""
        source, target = self._source, self._target
        topics = self._kept_topics()
        held = [part for topic in topics for part in self._topics.bounds(topic).values()]
        advance = self._start(Phase.VERIFY, sum(part.end - part.start for part in held))
        sums: list[PartitionSum] = []
        differences: list[str] = []
        for topic in topics:
            try:
                for number in range(topic.partitions):
                    wanted = messages.sum_up(source.log, topic, number, advance)
                    have = messages.sum_up(target.log, topic, number, lambda _: None)
                    sums.append(have)
                    if wanted != have:
                        differences.append(_difference(wanted, have))
            except TopicNotFound:
                differences.append(f"topic {topic.name!r} is not in both stores")
        differences += records.item_differences(self._queues, self._target_queues, self._clock)
        kept = records.lasting(target.coord)
        differences += records.differences(records.lasting(source.coord), kept)
        if not state.complete and (use := self._use_of_source()) is not None:
            # The stores are equal only for now: the source may change at any time.
            differences.append(use)
        return CopyReport(
            source=state.source,
            target=public(target.url),
            complete=not differences,
            resumed=resumed,
            only_verified=state.complete,
            topics=len(topics),
            groups=sum(key.startswith(records.GROUPS) for key in kept),
            claims=sum(key.startswith(records.CLAIMS) for key in kept),
            records=len(kept),
            queues=len(self._target_queues.all()) if self._target_queues else 0,
            items=records.count_items(self._target_queues),
            copied={str(p): n for p, n in self._done.items() if p is not Phase.VERIFY},
            partitions=tuple(sums),
            differences=tuple(differences),
        )

    def _start(self, phase: Phase, total: int) -> Callable[[int], None]:
        """Reports that a phase starts. Returns the function that counts what it has done."""

        def advance(number: int) -> None:
            self._done[phase] += number
            self._tell(Count(phase, self._done[phase], max(total, self._done[phase])))

        advance(0)
        return advance


def logs_of_copy(coord: CoordStore) -> frozenset[str]:
    """Ids of the logs that an unfinished copy into this store may have made, or is making."""
    state = _read_state(coord)
    return frozenset() if state is None or state.complete else frozenset(state.topics)


def _read_state(coord: CoordStore) -> CopyState | None:
    record = coord.get(_STATE_KEY)
    return None if record is None else decode(record, CopyState)


def _write_state(coord: CoordStore, before: CopyState | None, after: CopyState) -> None:
    """Replaces the state that was read. Raises `CopyRefused` if another copy has changed it."""
    while before != after:
        record = coord.get(_STATE_KEY)
        found = None if record is None else decode(record, CopyState)
        if found == after:
            return
        if found != before:
            raise CopyRefused("another copy into the same store is running; let it finish")
        version = 0 if record is None else record.version
        try:
            outcome = coord.commit([Check(_STATE_KEY, version)], [Put(_STATE_KEY, encode(after))])
        except OutcomeUnknown:
            continue
        if isinstance(outcome, Committed):
            return


def _difference(wanted: PartitionSum, have: PartitionSum) -> str:
    name = f"partition {wanted.partition} of topic {wanted.topic!r}"
    if (wanted.start, wanted.end) != (have.start, have.end):
        return (
            f"{name} holds {wanted.start} to {wanted.end} in the source, "
            f"{have.start} to {have.end} in the target"
        )
    return f"{name}: the batches are not the same"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
