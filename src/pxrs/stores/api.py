"""The protocols every backend implements.

They are small on purpose: a backend knows keys, versions, sessions and batches. Who owns a
partition, what an epoch means and when to rebalance is decided in `pxrs.core`.

`pxrs.testing.conformance` holds one suite per protocol; a backend is finished when it passes.
"""

from __future__ import annotations

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
        """Have this called when the watch is woken or closed: then `wait(0)` tells of it.

        It may be called by any thread and under a lock of the store. What a store finds out only
        in `wait`, as that time has passed, is not called: look now and then.
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
        """Seconds for which no other can take this session's place, by this process's own clock.

        Counted from when the last successful renewal was sent. 0 when it is over.
        """
        ...

    def close(self) -> None:
        """End it now. Its records are gone when this returns."""
        ...


class LentSession(Session, Protocol):
    """A `Session` of `LendsSessions`, as the handle knows it that adopted it last.

    Once another one has adopted it, renewing it through this one may raise `SessionLost`.
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

        A record by its key, or all in a folder: that ends with a slash, or is empty. A watch may
        wake for others too.
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
        """Remove the partitions and all they hold. Dropping what is not there is fine."""
        ...

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        """Append all batches durably, in order per partition; what became of each.

        Each stands alone: an error is said of the batch that it belongs to, the others get their
        offset. `OutcomeUnknown` is said of a batch that may be in the log, or may still come
        there; every other error only of one that this call did not append and never will. Behind
        a batch that is unknown, or whose error is retryable, the later ones of its partition are
        not appended. An exception is an error of all the batches alike. Sending the same batches
        again is safe where they carry a producer id.
        """
        ...

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        """Batches from the one that holds `offset`, at most `max_bytes` but at least one.

        Empty at the end only. Raises `OffsetOutOfRange` outside of it, `TopicNotFound` or
        `PartitionNotFound` if there is no such partition: all three are true of what is stored, not
        of what one replica of several believes. Without a majority that is `StoreUnavailable`.
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

        Offsets are never given twice: an emptied partition goes on where it was.
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
    all items of a fifo queue, strictly in the order in which they were put: the next one when
    the one before is done or dead, or when the same transaction holds it. One that is delayed
    or backs off holds up those behind it.
    """

    @property
    def limits(self) -> QueueLimits: ...

    def create(self, name: str, *, fifo: bool = False) -> Queue:
        """Make a queue. One that is just so is returned; raises `QueueExists` if it differs."""
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
        """Hold up to `count` items for the holder, each counted durably as one more delivery.

        An item that was delivered `most` times is not handed out again: it is dead. One whose
        holder died, or was too late, is a suspect: it is handed out alone. Without `suspects` it
        is neither handed out nor counted; when it is next nothing is, and `Taken.suspect` says
        so. A hold ends with the holder's session, or after `lock_for` seconds. Raises
        `SessionLost` if the session is over; a queue that does not exist is empty. `unit` names
        this very call, to be asked after with `held`.
        """
        ...

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        """List what the holder holds in the queue, once its `take` named `unit` can't change that.

        It waits for that `take` if it is under way. If it has not begun by then it is refused
        with `Fenced` whenever it comes: the answer is final.
        """
        ...

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        """Hold on for `lock_for` seconds from now. Raises `Fenced` if one is not held any more."""
        ...

    def apply(self, change: QueueChange) -> list[int | None]:
        """Remove and put, in one durable commit; the new items' ids, None for a duplicate.

        Queues that are put to are made if need be. Raises `Fenced` if an item to be removed is
        not held any more by this holder at this delivery, `SessionLost` if the session is over:
        then nothing was done. The session is not looked at where nothing is removed.

        It leaves evidence under its unit's name, if it has one, until a later change of the session
        forgets it, or long after the session's end by the store's own clock. A unit that `outcome`
        has given up is refused with `Fenced`.
        """
        ...

    def outcome(self, session: str, unit: str) -> Outcome:
        """Return the outcome of a unit, applied here or by `atomic`, whose answer did not arrive.

        It waits for the unit if that is under way. `DONE` and `NEVER` are final: a unit that has
        not been committed by then is refused whenever it comes. `UNKNOWN` if there is no evidence
        and the session is over: it may have been forgotten. (A store that knows better may say so.)
        """
        ...

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        """Give items back. One that is not held by this holder any more is left alone."""
        ...

    def reap(self) -> float | None:
        """Free what is held by ended sessions and past its time; when to look again, in seconds.

        An item whose holder died at its last delivery is dead. `take` does this when it must; call
        it now and then for queues from which no one takes.
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
        """Remove items that are not held, dead ones too; how many there were."""
        ...

    def redrive(self, queue: str, ids: Sequence[int]) -> int:
        """Put dead items back at the queue's end, not delivered yet; how many there were."""
        ...

    def purge(self, queue: str, states: Sequence[ItemState] = ()) -> int:
        """Remove everything in the given states (all but held and dead if none); how many."""
        ...

    def watch(self, *queues: str) -> Watch:
        """Wakes when there may be something to take from one of the queues."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ItemRestorer(Protocol):
    """A `QueueStore` that can be filled with what another one held: `pxrs store copy` needs it."""

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        """Add items under the numbers they had elsewhere, and as they stood there; how many.

        Order, priority, deliveries, times and errors are kept, and dead items are dead. What was
        held there is free here and handed out alone, as if its holder had died. A number that is
        there already is left as it is, so doing it again does no harm. Items that are put later
        come after. Raises `QueueNotFound`; at most `limits.items` at a time.
        """
        ...


class Atomic(Protocol):
    """Collects changes to several stores and applies them in one engine commit.

    Leaving the block applies and commits; leaving it by an exception rolls back. A transaction
    that was ended inside the block, by the caller or the engine, makes leaving it an
    `InvalidRequest`, even if another has begun since: nothing is applied without what was done
    before. If leaving is interrupted, the block is left once more, by the interrupt: what has
    ended by then stays so.
    After the block `versions`, `appended` and `queued` hold what `commit`, `append` and
    `QueueStore.apply` would have returned.
    """

    @property
    def connection(self) -> Any:
        """The engine's connection for the caller's own statements; None where there is none."""
        ...

    def lost(self, error: BaseException) -> PxrsError | None:
        """Translate an error of a statement on `connection`, if the connection was lost with it.

        None if it is the statement's own error, which is the caller's to handle.
        """
        ...

    @property
    def joined(self) -> bool:
        """Whether it runs inside a transaction that the caller will end."""
        ...

    @property
    def is_exclusive(self) -> bool:
        """Whether no other process can change the store until the block ends.

        Then no hold can be extended meanwhile, nor lost: one whose time was not over when the
        block began is held until it ends. Where it is false, `QueueStore.extend` works beside it.
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
        """Batches inside a transaction carry no producer id: a rollback would leave a gap."""
        ...

    def queue(self, change: QueueChange) -> None:
        """At most one: a unit of work has one holder.

        An empty one is worth its place: its unit is what `QueueStore.outcome` can be asked about
        when the answer to the commit does not come (`OutcomeUnknown`).
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

        One that comes as `pxrs.stores.connections.Lent` is committed, or rolled back, when the
        block is left. Any other is joined: the changes are applied when the block is left and
        land when, and only if, the caller commits; raises `InvalidRequest` if it is in no
        transaction and would begin none. Raises `NotAtomic` where the stores can't commit together.
        """
        ...

    def close(self) -> None: ...


