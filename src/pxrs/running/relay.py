"""`px.relay`: copies a source, or any topic, into a topic. Nothing is lost, nothing comes twice.

One member of a group reads the source, and each step copies what it was handed.

- Where one store holds both, the messages and the checkpoint are one commit (`OneCommit`).
- Where the log is elsewhere (`TwoStores`), a step is three: a record of what is about to be
  copied, written with the claim and so fenced by it; the batches, appended under the producer and
  the sequences of that record; and the checkpoint, with which the record is done.

Why the second one is right, wherever its process dies or freezes. A record is begun only by the
owner of the partition, and only when the one before is done. So at any time there is at most one
copy under way, and everyone who ever appends a batch of it, the owner, those after it and those
that were frozen meanwhile, does so under the same producer and sequence: for each partition the
log takes one batch and recognises or refuses the others.

The rows of a table may change between two attempts. So the record says which message goes to
which partition, and nobody asks their keys again: a row is in the batches of one partition only,
of which the log takes one, so it comes at most once. The first batch has all messages that were
recorded for its partition. Later ones lack those that are gone from the source since, and no
others: ids are final, so none comes in between, and a row that moved into this partition of the
source is not of this copy. So whichever batch the log has taken, all is in it that is still in
the source, and a row comes with the key and value that it had at one of the attempts. If the key
was changed meanwhile it comes in the partition of the key before.

A log forgets producers that were silent for long, so the next owner first reads back what was
appended since the record was begun. When it has finished the copy it goes on under another
producer: a batch of the last one that still comes is recognised, or refused. Only where all
messages of a batch are gone from the source nobody has taken its sequence: then it may come late,
with rows that were deleted, behind newer ones.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from pxrs.clock import Clock
from pxrs.codec.batches import (
    LARGEST_BATCH,
    MAX_TIMESTAMP,
    Builder,
    new_builder,
    read_header,
    seal,
)
from pxrs.codec.messages import cut, messages_of
from pxrs.config import check_group_name
from pxrs.consuming.consumer import Consumer
from pxrs.consuming.health import Health
from pxrs.consuming.member import Member
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.core import records
from pxrs.core.relaying import (
    Pending,
    RelayRecord,
    Target,
    first_of,
    pending,
    relay_key,
    target_key,
)
from pxrs.core.routing import hasher
from pxrs.errors import (
    Closed,
    Fenced,
    InvalidRequest,
    NotAtomic,
    OutcomeUnknown,
    PxrsError,
    SequenceGap,
    SessionLost,
    StoreUnavailable,
    TransactionConflict,
)
from pxrs.producing.records import NO_HEADERS
from pxrs.running.dead_letters import words_of
from pxrs.stores.api import CoordStore, LogStore
from pxrs.types import (
    Append,
    Check,
    Committed,
    LogPartition,
    Message,
    Put,
    Topic,
    TopicPartition,
)

_LOG = logging.getLogger("pxrs.relay")
_LOOK = 0.5
# How many messages one step copies, and how large a batch gets. A server of JetStream takes 1 MB.
_MOST = 10_000
_BATCH_BYTES = 512 * 2**10
_READ_BYTES = 4 * 2**20
_PRODUCERS = 2**62
# Partitions of so many keys are remembered.
_MOST_KEYS = 2**16


class RelayJob(NamedTuple):
    """The arguments of `relay`, checked: what is copied where, and as which group."""

    source: Topic
    topic: Topic
    group: str

    @property
    def name(self) -> str:
        """Its name in health and logs."""
        return f"relay:{self.group}"


def begin_relay(coord: CoordStore, source: Topic, topic: Topic, group: str) -> RelayJob:
    """Checks the arguments, and records where the group copies this source to.

    Another member that copied it elsewhere would take half of the messages there.
    """
    check_group_name(group)
    if source.id == topic.id:
        raise InvalidRequest(f"topic {topic.name!r} can't be copied to itself; name another one")
    key = target_key(group, source.id)
    found = coord.get(key)
    if found is None:
        put = Put(key, records.encode(Target(topic=topic.name)))
        outcome = coord.commit([Check(key, 0)], [put])
        if isinstance(outcome, Committed):
            return RelayJob(source, topic, group)
        found = outcome.current[key]
    target = topic.name if found is None else records.decode(found, Target).topic
    if target != topic.name:
        raise InvalidRequest(
            f"group {group!r} copies {source.name!r} to {target!r}, so it can't copy it to "
            f"{topic.name!r}; use another group"
        )
    return RelayJob(source, topic, group)


class Relay:
    """Copies what its consumer gets, until it is stopped. See `handle.Work`."""

    def __init__(
        self,
        job: RelayJob,
        coord: CoordStore,
        log: LogStore,
        clock: Clock,
        join: Callable[[], Member],
    ) -> None:
        self._job = job
        self._coord = coord
        self._log = log
        self._clock = clock
        self._join = join
        self._member: Member | None = None
        self._stopping = threading.Event()
        self.name = job.name
        self.handled = 0
        self.failed = 0

    def stop(self) -> None:
        """Finish the step at hand and leave. From any thread or signal."""
        self._stopping.set()
        if self._member is not None:
            # A signal handler must not wait for a lock that its own thread may hold.
            threading.Thread(target=self._member.wake, daemon=True).start()

    def health(self) -> dict[str, Health]:
        """Return the health of its member."""
        if self._member is None:
            return {self.name: Health("joining", "it has not joined its group yet")}
        return {self._member.name: self._member.health()}

    def run(self) -> None:
        """Copy until stopped; raises what made it stop by itself."""
        member = self._member = self._join()
        topic = self._job.topic
        spreader = Spreader(topic)
        way: Way = OneCommit(member, topic, spreader, self._clock)
        try:
            while not self._stopping.is_set():
                try:
                    self.handled += way.step(_LOOK)
                except NotAtomic:
                    if isinstance(way, TwoStores):
                        raise
                    # Nothing was done: what is in hand comes again.
                    way = TwoStores(
                        member, self._coord, self._log, self._job, spreader, self._clock
                    )
                except PxrsError as error:
                    self._failed(error)
        except Closed:
            if not self._stopping.is_set():
                raise
        finally:
            member.close()

    def _failed(self, error: PxrsError) -> None:
        """Wait a moment if it may pass; a partition that was lost is another member's to copy."""
        if isinstance(error, Fenced | SessionLost):
            return
        if not error.retryable and not isinstance(error, OutcomeUnknown):
            raise error
        self.failed += 1
        _LOG.warning("%s: not copied, it is tried again: %s", self.name, words_of(error))
        self._stopping.wait(_LOOK)


