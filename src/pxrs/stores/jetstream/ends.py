"""Finds where a partition begins and ends, as the stream's leader knows it.

The end is in the last batch's headers. A message there that pxrs did not write (`strays.py`) is
noticed because it does not fit; then the batch before it is looked up.
"""

from __future__ import annotations

import asyncio

import msgspec

from pxrs.stores.jetstream.entries import GENESIS, NOTHING, Entry, Floor, below
from pxrs.stores.jetstream.failures import WRONG_SEQUENCE, full, passing, translated
from pxrs.stores.jetstream.strays import (
    entry_of,
    floor_of,
    follows,
    goes_on,
    last_of,
    last_of_longest,
)
from pxrs.stores.jetstream.streams import Stored, Streams
from pxrs.stores.jetstream.topics import Part, Topics, Witness, probe
from pxrs.stores.jetstream.wire import ApiError, NoAnswer, NotSent

# This many batches in a row are enough to find out which of them pxrs wrote.
_ENOUGH = 16
_MANY = 256
_MOST_BYTES = 8 * 2**20


class Ends:
    """Finds the beginnings and ends of partitions."""

    def __init__(self, streams: Streams, topics: Topics) -> None:
        self._streams = streams
        self._topics = topics

    async def both(self, part: Part) -> tuple[Floor, Entry]:
        """Returns where the partition begins, and its last batch."""
        floor, tail = await asyncio.gather(self.floor(part), self.tail(part))
        if tail.seq and _beyond(floor, tail):
            tail = await self.tail(part)
            if _beyond(floor, tail):
                part.known_floor = GENESIS
                floor = await self.floor(part)
            if _beyond(floor, tail):
                floor = await self._floor_by_batches(part, floor.at)
        return floor, tail

    async def floor(self, part: Part) -> Floor:
        """Returns where the partition begins now.

        Floors only rise: a leader that was just elected may not know of the last one yet.
        """
        stored = await self._streams.last(part.stream, part.floor)
        if stored is None:
            await self._topics.require_same(part)
        elif stored.seq > part.known_floor.at:
            floor = floor_of(stored)
            if floor is None:
                return await self._floor_by_batches(part, stored.seq)
            part.known_floor = floor
        return part.known_floor

    async def _floor_by_batches(self, part: Part, at: int) -> Floor:
        """Find the floor by the first batch, because pxrs did not write the floor's message."""
        part.tell_stray(at)
        first = await self._streams.next(part.stream, part.batches, 1)
        while first is not None and entry_of(first) is None:
            first = await self._streams.next(part.stream, part.batches, first.seq + 1)
        entry = None if first is None else entry_of(first)
        floor = Floor(0, 1, 0) if entry is None else below(entry)
        part.known_floor = msgspec.structs.replace(floor, at=at)
        return part.known_floor

    async def tail(self, part: Part) -> Entry:
        """The last batch that was appended by now; `NOTHING` if there never was one."""
        await self.check(part)
        known = part.tail
        if known is not None:
            newer = await self._streams.next(part.stream, part.batches, known.last_seq + 1)
            if newer is None:
                return known
        last = await self._streams.last(part.stream, part.batches)
        if last is None:
            return NOTHING
        tail = await self._checked(part, last, known)
        part.note(tail)
        return tail

    async def check(self, part: Part) -> bool:
        """Whether the stream still has the newest known batch; if not, forget all that was known.

        Looked at once a second at most, and when the connection is another one: it costs one batch,
        however many partitions ask at the same time.
        """
        witness, connection = part.witness, self._streams.wire.connections
        if witness.is_fresh:
            return True
        falls = witness.falls
        while True:
            if witness.look is None or witness.look.done():
                witness.look = asyncio.create_task(self._look_for(witness, part.stream))
            # A caller that gives up must not take the look from the others.
            await asyncio.shield(witness.look)
            if witness.falls != falls:
                return False
            # One that was under way already may have gone by the connection before this one.
            if witness.connection >= connection:
                return True

    async def _look_for(self, witness: Witness, stream: str) -> None:
        connection = self._streams.wire.connections
        seq, writer = witness.seq, witness.writer
        stored = await self._streams.at(stream, seq)
        entry = None if stored is None else entry_of(stored)
        if entry is None or entry.writer != writer:
            witness.fall()
        elif witness.seq == seq:
            witness.see()
            witness.connection = connection

    async def confirmed(self, part: Part) -> tuple[Floor, Entry]:
        """Returns the same as `both`, confirmed by a majority of the stream's replicas.

        A leader that is cut off from its peers answers reads, for ten seconds, as if nothing had
        been appended since. It can't store anything: so this stores an empty message that the
        leader accepts only if the partition's last message is the one that was read. A server
        without room for it refuses at once; then a purge of these empty messages alone, which
        needs a majority but no room, shows that it still leads.
        """
        patience = self._streams.patience()
        while True:
            part.forget()
            floor, tail = await self.both(part)
            if not part.replicated:
                return floor, tail
            try:
                await probe(self._streams, part, tail.last_seq)
                return floor, tail
            except ApiError as error:
                if full(error):
                    await self._streams.purge(part.stream, part.probe)
                    part.forget()
                    again = await self.both(part)
                    if again == (floor, tail):
                        return again
                elif error.err_code not in WRONG_SEQUENCE and not passing(error):
                    raise translated(error) from error
                why: Exception = error
            except (NotSent, NoAnswer) as error:
                why = error
            await patience.pause(why)

    async def is_placed(self, part: Part, entry: Entry) -> bool:
        """Whether a batch goes on from the last one before it that is ours."""
        if await self._is_late(part, entry, None):
            return False
        if await self._goes_on(part, entry, None):
            return True
        if not entry.before:
            return False
        last = await self._before(part, entry.before, None)
        return follows(entry, last, part.known_floor)

    async def _checked(self, part: Part, last: Stored, known: Entry | None) -> Entry:
        """The last batch, given the last message, which may be a stray one."""
        entry = entry_of(last)
        is_ours = entry is not None and not await self._is_late(part, entry, known)
        if entry is not None and is_ours and await self._goes_on(part, entry, known):
            return entry
        return await self._before(part, last.seq, known)

    async def _is_late(self, part: Part, entry: Entry, known: Entry | None) -> bool:
        """Whether another message has come before a batch, behind the one that it names.

        The leader refuses such a batch. But one that has lost its last message, as with a full
        disk, and its majority with it, accepts it, and the next leader stores it. Nobody was told
        so: its writer looks for it, and sends it again.
        """
        if not may_be_late(part, entry):
            return False
        if known is not None and entry.before <= known.last_seq < entry.seq:
            return entry.before < known.last_seq
        first = await self._streams.next(part.stream, part.batches, entry.before + 1)
        return first is not None and first.seq < entry.seq

    async def _goes_on(self, part: Part, entry: Entry, known: Entry | None) -> bool:
        """Whether a batch goes on from the message before it; false if that is a stray one."""
        if known is not None and entry.before == known.last_seq:
            return follows(entry, known, part.known_floor)
        if not entry.before:
            floor = await self.floor(part)
            return entry.base <= floor.start and entry.total_before <= floor.total
        stored = await self._streams.at(part.stream, entry.before)
        if stored is None:
            return True  # Trimmed.
        previous = entry_of(stored)
        return previous is not None and goes_on(entry, previous)

    async def _before(self, part: Part, seq: int, known: Entry | None) -> Entry:
        """The last batch at or before a message that may be a stray one, or follow one."""
        if known is not None and known.last_seq < seq:
            found = await self._between(part, known.last_seq + 1, seq)
            entries = [entry for each in found if (entry := entry_of(each))]
            tail = last_of(entries, known, part.known_floor)
        else:
            reach = _ENOUGH
            while True:
                found = await self._between(part, max(1, seq - reach), seq)
                entries = [entry for each in found if (entry := entry_of(each))]
                if len(entries) >= _ENOUGH or reach >= seq:
                    break
                reach *= 4
            tail = last_of_longest(entries)
        for each in found:
            if each.seq > tail.seq:
                part.tell_stray(each.seq)
        return tail._replace(through=0 if tail.seq == seq else seq)

    async def _between(self, part: Part, first: int, last: int) -> list[Stored]:
        """The messages of the partition with these sequences.

        Read from any replica: one that has the last message has those before it, too.
        """
        found: list[Stored] = []
        patience = self._streams.patience()
        while first <= last:
            some, _ = await self._streams.read(part.stream, part.batches, first, _MANY, _MOST_BYTES)
            if not some:
                await patience.pause(LookupError(f"a replica does not have message {last} yet"))
                continue
            found += [each for each in some if each.seq <= last]
            first = some[-1].seq + 1
        return found


def may_be_late(part: Part, entry: Entry) -> bool:
    """Whether there can be messages between a batch and the one behind which it was to come."""
    return part.replicated and entry.before < entry.seq - 1


def _beyond(floor: Floor, tail: Entry) -> bool:
    return floor.start > tail.next or floor.total > tail.total
