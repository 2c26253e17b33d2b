"""The protocols every backend implements.

They are small on purpose: a backend knows keys, versions, sessions and batches. Who owns a
partition, what an epoch means and when to rebalance is decided in `pxrs.core`.

`pxrs.testing.conformance` holds one suite per protocol; a backend is finished when it passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from pxrs.codec.batches import HEADER_SIZE
from pxrs.errors import InvalidRequest, PxrsError, quoted
from pxrs.types import (
    Append,
    Appended,
    Batch,
    Bounds,
    Check,
    Committed,
    Conflict,
    Counted,
    Delivery,
    Fetched,
    Held,
    Holder,
    ItemState,
    Limits,
    LogPartition,
    Outcome,
    Put,
    Queue,
    QueueChange,
    QueueLimits,
    QueueStats,
    Release,
    StoredItem,
    Taken,
    Versioned,
    Write,
)

if TYPE_CHECKING:
    from pxrs.client.client import Client

T = TypeVar("T")


class Watch(Protocol):
    """A wake-up. Armed when handed out: a change after that ends the next `wait`.

    Wake-ups are hints. They may repeat, may be spurious and may cover many changes; a woken
    caller reads again.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Block until something may have changed (true) or the timeout has passed (false).

        A change that happened between two waits ends the second one at once. A closed watch
        returns true at once.
        """
        ...

    def wake(self) -> None:
        """End the wait at hand, or the next one, as a change would. From any thread."""
        ...

    def close(self) -> None:
        """Stop watching and wake all waiters. Can be called from any thread, twice too."""
        ...


@runtime_checkable
class CallsBack(Protocol):
    """A `Watch` that can call back, for one thread that waits for many of them."""

    def on_wake(self, call: Callable[[], None]) -> None:
        """Call `call` when the watch is woken or closed; `wait(0)` returns true after that.

        Any thread may call it, also under a lock of the store. For what a store notices only in
        `wait`, such as that a time has passed, there is no call: look now and then.
        """
        ...


class Session(Protocol):
    """A lease in the store. Records put with its id vanish, all at once, when it ends."""

    @property
    def id(self) -> str: ...

    @property
    def ttl(self) -> float: ...

    def renew(self) -> None:
        """Extend by one TTL from now, if it has not expired; raises `SessionLost` otherwise."""
        ...

    def remaining(self) -> float:
        """Seconds for which no other process can end this session, by this process's own clock.

        Counted from when the last successful renewal was sent. 0 when the session is over.
        """
        ...

    def close(self) -> None:
        """End it now. Its records are gone when this returns."""
        ...


class LentSession(Session, Protocol):
    """A `Session` of `LendsSessions`: the handle of the process that opened or adopted it.

    Once another handle has adopted it, renewing it through this one may raise `SessionLost`.
    """

    def abandon(self) -> None:
        """End it, unless another handle has adopted it since."""
        ...


class CoordStore(Protocol):
    """Everything that is owned, voted or versioned."""

    @property
    def limits(self) -> Limits: ...

    def get(self, key: str) -> Versioned | None:
        """The record as of now: linearizable per key. Never a record of an ended session."""
        ...

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        """Records whose key starts with `prefix`, sorted by key; each linearizable by itself.

        `after` leaves out keys up to and including that one; `limit` is at least 1. Keys sort
        by their code points.
        """
        ...

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        """If every check holds do every write, atomically; otherwise nothing.

        Raises `SessionLost` when a put names a session that has ended.
        """
        ...

    def watch(self, *where: str) -> Watch:
        """Wakes on a change of any of these records, its vanishing included.

        Each of `where` is the key of a record, or a folder: text that ends with a slash, or is
        empty for all. A watch may wake for other records too. It may miss a record that was made
        and removed before this handle has read it.
        """
        ...

    def session(self, ttl: float) -> Session:
        """Open a session that lives `ttl` seconds beyond its last renewal."""
        ...

    def close(self) -> None: ...


class LogStore(Protocol):
    """Append-only partitions of opaque record batches with dense offsets."""

    def create(self, topic_id: str, partitions: int) -> None:
        """Make the partitions, empty, from offset 0. Making them again changes nothing."""
        ...

    def drop(self, topic_id: str) -> None:
        """Remove the partitions and all they hold. Does nothing if there are none."""
        ...

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        """Append all batches durably, in order per partition; returns the result of each.

        Each batch stands alone: one that fails gets its error, the others get their offset.
        `OutcomeUnknown` means that the batch may be in the log, or may still get there; every
        other error means that this call did not append it and never will. Behind a batch that is
        unknown, or whose error is retryable, the later ones of its partition are not appended. A
        raised exception applies to all batches alike. Sending the same batches again is safe where
        they carry a producer id.
        """
        ...

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        """Batches from the one that holds `offset`, at most `max_bytes` but at least one.

        Empty at the end only. Raises `OffsetOutOfRange` outside of it, `TopicNotFound` or
        `PartitionNotFound` if there is no such partition: all three describe what is stored, not
        what one replica of several believes. Without a majority it raises `StoreUnavailable`.
        """
        ...

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        """Return the offsets of each partition of the topic; an end may be a moment old."""
        ...

    def size(self, where: LogPartition) -> int:
        """Return the size of the partition's batches in bytes."""
        ...

    def batch_at(self, where: LogPartition, timestamp: int) -> int | None:
        """Base offset of the first batch that holds a message of `timestamp` (ms) or later."""
        ...

    def trim(self, where: LogPartition, before: int) -> int:
        """Drop whole batches that end at or below `before`; returns the new start.

        No offset is given to two messages: an emptied partition goes on where it was.
        """
        ...

    def expire(
        self, where: LogPartition, before_timestamp: int | None, max_bytes: int | None
    ) -> int:
        """Drop the oldest batches that are wholly older, or over the size; returns the new start.

        The newest batch always stays.
        """
        ...

    def watch(self, *where: LogPartition) -> Watch:
        """Wakes on an append to one of the partitions."""
        ...

    def close(self) -> None: ...


