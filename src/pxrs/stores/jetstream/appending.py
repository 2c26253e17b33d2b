"""Appending: one publish at a time per partition, all partitions at once.

The appends of one process to a partition go one after the other, in the order in which they came;
those of several processes take turns (`turns.py`).

A publish names the sequence of the subject's last message, for which it was built. So at most one
try of a batch is stored, whatever became of the answers: a sequence that was passed never comes
back. The producers' states in the last message decide whether a batch is there already.

A partition's error goes to its own batches only, and a partition that does not answer does not
delay the others' answers: its outcome is reported as unknown, and the producer sends again.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.core.sequences import Duplicate, Fresh, judge
from pxrs.errors import (
    MessageTooLarge,
    OutcomeUnknown,
    PxrsError,
    StoreError,
    StoreUnavailable,
)
from pxrs.stores.api import validate_batch
from pxrs.stores.jetstream.ends import Ends
from pxrs.stores.jetstream.entries import (
    EXPECTED,
    PRODUCER_MEMORY_MS,
    Entry,
    Known,
    Producers,
    follow,
    known_from_bytes,
    known_to_bytes,
    to_headers,
)
from pxrs.stores.jetstream.failures import WRONG_SEQUENCE, Stale, passing, translated
from pxrs.stores.jetstream.strays import entry_of, goes_on
from pxrs.stores.jetstream.streams import ROLLUP, TRY, TTL, Streams
from pxrs.stores.jetstream.topics import Part, Topics
from pxrs.stores.jetstream.turns import Line, Turns
from pxrs.stores.jetstream.wire import ApiError, NoAnswer, NotSent
from pxrs.types import Append, Appended, Batch, LogPartition

# A big batch to several replicas that sync may take this long; a dead leader costs this long, too.
_PUBLISH = 3.0
# The most bytes that headers take: the states of some producers, and numbers.
_HEADER_ROOM = 2304
# How much longer than the others a partition may take before its outcome is called unknown.
_COMPANY = 1.0


_Append = Callable[[Part, "_Place", Batch], Awaitable[Appended | PxrsError]]


class Appending:
    """Appends to the partitions of streams."""

    def __init__(
        self, streams: Streams, topics: Topics, ends: Ends, turns: Turns, clock: Clock
    ) -> None:
        self._streams = streams
        self._topics = topics
        self._ends = ends
        self._turns = turns
        self._clock = clock
        # Partitions that kept the last call waiting, and the tasks still under way for them.
        self._late: set[LogPartition] = set()
        self._left: set[asyncio.Task[None]] = set()

    async def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        """See `LogStore.append`. Partitions run in parallel, and none waits long for another."""
        numbers: dict[LogPartition, list[int]] = {}
        for number, append in enumerate(appends):
            numbers.setdefault(append.where, []).append(number)
        works = [
            _Work(
                self._topics,
                self._turns,
                where,
                [appends[number].batch for number in those],
                self._one,
            )
            for where, those in numbers.items()
        ]
        await self._carry_out(works)
        outcomes: dict[int, Appended | PxrsError] = {}
        for work in works:
            outcomes.update(zip(numbers[work.where], work.outcomes_now(), strict=True))
            (self._late.discard if work.finished else self._late.add)(work.where)
        return [outcomes[number] for number in range(len(appends))]

    async def _carry_out(self, works: Sequence[_Work]) -> None:
        """Run until all partitions are done, or late.

        Once others are done, or if it was late before, a partition gets only a little more time. A
        batch that is under way then goes on, and sending the same batches again finds its outcome.
        """
        tasks = {asyncio.create_task(work.run()): work for work in works}
        waiting = set(tasks)
        try:
            while waiting:
                none_yet = len(waiting) == len(tasks)
                prompt = any(tasks[task].where not in self._late for task in waiting)
                done, waiting = await asyncio.wait(
                    waiting,
                    timeout=None if none_yet and prompt else _COMPANY,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    waiting = {task for task in waiting if not self._leave(task, tasks[task])}
        except BaseException:
            for task in waiting:
                task.cancel()
            raise

    def _leave(self, task: asyncio.Task[None], work: _Work) -> bool:
        """Stop waiting for a partition; false if its batch could not be recognised later."""
        if not work.under_way:
            task.cancel()
        elif work.batches[len(work.outcomes)].producer_id < 0:
            return False
        work.is_left = True
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        return True

    async def _one(self, part: Part, place: _Place, batch: Batch) -> Appended | PxrsError:
        """Append one batch, or return the error. Raises `Stale` only."""
        attempt = _Attempt(self._streams, self._ends, self._clock, part, place, batch)
        try:
            validate_batch(batch)
            return await attempt.run()
        except Stale:
            raise
        except PxrsError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one partition's error must not fail others
            unknown = OutcomeUnknown(f"appending failed with an unexpected error: {error!r}")
            unknown.__cause__ = error
            return unknown


class _Place(NamedTuple):
    """A call's place among those that append to a partition: its process's line, and its age."""

    line: Line
    since: float


@dataclass
class _Work:
    """The batches of one call for one partition, one after the other."""

    topics: Topics
    turns: Turns
    where: LogPartition
    batches: Sequence[Batch]
    append: _Append
    outcomes: list[Appended | PxrsError] = field(default_factory=list)
    # Whether the batch after those that have an outcome is on its way.
    under_way: bool = False
    # The caller no longer waits: the batch on its way is the last one that is sent.
    is_left: bool = False

    async def run(self) -> None:
        try:
            await self.topics.using_part(self.where, self._append_all)
        except PxrsError as error:
            # The topic can't be found or looked up. None of the remaining batches was sent.
            self.outcomes += [error] * (len(self.batches) - len(self.outcomes))

    async def _append_all(self, part: Part) -> None:
        since = asyncio.get_running_loop().time()
        async with part.lock:
            place = _Place(await self.turns.line(self.where), since)
            try:
                await self._append_in_turn(part, place)
            finally:
                place.line.rest()

    async def _append_in_turn(self, part: Part, place: _Place) -> None:
        while not self.is_left and len(self.outcomes) < len(self.batches):
            if await place.line.turn(place.since):
                # Others may have appended: the known end may be an old one.
                part.tail = None
            self.under_way = True
            try:
                outcome = await self.append(part, place, self.batches[len(self.outcomes)])
            finally:
                self.under_way = False
            self.outcomes.append(outcome)
            if _comes_again(outcome):
                # The batches that follow must not come before it.
                return

    @property
    def finished(self) -> bool:
        """Whether each batch has a final outcome."""
        return len(self.outcomes) == len(self.batches) and not any(map(_comes_again, self.outcomes))

    def outcomes_now(self) -> list[Appended | PxrsError]:
        """An outcome for every batch, as far as it is known now."""
        known = list(self.outcomes)
        if self.under_way:
            known.append(OutcomeUnknown("a batch is under way and its partition does not answer"))
        not_sent = StoreUnavailable("not sent: the batch before it still waits for its partition")
        return known + [not_sent] * (len(self.batches) - len(known))


def _comes_again(outcome: Appended | PxrsError) -> bool:
    """Whether the same batch should be sent again, before those that follow it."""
    return isinstance(outcome, OutcomeUnknown) or getattr(outcome, "retryable", False)


class _Overtaken(Exception):  # noqa: N818 - it is tried again
    """Another writer's batch came first."""


