"""Finding and reading batches. Nothing here changes a stream but `trim` and `expire`.

A replica's answer may be a moment old. That matters in one place only, the end: "there is nothing"
counts only from the leader, and "there is less than you have read" only from a majority.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from pxrs.errors import DamagedBatch, OffsetOutOfRange
from pxrs.stores.jetstream.ends import Ends, may_be_late
from pxrs.stores.jetstream.entries import Entry, Floor, above, below
from pxrs.stores.jetstream.failures import WRONG_SEQUENCE, full, passing, translated
from pxrs.stores.jetstream.strays import Sums, entry_of, goes_on
from pxrs.stores.jetstream.streams import Stored, Streams
from pxrs.stores.jetstream.topics import AT_ONCE, Part, publish_floor
from pxrs.stores.jetstream.wire import ApiError, NoAnswer, NotSent
from pxrs.types import Bounds, Fetched, StoredBatch


class Reading:
    """Reads partitions."""

    def __init__(self, streams: Streams, ends: Ends) -> None:
        self._streams = streams
        self._ends = ends

    async def bounds(self, parts: Iterable[Part]) -> dict[int, Bounds]:
        """Read the offsets of each of these partitions of a topic."""
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
        mark = part.marks.at(offset)
        # Before anything new takes the witness's place.
        if mark is not None and mark.total >= 0 and await self._ends.check(part):
            floor, run = await asyncio.gather(
                self._ends.floor(part), self._run(part, mark.seq, _Run(offset, mark), max_bytes)
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
            # That the partition ends below what was read counts only from a majority.
            floor, tail = await self._ends.confirmed(part)
        end = max(floor.start, tail.next)
        if not floor.start <= offset <= end:
            raise _out_of_range(part, offset, floor, tail)
        if offset == end:
            return Fetched([], floor.start, end)
        seq = await self._locate(part, floor, tail, offset)
        run = await self._run(part, seq, _Run(offset), max_bytes)
        if not run.batches:
            # The batch was purged since the floor was read, or is really missing.
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

    async def _run(self, part: Part, seq: int, run: _Run, max_bytes: int) -> _Run:
        """Batches that fit, one at least, from the one that holds the offset.

        `seq`: where to look for it. Skips a message of another program between two batches of pxrs,
        and stops at a gap: the batches behind it are left to the next fetch.
        """
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
                if run.may_begin_with(entry) and not await self._ends.is_placed(part, entry):
                    run.odd.append(entry)
                elif run.take(part, entry, stored.data):
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
        """A sequence from which on the first batch is the one that holds the offset."""
        low, high = max(1, floor.seq), tail.seq
        below_it, above_it = part.marks.around(offset)
        if below_it is not None:
            low = max(low, below_it.seq)
        if above_it is not None:
            high = min(high, above_it.seq)
        # Whether these are ours does not matter yet: their offsets rise in any case.
        return await self._first(
            part, low, high, tail, lambda entry: entry.next > offset, sure=False
        )

    async def _first(
        self,
        part: Part,
        low: int,
        high: int,
        tail: Entry,
        holds: Callable[[Entry], bool],
        *,
        sure: bool = True,
    ) -> int:
        """A sequence from which on the first batch is the first for which `holds` is true.

        `holds` must be true for all batches after one for which it is true, and for the one at
        `high`.
        """
        while low < high:
            middle = (low + high) // 2
            entry = await self._next(part, middle, tail, sure=sure)
            if entry is None or holds(entry):
                high = middle
            else:
                low = entry.seq + 1
        return low

    async def _next(self, part: Part, seq: int, tail: Entry, *, sure: bool = True) -> Entry | None:
        """The first batch at or after a sequence. What is beyond the last one is not ours.

        `sure`: nor is what does not go on from the batch before it, which has to be looked for.
        """
        while True:
            found, _ = await self._read(part, seq, 1, 1)
            if not found:
                return None
            entry = entry_of(found[0])
            if entry is not None and entry.seq <= tail.seq and entry.next > tail.next:
                entry = None
            if entry is not None and (not sure or await self._ends.is_placed(part, entry)):
                if sure or not may_be_late(part, entry):
                    part.mark(entry)
                return entry
            part.tell_stray(found[0].seq)
            seq = found[0].seq + 1

    async def _read(
        self, part: Part, seq: int, count: int, max_bytes: int
    ) -> tuple[list[Stored], int]:
        """Read from any replica; "there is nothing" counts only from the leader."""
        found, pending = await self._streams.read(part.stream, part.batches, seq, count, max_bytes)
        if not found and part.replicated:
            newest = await self._streams.next(part.stream, part.batches, seq)
            found = [] if newest is None else [newest]
        return found, pending

    async def batch_at(self, part: Part, timestamp: int) -> int | None:
        floor, tail = await self._ends.both(part)
        entry = await self._first_young(part, floor, tail, timestamp)
        if entry is None and part.replicated:
            # Only a majority is believed that there is none.
            floor, tail = await self._ends.confirmed(part)
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
        # The young message may have been trimmed: then each batch must be looked at.
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

        A full stream takes no floor: then purging comes first. Until the floor is raised, a reader
        gets the error that the batch is not there. The servers of a cluster tell each other of the
        new room a moment later.
        """
        if wanted.start <= floor.start:
            return floor.start
        # The last message stays, whatever the floor: it holds the end.
        purge_to = min(wanted.seq, tail.seq)
        patience = self._streams.patience()
        now = asyncio.get_running_loop().time
        is_purged = False
        full_until = 0.0
        while wanted.start > floor.start:
            try:
                at = await publish_floor(self._streams, part, wanted, floor.at)
                part.known_floor = msgspec.structs.replace(wanted, at=at)
                break
            except ApiError as error:
                if full(error) and not is_purged:
                    await self._streams.purge(part.stream, part.batches, purge_to)
                    is_purged = True
                    if part.replicated:
                        full_until = now() + min(_TOLD, self._streams.settings.timeout / 2)
                elif full(error):
                    if now() >= full_until:
                        raise translated(error) from error
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
# How long it may take until all servers of a cluster know of room that a purge has made.
_TOLD = 10.0