Spread = dict[int, list[Builder]]


class Spreader:
    """Puts messages into batches of the partitions of a topic, in the order that they came.

    A key decides by its hash, as for all who send. Messages without a key stay together, in the
    partition with the number of their own: they keep their order, too.
    """

    def __init__(self, topic: Topic) -> None:
        self._partitions = topic.partitions
        self._hash = hasher(topic.partitioner, topic.partitions)
        self._known: dict[bytes, int] = {}

    def targets(self, messages: Iterable[Message]) -> dict[int, int]:
        """The partition of each of these messages, by its offset in the source."""
        known = self._known
        return {
            message.offset: known[message.key]
            if message.key in known
            else self._partition(message.key, message)
            for message in messages
        }

    def spread(
        self,
        messages: Iterable[Message],
        now: int,
        batch_bytes: int = LARGEST_BATCH,
        targets: Mapping[int, int] | None = None,
    ) -> Spread:
        """The batches of each partition that gets some. Messages without a time get `now`.

        `targets` says where they go; without it their keys do.
        """
        known = self._known
        batches: list[list[Builder]] = [[] for _ in range(self._partitions)]
        appends: list[Callable[..., object]] = [_no_batch] * self._partitions
        counts = [0] * self._partitions
        here, append, count = 0, appends[0], 0
        for message in messages:
            key, time = message.key, message.timestamp
            try:
                partition = known[key] if targets is None else targets[message.offset]
            except KeyError:
                if targets is not None:
                    raise
                partition = self._partition(key, message)
            if partition != here:
                counts[here] = count
                here, append, count = partition, appends[partition], counts[partition]
            if not 0 < time <= MAX_TIMESTAMP:
                time = now
            headers = list(message.headers) if message.headers else NO_HEADERS
            if append(count, time, key, message.value, headers) is None:
                builder = new_builder(batch_bytes)
                batches[here].append(builder)
                append = appends[here] = builder.append
                append(0, time, key, message.value, headers)
                count = 0
            count += 1
        return {partition: found for partition, found in enumerate(batches) if found}

    def _partition(self, key: bytes | None, message: Message) -> int:
        if key is None:
            return message.partition % self._partitions
        if len(self._known) >= _MOST_KEYS:
            self._known.clear()
        partition = self._known[key] = self._hash(key) % self._partitions
        return partition