def validate_limit(limit: int | None) -> None:
    """Refuse a `CoordStore.list` that could return nothing."""
    if limit is not None and limit < 1:
        raise InvalidRequest(f"limit must be at least 1, got {limit}")


def validate_commit(checks: Sequence[Check], writes: Sequence[Write], limits: Limits) -> None:
    """Refuse what some engine could not do, on every engine alike."""
    if len(checks) + len(writes) > limits.operations:
        raise InvalidRequest(
            f"{len(checks) + len(writes)} operations in one commit; "
            f"this store takes {limits.operations}"
        )
    checked = {check.key for check in checks}
    written = {write.key for write in writes}
    if len(checked) < len(checks) or len(written) < len(writes):
        raise InvalidRequest("a key may be checked once and written once in a commit")
    put = {write.key for write in writes if isinstance(write, Put)}
    for check in checks:
        if check.version < 0:
            raise InvalidRequest(f"version {check.version} of {check.key!r}: versions start at 1")
        if check.version == 0 and check.key not in put:
            raise InvalidRequest(
                f"absence of {check.key!r} can be checked only in the commit that puts it"
            )
    for write in writes:
        if not write.key or not write.key.isprintable():
            raise InvalidRequest(f"a record's key must be printable text, got {quoted(write.key)}")
        if isinstance(write, Put) and len(write.value) > limits.value_bytes:
            raise InvalidRequest(
                f"{len(write.value)} bytes for {write.key!r}; this store takes {limits.value_bytes}"
            )