class QueueStore(Protocol):
    """Work queues: items that are held by one transaction at a time, counted by delivery.

    Items without a key are handed out by priority, then by age, roughly. Items of one key, and
    all items of a fifo queue, are handed out strictly in the order in which they were put: the next
    one when the one before is done or dead, or when the same transaction holds it. An item that is
    delayed or backs off blocks those behind it.
    """

    @property
    def limits(self) -> QueueLimits: ...

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        """Make a queue, or return the one of that name; raises `QueueExists` if it differs."""
        ...

    def find(self, name: str) -> Queue | None: ...

    def all(self) -> list[Queue]:
        """Every queue, by name."""
        ...

    def delete(self, name: str) -> None:
        """Remove the queue and all its items, held and dead ones too."""
        ...

    def take(
        self,
        queue: str,
        holder: Holder,
        count: int,
        *,
        most: int | None = None,
        lock_for: float | None = None,
        unit: str = "",
        suspects: bool = True,
    ) -> Taken:
        """Hold up to `count` items for the holder, each counted as one more delivery.

        The death of a process never undoes the count. A power cut that ends every holder may undo
        it, except for the item's last delivery (`most`): that is on the disk first.
        An item that was delivered `most` times is not handed out again: it is dead. One whose
        holder died, or was too late, is a suspect: it is handed out alone. Without `suspects` it
        is neither handed out nor counted; when a suspect is next, nothing is handed out and
        `Taken.suspect` is set. A hold ends with the holder's session, or after `lock_for` seconds.
        Raises `SessionLost` if the session is over; a queue that does not exist is empty. `unit`
        names this very call: `held` finds out what it took.
        """
        ...

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        """List what the holder holds in the queue, once its `take` named `unit` can't change that.

        It waits for that `take` if it is under way. A `take` that has not begun by then is refused
        with `Fenced` whenever it arrives: the answer is final.
        """
        ...

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        """Hold them for `lock_for` seconds from now. Raises `Fenced` if one is no longer held."""
        ...

    def apply(self, change: QueueChange) -> list[int | None]:
        """Remove and put, in one durable commit; the new items' ids, None for a duplicate.

        Queues that items are put to are created if they do not exist. Raises `Fenced` if an item to
        be removed is no longer held by this holder at this delivery, `SessionLost` if the session
        is over: then nothing was done. Where nothing is removed, the session is not checked.

        A change with a unit leaves evidence under the unit's name. It stays until a later change of
        the session forgets it, or until long after the session's end by the store's own clock. A
        unit that `outcome` has given up is refused with `Fenced`.
        """
        ...

    def outcome(self, session: str, unit: str) -> Outcome:
        """Return the outcome of a unit, applied here or by `atomic`, whose answer did not arrive.

        It waits for the unit if that is under way. `DONE` and `NEVER` are final: a unit that has
        not been committed by then is refused whenever it arrives. `UNKNOWN` if there is no evidence
        and the session is over: the evidence may have been forgotten. (A store that knows better
        may return that.)
        """
        ...

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        """Give items back. Ignores those that this holder no longer holds."""
        ...

    def reap(self) -> float | None:
        """Free items whose holder's session has ended or whose lock has run out.

        Returns in how many seconds to call again. An item whose holder died at its last delivery
        becomes dead. `take` does all this when it must; call it now and then for queues from which
        no consumer takes.
        """
        ...

    def stats(self, queue: str) -> QueueStats: ...

    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        """Items in the given states (all but dead ones, if none is given), oldest first."""
        ...

    def drop(self, queue: str, ids: Sequence[int]) -> int:
        """Remove items that are not held, dead ones too; returns how many there were."""
        ...

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        """Put dead items back at the end of the queue with no deliveries; returns how many."""
        ...

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        """Remove items in the given states (all but held and dead if none); returns how many."""
        ...

    def watch(self, *queues: str) -> Watch:
        """Wakes when there may be something to take from one of the queues."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ItemRestorer(Protocol):
    """A `QueueStore` that can be filled from another one: `pxrs store copy` needs it."""

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        """Add items of another store under the same ids and in the same state; returns how many.

        Order, priority, deliveries, times and errors are kept, and dead items are dead. An item
        that was held there is free here and handed out alone, as if its holder had died. An id that
        exists already is left as it is, so a repeated call does no harm. Items that are put later
        come after these. Raises `QueueNotFound`; takes at most `limits.items` at a time.
        """
        ...


class Atomic(Protocol):
    """Collects changes to several stores and applies them in one engine commit.

    Leaving the block applies and commits; leaving it by an exception rolls back. If the caller or
    the engine ended the transaction inside the block, leaving the block raises `InvalidRequest`,
    even if another transaction has begun since: nothing is applied without what was done before.
    If leaving is interrupted, the interrupt leaves the block once more: what has ended by then
    stays so.
    After the block `versions`, `appended` and `queued` hold what `commit`, `append` and
    `QueueStore.apply` would have returned.
    """

    @property
    def connection(self) -> Any:
        """The engine's connection for the caller's own statements; None where there is none."""
        ...

    def lost(self, error: BaseException) -> PxrsError | None:
        """Translate an error of a statement on `connection`, if the connection was lost with it.

        None if it is an error of the statement itself, which the caller handles.
        """
        ...

    @property
    def joined(self) -> bool:
        """Whether it runs inside a transaction that the caller will end."""
        ...

    @property
    def is_exclusive(self) -> bool:
        """Whether no other process can change the store until the block ends.

        Then no hold can be extended or lost meanwhile: an item whose lock had not run out when the
        block began is held until the block ends. Where it is false, `QueueStore.extend` can be
        called while the block runs.
        """
        ...

    @property
    def versions(self) -> dict[str, int]: ...

    @property
    def appended(self) -> list[Appended]: ...

    @property
    def queued(self) -> list[int | None]: ...

    def check(self, *checks: Check) -> None: ...

    def write(self, *writes: Write) -> None: ...

    def append(self, where: LogPartition, batch: Batch) -> None:
        """Add a batch. It must carry no producer id: a rollback would leave a sequence gap."""
        ...

    def queue(self, change: QueueChange) -> None:
        """Add a queue change, at most one: a unit of work has one holder.

        An empty change is useful, too: `QueueStore.outcome` can look up its unit when the answer to
        the commit does not arrive (`OutcomeUnknown`).
        """
        ...

    def __enter__(self) -> Atomic: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Stores(Protocol):
    """The stores that a URL opens: of one engine, or of several put together."""

    @property
    def url(self) -> str: ...

    @property
    def coord(self) -> CoordStore: ...

    @property
    def log(self) -> LogStore: ...

    @property
    def queues(self) -> QueueStore: ...

    def atomic(self, connection: Any = None) -> AbstractContextManager[Atomic]:
        """One commit across the stores, on the caller's own connection if one is given.

        A connection wrapped in `pxrs.stores.connections.Lent` is committed, or rolled back, when
        the block is left. Any other is joined: the changes are applied when the block is left and
        land when, and only if, the caller commits; raises `InvalidRequest` if it is in no
        transaction and would begin none. Raises `NotAtomic` where the stores can't commit together.
        """
        ...

    def close(self) -> None: ...


def validate_ttl(ttl: float, least: float = 0.001, most: float = 1_000_000_000) -> None:
    """Refuse a session that would end at once, or that the engine could not keep for so long."""
    if not least <= ttl <= most:
        raise InvalidRequest(
            f"a session's ttl must be from {least:,} to {most:,} seconds, got {ttl}"
        )


def validate_partitions(partitions: int) -> None:
    """Refuse a topic without partitions."""
    if partitions < 1:
        raise InvalidRequest(f"partitions must be at least 1, got {partitions}")


def validate_limit(limit: int | None) -> None:
    """Refuse a `CoordStore.list` that could return nothing."""
    if limit is not None and limit < 1:
        raise InvalidRequest(f"limit must be at least 1, got {limit}")


def validate_commit(checks: Sequence[Check], writes: Sequence[Write], limits: Limits) -> None:
    """Refuse what some engine could not do, on every engine alike."""
    if len(checks) + len(writes) > limits.operations:
        raise InvalidRequest(
            f"the commit has {len(checks) + len(writes)} checks and writes; "
            f"the limit of this store is {limits.operations}"
        )
    for keys in ([check.key for check in checks], [write.key for write in writes]):
        if len(set(keys)) < len(keys):
            [(key, times)] = Counter(keys).most_common(1)
            raise InvalidRequest(
                "a commit must check a key at most once and write it at most once, "
                f"got {quoted(key)} {times} times"
            )
    put = {write.key for write in writes if isinstance(write, Put)}
    for check in checks:
        if check.version < 0:
            raise InvalidRequest(
                f"the version of {quoted(check.key)} must be at least 0, got {check.version}"
            )
        if check.version == 0 and check.key not in put:
            raise InvalidRequest(
                f"a commit that checks that {quoted(check.key)} is absent must also put it"
            )
    for write in writes:
        if not write.key or not write.key.isprintable():
            raise InvalidRequest(f"a record's key must be printable text, got {quoted(write.key)}")
        if isinstance(write, Put) and len(write.value) > limits.value_bytes:
            raise InvalidRequest(
                f"the value of {quoted(write.key)} is {len(write.value)} bytes long; "
                f"the limit of this store is {limits.value_bytes}"
            )


def lots(
    items: Iterable[T], weigh: Callable[[T], tuple[int, ...]], room: tuple[int, ...]
) -> Iterator[list[T]]:
    """Split items, in order, into lots that fit into a commit: no sum of weights exceeds `room`.

    `weigh` gives an item's weights, one for each limit in `room`. One item always fits.
    """
    lot: list[T] = []
    left = room
    for item in items:
        weights = weigh(item)
        if lot and any(weight > rest for weight, rest in zip(weights, left, strict=True)):
            yield lot
            lot, left = [], room
        lot.append(item)
        left = tuple(rest - weight for weight, rest in zip(weights, left, strict=True))
    if lot:
        yield lot


def failed_checks(
    checks: Sequence[Check], found: Mapping[str, Versioned]
) -> dict[str, Versioned | None]:
    """Return the records, as they were found, for which a check does not hold."""
    failed: dict[str, Versioned | None] = {}
    for check in checks:
        record = found.get(check.key)
        if record is not None:
            refuse_session_check(record.session, check)
        if check.version != (0 if record is None else record.version):
            failed[check.key] = record
    return failed


def refuse_session_check(session: str | None, check: Check) -> None:
    """Refuse to check a session-bound record's version: some engines count it anew."""
    if session is not None and check.version != 0:
        raise InvalidRequest(f"{check.key!r} is bound to a session; its version can't be checked")


