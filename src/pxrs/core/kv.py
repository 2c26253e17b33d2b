"""Key-value, as pure rules: where records lie, what a write does, what a lost answer can mean.

    kv/<key in hex>               the value, behind a binary header; see `encode_record`
    kv-heads/<shard>              term and index of the shard's last write: the fence
    kv-once/<digest>              how a write with an idempotency key was answered
    kv-due/<ms>/<digest>          a key whose value may have expired by then, by the store's clock
    kv-timers/<digest>            the same where the store has none: which version lives how long
    kv-writers/<writer>           the last batch of this writer of a remote client, answered

Every write, of whichever process, checks its shard's head and writes the next one. So records that
were read while the head of their shard was known are still the same if the commit succeeds,
versions rise with every write, also after a delete, and a deposed leader finds the head changed.

A client has writers, which send its writes to nodes in batches: a writer has one batch under way at
a time, with a number that rises. A batch is one commit, and puts its number and its answers
into the writer's record. So a client that got no answer sends the batch again, through any node: it
is written once, also if the first node still has it and goes on after a freeze.

A key is deleted by removing its record: the head goes on, so a version never comes back. A value
that has expired is deleted too, by the process that comes across it, before any reader gets to know
that it is gone. Else a compare-and-set that had read it in time could succeed after that.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from pxrs.core.records import SCHEMA, decode
from pxrs.core.routing import SLOTS, jump_shard
from pxrs.errors import (
    AlreadyExists,
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    SchemaMismatch,
    VersionMismatch,
    quoted,
)
from pxrs.types import (
    ABSENT,
    Check,
    Delete,
    Entry,
    Limits,
    Outcome,
    Put,
    Version,
    Versioned,
    Write,
)

SHARDS = 1024
LONGEST_KEY = 1024
LONGEST_VALUE = 1_048_576
LONGEST_ONCE = 256
RECORDS = "kv/"
HEADS = "kv-heads/"
ONCES = "kv-once/"
DUES = "kv-due/"
TIMERS = "kv-timers/"
WRITERS = "kv-writers/"
# How long a repeated write is answered as the first one was.
ONCE_MS = 3600 * 1000
# The most operations that one write can add to a commit: head, record, idempotency key, the time
# when it is due, each checked and put; and those of a writer.
MOST_OPERATIONS = 8
_WRITER_OPERATIONS = 2
# Bytes that a record adds to its value, and that a commit adds to its records.
_ROOM = 1024
_UNIT_BYTES = 8
_HEADER = struct.Struct(f">BQQQ{_UNIT_BYTES}s")
_encode = msgspec.json.Encoder().encode


@lru_cache(maxsize=10_000)
def shard_of(key: bytes) -> int:
    """The shard of a key, as every client computes it. Remembered: it takes 5 µs to compute."""
    return jump_shard(key, SHARDS)


def slot_of_shard(shard: int) -> int:
    """The slot whose leader leads the shard."""
    return shard % SLOTS


def record_key(key: bytes) -> str:
    """The name of a key's record. In hex, keys sort as their bytes do."""
    return RECORDS + key.hex()


def head_key(shard: int) -> str:
    """The name of a shard's head."""
    return f"{HEADS}{shard:04x}"


def once_key(key: bytes, once: str) -> str:
    """The name of the record with the answer to a write with an idempotency key, for each key."""
    digest = hashlib.blake2b(once.encode(), key=hashlib.blake2b(key).digest()[:32], digest_size=16)
    return ONCES + digest.hexdigest()


def due_key(expires_ms: int, key: bytes) -> str:
    """The name under which a value that expires is listed, by time."""
    return f"{DUES}{expires_ms:016d}/{hashlib.blake2b(key, digest_size=16).hexdigest()}"


def timer_key(key: bytes) -> str:
    """The name of the record of a value's time to live, in a store without a clock."""
    return TIMERS + hashlib.blake2b(key, digest_size=16).hexdigest()


def writer_key(writer: str) -> str:
    """The name of the record of a writer's last batch."""
    return WRITERS + writer


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's last write. `unit` is the unique id of the commit that wrote it."""

    term: int = 1
    index: int = 0
    unit: str = ""
    schema: int = SCHEMA