def _no_batch(*_: object) -> None:
    """Stands for a batch that is full, where there is none yet."""


class Way(Protocol):
    """How messages are copied with their checkpoint."""

    def step(self, timeout: float) -> int:
        """Copy what there is, waiting so many seconds for the first; how many were copied.

        After an error everything that was not copied comes again.
        """
        ...


class OneCommit:
    """The messages and the checkpoint are one commit of the store."""

    def __init__(self, member: Member, topic: Topic, spreader: Spreader, clock: Clock) -> None:
        self._consumer: Consumer[bytes] = Consumer(member)
        self._topic = topic
        self._spreader = spreader
        self._clock = clock

    def step(self, timeout: float) -> int:
        messages = self._consumer.poll(_MOST, timeout)
        if not messages:
            return 0
        spread = self._spreader.spread(messages, self._clock.wall_ms(), _BATCH_BYTES)
        appends = [
            Append(LogPartition(self._topic.id, partition), seal(builder))
            for partition, builders in spread.items()
            for builder in builders
        ]
        with self._consumer.transaction() as tx:
            tx._append(appends)
        return len(messages)


class TwoStores:
    """The messages are in another store than the checkpoint: see the module."""

    def __init__(
        self,
        member: Member,
        coord: CoordStore,
        log: LogStore,
        job: RelayJob,
        spreader: Spreader,
        clock: Clock,
    ) -> None:
        self._consumer: Consumer[bytes] = Consumer(member)
        self._steps = member.steps
        self._coord = coord
        self._log = log
        self._job = job
        self._spreader = spreader
        self._clock = clock
        # The records of the partitions that are owned, as they are in the store.
        self._records: dict[TopicPartition, tuple[OwnedPartition, RelayRecord]] = {}

    def step(self, timeout: float) -> int:
        copied = 0
        try:
            for messages in _by_partition(self._consumer.poll(_MOST, timeout)):
                while messages:
                    done = self._copy_some(messages)
                    copied += done
                    messages = messages[done:] if done else []
        except BaseException:
            # What a record in the store says counts, not what was kept of it here.
            self._records.clear()
            self._steps.give_back_all()
            raise
        return copied

    def _copy_some(self, messages: list[Message]) -> int:
        """Copy the first of these messages, of one partition; how many.

        None if a copy had to be finished that was begun before: they come again behind it.
        """
        fence = messages[0].fence
        owned = self._steps.owned_partition(fence.topic, fence.partition)
        if owned.epoch != fence.epoch:
            raise Fenced("the partition was lost and claimed again", [owned.part])
        record = self._record(owned)
        if record.is_unfinished(owned.checkpoint):
            self._finish(owned, record)
            return 0
        if record.pending is not None:
            # Void, as the checkpoint was set elsewhere: its batches may be there, or still come.
            record = _new_record()
        messages = first_of(messages, _BATCH_BYTES)
        self._copy(owned, record, messages)
        return len(messages)

    def _copy(self, owned: OwnedPartition, record: RelayRecord, messages: list[Message]) -> None:
        targets = self._spreader.targets(messages)
        spread = self._spreader.spread(messages, self._clock.wall_ms(), targets=targets)
        bounds = self._log.bounds(self._job.topic.id)
        until = messages[-1].offset + 1
        # A partition of which nothing was copied yet has no checkpoint; from here on it has.
        checkpoint = owned.origin if owned.checkpoint is None else owned.checkpoint
        ends = {partition: bounds[partition].end for partition in spread}
        record = record.begun(pending(checkpoint, until, ends, targets))
        self._write(owned, checkpoint, record)
        try:
            counts = self._append(record, spread)
        except SequenceGap as gap:
            # Only if another owner was given the partition meanwhile, and has finished this copy.
            raise TransactionConflict(f"the copy was overtaken: {gap}") from gap
        self._write(owned, until, record.done(counts))

    def _finish(self, owned: OwnedPartition, record: RelayRecord) -> None:
        """Make sure that all batches of the copy are there, and go on behind it."""
        begun = record.pending
        assert begun is not None
        targets = begun.targets
        messages = [each for each in self._read(owned, begun) if each.offset in targets]
        spread = self._spreader.spread(messages, self._clock.wall_ms(), targets=targets)
        for partition, builders in spread.items():
            if not self._is_there(record, partition):
                try:
                    self._append(record, {partition: builders})
                except SequenceGap:
                    # Another one that finishes it, or began it, was faster, with more messages.
                    if not self._is_there(record, partition):
                        raise
        self._write(owned, begun.until, _new_record())
        self._steps.table.restart(owned.part, begun.until)

    def _append(self, record: RelayRecord, spread: Spread) -> dict[int, int]:
        """Append the batches of a copy, one for each partition; how many messages each has."""
        appends = [
            Append(
                LogPartition(self._job.topic.id, partition),
                seal(builder, record.producer, 0, record.sequences.get(partition, 0)),
            )
            for partition, [builder] in sorted(spread.items())
        ]
        for result in self._log.append(appends):
            if isinstance(result, PxrsError):
                raise result
        return {append.where.partition: append.batch.count for append in appends}

    def _is_there(self, record: RelayRecord, partition: int) -> bool:
        """Whether the partition has the batch of the copy that was begun.

        If retention has removed messages since then, only the log's own memory of producers tells.
        """
        assert record.pending is not None
        where = LogPartition(self._job.topic.id, partition)
        offset = record.pending.ends.get(partition, 0)
        batch = (record.producer, record.sequences.get(partition, 0))
        while True:
            bounds = self._log.bounds(where.topic_id)[partition]
            offset = max(offset, bounds.start)
            if offset >= bounds.end:
                return False
            for stored in self._log.fetch(where, offset, _READ_BYTES).batches:
                header = read_header(stored.data)
                if (header.producer_id, header.base_sequence) == batch:
                    return True
                offset = stored.next

    def _read(self, owned: OwnedPartition, begun: Pending) -> list[Message]:
        """All messages from where the copy starts to where it ends, as the source has them now."""
        messages: list[Message] = []
        offset = begun.start
        while offset < begun.until:
            batches = self._log.fetch(owned.where, offset, _READ_BYTES).batches
            if not batches:
                raise StoreUnavailable(
                    f"{owned.part.topic!r} can't be read up to offset {begun.until} yet, and a "
                    "copy up to there was begun"
                )
            for batch in batches:
                messages += cut(messages_of(batch, owned.fence), offset)
                offset = batch.next
        return [message for message in messages if message.offset < begun.until]

    def _record(self, owned: OwnedPartition) -> RelayRecord:
        """The record of a partition. Read once it is owned: from then on nobody else writes it."""
        known = self._records.get(owned.part)
        if known is not None and known[0] is owned:
            return known[1]
        found = self._coord.get(self._key(owned))
        record = _new_record() if found is None else records.decode(found, RelayRecord)
        self._records[owned.part] = (owned, record)
        return record

    def _write(self, owned: OwnedPartition, checkpoint: int, record: RelayRecord) -> None:
        """Commit the checkpoint and the record, if the partition is still owned."""
        put = Put(self._key(owned), records.encode(record))
        self._steps.commit_with(owned, checkpoint, [put])
        self._records[owned.part] = (owned, record)

    def _key(self, owned: OwnedPartition) -> str:
        job = self._job
        return relay_key(job.group, owned.where.topic_id, job.topic.id, owned.part.partition)


def _new_record() -> RelayRecord:
    return RelayRecord(producer=secrets.randbelow(_PRODUCERS))


def _by_partition(messages: list[Message]) -> list[list[Message]]:
    found: dict[TopicPartition, list[Message]] = {}
    for message in messages:
        found.setdefault(TopicPartition(message.topic, message.partition), []).append(message)
    return list(found.values())
