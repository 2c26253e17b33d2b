"""Distinguishes messages that pxrs wrote from other messages on the same subjects.

Any program with the right to publish can store a message on a subject of pxrs: by mistake, from a
mirror, or with forged headers. Such a message has no offsets. It is skipped, a warning is logged,
and the next batch is appended behind it.

Pure. A batch of pxrs has headers that fit its bytes and names the message it was stored behind,
which the server has checked. Its offsets begin where those of the batch before it end, and so do
the sums over all batches: the bytes, and the newest time. All who read or append judge so: a batch
that one took and another left out would be lost to a third, or read twice.

A leader that lost its last message may accept a batch for the place of that message. It comes too
late: it is stored behind the one that has the place already, and is left out, too.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from pxrs.codec.batches import HEADER_SIZE, read_header
from pxrs.stores.jetstream.entries import (
    NOTHING,
    Entry,
    Floor,
    Producers,
    floor_from_bytes,
    from_headers,
)
from pxrs.stores.jetstream.streams import Stored

_MOST = 2**63 - 1


class Sums(Protocol):
    """The end of a batch: its last offset, and the sums over all batches up to it."""

    @property
    def next(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def newest(self) -> int: ...


def entry_of(stored: Stored) -> Entry | None:
    """The entry of a message; None if the message itself shows that pxrs did not write it."""
    try:
        entry = from_headers(stored.headers, stored.seq)
        # Whoever appends next has to read them.
        Producers.of(entry)
    except (KeyError, ValueError, IndexError, struct.error):
        return None
    return entry if _fits(entry, stored.data) else None


def _fits(entry: Entry, data: bytes) -> bool:
    if len(data) < HEADER_SIZE or entry.size != len(data):
        return False
    header = read_header(data)
    return (
        0 <= entry.base == header.base_offset
        and entry.next - entry.base == header.count > 0
        and entry.next <= _MOST
        and entry.size <= entry.total <= _MOST
        and -1 <= entry.max_timestamp <= entry.newest <= _MOST
        and (entry.base > 0 or goes_on(entry, NOTHING))
        and 0 <= entry.before < entry.seq
    )


def goes_on(entry: Entry, last: Sums) -> bool:
    """Whether offsets and sums go on where those of the batch before it end."""
    return (
        entry.base == last.next
        and entry.total_before == last.total
        and entry.newest == max(last.newest, entry.max_timestamp)
    )


def follows(entry: Entry, last: Entry, floor: Floor) -> bool:
    """Whether it goes on. `floor`: where the partition begins, if all before is gone."""
    return goes_on(entry, last) or (
        last.seq == 0 and (entry.base, entry.total_before) == (floor.start, floor.total)
    )


def last_of(found: Iterable[Entry], known: Entry, floor: Floor) -> Entry:
    """The last batch, going on from one that is known."""
    for entry in found:
        if follows(entry, known, floor):
            known = entry
    return known


def last_of_longest(found: Sequence[Entry]) -> Entry:
    """The last batch of those that go on longest, where none is known to be right.

    Of runs of equal length the first: a forged one comes later than the real one.
    """
    best = NOTHING
    longest = 0
    # By the offset at which they end, how many batches lead up to each.
    ending: defaultdict[int, list[tuple[int, Entry]]] = defaultdict(list)
    for entry in found:
        before = (count for count, last in ending[entry.base] if goes_on(entry, last))
        length = max(before, default=0) + 1
        ending[entry.next].append((length, entry))
        if length > longest:
            best, longest = entry, length
    return best


def floor_of(stored: Stored) -> Floor | None:
    """The floor in a message; None if it holds none."""
    try:
        floor = floor_from_bytes(stored.data, stored.seq)
    except (ValueError, RecursionError):
        return None
    fits = floor.start >= 0 and 1 <= floor.seq <= stored.seq and 0 <= floor.total <= _MOST
    return floor if fits else None