@dataclass
class _Attempt:
    """One batch on its way: read the end, judge, publish for that end; repeat until it is known."""

    streams: Streams
    ends: Ends
    clock: Clock
    part: Part
    place: _Place
    batch: Batch
    writer: str = field(default_factory=partial(secrets.token_hex, 6))
    # The connection by which the end was looked at.
    connection: int = 0
    # The end for which the first try without an answer was built.
    unanswered: Entry | None = None

    async def run(self) -> Appended | PxrsError:
        size, most = len(self.batch.data), self.streams.wire.max_payload
        if size + _HEADER_ROOM > most:
            return MessageTooLarge(
                f"batch is {size} bytes long; the limit of this NATS server is "
                f"{most} with headers: raise its max_payload, or lower the "
                "producer's batch_bytes and max_message_bytes"
            )
        try:
            return await self._until_known()
        except StoreError as error:
            if self.unanswered is None or isinstance(error, OutcomeUnknown):
                raise
            raise OutcomeUnknown(f"a batch was sent and no answer came: {error}") from error

    async def _until_known(self) -> Appended | PxrsError:
        """Try until the outcome is known; raises `StoreError` if the time is up."""
        patience = self.streams.patience()
        fresh = False
        now = asyncio.get_running_loop().time
        while True:
            delay: float | None = None
            began = now()
            try:
                last = await self._last(fresh=fresh)
                outcome = await self._find_mine(last) or await self._publish(last)
                if isinstance(outcome, Appended) or (outcome is not None and fresh):
                    return outcome
                # Overtaken by another writer; or to be refused, which only a fresh read may decide.
                why: Exception = _Overtaken("others append to this partition all the time")
                if outcome is None:
                    await self.place.line.overtaken(self.place.since, now() - began)
                delay = 0
            except NotSent as error:
                await self.streams.require(self.part.stream)
                why = error
            except NoAnswer as error:
                why = error
            except ApiError as error:
                if not passing(error):
                    raise translated(error) from error
                why = error
            fresh = True
            await patience.pause(why, delay)

    async def _last(self, *, fresh: bool) -> Entry:
        """The last batch: as it is remembered, unless it has to be fresh."""
        part = self.part
        self.connection = self.streams.wire.connections
        if fresh:
            part.tail = None
        elif part.tail is not None:
            # The server may have lost the end, and have another message by now where it was: this
            # batch would be stored behind that, with wrong offsets. It would have been away: so the
            # batch goes by the connection by which the end was looked at, or not at all.
            await self.ends.check(part)
            if part.tail is not None:
                return part.tail
        floor, tail = await self.ends.both(part)
        if tail.next < floor.start:
            # An operator purged the stream by hand: offsets must not be used again.
            tail = tail._replace(next=floor.start, total=max(tail.total, floor.total))
        return tail

    async def _publish(self, last: Entry) -> Appended | PxrsError | None:
        """Judge and publish; None if another writer was faster."""
        batch = self.batch
        producers: Producers | None = None
        if batch.producer_id >= 0:
            judged = await self._judge(last)
            if not isinstance(judged, Producers):
                return judged
            producers = judged
        entry = follow(
            last, self.writer, batch.count, len(batch.data), batch.max_timestamp, producers
        )
        data = entry.base.to_bytes(8, "big") + batch.data[8:]
        try:
            seq = await self.streams.publish(
                self.part.batches, data, to_headers(entry), _PUBLISH, self.connection
            )
        except ApiError as error:
            if error.err_code in WRONG_SEQUENCE:
                return None
            if passing(error):
                # The leader may have passed the batch on before it stopped leading.
                self.unanswered = self.unanswered or last
            raise
        except NoAnswer:
            self.unanswered = self.unanswered or last
            raise
        self.part.appended(entry._replace(seq=seq))
        return Appended(entry.base)

    async def _judge(self, last: Entry) -> Producers | Appended | PxrsError:
        """The producers' states after the batch, or the result if it must not be appended."""
        batch = self.batch
        producers = Producers.of(last)
        known = producers.get(batch.producer_id)
        if known is None and producers.aside:
            known = await from_aside(self.streams, self.part, batch.producer_id)
        now = self.part.time.now(self.clock)
        if known is not None and known.used <= now - PRODUCER_MEMORY_MS:
            known = None
        verdict = judge(known.state if known else None, batch, last.next)
        if isinstance(verdict, Duplicate):
            return Appended(verdict.base, duplicate=True)
        if not isinstance(verdict, Fresh):
            return verdict
        aside_seq = known.aside_seq if known else 0
        producers = producers.appended(batch.producer_id, Known(verdict.state, now, aside_seq))
        while (surplus := producers.surplus()) is not None:
            await put_aside(self.streams, self.part, *surplus)
            producers = producers.without(surplus[0])
        return producers

    async def _find_mine(self, last: Entry) -> Appended | None:
        """Find out whether an unanswered try was stored after all."""
        if self.unanswered is None or last.last_seq <= self.unanswered.last_seq:
            return None
        if self.batch.producer_id >= 0 and last.writer != self.writer:
            return None  # The producer's state will show it.
        before, seq = self.unanswered, self.unanswered.last_seq
        while seq < last.seq:
            stored = await self.streams.next(self.part.stream, self.part.batches, seq + 1)
            entry = None if stored is None else entry_of(stored)
            if stored is not None and entry is None:
                seq = stored.seq
                continue
            if entry is not None and (
                entry.before < seq or (entry.base == before.next and not goes_on(entry, before))
            ):
                # Another program's, which only looks like the next one, or one that came too late.
                seq = entry.seq
                continue
            if entry is None or entry.base != before.next:
                raise OutcomeUnknown(
                    "a batch was sent, no answer came, and its place in the partition was trimmed"
                )
            if entry.writer == self.writer:
                return Appended(entry.base)
            before, seq = entry, entry.seq
        # Another writer's message has the place for which it was built: it will never be stored.
        self.unanswered = None
        return None


