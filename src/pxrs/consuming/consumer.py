"""The consumer: the user's interface to a member of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, Self, TypeVar

from pxrs import arguments
from pxrs.arguments import refuse_unsaid
from pxrs.consuming.callbacks import Parts
from pxrs.consuming.health import Health
from pxrs.consuming.member import Member
from pxrs.consuming.transactions import Transaction
from pxrs.groups.owned_claims import all_of
from pxrs.options import declared
from pxrs.types import Message, TopicPartition, Value

T = TypeVar("T")
Tx = TypeVar("Tx", covariant=True)
# How many messages a loop takes at a time.
LOOP_MESSAGES = 500


class Transacting(Protocol[Tx]):
    """`run_transaction`. `Tx` is the transaction that `work` gets: in `aio` another one."""

    def run_transaction(
        self,
        work: Callable[[Tx], T],
        *,
        commits: Any = None,
        attempts: int = 5,
        connection: None = None,
    ) -> T: ...


class Consumer(Generic[Value]):
    """Consumes topics as a member of a group. One thread uses it; close it, or use `with`."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._steps = member.steps

    @property
    def member(self) -> str:
        """This member's name in the group."""
        return self._member.name

    @property
    def assignment(self) -> set[TopicPartition]:
        """The partitions owned now."""
        partitions = list(self._steps.table.partitions.values())
        return {owned.part for owned in partitions if owned.state == "owned"}

    def health(self, *, stuck_after: float | None = None, lag_limit: int = 10_000) -> Health:
        """Return the health of this consumer. From any thread; for probes, `health().ok`.

        `stuck_after`: how many seconds a handler may be at the same messages; the consumer's own
        setting by default.
        """
        return self._member.health(stuck_after=stuck_after, lag_limit=lag_limit)

    def poll(self, max_records: int = 500, timeout: float | None = None) -> list[Message[Value]]:
        """Return messages of the owned partitions, at most `max_records`; waits for the first.

        The messages of the last call count as handled now. Waits for a store that is unavailable,
        too, and raises `StoreUnavailable` when the time is over.
        """
        arguments.check_whole("max_records", max_records, least=1)
        arguments.check_timeout(timeout)
        self._member.require_open()
        try:
            with self._member.one_user:
                self._steps.finish()
                return self._steps.all_at_once(self._member.next(max_records, timeout))
        except BaseException as error:
            self._steps.did_not_arrive(error)
            raise

    def __iter__(self) -> Iterator[Message[Value]]:
        """Messages one by one, without end. One is handled when the next one is asked for."""
        self._begin_loop()
        while True:
            yield from self._steps.one_by_one(self._member.take(LOOP_MESSAGES, None))

    def batches(self, max_records: int = 500) -> Iterator[list[Message[Value]]]:
        """Lists of messages, each of one partition. One is handled when the next is asked for."""
        arguments.check_whole("max_records", max_records, least=1)
        return self._batches(max_records)

    def _batches(self, max_records: int) -> Iterator[list[Message[Value]]]:
        self._begin_loop()
        while True:
            yield from self._steps.by_partition(self._member.take(max_records, None))

    def _begin_loop(self) -> None:
        self._member.require_open()
        with self._member.one_user:
            self._steps.finish()

    def commit(self, message: Message | None = None) -> None:
        """Commit what was handed out so far, or up to and including one message.

        Messages handed out while it waits for its turn are no part of it. Raises `Fenced` for
        partitions that were lost; the others are committed all the same. A checkpoint never goes
        back, and never past what was handed out.
        """
        self._member.committing(message)()

    def commit_async(self) -> Future[None]:
        """Commit what was handed out so far in the background; the future has the outcome.

        Its `result()` is that of `commit`. You need not ask for it: `on_lost` reports lost
        partitions. Messages handed out after this call are no part of it.
        """
        self._member.require_open()
        return self._member.background.commit_soon()

    def transaction(self, connection: None = None, *, commits: Any = None) -> Transaction:
        """Commit the checkpoint of what the last poll returned together with the caller's writes.

        In a loop it covers the current message, or without auto-commit all since the last commit.
        With `commits`, a connection of the caller's, it runs on that and pxrs commits it, with
        what it had begun before: the driver's own, or an SQLAlchemy Session or Connection. A block
        left by an exception is rolled back, and its messages are handed out again. `Fenced` if
        another member owns a partition now; `NotAtomic` where the store can't do it.
        """
        refuse_unsaid(connection, "consumer.transaction(commits=connection): pxrs does")
        self._member.require_open()
        return self._member.transactions.begin(commits)

    @declared(Transacting[Transaction].run_transaction)
    def run_transaction(self, work: Any, *, commits: Any, attempts: Any, connection: Any) -> Any:
        """Run `work(tx)` in a `Transaction`, again on a conflict that may pass; its result."""
        refuse_unsaid(connection, "consumer.run_transaction(work, commits=connection)")
        self._member.require_open()
        return self._member.transactions.run(work, commits, attempts)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from this offset, and make it the checkpoint. Forward or back; it is recorded."""
        arguments.check_whole("offset", offset)
        self._member.require_open()
        self._steps.seek(topic, partition, offset)

    def seek_to_time(self, timestamp: int, parts: Parts | None = None) -> None:
        """Go on from the first messages of this time (ms) or later, or from the end."""
        arguments.check_time("timestamp", timestamp)
        self._member.require_open()
        for part in all_of(self.assignment) if parts is None else arguments.check_parts(parts):
            self._steps.seek(*part, self._steps.offset_at(part, timestamp))

    def pause(self, *parts: TopicPartition) -> None:
        """Hand out nothing of these partitions until `resume`; kept across rebalances."""
        self._steps.pause(arguments.check_parts(parts))

    def resume(self, *parts: TopicPartition) -> None:
        """Go on with these partitions."""
        self._member.resume(arguments.check_parts(parts))

    def wake(self) -> None:
        """End the wait of `poll`, or the next one: it returns with nothing. From any thread."""
        self._member.wake()

    def close(self) -> None:
        """Finish: commit what was handled, release everything and leave the group at once.

        `on_revoked` is called first with the owned partitions; it can still commit. If `close` was
        interrupted, call it again.
        """
        self._member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
