"""Topics: named records that point to a log by its id.

The log may be kept by another engine, and then the two can't be made in one commit. So the record
comes first, marked as not made yet: the topic can't be found until it is. Then comes the log, and
then the final record, if the first one is still there.

A process that creates a topic that was begun goes on where that stopped, with the same log. If the
record of a topic that is not made is removed, the topic will never be made, and its log can go,
too. A log that no record names will never be used: `pxrs store tidy` removes it.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from pxrs.clock import Clock
from pxrs.codec.batches import MAX_TIMESTAMP, decode
from pxrs.config import check_partitions, check_topic_name
from pxrs.core.routing import DEFAULT_PARTITIONER
from pxrs.core.routing import partitioner as check_partitioner
from pxrs.errors import (
    InvalidRequest,
    OffsetOutOfRange,
    OutcomeUnknown,
    PxrsError,
    StoreBusy,
    TopicExists,
    TopicNotFound,
    quoted,
)
from pxrs.stores.api import CoordStore, LogStore, SettlesLate, TellsSizes, TellsTime
from pxrs.types import (
    Bounds,
    Check,
    Committed,
    Delete,
    Fence,
    LogPartition,
    Put,
    StoredRows,
    Topic,
    Versioned,
)

_FOLDER = "topics/"
_SCHEMA = 1
# Ten thousand years.
_LONGEST_RETENTION = 10_000 * 365 * 24 * 3600.0
_MOST_BYTES = 2**62
_LAST_OFFSET = 2**63 - 1
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The ids of virtual topics begin so: their messages are rows of a source, not of the store's log.
_VIRTUAL = "source-"
# Seconds to wait for the end of a virtual topic to be known, and between two looks.
_PATIENCE = 10.0
_BETWEEN_LOOKS = 0.02
# The setting of a source that has what `prepare` has added to it. It can't be given to `attach`.
PREPARED = "prepared"


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A topic in the store, as JSON that an operator can read."""

    schema: int
    id: str
    partitions: int
    partitioner: str = DEFAULT_PARTITIONER
    retention_ms: int | None = None
    retention_bytes: int | None = None
    created_ms: int = 0
    source: dict[str, Any] | None = None
    made: bool = True


class Recorded(NamedTuple):
    """A topic as recorded; `made`: it can be used."""

    topic: Topic
    made: bool
    version: int

    @property
    def key(self) -> str:
        return _FOLDER + self.topic.name


class PartitionInfo(msgspec.Struct, frozen=True):
    """The offsets of a partition, `start` up to (not including) `end`, and its bytes."""

    partition: int
    start: int
    end: int
    size: int


class TopicInfo(msgspec.Struct, frozen=True):
    """A topic with the bounds and sizes of its partitions."""

    topic: Topic
    partitions: list[PartitionInfo]

    @property
    def messages(self) -> int:
        """The number of messages. For a virtual topic, the most offsets that a partition spans.

        Partitions of a virtual topic share the offsets of its source, which have gaps.
        """
        held = [part.end - part.start for part in self.partitions]
        return sum(held) if self.topic.source is None else max(held)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.partitions)