def validate_batch(batch: Batch) -> None:
    """Refuse a batch that no log could place: empty, cut off, or with half a producer state."""
    if batch.count < 1 or len(batch.data) < HEADER_SIZE:
        raise InvalidRequest(
            f"a batch of {batch.count} messages in {len(batch.data)} bytes is not valid"
        )
    if batch.producer_id >= 0 and not (
        0 <= batch.producer_epoch < 2**15 and 0 <= batch.base_sequence < 2**31
    ):
        raise InvalidRequest(
            f"producer {batch.producer_id} must have an epoch and a sequence, "
            f"got {batch.producer_epoch} and {batch.base_sequence}"
        )


@runtime_checkable
class FetchesMany(Protocol):
    """A `LogStore` that fetches from several partitions in one call.

    Over a network the rest is on its way while the first is decoded.
    """

    def fetch_many(
        self, places: Sequence[tuple[LogPartition, int]], max_bytes: int
    ) -> Generator[Fetched | PxrsError]:
        """Yield what `fetch` would return or raise for each partition and offset, in order.

        Each result has at most `max_bytes`, but at least one batch. Close the iterator if it is not
        read to its end.
        """
        ...


@runtime_checkable
class SettlesLate(Protocol):
    """A `LogStore` in which messages may appear below the end for a while."""

    def final(self, where: LogPartition) -> int | None:
        """Return the offset below which no new message can appear; None if not known yet."""
        ...


