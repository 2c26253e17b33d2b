"""Finding and reading batches. Nothing here changes a stream but `trim` and `expire`.

What a replica answers may be a moment old. That matters in one place only, the end: "there is
nothing" counts when the leader says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pxrs.errors import DamagedBatch, OffsetOutOfRange
from pxrs.stores.jetstream.entries import (
    NOTHING,
    Entry,
    Floor,
    above,
    below,
    floor_from_bytes,
)
from pxrs.stores.jetstream.failures import WRONG_SEQUENCE, passing, translated
from pxrs.stores.jetstream.streams import Stored, Streams
from pxrs.stores.jetstream.topics import AT_ONCE, Part, Topic, Topics, publish_floor
from pxrs.stores.jetstream.wire import ApiError, NoAnswer, NotSent
from pxrs.types import Bounds, Fetched, StoredBatch


class Reading:
    """Reads the partitions of streams that are there."""

    def __init__(self, streams: Streams, topics: Topics) -> None:
        self._streams = streams
        self._topics = topics

    # The ends of a partition

    async def floor(self, part: Part) -> Floor:
        """Returns where the partition begins now.

        Floors only rise: a leader that was just elected may not know of the last one yet.
        """
        stored = await self._streams.last(part.stream, part.floor)
        if stored is None:
            await self._topics.require_same(part)
        elif stored.seq > part.known_floor.at:
            part.known_floor = floor_from_bytes(stored.data, stored.seq)
        return part.known_floor

    async def tail(self, part: Part) -> Entry:
        """The last batch that was appended by now; `NOTHING` if there never was one."""
        known = part.tail
        if known is not None:
            newer = await self._streams.next(part.stream, part.batches, known.seq + 1)
            if newer is None:
                return known
            part.noted(newer)
        last = await self._streams.last(part.stream, part.batches)
        return NOTHING if last is None else part.noted(last)

    async def ends(self, part: Part) -> tuple[Floor, Entry]:
        floor, tail = await asyncio.gather(self.floor(part), self.tail(part))
        return floor, tail

    async def bounds(self, topic: Topic) -> dict[int, Bounds]:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(part: Part) -> Bounds:
            async with limit:
                floor, tail = await self.ends(part)
                return Bounds(floor.start, max(floor.start, tail.next))

        found = await asyncio.gather(*map(one, topic.parts))
        return dict(enumerate(found))

    async def size(self, part: Part) -> int:
        floor, tail = await self.ends(part)
        return max(0, tail.total - floor.total)

    # Fetching

    async def fetch(self, part: Part, offset: int, max_bytes: int) -> Fetched:
        seq = part.marks.at(offset)
        if seq is not None:
            floor, (run, pending) = await asyncio.gather(
                self.floor(part), self._run(part, seq, max_bytes)
            )
            if offset < floor.start:
                raise _out_of_range(part, offset, *await self.ends(part))
            if not run or run[0][0].base == offset:
                return await self._fetched(part, floor, offset, run, pending)
            part.forget()
        return await self._fetch_afresh(part, offset, max_bytes)

    async def _fetch_afresh(self, part: Part, offset: int, max_bytes: int) -> Fetched:
        floor, tail = await self.ends(part)
        end = max(floor.start, tail.next)
        if not floor.start <= offset <= end:
            raise _out_of_range(part, offset, floor, tail)
        if offset == end:
            return Fetched([], floor.start, end)
        seq = await self._locate(part, floor, tail, offset)
        run, pending = await self._run(part, seq, max_bytes)
        if not run or run[0][0].base > offset:
            # Purged since the floor was read, or really not there.
            floor, tail = await self.ends(part)
            if offset < floor.start:
                raise _out_of_range(part, offset, floor, tail)
            following = run[0][0].base if run else end
            raise DamagedBatch(part.topic_id, part.number, offset, following, "it is not there")
        return await self._fetched(part, floor, offset, run, pending)

    async def _fetched(
        self, part: Part, floor: Floor, offset: int, run: list[tuple[Entry, bytes]], pending: int
    ) -> Fetched:
        if not run:
            return Fetched([], floor.start, offset)
        batches = _up_to_a_hole(run)
        end = batches[-1].next
        if pending or len(batches) < len(run):
            if part.tail is None or part.tail.next <= end:
                await self.tail(part)
            end = max(end, part.tail.next if part.tail else 0)
        return Fetched(batches, floor.start, end)

    async def _run(
        self, part: Part, seq: int, max_bytes: int
    ) -> tuple[list[tuple[Entry, bytes]], int]:
        """Batches from a sequence on that fit, one at least, and whether there are more."""
        run: list[tuple[Entry, bytes]] = []
        room = max_bytes
        while True:
            found, pending = await self._read(part, seq, 1 if room <= 0 else _MANY, room)
            for stored in found:
                entry = part.noted(stored)
                if run and entry.size > room:
                    return run, 1
                room -= entry.size
                run.append((entry, stored.data))
            if not found or not pending or room < run[-1][0].size:
                return run, pending
            seq = run[-1][0].seq + 1

    # Searching

    async def _locate(self, part: Part, floor: Floor, tail: Entry, offset: int) -> int:
        """The sequence from which the batch that holds the offset is the first."""
        low, high = max(1, floor.seq), tail.seq
        below_it, above_it = part.marks.around(offset)
        if below_it is not None:
            low = max(low, below_it.seq)
        if above_it is not None:
            high = min(high, above_it.seq)
        return await self._first(part, low, high, lambda entry: entry.next > offset)

    async def _first(self, part: Part, low: int, high: int, holds: Callable[[Entry], bool]) -> int:
        """The sequence from which the first batch is the first that `holds` is true for.

        It is true for all batches after one that it is true for, and for the one at `high`.
        """
        while low < high:
            middle = (low + high) // 2
            entry = await self._next(part, middle)
            if entry is None or holds(entry):
                high = middle
            else:
                low = entry.seq + 1
        return low

    async def _next(self, part: Part, seq: int) -> Entry | None:
        found, _ = await self._read(part, seq, 1, 1)
        return part.noted(found[0]) if found else None

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
        floor, tail = await self.ends(part)
        entry = await self._first_young(part, floor, tail, timestamp)
        return None if entry is None else entry.base

    async def _first_young(
        self, part: Part, floor: Floor, tail: Entry, timestamp: int
    ) -> Entry | None:
        """The first batch above the floor with a message of this time or later."""
        if tail.next <= floor.start or tail.newest < timestamp:
            return None
        first = await self._next(part, floor.seq)
        if first is not None and first.newest < timestamp:
            seq = await self._first(
                part, first.seq, tail.seq, lambda entry: entry.newest >= timestamp
            )
            return await self._next(part, seq)
        # What is young may have been trimmed: then only a look at each batch tells.
        entry = first
        while entry is not None and entry.max_timestamp < timestamp:
            entry = await self._next(part, entry.seq + 1)
        return entry

    # Dropping

    async def trim(self, part: Part, before: int) -> int:
        floor, tail = await self.ends(part)
        if before <= floor.start or tail.next <= floor.start:
            return floor.start
        if before >= tail.next:
            return await self._raise_floor(part, floor, above(tail), tail)
        seq = await self._locate(part, floor, tail, before)
        kept = await self._next(part, seq)
        return await self._raise_floor(part, floor, below(kept or tail), tail)

    async def expire(self, part: Part, before_timestamp: int | None, max_bytes: int | None) -> int:
        floor, tail = await self.ends(part)
        if tail.next <= floor.start:
            return floor.start
        kept = floor
        if max_bytes is not None and tail.total - floor.total > max_bytes:
            most = max_bytes
            seq = await self._first(
                part,
                max(1, floor.seq),
                tail.seq,
                lambda entry: tail.total - entry.total_before <= most,
            )
            kept = below(await self._next(part, seq) or tail)
        if before_timestamp is not None:
            young = await self._first_young(part, kept, tail, before_timestamp)
            kept = below(young or tail)
        return await self._raise_floor(part, floor, kept, tail)

    async def _raise_floor(self, part: Part, floor: Floor, wanted: Floor, tail: Entry) -> int:
        """Raise the floor, unless another process has raised it higher; then purge below it."""
        if wanted.start <= floor.start:
            return floor.start
        patience = self._streams.patience()
        while wanted.start > floor.start:
            try:
                at = await publish_floor(self._streams, part, wanted, floor.at)
                part.known_floor = msgspec.structs.replace(wanted, at=at)
                break
            except ApiError as error:
                if error.err_code not in WRONG_SEQUENCE and not passing(error):
                    raise translated(error) from error
                why: Exception = error
            except (NotSent, NoAnswer) as error:
                why = error
            await patience.pause(why)
            floor = await self.floor(part)
        # The last message stays, whatever the floor: it holds the end.
        await self._streams.purge(part.stream, part.batches, min(wanted.seq, tail.seq))
        return max(floor.start, wanted.start)


_MANY = 256


def _out_of_range(part: Part, offset: int, floor: Floor, tail: Entry) -> OffsetOutOfRange:
    end = max(floor.start, tail.next)
    return OffsetOutOfRange(part.topic_id, part.number, offset, floor.start, end)


def _up_to_a_hole(run: list[tuple[Entry, bytes]]) -> list[StoredBatch]:
    """The batches that follow each other. What follows a missing one is for the next fetch."""
    batches: list[StoredBatch] = []
    for entry, data in run:
        if batches and entry.base != batches[-1].next:
            break
        batches.append(StoredBatch(entry.base, entry.next, data))
    return batches