class Topics:
    """Create, find, describe and delete topics."""

    def __init__(
        self,
        coord: CoordStore,
        log: LogStore,
        clock: Clock,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._coord = coord
        self._log = log
        self._clock = clock
        self._new_id = new_id or (lambda: secrets.token_hex(8))

    def create(
        self,
        name: str,
        partitions: int,
        *,
        partitioner: str = DEFAULT_PARTITIONER,
        retention: float | timedelta | None = None,
        retention_bytes: int | None = None,
    ) -> Topic:
        """Create a topic with a fixed number of partitions.

        Returns the topic if it exists with the same settings; raises `TopicExists` if they differ.
        `partitioner` decides which partition a key belongs to, for all producers: `xxhash`,
        Kafka's `murmur2`, or `jump`. `retention` is in seconds, or a timedelta; it applies to each
        partition, as `retention_bytes` does, and drops whole batches, the oldest first.
        """
        check_topic_name(name)
        check_partitions(partitions)
        check_partitioner(partitioner)
        retention_ms = _milliseconds(retention)
        _check_bytes(retention_bytes)
        wanted = Topic(
            name=name,
            id=self._id(),
            partitions=partitions,
            partitioner=partitioner,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            created_ms=self._clock.wall_ms(),
        )
        return self._create(wanted)

    def _attach(
        self, name: str, partitions: int, source: dict[str, Any], *, partitioner: str
    ) -> Topic:
        """Create a virtual topic over a source; the settings of that are kept with it.

        Returns the topic if it exists with the same settings; raises `TopicExists` if they differ.
        """
        check_topic_name(name)
        check_partitions(partitions)
        check_partitioner(partitioner)
        return self._create(
            Topic(
                name=name,
                id=self._id(virtual=True),
                partitions=partitions,
                partitioner=partitioner,
                created_ms=self._clock.wall_ms(),
                source=source,
            )
        )

    def _set_prepared(self, topic: Topic, prepared: dict[str, Any]) -> Topic:
        """Record what was added to a virtual topic's source; `TopicNotFound` if it is another."""
        key = _FOLDER + topic.name
        while True:
            found = self._look_up(topic.name)
            if found is None or found.topic.id != topic.id:
                raise TopicNotFound(topic.name)
            source = {**(found.topic.source or {}), PREPARED: prepared}
            changed = msgspec.structs.replace(found.topic, source=source)
            outcome = self._coord.commit([Check(key, found.version)], [Put(key, _encode(changed))])
            if isinstance(outcome, Committed):
                return changed

    def _create(self, wanted: Topic) -> Topic:
        while True:
            begun = self._begin(wanted)
            if begun.made or self._finish(begun):
                return _same_or_refuse(begun.topic, wanted)
            # A process that gave it up may be about to drop its log: no record may name that again.
            wanted = msgspec.structs.replace(wanted, id=self._id(virtual=wanted.source is not None))

    def _id(self, *, virtual: bool = False) -> str:
        return (_VIRTUAL if virtual else "") + self._new_id()

    def _begin(self, wanted: Topic) -> Recorded:
        """Record the topic as one that is not made yet, or return what is recorded."""
        key = _FOLDER + wanted.name
        while True:
            record = self._coord.get(key)
            if record is not None:
                return _recorded(record)
            outcome = self._coord.commit([Check(key, 0)], [Put(key, _encode(wanted, made=False))])
            if isinstance(outcome, Committed):
                return Recorded(wanted, False, outcome.versions[key])

    def _finish(self, begun: Recorded) -> bool:
        """Make the topic that was begun; false if others have made it, or given it up."""
        topic = begun.topic
        try:
            self._log.create(topic.id, topic.partitions)
        except PxrsError:
            # A log under this id, if there is one, may belong to another store.
            with suppress(PxrsError):
                _give_up(self._coord, begun)
            raise
        try:
            outcome = self._coord.commit(
                [Check(begun.key, begun.version)], [Put(begun.key, _encode(topic))]
            )
        except OutcomeUnknown:
            raise
        except PxrsError:
            with suppress(PxrsError):
                withdraw(self._coord, self._log, begun)
            raise
        if isinstance(outcome, Committed):
            return True
        current = outcome.current[begun.key]
        if current is None or _recorded(current).topic.id != topic.id:
            # No record names the log, and none will.
            self._log.drop(topic.id)
        return False

    def find(self, name: str) -> Topic:
        """Return the topic of this name, or raise `TopicNotFound`."""
        found = self._look_up(check_topic_name(name))
        if found is None:
            raise TopicNotFound(name)
        return found.topic

    def _find_writable(self, name: str) -> Topic:
        """Return the topic of this name, to send to; a virtual one can only be read."""
        topic = self.find(name)
        if topic.source is not None:
            raise InvalidRequest(
                f"topic {name!r} lies over a source and can only be read; write to the source"
            )
        return topic

    def list(self) -> list[Topic]:
        """Return all topics, sorted by name."""
        return topics_in(self._coord)

    def describe(self, name: str) -> TopicInfo:
        """Return the topic with the bounds and sizes of its partitions."""
        topic = self.find(name)
        with named(topic.name):
            bounds = self._log.bounds(topic.id)
            if isinstance(self._log, TellsSizes):
                sizes = self._log.sizes(topic.id)
            else:
                sizes = {
                    number: self._log.size(LogPartition(topic.id, number)) for number in bounds
                }
            return TopicInfo(
                topic,
                [PartitionInfo(number, *held, sizes[number]) for number, held in bounds.items()],
            )

    def bounds(self, topic: Topic) -> dict[int, Bounds]:
        """Return the first and the next offset of each partition."""
        with named(topic.name):
            return self._log.bounds(topic.id)

    def _confirmed_bounds(self, topic: Topic, number: int) -> Bounds:
        """Return the bounds of a partition for a decision: they are no older than this call."""
        with named(topic.name):
            return confirmed_bounds(self._log, LogPartition(topic.id, number))

    def delete(self, name: str) -> None:
        """Remove the topic and all its messages. If it is created again, it starts at offset 0."""
        check_topic_name(name)
        while True:
            found = self._look_up(name)
            if found is None:
                raise TopicNotFound(name)
            if withdraw(self._coord, self._log, found):
                return

    def apply_retention(self, name: str) -> None:
        """Drop messages that the topic's retention does not keep; producers do it every 10 seconds.

        The newest batch always stays.
        """
        self._retain(self.find(name))

    def _retain(self, topic: Topic) -> None:
        if topic.retention_ms is None and topic.retention_bytes is None:
            return
        before = None
        if topic.retention_ms is not None:
            # By the store's clock: a host whose clock is ahead would trim what others still need.
            coord = self._coord
            now_ms = coord.now_ms() if isinstance(coord, TellsTime) else self._clock.wall_ms()
            before = now_ms - topic.retention_ms
        with named(topic.name):
            for number in range(topic.partitions):
                self._log.expire(LogPartition(topic.id, number), before, topic.retention_bytes)

    def _look_up(self, name: str) -> Recorded | None:
        record = self._coord.get(_FOLDER + name)
        if record is None or not (found := _recorded(record)).made:
            return None
        return found


@contextmanager
def named(topic: str) -> Iterator[None]:
    """Replaces the topic's id, which is all the log knows, by its name in errors."""
    try:
        yield
    except TopicNotFound:
        raise TopicNotFound(topic) from None


def confirmed_bounds(log: LogStore, where: LogPartition) -> Bounds:
    """Returns a partition's bounds for decisions: its end is no older than this call.

    What `LogStore.bounds` says may be a moment old, and a server that was cut off from its peers
    says so for seconds. What `fetch` says of an offset that can't be there is true.
    """
    if is_virtual(where.topic_id):
        return log.bounds(where.topic_id)[where.partition]
    try:
        fetched = log.fetch(where, _LAST_OFFSET, 1)
    except OffsetOutOfRange as error:
        return Bounds(error.start, error.end)
    return Bounds(fetched.start, fetched.end)


def require_in_range(log: LogStore, where: LogPartition, topic: str, offset: int) -> None:
    """Raise `OffsetOutOfRange` unless the partition has the offset, or ends with it.

    An offset between bounds of any age is not past the end: only one outside of them needs
    confirmed ones. Retention may have removed it meanwhile; whoever fetches it learns that.
    """
    with named(topic):
        held = log.bounds(where.topic_id)[where.partition]
        if not held.start <= offset <= held.end:
            held = confirmed_bounds(log, where)
    if not held.start <= offset <= held.end:
        raise OffsetOutOfRange(topic, where.partition, offset, *held)


def settled_end(log: LogStore, where: LogPartition) -> int:
    """The offset below which no message can appear any more: where "the end" is for a checkpoint.

    A virtual topic has messages behind it that are not final. A process that has just begun to
    read one knows it once the transactions have ended that were open then: waits for those, and
    raises `StoreBusy` if they stay open.
    """
    if not is_virtual(where.topic_id) or not isinstance(log, SettlesLate):
        return confirmed_bounds(log, where).end
    deadline = time.monotonic() + _PATIENCE
    while (end := log.final(where)) is None:
        if time.monotonic() >= deadline:
            raise StoreBusy(
                "transactions that may write to the source have been open for "
                f"{_PATIENCE:g} seconds, and rows below the newest one may still come; end them, "
                "or try again once they have ended"
            )
        time.sleep(_BETWEEN_LOOKS)
    return end


def offset_or_end_at(log: LogStore, where: LogPartition, fence: Fence, timestamp: int) -> int:
    """Offset of the first message of `timestamp` (ms) or later, else the end.

    The end is read first: what is appended after the look for a message may be of that time.
    """
    end = settled_end(log, where)
    found = offset_at(log, where, fence, timestamp)
    return end if found is None else found


def offset_at(log: LogStore, where: LogPartition, fence: Fence, timestamp: int) -> int | None:
    """Offset of the first message of `timestamp` (ms) or later; None if there is none.

    In a virtual topic it is at most the end of what is final: a row that may still appear may be
    of that time, though rows with higher offsets are there. That end is read first: every row
    below it is there when the source looks for the first one, so what it misses is not below.
    """
    if not is_virtual(where.topic_id) or not isinstance(log, SettlesLate):
        return _offset_at(log, where, fence, timestamp)
    end = settled_end(log, where)
    found = _offset_at(log, where, fence, timestamp)
    if found is None and end >= log.bounds(where.topic_id)[where.partition].end:
        return None
    return end if found is None else min(found, end)


def _offset_at(log: LogStore, where: LogPartition, fence: Fence, timestamp: int) -> int | None:
    while True:
        base = log.batch_at(where, max(0, min(timestamp, MAX_TIMESTAMP)))
        if base is None or timestamp > MAX_TIMESTAMP:
            return None
        try:
            batches = log.fetch(where, base, 1).batches
        except OffsetOutOfRange:
            # Retention has just removed it: look again.
            continue
        if not batches or isinstance(batch := batches[0], StoredRows):
            # A source returns exact offsets of rows. This row may lie in another partition.
            return base
        return next(
            message.offset for message in decode(batch, fence) if message.timestamp >= timestamp
        )


def _encode(topic: Topic, *, made: bool = True) -> bytes:
    record = _Record(
        schema=_SCHEMA,
        id=topic.id,
        partitions=topic.partitions,
        partitioner=topic.partitioner,
        retention_ms=topic.retention_ms,
        retention_bytes=topic.retention_bytes,
        created_ms=topic.created_ms,
        source=topic.source,
        made=made,
    )
    return msgspec.json.encode(record)


def _recorded(record: Versioned) -> Recorded:
    stored = msgspec.json.decode(record.value, type=_Record)
    topic = Topic(
        name=record.key.removeprefix(_FOLDER),
        id=stored.id,
        partitions=stored.partitions,
        partitioner=stored.partitioner,
        retention_ms=stored.retention_ms,
        retention_bytes=stored.retention_bytes,
        created_ms=stored.created_ms,
        source=stored.source,
    )
    return Recorded(topic, stored.made, record.version)


def recorded_in(coord: CoordStore) -> list[Recorded]:
    """All recorded topics, sorted by name, including those that are not made yet."""
    return [_recorded(record) for record in coord.list(_FOLDER)]


def topics_in(coord: CoordStore) -> list[Topic]:
    """All topics that can be used, sorted by name."""
    return [found.topic for found in recorded_in(coord) if found.made]


def withdraw(coord: CoordStore, log: LogStore, found: Recorded) -> bool:
    """Remove the topic and its log; false if the record is another one by now, or gone."""
    if not _give_up(coord, found):
        return False
    log.drop(found.topic.id)
    return True


def _give_up(coord: CoordStore, found: Recorded) -> bool:
    outcome = coord.commit([Check(found.key, found.version)], [Delete(found.key)])
    return isinstance(outcome, Committed)


def is_virtual(topic_id: str) -> bool:
    """Whether the topic of this id lies over a source."""
    return topic_id.startswith(_VIRTUAL)


def read_topic(record: Put) -> Topic:
    """Decodes a topic record from a remote client; raises `InvalidRequest` if it is invalid."""
    name = check_topic_name(record.key.removeprefix(_FOLDER))
    try:
        stored = msgspec.json.decode(record.value, type=_Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the record of topic {name!r} can't be read: {error}") from None
    if stored.schema != _SCHEMA:
        raise InvalidRequest(f"schema must be {_SCHEMA}, got {stored.schema}")
    check_partitions(stored.partitions)
    check_partitioner(stored.partitioner)
    if stored.retention_ms is not None:
        _milliseconds(stored.retention_ms / 1000)
    _check_bytes(stored.retention_bytes)
    check_topic_id(stored.id)
    return _recorded(Versioned(record.key, record.value, 0)).topic


def check_topic_id(topic_id: str) -> None:
    """Rejects ids of logs that some engine could not store."""
    if not _ID.fullmatch(topic_id):
        raise InvalidRequest(
            f"a topic's id must be 1 to 64 letters, digits, '_' or '-', got {quoted(topic_id)}"
        )


def _same_or_refuse(existing: Topic, wanted: Topic) -> Topic:
    for name in ("partitions", "partitioner", "retention", "retention_bytes", "source"):
        has, asked = getattr(existing, name), getattr(wanted, name)
        if name == "source" and has is not None:
            has = {each: value for each, value in has.items() if each != PREPARED}
        if has != asked:
            raise TopicExists(
                f"topic {wanted.name!r} exists with {name} = {has}, not {asked}; "
                "use it as it is, or delete it first"
            )
    return existing


def _milliseconds(retention: object) -> int | None:
    """Converts a retention to whole milliseconds; None keeps messages for ever."""
    if retention is None:
        return None
    seconds = retention.total_seconds() if isinstance(retention, timedelta) else retention
    if (
        not isinstance(seconds, int | float)
        or isinstance(seconds, bool)
        or not 0.001 <= seconds <= _LONGEST_RETENTION
    ):
        raise InvalidRequest(
            "retention must be seconds (0.001 or more), a timedelta, or None for ever; "
            f"got {quoted(retention)}"
        )
    return math.ceil(seconds * 1000)


def _check_bytes(retention_bytes: object) -> None:
    if retention_bytes is None:
        return
    if type(retention_bytes) is not int or not 1 <= retention_bytes <= _MOST_BYTES:
        raise InvalidRequest(
            f"retention_bytes must be an integer from 1 to {_MOST_BYTES}, or None for ever; "
            f"got {quoted(retention_bytes)}"
        )
