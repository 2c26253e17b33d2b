"""Topics: named records that point to a log by its id."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec

from pxrs.clock import Clock
from pxrs.config import check_partitions, check_topic_name
from pxrs.core.routing import DEFAULT_PARTITIONER
from pxrs.core.routing import partitioner as check_partitioner
from pxrs.errors import (
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    StoreError,
    TopicExists,
    TopicNotFound,
    quoted,
)
from pxrs.stores.api import CoordStore, LogStore, TellsSizes
from pxrs.types import Bounds, Check, Committed, Delete, LogPartition, Put, Topic, Versioned

_FOLDER = "topics/"
_SCHEMA = 1
# Ten thousand years.
_LONGEST_RETENTION = 10_000 * 365 * 24 * 3600.0
_MOST_BYTES = 2**62
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The ids of virtual topics begin so: their messages are rows of a source, not of the store's log.
_VIRTUAL = "source-"
# Among the settings of a source: what `prepare` has added to it. Nobody attaches with that.
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
        """How many there are. For a virtual topic, the most offsets that a partition spans.

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
            id=self._new_id(),
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
                id=_VIRTUAL + self._new_id(),
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
            record = self._coord.get(key)
            if record is None or (found := _decode(record)).id != topic.id:
                raise TopicNotFound(topic.name)
            source = {**(found.source or {}), PREPARED: prepared}
            changed = msgspec.structs.replace(found, source=source)
            outcome = self._coord.commit([Check(key, record.version)], [Put(key, _encode(changed))])
            if isinstance(outcome, Committed):
                return changed

    def _create(self, wanted: Topic) -> Topic:
        name = wanted.name
        existing = self._look_up(name)
        if existing is not None:
            return _same_or_refuse(existing, wanted)
        self._log.create(wanted.id, wanted.partitions)
        key = _FOLDER + name
        try:
            outcome = self._coord.commit([Check(key, 0)], [Put(key, _encode(wanted))])
        except OutcomeUnknown:
            raise
        except PxrsError:
            # Nothing points to the log, and nothing will.
            with suppress(PxrsError):
                self._log.drop(wanted.id)
            raise
        if isinstance(outcome, Committed):
            return wanted
        self._log.drop(wanted.id)
        current = outcome.current[key]
        if current is None:
            raise StoreError(f"the store refused topic {name!r} without saying why")
        return _same_or_refuse(_decode(current), wanted)

    def find(self, name: str) -> Topic:
        """Return the topic of this name, or raise `TopicNotFound`."""
        topic = self._look_up(check_topic_name(name))
        if topic is None:
            raise TopicNotFound(name)
        return topic

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

    def delete(self, name: str) -> None:
        """Remove the topic and all its messages. If it is created again, it starts at offset 0."""
        key = _FOLDER + check_topic_name(name)
        while True:
            record = self._coord.get(key)
            if record is None:
                raise TopicNotFound(name)
            outcome = self._coord.commit([Check(key, record.version)], [Delete(key)])
            if isinstance(outcome, Committed):
                self._log.drop(_decode(record).id)
                return

    def apply_retention(self, name: str) -> None:
        """Drop what the topic's retention no longer keeps; producers do it every 10 seconds.

        The newest batch always stays.
        """
        self._retain(self.find(name))

    def _retain(self, topic: Topic) -> None:
        if topic.retention_ms is None and topic.retention_bytes is None:
            return
        before = None
        if topic.retention_ms is not None:
            before = self._clock.wall_ms() - topic.retention_ms
        with named(topic.name):
            for number in range(topic.partitions):
                self._log.expire(LogPartition(topic.id, number), before, topic.retention_bytes)

    def _look_up(self, name: str) -> Topic | None:
        record = self._coord.get(_FOLDER + name)
        return None if record is None else _decode(record)


@contextmanager
def named(topic: str) -> Iterator[None]:
    """Replaces the topic's id, which is all the log knows, by its name in errors."""
    try:
        yield
    except TopicNotFound:
        raise TopicNotFound(topic) from None


def _encode(topic: Topic) -> bytes:
    record = _Record(
        schema=_SCHEMA,
        id=topic.id,
        partitions=topic.partitions,
        partitioner=topic.partitioner,
        retention_ms=topic.retention_ms,
        retention_bytes=topic.retention_bytes,
        created_ms=topic.created_ms,
        source=topic.source,
    )
    return msgspec.json.encode(record)


def _decode(record: Versioned) -> Topic:
    stored = msgspec.json.decode(record.value, type=_Record)
    return Topic(
        name=record.key.removeprefix(_FOLDER),
        id=stored.id,
        partitions=stored.partitions,
        partitioner=stored.partitioner,
        retention_ms=stored.retention_ms,
        retention_bytes=stored.retention_bytes,
        created_ms=stored.created_ms,
        source=stored.source,
    )


def topics_in(coord: CoordStore) -> list[Topic]:
    """All topics that are recorded there, sorted by name."""
    return [_decode(record) for record in coord.list(_FOLDER)]


def is_virtual(topic_id: str) -> bool:
    """Whether the topic of this id lies over a source."""
    return topic_id.startswith(_VIRTUAL)


def read_topic(record: Put) -> Topic:
    """The topic as a stranger wrote it; raises `InvalidRequest` where no topic can be so."""
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
    return _decode(Versioned(record.key, record.value, 0))


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
