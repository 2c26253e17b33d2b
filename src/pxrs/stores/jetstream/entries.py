"""Values stored beside the batches: their headers, the producers' states, and floors.

Pure: text and numbers in, values out. The header of the last message of a subject is all that
is needed to append the next one.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pxrs.core.sequences import ProducerState, pack, unpack

BATCH = "Px-Batch"
PRODUCERS = "Px-Producers"
# The writer of the batch before this one.
AFTER = "Px-After"
# Added by the server to each stored message that it hands out with its headers.
SEQUENCE = "Nats-Sequence"
# The server stores a message with this header only directly behind the message that it names.
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
# The subject to which the header above applies, if not the message's own.
EXPECTED_OF = f"{EXPECTED}-Subject"

# How many producers' states are stored with each batch; the others are put aside.
INLINE = 8
PRODUCER_MEMORY_MS = 7 * 24 * 3600 * 1000


class Entry(NamedTuple):
    """A stored batch without its bytes.

    `seq` is its place in the stream, `total` the bytes of all batches of the partition up to
    and including this one, `newest` the highest timestamp of all of them, `writer` the name that
    its writer gave it. `aside`: some producers' states are no longer in `producers`. `before` is
    the sequence of the message behind which it was stored. `after` is the writer of the batch
    before it, empty if that is not known. `through`: up to this sequence only messages follow that
    pxrs did not write (`strays.py`).
    """

    seq: int
    writer: str
    base: int
    next: int
    size: int
    total: int
    max_timestamp: int
    newest: int
    aside: bool
    producers: str
    before: int = 0
    after: str = ""
    through: int = 0

    @property
    def last_seq(self) -> int:
        """The sequence of the subject's last message, if this is its last batch."""
        return max(self.seq, self.through)

    @property
    def total_before(self) -> int:
        return self.total - self.size


# The entry before the first batch.
NOTHING = Entry(0, "", 0, 0, 0, 0, -1, -1, False, "")


def follow(
    last: Entry, writer: str, count: int, size: int, max_timestamp: int, producers: Producers | None
) -> Entry:
    """The entry of a batch that comes after `last`. Its sequence is not known yet.

    Without producers it takes over those of `last`.
    """
    return Entry(
        seq=0,
        writer=writer,
        base=last.next,
        next=last.next + count,
        size=size,
        total=last.total + size,
        max_timestamp=max_timestamp,
        newest=max(last.newest, max_timestamp),
        aside=last.aside if producers is None else producers.aside,
        producers=last.producers if producers is None else producers.text(),
        before=last.last_seq,
        after=last.writer,
    )


def to_headers(entry: Entry) -> dict[str, str]:
    """Write the headers that are sent with the batch."""
    _, writer, *numbers, aside, producers, before, after, _ = entry
    headers = {BATCH: " ".join(map(str, (writer, *numbers, int(aside)))), EXPECTED: str(before)}
    if producers:
        headers[PRODUCERS] = producers
    if after:
        headers[AFTER] = after
    return headers


def from_headers(headers: Mapping[str, str], seq: int) -> Entry:
    """Read the headers that `to_headers` has written; `seq` is the place in the stream.

    Raises `KeyError` or `ValueError` for any other headers.
    """
    writer, base, end, size, total, max_timestamp, newest, aside = headers[BATCH].split(" ")
    return Entry(
        seq=seq,
        writer=writer,
        base=int(base),
        next=int(end),
        size=int(size),
        total=int(total),
        max_timestamp=int(max_timestamp),
        newest=int(newest),
        aside=aside == "1",
        producers=headers.get(PRODUCERS, ""),
        before=int(headers[EXPECTED]),
        after=headers.get(AFTER, ""),
    )


class Known(NamedTuple):
    """A producer's state, when it last appended, and the sequence under which it was put aside.

    `used` is the server's time: with hosts' own clocks, one that is ahead would make all other
    producers look silent.
    """

    state: ProducerState
    used: int
    aside_seq: int = 0


_HEAD = struct.Struct("<qqQB")


def known_to_bytes(producer: int, known: Known) -> bytes:
    """One producer's state in the form in which it is put aside."""
    state = pack(known.state)
    return _HEAD.pack(producer, known.used, known.aside_seq, len(state)) + state


def known_from_bytes(data: bytes, at: int = 0) -> tuple[int, Known, int]:
    """The producer, its state, and where the next one begins.

    Raises `struct.error` or `ValueError` if the bytes are no producer's state.
    """
    producer, used, aside_seq, length = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    state = unpack(data[start : start + length])
    if not state.batches:
        raise ValueError("a producer that has appended nothing has no state")
    return producer, Known(state, used, aside_seq), start + length


class Producers:
    """The producers of a partition that appended last, the most recent one at the end."""

    def __init__(self, known: Mapping[int, Known], aside: bool) -> None:
        self._known = dict(known)
        self.aside = aside

    @classmethod
    def of(cls, entry: Entry) -> Producers:
        """The producers as of this entry."""
        data = b64decode(entry.producers)
        known: dict[int, Known] = {}
        at = 0
        while at < len(data):
            producer, state, at = known_from_bytes(data, at)
            known[producer] = state
        return cls(known, entry.aside)

    def get(self, producer: int) -> Known | None:
        return self._known.get(producer)

    def appended(self, producer: int, known: Known) -> Producers:
        """With this producer's new state, which makes it the most recent one.

        Those silent for a week are forgotten.
        """
        kept = {
            other: state
            for other, state in self._known.items()
            if other != producer and state.used > known.used - PRODUCER_MEMORY_MS
        }
        return Producers({**kept, producer: known}, self.aside)

    def surplus(self) -> tuple[int, Known] | None:
        """The producer that was silent for longest, if there are too many for one batch."""
        if len(self._known) <= INLINE:
            return None
        return next(iter(self._known.items()))

    def without(self, producer: int) -> Producers:
        """The producers without this one, which was put aside."""
        kept = {other: known for other, known in self._known.items() if other != producer}
        return Producers(kept, aside=True)

    def text(self) -> str:
        """The text of the header."""
        return b64encode(b"".join(map(known_to_bytes, self._known, self._known.values()))).decode()


class Floor(msgspec.Struct, frozen=True):
    """The beginning of a partition: offset `start`, in the first batch at or after `seq`.

    `total`: the bytes of all batches before it. `at` is the floor's own place in the stream.

    The last batch's message always stays, because it holds the end of the partition and the
    producers' states. So the floor, a small message of its own, records how far the partition was
    trimmed, and the batches below it are purged after it was raised. Floors only rise.
    """

    start: int
    seq: int
    total: int
    at: int = 0


GENESIS = Floor(0, 1, 0)


def below(entry: Entry) -> Floor:
    """The floor of a partition that begins with this batch."""
    return Floor(entry.base, entry.seq, entry.total_before)


def above(entry: Entry) -> Floor:
    """The floor of a partition that was trimmed up to and including this batch."""
    return Floor(entry.next, entry.seq + 1, entry.total)


def floor_from_bytes(data: bytes, at: int) -> Floor:
    """A stored floor; raises `ValueError` if the bytes are not a floor's."""
    return msgspec.structs.replace(msgspec.json.decode(data, type=Floor), at=at)


def floor_to_bytes(floor: Floor) -> bytes:
    return msgspec.json.encode({"start": floor.start, "seq": floor.seq, "total": floor.total})