async def put_aside(streams: Streams, part: Part, producer: int, known: Known) -> None:
    """Keep the state of a producer that no longer travels with the batches.

    Another process may have done so before: for a batch that then came too late, or for this
    very state. The newer state stays; the offset of its last batch shows which that is.
    """
    subject, data = f"{part.aside}.{producer}", known_to_bytes(producer, known)
    lifetime = {ROLLUP: "sub", TTL: f"{PRODUCER_MEMORY_MS // 1000}s"}
    expected = known.aside_seq
    while True:
        try:
            headers = {EXPECTED: str(expected), **lifetime}
            await streams.publish(subject, data, headers, TRY)
        except ApiError as error:
            if error.err_code not in WRONG_SEQUENCE:
                raise
        else:
            return
        expected, there = await _aside(streams, part, producer)
        if there is not None and there.state.batches[-1].base >= known.state.batches[-1].base:
            return


async def from_aside(streams: Streams, part: Part, producer: int) -> Known | None:
    """The state of a producer that was put aside."""
    _, known = await _aside(streams, part, producer)
    return known


async def _aside(streams: Streams, part: Part, producer: int) -> tuple[int, Known | None]:
    """Reads the sequence at which a producer's state was put, and the state if pxrs wrote it."""
    stored = await streams.last(part.stream, f"{part.aside}.{producer}")
    if stored is None:
        return 0, None
    try:
        _, known, _ = known_from_bytes(stored.data)
    except (ValueError, LookupError, struct.error):
        part.tell_stray(stored.seq)
        return stored.seq, None
    return stored.seq, known._replace(aside_seq=stored.seq)
