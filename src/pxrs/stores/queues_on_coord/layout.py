"""The records of a queue, and their contents.

```
queue-list/<queue>                      whether it is fifo, when it was made
queue-holders/<session>                 there as long as the session is, which is how it is asked
queue-commits/<session>/<unit>          that a unit was done, or never will be: for unknown outcomes
queues/<queue>/tail                     the next item's number, how many were put and dropped
queues/<queue>/items/item-<number>      an item: a line of JSON, then its body
queues/<queue>/ready/<rank>.<number>    where an item stands that may be taken,
queues/<queue>/delayed/<ms>.<number>    or is delayed (until its time has come),
queues/<queue>/waiting/<order>/<number> or is behind another of its key,
queues/<queue>/meta/meta-<number>       or is held: by whom, for which time
queues/<queue>/locks/lock-<number>      there as long as the holder's session is
queues/<queue>/locks/until-<number>     there as long as the hold may last, if it has an end
queues/<queue>/lanes/<order>            who holds items of a key, and which of it shows
queues/<queue>/dlq/item-<number>        a dead item
queues/<queue>/seen/<hash>              a dedupe key, and until when it counts
```

Every live item has its `item` and exactly one record for its state. A commit that moves it checks
the version of that record and deletes it, so of two commits that move it one succeeds.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from pxrs.types import Holder, ItemState, Queue, Versioned

LIST = "queue-list/"
HOLDERS = "queue-holders/"
COMMITS = "queue-commits/"
# Numbers sort as text up to here: at a thousand items a second for thirty years.
NUMBERS_END = 10**12
_READABLE = 100

R = TypeVar("R", bound=msgspec.Struct)


class Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """A queue. One that is `deleting` no longer exists: its records are being removed."""

    fifo: bool
    created_ms: int
    deleting: bool = False


class Tail(msgspec.Struct, frozen=True):
    """The end of the queue. The number of done items follows from it and from the items left."""

    next: int = 1
    put: int = 0
    dropped: int = 0


class Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item without its body. It does not change until the item is dead."""

    key: str | None = None
    priority: int = 0
    put_ms: int
    # Of a dead item: its last state, and when it died.
    standing: Standing | None = None
    dead_ms: int | None = None


class Standing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of an item so far."""

    number: int
    key_order: str | None = msgspec.field(default=None, name="lane")
    priority: int = 0
    visible_ms: int = 0
    deliveries: int = 0
    suspect: bool = False
    error: str = ""
    taken_ms: int | None = None
    # Of a held item. `until`: the session that ends when the hold does.
    holder: Holder | None = None
    most: int | None = None
    until: str | None = None
    until_ms: int | None = None


class KeyOrderRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key of a queue. `front` is the record of the item that shows: none while some are held."""

    held: tuple[int, ...] = ()
    holder: Holder | None = None
    front: str | None = None


class Seen(msgspec.Struct, frozen=True):
    """A dedupe key, by its record's name."""

    until_ms: int


class Entry(NamedTuple):
    """A standing, and the key and version of its record."""

    key: str
    version: int
    standing: Standing

    @property
    def deliveries(self) -> int:
        return self.standing.deliveries

    @property
    def suspect(self) -> bool:
        return self.standing.suspect

    @property
    def rank(self) -> tuple[int, int]:
        """Orders items for handing out: the smallest first."""
        return -self.standing.priority, self.standing.number


class Layout:
    """The keys of one queue."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.folder = f"queues/{queue}/"
        self.head = f"{LIST}{queue}"
        self.tail = f"{self.folder}tail"
        self.items = f"{self.folder}items/"
        self.ready = f"{self.folder}ready/"
        self.delayed = f"{self.folder}delayed/"
        self.all_waiting = f"{self.folder}waiting/"
        self.metas = f"{self.folder}meta/"
        self.locks = f"{self.folder}locks/"
        self.key_orders = f"{self.folder}lanes/"
        self.dlq = f"{self.folder}dlq/"
        self.all_seen = f"{self.folder}seen/"

    def item(self, number: int) -> str:
        return f"{self.items}item-{number:012d}"

    def meta(self, number: int) -> str:
        return f"{self.metas}meta-{number:012d}"

    def lock(self, number: int) -> str:
        return f"{self.locks}lock-{number:012d}"

    def until(self, number: int) -> str:
        return f"{self.locks}until-{number:012d}"

    def dead(self, number: int) -> str:
        return f"{self.dlq}item-{number:012d}"

    def key_order(self, name: str) -> str:
        return f"{self.key_orders}{name}"

    def waiting_in(self, order: str) -> str:
        return f"{self.all_waiting}{order}/"

    def waiting(self, order: str, number: int) -> str:
        return f"{self.waiting_in(order)}{number:012d}"

    def seen(self, dedupe: str) -> str:
        return self.all_seen + hashlib.sha256(dedupe.encode()).hexdigest()[:40]

    def shown(self, standing: Standing, now_ms: int) -> str:
        """Returns the key of an item that is not held and not behind another."""
        number = f"{standing.number:012d}"
        if standing.visible_ms > now_ms:
            return f"{self.delayed}{standing.visible_ms:015d}.{number}"
        return f"{self.ready}{2**31 - standing.priority:010d}.{number}"

    def state(self, entry: Entry, now_ms: int) -> ItemState:
        """The state that users see."""
        if entry.standing.holder is not None:
            return ItemState.HELD
        if entry.key.startswith(self.all_waiting):
            return ItemState.WAITING
        late = entry.standing.visible_ms > now_ms
        return ItemState.DELAYED if late else ItemState.READY


def order_name(queue: Queue, key: str | None) -> str | None:
    """The name of an item's key order: of its key, or of the whole fifo queue."""
    if queue.fifo:
        return "fifo"
    return None if key is None else f"key-{part_name(key)}"


def part_name(text: str) -> str:
    """Any text as one part of a record's name."""
    plain = quote(text, safe=" ")
    if len(plain) <= _READABLE and text.isprintable():
        return plain
    return f"%{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def holder_key(session: str) -> str:
    return HOLDERS + part_name(session)


def entry_of(record: Versioned) -> Entry:
    return Entry(record.key, record.version, decode(record.value, Standing))


def number_of(record: Versioned) -> int:
    """The number of an item, by its record's name."""
    return int(record.key.rpartition("-")[2])


def encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value)


def decode(value: bytes, kind: type[R]) -> R:
    return msgspec.json.decode(value, type=kind)


def encode_item(item: Item, body: bytes) -> bytes:
    """One line of JSON, then the body as it is: the engine's own tools can show both."""
    return msgspec.json.encode(item) + b"\n" + body


def decode_item(value: bytes) -> tuple[Item, bytes]:
    line, _, body = value.partition(b"\n")
    return msgspec.json.decode(line, type=Item), body
