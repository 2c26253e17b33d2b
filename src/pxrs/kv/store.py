"""`px.kv`: keys, values and versions, on any coordination store."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple, TypeAlias

from pxrs.chance import CHANCE
from pxrs.clock import Clock
from pxrs.core import kv
from pxrs.core.kv import (
    Change,
    Draft,
    KeyBatch,
    KnownHead,
    KnownWriter,
    Once,
    Record,
    Writer,
    Written,
)
from pxrs.core.records import decode
from pxrs.core.retry import Backoff
from pxrs.errors import InvalidRequest, OutcomeUnknown, PxrsError, TransactionConflict, quoted
from pxrs.kv.group_commit import GroupCommit, Waiting
from pxrs.kv.timers import Timers
from pxrs.kv.watch import KeyWatch
from pxrs.serde import to_bytes
from pxrs.stores.api import CoordStore, TellsTime
from pxrs.types import Check, Conflict, Delete, Entry, Outcome, Version, Versioned

# The values of `consistency`: those that ask the store, and the one that may not.
_STORE = ("lease", "linearizable")
_CACHE = "stale_ok"
# How old an answer to `stale_ok` can be, and how many are kept.
_STALE = 1.0
_MOST_SEEN = 10_000
# How long a write is retried while others write to its shard.
_PATIENCE = 30.0
_PAUSES = Backoff(first=0.008, longest=0.1, jitter=1.0)
_MOST_TOGETHER = 1000
_MOST_WRITERS = 10_000
# Up to this many heads are read one by one before a commit.
_MOST_READ = 2
_PAGE = 500
_SWEEP_EVERY = 30.0
_SWEEP_EVIDENCE_EVERY = 600.0
_MOST_SWEPT = 1000


class Seen(NamedTuple):
    """An answer that was read, and when."""

    at: float
    entry: Entry | None


class KeyValues:
    """Puts, gets, deletes, scans and watches keys. Thread-safe.

    Keys and values are bytes, or text, which is stored as UTF-8. Every write makes a `Version`,
    which only rises; a write that names the version it has read (`if_match`) changes nothing if
    another one came before it.
    """

    def __init__(self, coord: CoordStore, clock: Clock) -> None:
        self._coord = coord
        self._clock = clock
        self._group: GroupCommit[KeyBatch, Answers] = GroupCommit(self._commit)
        self._heads: dict[int, KnownHead] = {}
        # The writers of remote clients, the last used ones.
        self._writers: OrderedDict[str, KnownWriter] = OrderedDict()
        # How many batches go into one commit: fewer while others write to the same shards.
        self._most = _MOST_TOGETHER
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()
        self._seen_lock = threading.Lock()
        # Shards that this process leads, and has not written to since.
        # Each with the number of the change by which it was gained.
        self._to_lead: Mapping[int, int] = {}
        self._lead_changes = count(1)
        self._lead_lock = threading.Lock()
        self._next_sweep = clock.monotonic() + _SWEEP_EVERY
        self._next_evidence_sweep = clock.monotonic() + _SWEEP_EVIDENCE_EVERY
        # On a node, if the store has no clock.
        self._timers: Timers | None = None
        # By record of evidence: the version that was seen, and since when.
        self._evidence: dict[str, tuple[int, float]] = {}

    # Verbs

    def put(
        self,
        key: str | bytes,
        value: str | bytes,
        *,
        if_match: Version | None = None,
        ttl: float | None = None,
        idempotency_key: str | None = None,
    ) -> Version:
        """Write a value, durably; returns its version.

        `if_match`: only if the key has this version; `VersionMismatch` otherwise. `ABSENT` creates:
        `AlreadyExists` if the key is there. `ttl`: seconds after which it expires, by the store's
        clock; a later put without one makes it stay. `idempotency_key`: another put of this key
        with the same one writes nothing and is answered as the first one, for an hour.
        """
        return self._do(self._put_change(key, value, if_match, ttl, idempotency_key)).version

    def delete(
        self,
        key: str | bytes,
        *,
        if_match: Version | None = None,
        idempotency_key: str | None = None,
    ) -> bool:
        """Remove a key; returns whether it was there. The options are those of `put`."""
        return self._do(self._delete_change(key, if_match, idempotency_key)).existed

    def get(self, key: str | bytes, *, consistency: str = "lease") -> Entry | None:
        """The key's value and version; None if there is no such key, or it has expired.

        `lease` and `linearizable` both ask the store, and see every write that was answered
        before. `stale_ok` may answer from memory, with a value up to a second old.
        """
        raw = to_bytes(key, "key")
        if self._check_read(raw, consistency):
            return self._read_stale(raw)
        return self._read(raw)

    def get_many(
        self, keys: Iterable[str | bytes], *, consistency: str = "lease"
    ) -> dict[bytes, Entry]:
        """Get the keys that exist. Each is read by itself: values need not be of one moment."""
        found = (self.get(key, consistency=consistency) for key in keys)
        return {entry.key: entry for entry in found if entry is not None}

    def scan(
        self,
        prefix: str | bytes = b"",
        *,
        after: str | bytes | None = None,
        limit: int | None = None,
    ) -> Iterator[Entry]:
        """The keys that begin with `prefix`, and come after `after`, in the order of their bytes.

        They are read in pages while the caller goes on: not a snapshot, but each as it was when
        its page was read.
        """
        if limit is not None and limit < 1:
            raise InvalidRequest(f"limit must be at least 1, got {limit}")
        where = kv.RECORDS + to_bytes(prefix, "prefix").hex()
        beyond = None if after is None else kv.record_key(to_bytes(after, "after"))
        return self._scan(where, beyond, limit)

    def watch(self, prefix: str | bytes = b"") -> KeyWatch:
        """Watch the keys that begin with `prefix`: iterate over it, and close it.

        See `KeyWatch`.
        """
        return KeyWatch(self._coord, to_bytes(prefix, "prefix"), self._clock)

    # Reading

    def _check_read(self, key: bytes, consistency: str) -> bool:
        """Checks a read's arguments; returns whether it may be answered from memory."""
        kv.check_key(key, self._coord.limits)
        return is_stale_ok(consistency)

    def _read(self, key: bytes) -> Entry | None:
        while True:
            stored = self._coord.get(kv.record_key(key))
            if stored is None:
                return None
            record = kv.decode_record(stored)
            if not self._has_expired(record):
                return kv.decode_entry(stored, record)
            expired = Change(key, None, record.version, expired=True)
            if _first(self._group.do(KeyBatch([expired]))).existed:
                return None

    def _read_stale(self, key: bytes) -> Entry | None:
        now = self._clock.monotonic()
        with self._seen_lock:
            seen = self._seen.get(key)
            if seen is not None and now - seen.at < _STALE:
                return seen.entry
        entry = self._read(key)
        with self._seen_lock:
            self._seen[key] = Seen(now, entry)
            self._seen.move_to_end(key)
            while len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        return entry

    def _scan(self, where: str, after: str | None, limit: int | None) -> Iterator[Entry]:
        left = limit
        while left is None or left > 0:
            page = self._coord.list(where, after, _PAGE if left is None else min(_PAGE, left))
            for stored in page:
                record = kv.decode_record(stored)
                entry: Entry | None = kv.decode_entry(stored, record)
                if self._has_expired(record):
                    entry = self._read(bytes.fromhex(stored.key.removeprefix(kv.RECORDS)))
                if entry is None:
                    continue
                yield entry
                left = None if left is None else left - 1
            if not page:
                return
            after = page[-1].key

    def _has_expired(self, record: Record) -> bool:
        return bool(
            record.expires_ms
            and isinstance(self._coord, TellsTime)
            and record.expires_ms <= self._coord.now_ms()
        )

    # Writing

    def _lead(self, gained: Collection[int], lost: Collection[int] = ()) -> None:
        """Note which shards this process leads: writes to those gained raise their term."""
        with self._lead_lock:
            kept = {it: number for it, number in self._to_lead.items() if it not in lost}
            self._to_lead = kept | dict.fromkeys(gained, next(self._lead_changes))

    def _ttl_ms(self, ttl: float | None) -> int:
        if ttl is not None and not isinstance(self._coord, TellsTime) and self._timers is None:
            raise InvalidRequest(
                "ttl needs a store with a clock of its own (SQLite, PostgreSQL, MariaDB), or a "
                "node that looks after it (pxrs serve); this one has none"
            )
        return check_ttl(ttl)

    def _do(self, change: Change) -> Written:
        (answers,) = self._do_all([KeyBatch([change])])
        if isinstance(answers, BaseException):
            raise answers
        return _first(answers)

    def _do_all(self, batches: Sequence[KeyBatch]) -> list[Answers | BaseException]:
        """Writes several batches of one thread together; the answers, or an error, for each."""
        answers = self._group.do_all(batches)
        for batch, told in zip(batches, answers, strict=True):
            for change in batch.changes:
                self._forget_seen(change.key)
            if self._timers is not None and not isinstance(told, BaseException):
                self._set_timers(self._timers, batch.changes, told)
        self._sweep_if_due()
        return answers

    def _set_timers(self, timers: Timers, changes: Sequence[Change], answers: Answers) -> None:
        for change, answer in zip(changes, answers, strict=True):
            if change.ttl_ms and isinstance(answer, Written):
                timers.add(change.key, answer.version, change.ttl_ms)

    def _keep_time(self, leads: Callable[[int], bool]) -> Timers:
        """Deletes values that expire, of the shards that it leads. See `Timers`."""

        def expire(key: bytes, version: Version) -> None:
            self._group.do(KeyBatch([Change(key, None, version, expired=True)]))

        self._timers = Timers(self._coord, self._clock, expire, leads)
        return self._timers

    def _put_change(
        self,
        key: str | bytes,
        value: str | bytes,
        if_match: Version | None,
        ttl: float | None,
        idempotency_key: str | None = None,
    ) -> Change:
        """The change that `put` writes, checked."""
        change = Change(
            to_bytes(key, "key"),
            to_bytes(value, "value"),
            check_version(if_match),
            self._ttl_ms(ttl),
            _once(idempotency_key),
        )
        kv.check_change(change, self._coord.limits)
        return change

    def _delete_change(
        self, key: str | bytes, if_match: Version | None, idempotency_key: str | None = None
    ) -> Change:
        """The change that `delete` writes, checked."""
        once = _once(idempotency_key)
        change = Change(to_bytes(key, "key"), None, check_version(if_match), once=once)
        kv.check_change(change, self._coord.limits)
        return change

    def _forget_seen(self, key: bytes) -> None:
        if self._seen:
            with self._seen_lock:
                self._seen.pop(key, None)

    def _commit(self, waiting: Sequence[Waiting[KeyBatch, Answers]]) -> None:
        """Commits as many of these as fit, from the first on. By one thread at a time."""
        batch = list(waiting[: self._most])
        try:
            done = self._commit_until_known(batch)
        except PxrsError as error:
            for each in batch:
                each.settle(error)
            return
        # Of attempts at the same writes one that was done may have had fewer than the others.
        for each, answer in zip(batch, done.answers, strict=False):
            each.settle(answer)

    def _commit_until_known(self, batch: list[Waiting[KeyBatch, Answers]]) -> Attempt:
        """Tries until an attempt has succeeded; cuts the batch to what fits into one."""
        ends = self._clock.monotonic() + _PATIENCE
        onces: dict[str, Once] = {}
        doubts: list[Attempt] = []
        for tries in count(1):
            try:
                # First: an attempt that was done must not be repeated.
                if doubts and (done := self._find_out(doubts, onces)) is not None:
                    return done
                attempt = self._attempt([each.work for each in batch], onces)
                if not doubts:
                    # Batches that did not fit stay behind; later attempts make the same writes.
                    del batch[len(attempt.answers) :]
                if self._apply(attempt, onces, doubts):
                    return attempt
            except PxrsError as error:
                if not doubts or isinstance(error, OutcomeUnknown):
                    raise
                if not error.retryable or self._clock.monotonic() > ends:
                    raise OutcomeUnknown(
                        f"a write was sent, no answer came, and the store can't be asked: {error}"
                    ) from error
            if self._clock.monotonic() > ends:
                if doubts:
                    raise OutcomeUnknown("a write was sent, no answer came, and it may still come")
                raise TransactionConflict(
                    f"other writers kept the same shard busy for {_PATIENCE:g} s; try again later"
                )
            # The first conflict only shows what was not known. After it, others write there, too.
            if tries > 1:
                self._most = max(1, len(batch) // 2)
                threading.Event().wait(_PAUSES.delay(tries - 1, CHANCE))
        raise AssertionError("unreachable")

    def _attempt(
        self,
        batches: Sequence[KeyBatch],
        onces: Mapping[str, Once],
        *,
        fresh: bool = False,
        all_of_them: bool = False,
    ) -> Attempt:
        """Drafts one commit of the batches, as many as fit, from what the store has now.

        `fresh`: heads are read, not remembered. They are read before records: a record that was
        read is valid if the head of its shard is still the same at the commit. `all_of_them`:
        batches that do not fit are not left out, so the store refuses them.
        """
        changes = [change for batch in batches for change in batch.changes]
        shards = sorted({kv.shard_of(change.key) for change in changes})
        if not fresh:
            self._guess_heads([shard for shard in shards if shard not in self._heads])
        heads = {shard: self._head(shard, fresh=fresh) for shard in shards}
        records, expired = self._records([change.key for change in changes if change.reads])
        timed = any(change.ttl_ms or change.once for change in changes)
        now_ms = self._coord.now_ms() if timed and isinstance(self._coord, TellsTime) else 0
        known = {**onces, **self._used_onces(changes)}
        writers = {
            it.writer.name: self._writer(it.writer) for it in batches if it.writer is not None
        }
        unit = secrets.token_hex(8)
        leads = self._to_lead
        draft = Draft(unit, heads, records, known, leads, now_ms, writers)
        for key in expired:
            draft.add(Change(key, None))
        answers: list[Answers] = []
        for batch in batches:
            if answers and not (all_of_them or draft.has_room(batch, self._coord.limits)):
                break
            answers.append(draft.add_batch(batch))
        return Attempt(draft, answers, leads)

    def _writer(self, writer: Writer) -> KnownWriter:
        known = self._writers.get(writer.name)
        if known is None:
            # The first batch of a writer finds none, unless it was sent before.
            is_new = writer.number == 1 and not writer.again
            stored = None if is_new else self._coord.get(kv.writer_key(writer.name))
            known = kv.known_writer(stored)
        return known

    def _remember_writers(self, writers: Mapping[str, KnownWriter]) -> None:
        for name, known in writers.items():
            self._writers[name] = known
            self._writers.move_to_end(name)
        while len(self._writers) > _MOST_WRITERS:
            self._writers.popitem(last=False)

    def _guess_heads(self, unknown: Sequence[int]) -> None:
        """Assumes that many unknown heads are absent: a conflict returns all of them at once."""
        if len(unknown) > _MOST_READ:
            self._heads.update(dict.fromkeys(unknown, kv.known_head(None)))

    def _head(self, shard: int, *, fresh: bool) -> KnownHead:
        known = None if fresh else self._heads.get(shard)
        if known is None:
            known = self._heads[shard] = kv.known_head(self._coord.get(kv.head_key(shard)))
        return known

    def _used_onces(self, changes: Iterable[Change]) -> dict[str, Once]:
        """The idempotency keys that were used before, of changes that may be refused.

        For all other changes the commit finds that out.
        """
        found = {}
        for change in changes:
            if change.once and change.reads:
                stored = self._coord.get(kv.once_key(change.key, change.once))
                if stored is not None:
                    found[stored.key] = decode(stored, Once)
        return found

    def _records(self, keys: Iterable[bytes]) -> tuple[dict[bytes, Record | None], list[bytes]]:
        """The keys' records as they are now, and which of these have expired."""
        found: dict[bytes, Record | None] = {}
        for key in keys:
            if key not in found:
                stored = self._coord.get(kv.record_key(key))
                found[key] = None if stored is None else kv.decode_record(stored)
        return found, [key for key, it in found.items() if it is not None and self._has_expired(it)]

    def _apply(self, attempt: Attempt, onces: dict[str, Once], doubts: list[Attempt]) -> bool:
        """Commits an attempt; returns whether it is done.

        Notes what another attempt must know: current heads, idempotency keys that were used, and
        attempts whose answer was lost.
        """
        draft = attempt.draft
        # A doubt may still come, or has come since it was looked for. Only what can't be applied
        # beside it, as both check a record as one version, is tried; else it is looked for again.
        if not all(draft.excludes(doubt.draft) for doubt in doubts):
            return False
        try:
            outcome = self._coord.commit(draft.checks, draft.writes) if draft.operations else None
        except OutcomeUnknown:
            # One that writes no key only notes answers: done or not, another attempt finds out.
            if draft.shards:
                doubts.append(attempt)
            return False
        if isinstance(outcome, Conflict):
            self._note_current(outcome.current, onces)
            return False
        if outcome is not None:
            self._heads.update(draft.new_heads(outcome.versions))
            self._remember_writers(draft.new_writers(outcome.versions))
            with self._lead_lock:
                # Not those that were gained while the commit was under way, perhaps once more: it
                # did not raise their terms.
                now, then = self._to_lead, attempt.leads
                done = {it for it in draft.shards if it in now and now[it] == then.get(it)}
                if done:
                    self._to_lead = {it: now[it] for it in now if it not in done}
            self._most = min(_MOST_TOGETHER, self._most + len(attempt.answers))
        return True

    def _note_current(self, found: Mapping[str, Versioned | None], onces: dict[str, Once]) -> None:
        """Notes heads, writers and idempotency keys as they are now."""
        for key, current in found.items():
            if key.startswith(kv.HEADS):
                self._heads[int(key.removeprefix(kv.HEADS), 16)] = kv.known_head(current)
            elif key.startswith(kv.WRITERS):
                self._remember_writers({key.removeprefix(kv.WRITERS): kv.known_writer(current)})
            elif current is not None:
                onces[key] = decode(current, Once)

    def _find_out(self, doubts: list[Attempt], onces: dict[str, Once]) -> Attempt | None:
        """Finds out what became of attempts whose answer was lost: the one that was done, if any.

        Attempts that will never be done are left out from then on. Raises `OutcomeUnknown` if the
        outcome can't be known any more, because others have written to the same keys since.
        """
        outcomes = [self._outcome(attempt.draft, onces) for attempt in doubts]
        # One attempt that is done settles all: attempts at the same writes exclude each other.
        if Outcome.DONE in outcomes:
            return doubts[outcomes.index(Outcome.DONE)]
        if Outcome.UNKNOWN in outcomes:
            raise OutcomeUnknown(
                "a write was sent and no answer came; others have written to the same keys since, "
                "so its outcome can't be known. A write with an idempotency_key can be "
                "repeated safely"
            )
        open_ones = [it for it, told in zip(doubts, outcomes, strict=True) if told is None]
        doubts[:] = open_ones
        return None

    def _outcome(self, draft: Draft, onces: dict[str, Once]) -> Outcome | None:
        found = {key: self._coord.get(key) for key in draft.fences}
        moved = draft.moved(found)
        if moved:
            # What was read before one was seen to have moved tells nothing: the commit may have
            # come in between. Since then it can't, so what is read from here on tells.
            for key in draft.fences.keys() - moved:
                found[key] = self._coord.get(key)
        self._note_current(found, onces)
        return draft.outcome(found, self._records(draft.keys)[0] if moved else {})

    # Sweeping

    def _sweep_if_due(self) -> None:
        """Now and then, remove what is not needed: expired values, old evidence of writes.

        A writer does this after its write: a failure here is no failure of the write.
        """
        now = self._clock.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_EVERY
        with suppress(PxrsError):
            now_ms = self._coord.now_ms() if isinstance(self._coord, TellsTime) else 0
            if now_ms:
                self._sweep_values(now_ms)
            if now >= self._next_evidence_sweep:
                self._next_evidence_sweep = now + _SWEEP_EVIDENCE_EVERY
                self._sweep_evidence(now, now_ms)

    def _sweep_values(self, now_ms: int) -> None:
        due = [it for it in self._coord.list(kv.DUES, limit=_MOST_SWEPT) if _due_ms(it) <= now_ms]
        for listed in due:
            # A read deletes it if it has expired: it may have been written again since.
            self._read(bytes.fromhex(listed.value.decode()))
        self._remove(due)

    def _sweep_evidence(self, now: float, now_ms: int) -> None:
        """Removes idempotency keys and writers that are too old to be used again.

        By the store's clock where it has one and they have the time of their write, else once
        this process has seen them unchanged for as long.
        """
        seen: dict[str, tuple[int, float]] = {}
        for where in (kv.ONCES, kv.WRITERS):
            after: str | None = None
            while page := self._coord.list(where, after, _MOST_SWEPT):
                due = []
                for it in page:
                    at_ms = decode(it, Once).at_ms if where == kv.ONCES else 0
                    version, since = self._evidence.get(it.key, (it.version, now))
                    seen[it.key] = (it.version, since if version == it.version else now)
                    old = at_ms + kv.ONCE_MS <= now_ms if at_ms else False
                    if old or now - seen[it.key][1] >= kv.ONCE_MS / 1000:
                        due.append(it)
                self._remove(due)
                after = page[-1].key
        self._evidence = seen

    def _remove(self, records: Sequence[Versioned]) -> None:
        """Removes up to 100 records per commit; none of these if one of them has changed."""
        size = min(100, self._coord.limits.operations // 2)
        for first in range(0, len(records), size):
            some = records[first : first + size]
            checks = [Check(it.key, it.version) for it in some]
            self._coord.commit(checks, [Delete(it.key) for it in some])


# The answers to the writes of a batch.
Answers: TypeAlias = list[Written | PxrsError]


class Attempt(NamedTuple):
    """A commit, and the answers to each of its batches if it succeeds."""

    draft: Draft
    answers: list[Answers]
    # The shards whose terms it raises, if it writes to them.
    leads: Mapping[int, int]


def _first(answers: Answers) -> Written:
    """The answer to a batch of one write; raises its error."""
    (answer,) = answers
    if isinstance(answer, PxrsError):
        raise answer
    return answer


def _due_ms(listed: Versioned) -> int:
    return int(listed.key.removeprefix(kv.DUES).partition("/")[0])


def is_stale_ok(consistency: str) -> bool:
    """Whether a read may be answered from memory; refuses unknown consistencies."""
    if consistency in _STORE:
        return False
    if consistency == _CACHE:
        return True
    raise InvalidRequest(
        f"consistency must be lease, linearizable or stale_ok, got {quoted(consistency)}"
    )


def check_ttl(ttl: object) -> int:
    """The milliseconds, 0 for ever; refuses a value that is no time to live."""
    if ttl is None:
        return 0
    if not isinstance(ttl, int | float) or isinstance(ttl, bool) or not 0.001 <= ttl < 2**43:
        raise InvalidRequest(f"ttl must be a number of seconds above 0, got {quoted(ttl)}")
    return round(ttl * 1000)


def check_version(version: object) -> Version | None:
    """Refuses a value that is no version."""
    if version is None:
        return None
    if isinstance(version, Version):
        numbers = (version.term, version.index)
        if all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            return version
    raise InvalidRequest(f"if_match must be a Version, got {quoted(version)}")


def _once(idempotency_key: object) -> str:
    if idempotency_key is None:
        return ""
    if isinstance(idempotency_key, str) and idempotency_key:
        return idempotency_key
    raise InvalidRequest(f"idempotency_key must be text, got {quoted(idempotency_key)}")
