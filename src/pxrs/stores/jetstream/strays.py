"""Tells the messages that pxrs wrote from others that lie on the same subjects.

Any program with the right to publish can store a message on a subject of ours: by mistake, from a
mirror, or with forged headers. Such a message has no offsets. It is left out and told of, and the
next batch is appended behind it.

Pure. A batch of pxrs has headers that fit its bytes and names the message it was stored behind,
which the server has checked. Its offsets begin where those of the batch before it end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pxrs.codec.batches import HEADER_SIZE, read_header
from pxrs.stores.jetstream.entries import NOTHING, Entry, Floor, floor_from_bytes, from_headers
from pxrs.stores.jetstream.streams import Stored

_MOST = 2**63 - 1


def entry_of(stored: Stored) -> Entry | None:
    """The entry of a message; None if pxrs did not write it, by all that itself can tell."""
    try:
        entry = from_headers(stored.headers, stored.seq)
    except (KeyError, ValueError):
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
        and entry.total >= entry.size
        and 0 <= entry.before < entry.seq
    )


def follows(entry: Entry, last: Entry, start: int) -> bool:
    """Whether the offsets go on. `start`: where the partition begins, if all before is gone."""
    return entry.base == last.next or (last.seq == 0 and entry.base == start)


def last_of(found: Iterable[Entry], known: Entry, start: int) -> Entry:
    """The last batch, going on from one that is known."""
    for entry in found:
        if follows(entry, known, start):
            known = entry
    return known


def last_of_longest(found: Sequence[Entry]) -> Entry:
    """The last batch of those whose offsets go on longest, where none is known to be right.

    Of equal ones the first: who forges comes later than what was there.
    """
    best = NOTHING
    longest = 0
    lengths: dict[int, int] = {}
    for entry in found:
        length = lengths.get(entry.base, 0) + 1
        if length > lengths.get(entry.next, 0):
            lengths[entry.next] = length
        if length > longest:
            best, longest = entry, length
    return best


def floor_of(stored: Stored) -> Floor | None:
    """The floor in a message; None if it holds none."""
    try:
        floor = floor_from_bytes(stored.data, stored.seq)
    except ValueError:
        return None
    return floor if floor.start >= 0 and 1 <= floor.seq <= stored.seq else None
