"""Where a partition begins: a small message of its own, beside the batches.

The last batch's message always stays, because it holds the end of the partition and the
producers' states. So what was trimmed is told by the floor, and the batches below it are purged
after it was raised. Floors only rise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pxrs.stores.jetstream.entries import Entry
from pxrs.stores.jetstream.streams import EXPECTED, ROLLUP, TRY, Streams

if TYPE_CHECKING:
    from pxrs.stores.jetstream.topics import Part


class Floor(msgspec.Struct, frozen=True):
    """The partition begins with offset `start`, in the first batch at or after `seq`.

    `total`: the bytes of all batches before it. `at` is the floor's own place in the stream.
    """

    start: int
    seq: int
    total: int
    at: int = 0


GENESIS = Floor(0, 1, 0)


def below(entry: Entry) -> Floor:
    """The floor with which the partition begins with this batch."""
    return Floor(entry.base, entry.seq, entry.total_before)


def above(entry: Entry) -> Floor:
    """The floor with which the partition holds nothing up to and including this batch."""
    return Floor(entry.next, entry.seq + 1, entry.total)


def decode(data: bytes, at: int) -> Floor:
    """A stored floor."""
    return msgspec.structs.replace(msgspec.json.decode(data, type=Floor), at=at)


async def publish_floor(streams: Streams, part: Part, floor: Floor, expected: int) -> int:
    """Lay the floor if the one before it is still at `expected`; where it lies now.

    Raises what `Streams.publish` does.
    """
    data = msgspec.json.encode({"start": floor.start, "seq": floor.seq, "total": floor.total})
    headers = {EXPECTED: str(expected), ROLLUP: "sub"}
    return await streams.publish(part.floor, data, headers, TRY)