def _out_of_range(part: Part, offset: int, floor: Floor, tail: Entry) -> OffsetOutOfRange:
    end = max(floor.start, tail.next)
    return OffsetOutOfRange(part.topic_id, part.number, offset, floor.start, end)


class _Run:
    """Consecutive batches from an offset on, collected while they are read."""

    def __init__(self, offset: int, after: Sums | None = None) -> None:
        self.next = offset
        # What the next of them has to go on from, as far as that is known.
        self._after = after
        self.batches: list[StoredBatch] = []
        # Entries that were read since the last of these batches and do not follow it.
        self.odd: list[Entry] = []
        # Whether there are more batches behind these.
        self.more = False

    def take(self, part: Part, entry: Entry, data: bytes) -> bool:
        """Whether the batch is the next one."""
        if self._after is None:
            comes_next = self.may_begin_with(entry)
        else:
            comes_next = goes_on(entry, self._after)
        if not comes_next:
            self.odd.append(entry)
            return False
        part.note(entry)
        for stray in self.odd:
            part.tell_stray(stray.seq)
        self.odd.clear()
        self.batches.append(StoredBatch(entry.base, entry.next, data, entry.writer, entry.after))
        self.next = entry.next
        self._after = entry
        return True

    def may_begin_with(self, entry: Entry) -> bool:
        """Whether it would be the first one, with nothing known that it has to go on from."""
        return self._after is None and entry.base <= self.next < entry.next

    @property
    def behind_a_hole(self) -> bool:
        """Whether the last two odd batches follow each other, but not those that were taken."""
        return len(self.odd) > 1 and self.odd[-1].base == self.odd[-2].next > self.next