class Once(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a write with an idempotency key, and a digest of what the write is.

    `kind` and the version are those of `_packed`.
    """

    term: int
    index: int
    body: str
    at_ms: int = 0
    kind: int = 0
    schema: int = SCHEMA


class Timer(msgspec.Struct, frozen=True, kw_only=True):
    """How long a version of a key lives, from when its leader learns of it."""

    key: bytes
    term: int
    index: int
    ttl_ms: int
    schema: int = SCHEMA

    @property
    def version(self) -> Version:
        """The version that expires."""
        return Version(self.term, self.index)


class Record(NamedTuple):
    """A key's record, decoded. `expires_ms` is 0 for one that does not expire."""

    version: Version
    value: bytes
    expires_ms: int
    unit: str


def encode_record(record: Record) -> bytes:
    """The record as it is stored: a header of fixed size, then the value as it is."""
    term, index = record.version.term, record.version.index
    unit = bytes.fromhex(record.unit)
    return _HEADER.pack(SCHEMA, term, index, record.expires_ms, unit) + record.value


def decode_record(stored: Versioned) -> Record:
    """Decodes a stored record; raises `SchemaMismatch` if it can't."""
    if len(stored.value) < _HEADER.size or stored.value[0] != SCHEMA:
        raise SchemaMismatch(
            f"the record {quoted(stored.key)} can't be read; another version of pxrs wrote it"
        )
    _, term, index, expires_ms, unit = _HEADER.unpack_from(stored.value)
    return Record(Version(term, index), stored.value[_HEADER.size :], expires_ms, unit.hex())


def decode_entry(stored: Versioned, record: Record) -> Entry:
    """The record as the `Entry` that users get."""
    return Entry(bytes.fromhex(stored.key.removeprefix(RECORDS)), record.value, record.version)


class Change(NamedTuple):
    """One write: `value` None deletes.

    `if_match` is the version the key must have; 0/0 means that there must be no such key. A value
    with `ttl_ms` expires this long after it was written. `once` is an idempotency key. `expired`:
    deletes a value that has expired; it may be gone already.
    """

    key: bytes
    value: bytes | None
    if_match: Version | None = None
    ttl_ms: int = 0
    once: str = ""
    expired: bool = False

    @property
    def reads(self) -> bool:
        """Whether its effect depends on the key's present record."""
        return self.value is None or self.if_match is not None

    @property
    def body(self) -> str:
        """A digest of the written data: an idempotency key stands for one body."""
        text = b"delete" if self.value is None else b"put %d " % self.ttl_ms + self.value
        return hashlib.blake2b(text, digest_size=16).hexdigest()


class Written(NamedTuple):
    """The answer to a write. `existed`: whether there was something to delete."""

    version: Version
    existed: bool = True


class Writer(NamedTuple):
    """The writer of a batch, and which of its batches it is: `number` rises with each.

    `again`: it was sent before, so a node that does not answer may have it.
    """

    name: str
    number: int
    again: bool = False


class KeyBatch(NamedTuple):
    """Writes of one commit. Those of a remote client have a writer."""

    changes: Sequence[Change]
    writer: Writer | None = None


class WriterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last batch of a writer and how each of its writes was answered; see `_packed`."""

    number: int = 0
    answers: tuple[tuple[int, ...], ...] = ()
    schema: int = SCHEMA


class KnownWriter(NamedTuple):
    """A writer's record and its version; 0 if there is none yet."""

    version: int
    record: WriterRecord


def known_writer(stored: Versioned | None) -> KnownWriter:
    """The writer as it was read."""
    if stored is None:
        return KnownWriter(0, WriterRecord())
    return KnownWriter(stored.version, decode(stored, WriterRecord))


def count_together(changes: Iterable[Change], limits: Limits) -> int:
    """How many of these changes, from the first on, fit into one batch."""
    count = operations = size = 0
    for change in changes:
        operations += MOST_OPERATIONS
        size += len(change.value or b"") + _ROOM
        if count and not _fits(operations + _WRITER_OPERATIONS, size, limits):
            break
        count += 1
    return count


def _fits(operations: int, size: int, limits: Limits) -> bool:
    return operations <= limits.operations and size <= limits.value_bytes


def check_change(change: Change, limits: Limits) -> None:
    """Refuses a change that no store, or not this one, could keep."""
    check_key(change.key, limits)
    if change.value is not None:
        most = min(LONGEST_VALUE, limits.value_bytes - _HEADER.size)
        if len(change.value) > most:
            raise InvalidRequest(f"value is {len(change.value)} bytes long; the limit is {most}")
    if not 0 <= change.ttl_ms < 2**53:
        raise InvalidRequest(f"ttl must be 0.001 s to 285,000 years, got {change.ttl_ms / 1000} s")
    if change.once and (len(change.once) > LONGEST_ONCE or not change.once.isprintable()):
        raise InvalidRequest(
            f"an idempotency key must be printable text of at most {LONGEST_ONCE} characters"
        )


def check_key(key: bytes, limits: Limits) -> None:
    """Refuses a key that is empty, or longer than the store can keep."""
    most = min(LONGEST_KEY, (limits.key_chars - len(RECORDS)) // 2)
    if not 1 <= len(key) <= most:
        raise InvalidRequest(f"key must be 1 to {most} bytes long, got {len(key)} bytes")


class KnownHead(NamedTuple):
    """A head and the version of its record; 0 if there is none yet."""

    version: int
    head: Head


def known_head(stored: Versioned | None) -> KnownHead:
    """The head as it was read."""
    return (
        KnownHead(0, Head()) if stored is None else KnownHead(stored.version, decode(stored, Head))
    )


class Draft:
    """One commit of several writes: its checks and writes, and the answer to each write.

    `heads` are the known heads of the shards. `records` are those that were read since, for all
    changes that read: None if a key has none. `onces` has the known idempotency keys; others are
    assumed to be new, which the commit checks. `writers` has those of all batches. `leads` names
    shards whose term this commit raises. `unit` is the commit's unique id.
    """

    def __init__(
        self,
        unit: str,
        heads: Mapping[int, KnownHead],
        records: Mapping[bytes, Record | None],
        onces: Mapping[str, Once],
        leads: Iterable[int] = (),
        now_ms: int = 0,
        writers: Mapping[str, KnownWriter] | None = None,
    ) -> None:
        self.unit = unit
        self.known = dict(heads)
        self.operations = 0
        self.bytes = 0
        self._now_ms = now_ms
        self._heads: dict[int, Head] = {}
        self._records = dict(records)
        self._onces = dict(onces)
        self._leads = frozenset(leads)
        self._first: dict[int, int] = {}
        self._puts: dict[str, Write] = {}
        self._keys: set[bytes] = set()
        self._absent: set[str] = set()
        self._writers = dict(writers or {})
        self._new_writers: dict[str, WriterRecord] = {}

    def add_batch(self, batch: KeyBatch) -> list[Written | PxrsError]:
        """Adds all writes of a batch; returns their answers, if the commit succeeds."""
        writer = batch.writer
        if writer is None:
            return [self.add(change) for change in batch.changes]
        # A batch that was sent again may wait beside itself, and be in one commit with it.
        last = self._new_writers.get(writer.name) or self._writers[writer.name].record
        if last.number >= writer.number:
            return _answers_before(batch.changes, writer, last)
        operations = self.operations
        answers = [self.add(change) for change in batch.changes]
        # A repeated batch that writes nothing is noted too. Else a node that still has it could
        # find something to write later, after its client got the answer that there was nothing.
        if writer.again or self.operations > operations:
            self._count(_WRITER_OPERATIONS, 0)
            packed = tuple(_packed(answer) for answer in answers)
            self._new_writers[writer.name] = WriterRecord(number=writer.number, answers=packed)
        return answers

    def add(self, change: Change) -> Written | PxrsError:
        """Adds one write; returns its answer, if the commit succeeds.

        A write that is refused, or finds nothing to delete, adds nothing but that answer, under its
        idempotency key.
        """
        shard = shard_of(change.key)
        once = once_key(change.key, change.once) if change.once else ""
        if (before := self._onces.get(once)) is not None:
            return _as_before(change, before)
        if change.reads and (refused := self._refusal(change)) is not None:
            # Another node may have the same write, and make it once it wakes from a freeze: delete
            # a value, or create one, that its client was told it did not. If the write names a
            # version, it is refused there too, as no version comes back.
            if once and change.if_match in (None, ABSENT):
                self._keep_answer(once, change, refused)
            return refused
        written = Written(self._advance(shard))
        self._write(change, written.version)
        if once:
            self._keep_answer(once, change, written)
        return written

    @property
    def fences(self) -> dict[str, int]:
        """The records that it checks, with their versions. It writes each of them, too."""
        heads = {head_key(shard): self.known[shard].version for shard in self._heads}
        writers = {writer_key(name): self._writers[name].version for name in self._new_writers}
        return heads | writers | dict.fromkeys(self._absent, 0)

    @property
    def checks(self) -> list[Check]:
        """Checks that written heads and writers are as known, and idempotency keys are unused."""
        return [Check(key, version) for key, version in self.fences.items()]

    def excludes(self, other: Draft) -> bool:
        """Whether at most one of the two can ever be applied: both check a record as one version.

        Each of them writes what it checks, so the version is another one after the first.
        """
        return bool(self.fences.items() & other.fences.items())

    @property
    def writes(self) -> list[Write]:
        """The heads, the writers, and everything else."""
        heads = [Put(head_key(shard), _encode(it)) for shard, it in self._heads.items()]
        writers = [Put(writer_key(it), _encode(record)) for it, record in self._new_writers.items()]
        return [*heads, *writers, *self._puts.values()]

    @property
    def shards(self) -> list[int]:
        """The shards that it writes to."""
        return list(self._heads)

    @property
    def keys(self) -> list[bytes]:
        """The keys that it writes."""
        return list(self._keys)

    def new_heads(self, versions: Mapping[str, int]) -> dict[int, KnownHead]:
        """The heads once it is committed, with the versions that the store gave."""
        return {s: KnownHead(versions[head_key(s)], head) for s, head in self._heads.items()}

    def new_writers(self, versions: Mapping[str, int]) -> dict[str, KnownWriter]:
        """The writers once it is committed."""
        written = self._new_writers.items()
        return {name: KnownWriter(versions[writer_key(name)], it) for name, it in written}

    def moved(self, found: Mapping[str, Versioned | None]) -> set[str]:
        """Which of its `fences` are not, as they were found, what it checks."""
        versions = {key: 0 if it is None else it.version for key, it in found.items()}
        return {key for key, version in self.fences.items() if versions[key] != version}

    def outcome(
        self, found: Mapping[str, Versioned | None], records: Mapping[bytes, Record | None]
    ) -> Outcome | None:
        """The outcome of this commit, whose answer was lost, by the records in the store now.

        `found` are its `fences`, `records` those of its keys. None: it was not applied, but may
        still be on its way; another commit that it excludes settles it.

        They are read one by one, so they are not of one moment. If one of the fences has moved, all
        others that have not, and the records, must have been read after it was.
        """
        moved = self.moved(found)
        if not moved:
            return None
        heads = {key: known_head(found[key]) for key in map(head_key, self._heads)}
        if any(known.head.unit == self.unit for known in heads.values()):
            return Outcome.DONE
        if any(record is not None and record.unit == self.unit for record in records.values()):
            return Outcome.DONE
        # A fence was seen to have moved, so since then it can't come any more. Had it come before,
        # it would have moved all of its heads, and no key of its own would have an older record.
        # Heads only: an idempotency key or a writer that is not there may have been swept.
        if heads.keys() - moved or any(
            record is not None and record.version.index < self._first[shard_of(key)]
            for key, record in records.items()
        ):
            return Outcome.NEVER
        return Outcome.UNKNOWN

    def _keep_answer(self, once: str, change: Change, answer: Written | PxrsError) -> None:
        """Answers the same write so from now on; the commit checks that nobody did before."""
        kind, term, index = _packed(answer)
        kept = Once(term=term, index=index, body=change.body, at_ms=self._now_ms, kind=kind)
        self._onces[once] = kept
        self._absent.add(once)
        self._put(once, _encode(kept))

    def _refusal(self, change: Change) -> Written | PxrsError | None:
        """The answer to a change that is not made: an error, or that there is nothing to delete."""
        record = self._records[change.key]
        current = None if record is None else record.version
        if change.expired and current != change.if_match:
            return Written(ABSENT, existed=False)
        if change.if_match == ABSENT:
            if current is not None:
                return AlreadyExists(change.key, current)
        elif change.if_match is not None and current != change.if_match:
            return VersionMismatch(change.key, change.if_match, current)
        if change.value is None and record is None:
            return Written(ABSENT, existed=False)
        return None

    def _advance(self, shard: int) -> Version:
        """Moves the shard's head on by one write."""
        version, known = self.known[shard]
        head = self._heads.get(shard)
        if head is None:
            # The first process to write to a shard leads it in its first term.
            raised = known.term + (version > 0 and shard in self._leads)
            head = Head(term=raised, index=known.index, unit=self.unit)
            self._first[shard] = known.index + 1
            self._count(2, 0)
        head = Head(term=head.term, index=head.index + 1, unit=self.unit)
        self._heads[shard] = head
        return Version(head.term, head.index)

    def _write(self, change: Change, version: Version) -> None:
        self._keys.add(change.key)
        where = record_key(change.key)
        if change.value is None:
            self._records[change.key] = None
            self._puts[where] = Delete(where)
            self._count(1, 0)
            return
        expires_ms = self._now_ms + change.ttl_ms if change.ttl_ms and self._now_ms else 0
        record = Record(version, change.value, expires_ms, self.unit)
        self._records[change.key] = record
        self._put(where, encode_record(record))
        if expires_ms:
            self._put(due_key(expires_ms, change.key), change.key.hex().encode())
        elif change.ttl_ms:
            term, index = version.term, version.index
            timer = Timer(key=change.key, term=term, index=index, ttl_ms=change.ttl_ms)
            self._put(timer_key(change.key), _encode(timer))

    def _put(self, key: str, value: bytes) -> None:
        self._puts[key] = Put(key, value)
        self._count(1 + (key in self._absent), len(value))

    def _count(self, operations: int, size: int) -> None:
        self.operations += operations
        self.bytes += size

    def has_room(self, batch: KeyBatch, limits: Limits) -> bool:
        """Whether the batch fits beside the others, by what engines take in one commit."""
        operations = MOST_OPERATIONS * len(batch.changes) + _WRITER_OPERATIONS
        size = sum(len(change.value or b"") for change in batch.changes) + _ROOM
        return not self.operations or _fits(self.operations + operations, self.bytes + size, limits)


def _as_before(change: Change, before: Once) -> Written | PxrsError:
    # Only a write that creates can be told that the key exists.
    if before.body != change.body or (before.kind == _EXISTS and change.if_match != ABSENT):
        return _reused(change)
    return _unpacked(change, (before.kind, before.term, before.index))


def _reused(change: Change) -> InvalidRequest:
    return InvalidRequest(
        f"the idempotency key {change.once!r} was used for another write of this key; "
        "use a new one for each write"
    )


# How the answers of a batch are kept: the number of the kind, and the version in it, if any.
_WRITTEN, _NOTHING, _MISMATCH, _EXISTS, _REUSED = range(5)


def _packed(answer: Written | PxrsError) -> tuple[int, ...]:
    if isinstance(answer, Written):
        return (_WRITTEN if answer.existed else _NOTHING, *_numbers(answer.version))
    if isinstance(answer, VersionMismatch):
        return (_MISMATCH, *_numbers(answer.current))
    if isinstance(answer, AlreadyExists):
        return (_EXISTS, *_numbers(answer.current))
    return (_REUSED,)


def _numbers(version: Version | None) -> tuple[int, ...]:
    return () if version is None else (version.term, version.index)


def _answers_before(
    changes: Sequence[Change], writer: Writer, last: WriterRecord
) -> list[Written | PxrsError]:
    """The earlier answers to a batch that is sent again."""
    if last.number > writer.number or len(last.answers) != len(changes):
        # The client has gone on, so it has the answer, or has given up.
        return [OutcomeUnknown("a later batch of this client was written")] * len(changes)
    pairs = zip(changes, last.answers, strict=True)
    return [_unpacked(change, answer) for change, answer in pairs]


def _unpacked(change: Change, answer: tuple[int, ...]) -> Written | PxrsError:
    kind, *numbers = answer
    version = Version(*numbers) if numbers else None
    if kind == _MISMATCH:
        return VersionMismatch(change.key, change.if_match or ABSENT, version)
    if kind == _EXISTS:
        return AlreadyExists(change.key, version or ABSENT)
    if kind == _REUSED:
        return _reused(change)
    return Written(version or ABSENT, existed=kind == _WRITTEN)
