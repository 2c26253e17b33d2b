"""Finding and reading batches. Nothing here changes a stream but `trim` and `expire`.

What a replica answers may be a moment old. That matters in one place only, the end: "there is
nothing" counts when the leader says so, and "there is less than you have read" when a majority
does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from pxrs.errors import DamagedBatch, OffsetOutOfRange
from pxrs.stores.jetstream.ends import Ends
from pxrs.stores.jetstream.entries import Entry, Floor, above, below
from pxrs.stores.jetstream.failures import WRONG_SEQUENCE, full, passing, translated
from pxrs.stores.jetstream.strays import entry_of
from pxrs.stores.jetstream.streams import Stored, Streams
from pxrs.stores.jetstream.topics import AT_ONCE, Part, publish_floor
from pxrs.stores.jetstream.wire import ApiError, NoAnswer, NotSent
from pxrs.types import Bounds, Fetched, StoredBatch


class Reading:
    """Reads the partitions of streams that are there."""

    def __init__(self, streams: Streams, ends: Ends) -> None:
        self._streams = streams
        self._ends = ends

    async def bounds(self, parts: Iterable[Part]) -> dict[int, Bounds]:
        """Ask each of these partitions of a topic for its offsets."""
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(part: Part) -> tuple[int, Bounds]:
            async with limit:
                floor, tail = await self._ends.both(part)
                return part.number, Bounds(floor.start, max(floor.start, tail.next))

        return dict(await asyncio.gather(*map(one, parts)))

    async def size(self, part: Part) -> int:
        floor, tail = await self._ends.both(part)
        return max(0, tail.total - floor.total)

    # Fetching

    async def fetch(self, part: Part, offset: int, max_bytes: int) -> Fetched:
        seq = part.marks.at(offset)
        if seq is not None:
            floor, run = await asyncio.gather(
                self._ends.floor(part), self._run(part, seq, offset, max_bytes)
            )
            stands = bool(run.batches) or await self._ends.check(part)
            if stands and offset >= floor.start and not run.odd:
                return await self._fetched(part, floor, offset, run)
            if run.odd:
                part.forget()
        return await self._fetch_afresh(part, offset, max_bytes)

    async def _fetch_afresh(self, part: Part, offset: int, max_bytes: int) -> Fetched:
        floor, tail = await self._ends.both(part)
        if offset > max(floor.start, tail.next):
            # Only a majority is believed that there is less than was read.
            floor, tail = await self._ends.confirmed(part)
        end = max(floor.start, tail.next)
        if not floor.start <= offset <= end:
            raise _out_of_range(part, offset, floor, tail)
        if offset == end:
            return Fetched([], floor.start, end)
        seq = await self._locate(part, floor, tail, offset)
        run = await self._run(part, seq, offset, max_bytes)
        if not run.batches:
            # Purged since the floor was read, or really not there.
            floor, tail = await self._ends.both(part)
            if offset < floor.start:
                raise _out_of_range(part, offset, floor, tail)
            following = min(
                (entry.base for entry in run.odd if offset < entry.base < tail.next), default=end
            )
            raise DamagedBatch(part.topic_id, part.number, offset, following, "it is not there")
        return await self._fetched(part, floor, offset, run)

    async def _fetched(self, part: Part, floor: Floor, offset: int, run: _Run) -> Fetched:
        if not run.batches:
            return Fetched([], floor.start, offset)
        end = run.next
        if run.more:
            if part.tail is None or part.tail.next <= end:
                await self._ends.tail(part)
            end = max(end, part.tail.next if part.tail else 0)
        return Fetched(run.batches, floor.start, end)

    async def _run(self, part: Part, seq: int, offset: int, max_bytes: int) -> _Run:
        """Batches that fit, one at least, from the one that holds the offset.

        `seq`: where to look for it. What does not follow them is left out: a message of another
        program, which batches of ours follow; or batches behind a hole, for the next fetch.
        """
        run = _Run(offset)
        room = max_bytes
        while True:
            found, pending = await self._read(part, seq, 1 if room <= 0 else _MANY, room)
            for stored in found:
                entry = entry_of(stored)
                if entry is None:
                    part.tell_stray(stored.seq)
                    continue
                if run.batches and entry.size > room:
                    run.more = True
                    return run
                if run.take(part, entry, stored.data):
                    room -= entry.size
                elif run.behind_a_hole:
                    run.more = True
                    return run
            size = len(run.batches[-1].data) if run.batches else 0
            if not found or not pending or (run.batches and room < size):
                run.more = pending > 0 or bool(run.odd)
                return run
            seq = found[-1].seq + 1

    # Searching

    async def _locate(self, part: Part, floor: Floor, tail: Entry, offset: int) -> int:
        """The sequence from which the batch that holds the offset is the first."""
        low, high = max(1, floor.seq), tail.seq
        below_it, above_it = part.marks.around(offset)
        if below_it is not None:
            low = max(low, below_it.seq)
        if above_it is not None:
            high = min(high, above_it.seq)
        return await self._first(part, low, high, tail, lambda entry: entry.next > offset)

    async def _first(
        self, part: Part, low: int, high: int, tail: Entry, holds: Callable[[Entry], bool]
    ) -> int:
        """The sequence from which the first batch is the first that `holds` is true for.

        It is true for all batches after one that it is true for, and for the one at `high`.
        """
        while low < high:
            middle = (low + high) // 2
            entry = await self._next(part, middle, tail)
            if entry is None or holds(entry):
                high = middle
            else:
                low = entry.seq + 1
        return low

    async def _next(self, part: Part, seq: int, tail: Entry) -> Entry | None:
        """The first batch at or after a sequence. What is beyond the last one is not ours."""
        while True:
            found, _ = await self._read(part, seq, 1, 1)
            if not found:
                return None
            entry = entry_of(found[0])
            if entry is not None and (entry.seq > tail.seq or entry.next <= tail.next):
                part.mark(entry)
                return entry
            part.tell_stray(found[0].seq)
            seq = found[0].seq + 1

    async def _read(
        self, part: Part, seq: int, count: int, max_bytes: int
    ) -> tuple[list[Stored], int]:
        """From any replica; "there is nothing" counts when the leader says so."""
        found, pending = await self._streams.read(part.stream, part.batches, seq, count, max_bytes)
        if not found and part.replicated:
            newest = await self._streams.next(part.stream, part.batches, seq)
            found = [] if newest is None else [newest]
        return found, pending

    async def batch_at(self, part: Part, timestamp: int) -> int | None:
        floor, tail = await self._ends.both(part)
        entry = await self._first_young(part, floor, tail, timestamp)
        return None if entry is None else entry.base

    async def _first_young(
        self, part: Part, floor: Floor, tail: Entry, timestamp: int
    ) -> Entry | None:
        """The first batch above the floor with a message of this time or later."""
        if tail.next <= floor.start or tail.newest < timestamp:
            return None
        first = await self._next(part, floor.seq, tail)
        if first is not None and first.newest < timestamp:
            seq = await self._first(
                part, first.seq, tail.seq, tail, lambda entry: entry.newest >= timestamp
            )
            return await self._next(part, seq, tail)
        # What is young may have been trimmed: then only a look at each batch tells.
        entry = first
        while entry is not None and entry.max_timestamp < timestamp:
            entry = await self._next(part, entry.seq + 1, tail)
        return entry

    # Dropping

    async def trim(self, part: Part, before: int) -> int:
        floor, tail = await self._ends.both(part)
        if before <= floor.start or tail.next <= floor.start:
            return floor.start
        if before >= tail.next:
            return await self._raise_floor(part, floor, above(tail), tail)
        seq = await self._locate(part, floor, tail, before)
        kept = await self._next(part, seq, tail)
        return await self._raise_floor(part, floor, below(kept or tail), tail)

    async def expire(self, part: Part, before_timestamp: int | None, max_bytes: int | None) -> int:
        floor, tail = await self._ends.both(part)
        if tail.next <= floor.start:
            return floor.start
        kept = floor
        if max_bytes is not None and tail.total - floor.total > max_bytes:
            most = max_bytes
            seq = await self._first(
                part,
                max(1, floor.seq),
                tail.seq,
                tail,
                lambda entry: tail.total - entry.total_before <= most,
            )
            kept = below(await self._next(part, seq, tail) or tail)
        if before_timestamp is not None:
            young = await self._first_young(part, kept, tail, before_timestamp)
            kept = below(young or tail)
        return await self._raise_floor(part, floor, kept, tail)

    async def _raise_floor(self, part: Part, floor: Floor, wanted: Floor, tail: Entry) -> int:
        """Raise the floor, unless another process has raised it higher; then purge below it.

        A stream without room takes no floor: then purging comes first. Who reads in between is told
        that the batch is not there, as long as the floor is not raised.
        """
        if wanted.start <= floor.start:
            return floor.start
        # The last message stays, whatever the floor: it holds the end.
        purge_to = min(wanted.seq, tail.seq)
        patience = self._streams.patience()
        is_purged = False
        while wanted.start > floor.start:
            try:
                at = await publish_floor(self._streams, part, wanted, floor.at)
                part.known_floor = msgspec.structs.replace(wanted, at=at)
                break
            except ApiError as error:
                if full(error) and not is_purged:
                    await self._streams.purge(part.stream, part.batches, purge_to)
                    is_purged = True
                elif error.err_code not in WRONG_SEQUENCE and not passing(error):
                    raise translated(error) from error
                why: Exception = error
            except (NotSent, NoAnswer) as error:
                why = error
            await patience.pause(why)
            floor = await self._ends.floor(part)
        if not is_purged:
            await self._streams.purge(part.stream, part.batches, purge_to)
        return max(floor.start, wanted.start)


_MANY = 256


def _out_of_range(part: Part, offset: int, floor: Floor, tail: Entry) -> OffsetOutOfRange:
    end = max(floor.start, tail.next)
    return OffsetOutOfRange(part.topic_id, part.number, offset, floor.start, end)


class _Run:
    """Batches that follow each other, from an offset on, as they are read."""

    def __init__(self, offset: int) -> None:
        self.next = offset
        self.batches: list[StoredBatch] = []
        # What was read since the last of them and does not follow it.
        self.odd: list[Entry] = []
        # Whether there is more behind them.
        self.more = False

    def take(self, part: Part, entry: Entry, data: bytes) -> bool:
        """Whether the batch is the next one."""
        if self.batches:
            comes_next = entry.base == self.next
        else:
            comes_next = entry.base <= self.next < entry.next
        if not comes_next:
            self.odd.append(entry)
            return False
        part.note(entry)
        for stray in self.odd:
            part.tell_stray(stray.seq)
        self.odd.clear()
        self.batches.append(StoredBatch(entry.base, entry.next, data, entry.writer, entry.after))
        self.next = entry.next
        return True

    @property
    def behind_a_hole(self) -> bool:
        """Whether batches follow each other, but not those that were taken."""
        return len(self.odd) > 1 and self.odd[-1].base == self.odd[-2].next > self.next