@runtime_checkable
class NoticesAnother(Protocol):
    """A `LogStore` that notices when other messages stand where those stood that were read."""

    def incarnation(self, where: LogPartition, since: int | None = None) -> int:
        """Return how often this process has seen that.

        Offsets of an earlier incarnation mean nothing in a later one: raises `SourceChanged` if it
        is not `since`, the one in which the caller began.
        """
        ...


@runtime_checkable
class CountsMessages(Protocol):
    """A `LogStore` with offsets that have gaps: their differences do not count messages."""

    def count(
        self, topic_id: str, ranges: Mapping[int, tuple[tuple[int, int], ...]]
    ) -> dict[int, Counted]:
        """Return how many messages are in these ranges of offsets, by partition.

        Its cost is bounded: a large number is an estimate.
        """
        ...


@runtime_checkable
class TellsSizes(Protocol):
    """A `LogStore` that returns the sizes of all partitions of a topic in one call."""

    def sizes(self, topic_id: str) -> dict[int, int]:
        """Return what `size` would for each partition of the topic."""
        ...


@runtime_checkable
class KeepsOwners(Protocol):
    """A `LogStore` that another store may use by mistake, with a coordination of its own.

    Its topics bear the identity of the store that made them (`pxrs.stores.identity`). `drop` leaves
    another store's topic alone.
    """

    def owned_by(self, identity: Callable[[], str]) -> None:
        """Set the owner of later `create` calls: another store's topic raises `TopicExists`."""
        ...

    def owner(self) -> str:
        """Return the identity of the store that uses this log; empty if it is not known."""
        ...

    def held(self) -> dict[str, str]:
        """Return the topics of the log by id, each with the identity of the store that made it.

        The identity is empty where it is not known.
        """
        ...