def lots(
    items: Iterable[T], weigh: Callable[[T], tuple[int, ...]], room: tuple[int, ...]
) -> Iterator[list[T]]:
    """Split items, in their order, into lots that fit into a commit: each weight into its room."""
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
    """The records, as they were found, for which a check does not hold."""
    failed: dict[str, Versioned | None] = {}
    for check in checks:
        record = found.get(check.key)
        if record is not None:
            refuse_session_check(record.session, check)
        if check.version != (0 if record is None else record.version):
            failed[check.key] = record
    return failed


def refuse_session_check(session: str | None, check: Check) -> None:
    """Refuse to check the version of a session-bound record: some engines start it again."""
    if session is not None and check.version != 0:
        raise InvalidRequest(f"{check.key!r} is bound to a session; its version can't be checked")


def validate_batch(batch: Batch) -> None:
    """Refuse a batch that no log could place: empty, cut off, or with half a producer state."""
    if batch.count < 1 or len(batch.data) < HEADER_SIZE:
        raise InvalidRequest(
            f"a batch of {batch.count} messages in {len(batch.data)} bytes can't be appended"
        )
    if batch.producer_id >= 0 and not (
        0 <= batch.producer_epoch < 2**15 and 0 <= batch.base_sequence < 2**31
    ):
        raise InvalidRequest(
            f"producer {batch.producer_id} needs an epoch and a sequence, "
            f"not {batch.producer_epoch} and {batch.base_sequence}"
        )


@runtime_checkable
class FetchesMany(Protocol):
    """A `LogStore` that gives several partitions' batches in one go.

    Over a network the rest is on its way while the first is decoded.
    """

    def fetch_many(
        self, places: Sequence[tuple[LogPartition, int]], max_bytes: int
    ) -> Generator[Fetched | PxrsError]:
        """Yield what `fetch` would return or raise for each partition and offset, in order.

        Each at most `max_bytes`, but at least one batch. Close the iterator if it is not read to
        its end.
        """
        ...


@runtime_checkable
class SettlesLate(Protocol):
    """A `LogStore` in which messages may appear below the end for a while."""

    def final(self, where: LogPartition) -> int | None:
        """Return the offset below which no message can appear; None if it is not known yet."""
        ...


@runtime_checkable
class CountsMessages(Protocol):
    """A `LogStore` with offsets that have gaps: their differences do not count messages."""

    def count(
        self, topic_id: str, ranges: Mapping[int, tuple[tuple[int, int], ...]]
    ) -> dict[int, Counted]:
        """Return how many messages are in these ranges of offsets, by partition.

        What it costs is bounded: of many messages it is an estimate.
        """
        ...


@runtime_checkable
class TellsSizes(Protocol):
    """A `LogStore` that tells the sizes of all partitions of a topic in one go."""

    def sizes(self, topic_id: str) -> dict[int, int]:
        """Return what `size` would for each partition of the topic."""
        ...


@runtime_checkable
class KeepsOwners(Protocol):
    """A `LogStore` apart from its coordination, which another store may use by mistake.

    Its topics bear the identity of the store that made them (`pxrs.stores.identity`).
    """

    def owned_by(self, identity: Callable[[], str]) -> None:
        """From now on `create` is for this store: `TopicExists` for a topic that another made."""
        ...

    def held(self) -> dict[str, str]:
        """Return the topics that are there, by their id, with the stores that made them.

        A store is empty text where it is not known.
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
    """`Stores` that nodes serve."""

    @property
    def client(self) -> Client:
        """Knows the nodes."""
        ...


@runtime_checkable
class LendsSessions(Protocol):
    """A `CoordStore` with sessions that outlive the process that opened them.

    A node opens them for its clients. They end by their time, or when they are closed; the death of
    the process, or closing the store, does not end them: the client goes on through another node.
    """

    def lend(self, ttl: float) -> LentSession:
        """Open a session with which any process may go on, by its id."""
        ...

    def adopt(self, session: str) -> LentSession:
        """Renew a lent session, from now on through this handle.

        Raises `SessionLost` if it is over, or was not lent.
        """
        ...


@runtime_checkable
class GivesWay(Protocol):
    """A `CoordStore` with one writer, which a program may hold by a connection of its own."""

    def commit_unless(
        self, checks: Sequence[Check], writes: Sequence[Write], wanted: Callable[[], bool]
    ) -> Committed | Conflict:
        """`commit`, but it does not go on waiting for the writer once `wanted()`: `StoreBusy`.

        For a thread that holds what the writer's holder may come to wait for.
        """
        ...