@runtime_checkable
class TellsTime(Protocol):
    """A `CoordStore` with a clock that all who use the store share."""

    def now_ms(self) -> int:
        """Milliseconds since 1970 by the store's own clock."""
        ...


@runtime_checkable
class OfNodes(Protocol):
    """`Stores` that nodes of `pxrs serve` serve."""

    @property
    def client(self) -> Client:
        """The client that finds and calls the nodes."""
        ...


@runtime_checkable
class LendsSessions(Protocol):
    """A `CoordStore` with sessions that outlive the process that opened them.

    A node opens them for its clients. They end when their TTL has passed or when they are closed.
    The death of the process, or closing the store, does not end them: the client goes on through
    another node.
    """

    def lend(self, ttl: float) -> LentSession:
        """Open a session that any process may adopt by its id."""
        ...

    def adopt(self, session: str) -> LentSession:
        """Take over a lent session and renew it; from now on this handle renews it.

        Raises `SessionLost` if it is over, or was not lent.
        """
        ...


@runtime_checkable
class GivesWay(Protocol):
    """A `CoordStore` with one writer at a time, which may be the program's own connection."""

    def commit_unless(
        self, checks: Sequence[Check], writes: Sequence[Write], wanted: Callable[[], bool]
    ) -> Committed | Conflict:
        """`commit`, but stop waiting for the writer once `wanted()`: raises `StoreBusy` then.

        For a thread that holds something that the current writer may come to wait for.
        """
        ...
