"""Topics as streams: names, subjects, settings, and what this process knows of each partition.

A stream's subjects contain a word that is new every time a topic is made. So after a topic was
dropped and made again, a process that still uses the old subjects finds nothing there, instead of
taking the new topic's batches for the old one's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from bisect import bisect_left, insort
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from pxrs.clock import Clock
from pxrs.config import NatsSettings
from pxrs.errors import (
    InvalidRequest,
    PartitionNotFound,
    SchemaMismatch,
    StoreError,
    TopicExists,
    TopicNotFound,
)
from pxrs.stores.api import validate_partitions
from pxrs.stores.jetstream.entries import (
    EXPECTED,
    EXPECTED_OF,
    GENESIS,
    Entry,
    Floor,
    floor_to_bytes,
)
from pxrs.stores.jetstream.failures import Stale
from pxrs.stores.jetstream.streams import ROLLUP, TRY, TTL, Info, Streams
from pxrs.stores.jetstream.wire import ApiError, NoAnswer, NotSent, Wire
from pxrs.types import LogPartition

T = TypeVar("T")

_LOG = logging.getLogger("pxrs.nats")
_SCHEMA = "1"
_OWNER = "pxrs.store"
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_LONGEST_NAME = 255
_PROBE_STAYS = "1s"
# How many stray messages are logged for each partition.
_MOST_STRAYS = 100
# For how many seconds a stream is assumed not to have lost messages.
_FRESH = 1.0
# How many requests are under way at once when every partition is asked.
AT_ONCE = 128


class Part:
    """One partition: its subjects, and what is known of it. Its lock is held while appending."""

    def __init__(
        self,
        topic_id: str,
        stream: str,
        root: str,
        number: int,
        replicated: bool,
        time: ServerTime,
        witness: Witness,
    ) -> None:
        self.topic_id = topic_id
        self.stream = stream
        self.root = root
        self.number = number
        self.replicated = replicated
        self.time = time
        self.batches = f"{root}.b.{number}"
        self.floor = f"{root}.f.{number}"
        self.aside = f"{root}.p.{number}"
        self.probe = f"{root}.e.{number}"
        self.witness = witness
        self.marks = Marks()
        # The last batch as far as is known; None if it was not read yet.
        self.tail: Entry | None = None
        self.known_floor = GENESIS
        self._strays: set[int] = set()
        self.lock = asyncio.Lock()

    def note(self, entry: Entry) -> None:
        """Remember a batch: where it is, and that it is the last one, as far as is known."""
        known = self.tail
        if known is not None and entry.base == known.next and entry.after not in ("", known.writer):
            # The batch before it is another one than this process knows: the stream has lost that.
            self.witness.fall()
        if entry.seq:
            self.marks.add(Mark(entry.next, entry.seq + 1, entry.total, entry.newest))
        self.mark(entry)
        self.witness.note(entry)
        if self.tail is None or entry.last_seq > self.tail.last_seq:
            self.tail = entry

    def appended(self, entry: Entry) -> None:
        """Remember a batch that was stored just now."""
        if entry.seq <= self.witness.seq:
            # Sequences only rise, unless the stream lost the message that had this one.
            self.witness.fall()
        self.note(entry)

    def mark(self, entry: Entry) -> None:
        """Remember where a batch is, or where one that pxrs did not write says it is."""
        if entry.seq:
            self.marks.add(Mark(entry.base, entry.seq))
            self.marks.add(Mark(entry.next, entry.seq + 1))

    def tell_stray(self, seq: int) -> None:
        """Warn, once, of a message that pxrs did not write."""
        if seq not in self._strays and len(self._strays) < _MOST_STRAYS:
            self._strays.add(seq)
            _LOG.warning(
                "message %d of stream %s, on a subject of partition %d of topic %r, was not "
                "written by pxrs and is left out; find out who publishes to %s and forbid it",
                seq,
                self.stream,
                self.number,
                self.topic_id,
                self.root,
            )

    def forget(self) -> None:
        """Forget what is known: it turned out to be wrong."""
        self.marks = Marks()
        self.tail = None


class Witness:
    """The newest batch of a stream that this process knows, and when it was last seen there.

    A stream that loses messages loses the last ones. So as long as this batch exists, everything
    that is known of the stream's partitions still holds; once it is gone, none of it does.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.parts: list[Part] = []
        self.seq = 0
        self.writer = ""
        self.seen_at = 0.0
        # The connection by which it was looked for last.
        self.connection = 0
        # The look that is under way: it costs a batch, and all partitions wait for the same one.
        self.look: asyncio.Task[None] | None = None
        # How often it was gone.
        self.falls = 0

    def note(self, entry: Entry) -> None:
        """Take a newer batch, if the one before was there just now: it speaks for what is known."""
        if not self.seq:
            self.connection = self._wire.connections
        if entry.seq >= self.seq and self.is_fresh:
            self.seq, self.writer = entry.seq, entry.writer
            self.see()

    def see(self) -> None:
        """Note that it exists now."""
        self.seen_at = asyncio.get_running_loop().time()

    def fall(self) -> None:
        """Forget what is known of all partitions: the batch is gone, or may be."""
        self.seq, self.writer = 0, ""
        self.falls += 1
        for part in self.parts:
            part.forget()

    @property
    def is_fresh(self) -> bool:
        """Whether it need not be looked for: it was seen just now, or there is none.

        A server that loses what it has is away before: by a new connection it was not seen yet.
        """
        if not self.seq:
            return True
        now = asyncio.get_running_loop().time()
        return self.connection == self._wire.connections and now - self.seen_at < _FRESH


class ServerTime(NamedTuple):
    """The server's time, in ms since 1970, and when it arrived by our own monotonic clock.

    Hosts' clocks may be wrong by days, and differently; the server's is the same for all.
    """

    told: int
    heard: float

    def now(self, clock: Clock) -> int:
        """The server's time now, minus the time that its answer took to arrive."""
        return self.told + int((clock.monotonic() - self.heard) * 1000)


class Topic:
    """A stream that exists, as far as is known."""

    def __init__(
        self,
        topic_id: str,
        stream: str,
        root: str,
        parts: int,
        replicas: int,
        time: ServerTime,
        owner: str,
        wire: Wire,
    ) -> None:
        self.id = topic_id
        self.root = root
        # The store that made the stream, empty if that is not known.
        self.owner = owner
        witness = Witness(wire)
        self.parts = witness.parts = [
            Part(topic_id, stream, root, number, replicas > 1, time, witness)
            for number in range(parts)
        ]

    def part(self, number: int) -> Part:
        if not 0 <= number < len(self.parts):
            raise PartitionNotFound(self.id, number, len(self.parts))
        return self.parts[number]


class Topics:
    """Finds, makes and drops topics."""

    def __init__(self, streams: Streams, settings: NatsSettings, clock: Clock) -> None:
        self._streams = streams
        self._settings = settings
        self._clock = clock
        self._found: dict[str, Topic] = {}

    def hint_prefix(self, topic_id: str) -> str:
        """The prefix of the topic's subjects for hints, under which nothing is stored."""
        return f"{self._settings.prefix}-bell.{token(topic_id)}"

    def hints(self, where: LogPartition) -> str:
        """The subject on which the server announces a partition's new batches."""
        return f"{self.hint_prefix(where.topic_id)}.{where.partition}"

    def stream(self, topic_id: str) -> str:
        """The name of a topic's stream."""
        name = f"{self._settings.prefix}_{token(topic_id)}"
        if len(name) > _LONGEST_NAME:
            raise InvalidRequest(
                f"topic id {topic_id!r} is too long: its stream's name is {len(name)} characters "
                f"long; the limit is {_LONGEST_NAME}"
            )
        return name

    def known(self, topic_id: str) -> Topic | None:
        return self._found.get(topic_id)

    def forget(self, topic: Topic) -> None:
        if self._found.get(topic.id) is topic:
            del self._found[topic.id]

    async def find(self, topic_id: str) -> Topic:
        """The topic, from memory if it was found before; raises `TopicNotFound`."""
        found = self._found.get(topic_id)
        if found is None:
            looked_up = await self._look_up_surely(topic_id)
            if looked_up is None:
                raise TopicNotFound(topic_id)
            # Another task may have found it meanwhile: all tasks must use the same locks.
            found = self._found.get(topic_id)
            if found is None or found.root != looked_up.root:
                found = self._found[topic_id] = looked_up
        return found

    async def using(self, topic_id: str, use: Callable[[Topic], Awaitable[T]]) -> T:
        """Use the topic as it is known; tries again if another topic has its name by now.

        Raises `TopicNotFound` only if `find` does: that the stream is gone may be old knowledge of
        a server, while the next one still has it.
        """
        patience = self._streams.patience()
        while True:
            topic = await self.find(topic_id)
            try:
                return await use(topic)
            except Stale as error:
                self.forget(topic)
                why = error
            await patience.pause(why)

    async def using_part(self, where: LogPartition, use: Callable[[Part], Awaitable[T]]) -> T:
        """Use a partition, as `using` does."""
        return await self.using(where.topic_id, lambda topic: use(topic.part(where.partition)))

    async def require_same(self, part: Part) -> None:
        """Raise `Stale` unless the stream is still the same one."""
        now = await self._look_up(part.topic_id)
        if now is None or now.root != part.root:
            raise Stale(part.topic_id)

    async def held(self) -> dict[str, str]:
        """The topics that have streams under this prefix, and the stores that made them."""
        found = await self._streams.all(f"{self._settings.prefix}.>")
        kept = [info.config.metadata for info in found if info.config is not None]
        return {
            metadata["pxrs.topic"]: metadata.get(_OWNER, "")
            for metadata in kept
            if "pxrs.topic" in metadata
        }

    async def create(self, topic_id: str, partitions: int, owner: str | None = None) -> None:
        """Make the stream, unless it exists; raises `TopicExists` if it is another owner's."""
        validate_partitions(partitions)
        root = f"{self._settings.prefix}.{token(topic_id)}.{secrets.token_hex(4)}"
        stream = self.stream(topic_id)
        config = self._config(topic_id, root, partitions)
        if owner is not None:
            config["metadata"][_OWNER] = owner
        patience = self._streams.patience()
        while (made := await self._streams.create(stream, config)) is None:
            existing = await self._look_up(topic_id)
            if existing is None:
                # It was removed meanwhile, or another server has answered, which has old knowledge.
                await patience.pause(Stale(topic_id))
                continue
            if len(existing.parts) != partitions:
                raise TopicExists(f"topic {topic_id!r} has {len(existing.parts)} partitions")
            if owner is not None and existing.owner != owner:
                raise TopicExists(
                    f"stream {stream!r} was made by another store; use another prefix for one of "
                    "them"
                )
            return
        time = self._time(made)
        topic = Topic(
            topic_id,
            stream,
            root,
            partitions,
            self._settings.replicas,
            time,
            owner or "",
            self._streams.wire,
        )
        await self._lay_floors(topic)
        self._found[topic_id] = topic

    async def drop(self, topic_id: str, owner: str | None = None) -> None:
        """Delete the stream, unless another owner than this one has made it.

        NATS can't make a deletion conditional, so the owner is compared before each try. But only
        the owner deletes a stream, so another store can make one under its name in between only if
        two processes of the owner drop it.
        """
        patience = self._streams.patience()
        while (existing := await self._look_up_surely(topic_id)) is not None:
            if owner is not None and existing.owner not in ("", owner):
                break
            why = await self._streams.delete(self.stream(topic_id))
            if why is None:
                break
            await patience.pause(why)
        self._found.pop(topic_id, None)

    async def _look_up_surely(self, topic_id: str) -> Topic | None:
        """Look the topic up; None only if the server that says so has a majority behind it."""
        patience = self._streams.patience()
        while (found := await self._look_up(topic_id)) is None:
            connection = self._streams.wire.connections
            await self._streams.require_majority()
            found = await self._look_up(topic_id)
            if found is not None or self._streams.wire.connections == connection:
                break
            # Another server has answered than the one that has shown a majority.
            await patience.pause(Stale(topic_id))
        return found

    async def _look_up(self, topic_id: str) -> Topic | None:
        stream = self.stream(topic_id)
        info = await self._streams.info(stream)
        if info is None or info.config is None:
            return None
        metadata = info.config.metadata
        if metadata.get("pxrs.schema") != _SCHEMA:
            raise SchemaMismatch(
                f"stream {stream!r} was not made by this version of pxrs; use another prefix="
            )
        return Topic(
            topic_id,
            stream,
            metadata["pxrs.root"],
            int(metadata["pxrs.partitions"]),
            info.config.num_replicas,
            self._time(info),
            metadata.get(_OWNER, ""),
            self._streams.wire,
        )

    def _time(self, info: Info) -> ServerTime:
        if info.ts is None:
            raise StoreError("NATS did not send its time; pxrs needs NATS 2.11 or newer")
        return ServerTime(int(info.ts.timestamp() * 1000), self._clock.monotonic())

    def _config(self, topic_id: str, root: str, partitions: int) -> dict[str, Any]:
        return {
            "subjects": [f"{root}.>"],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            # No limits of the server: if it removed the last batch, the offsets would be lost.
            "max_age": 0,
            "num_replicas": self._settings.replicas,
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "allow_msg_ttl": True,
            "deny_delete": True,
            "republish": {
                "src": f"{root}.b.*",
                "dest": f"{self.hint_prefix(topic_id)}.{{{{wildcard(1)}}}}",
                "headers_only": True,
            },
            "metadata": {
                "pxrs.schema": _SCHEMA,
                "pxrs.root": root,
                "pxrs.partitions": str(partitions),
                "pxrs.topic": topic_id,
            },
        }

    async def _lay_floors(self, topic: Topic) -> None:
        """Store a floor for each partition, so that a missing floor means: a different stream.

        If this fails, the floor is taken to be 0, after a look at the stream.
        """
        limit = asyncio.Semaphore(AT_ONCE)

        async def lay(part: Part) -> None:
            async with limit:
                try:
                    await publish_floor(self._streams, part, GENESIS, 0)
                except (ApiError, NotSent, NoAnswer):
                    return

        await asyncio.gather(*map(lay, topic.parts))


async def publish_floor(streams: Streams, part: Part, floor: Floor, expected: int) -> int:
    """Store the floor if the one before it is still at `expected`; returns its sequence.

    Raises the same errors as `Streams.publish`.
    """
    headers = {EXPECTED: str(expected), ROLLUP: "sub"}
    return await streams.publish(part.floor, floor_to_bytes(floor), headers, TRY)


async def probe(streams: Streams, part: Part, last: int) -> None:
    """Store an empty message if the partition's last one is still at `last`; it soon expires.

    Raises the same errors as `Streams.publish`.
    """
    headers = {
        EXPECTED: str(last),
        EXPECTED_OF: part.batches,
        ROLLUP: "sub",
        TTL: _PROBE_STAYS,
    }
    await streams.publish(part.probe, b"", headers, TRY)


def token(text: str) -> str:
    """The text as one word of a subject and part of a stream's name."""
    return "".join(
        char if char in _SAFE else "".join(f"={byte:02X}" for byte in char.encode())
        for char in text
    )


_MOST = 512


class Mark(NamedTuple):
    """The first of the partition's messages at or after `seq` begins with `offset`.

    That stays true as long as the message is there: sequences and offsets only rise. `total` and
    `newest` are the sums over the batches before it, -1 if they are not known for sure.
    """

    offset: int
    seq: int
    total: int = -1
    newest: int = -1

    @property
    def next(self) -> int:
        """The end of the batches before it."""
        return self.offset


class Marks:
    """Marks of one partition, sorted; when there are too many, every other one is forgotten."""

    def __init__(self) -> None:
        self._sorted: list[Mark] = []

    def add(self, mark: Mark) -> None:
        known = self.at(mark.offset)
        if known is not None:
            if known.total < 0 <= mark.total:
                self._sorted[bisect_left(self._sorted, (mark.offset,))] = mark
            return
        if len(self._sorted) >= _MOST:
            del self._sorted[:-2:2]
        insort(self._sorted, mark)

    def at(self, offset: int) -> Mark | None:
        """The mark of this very offset."""
        at = bisect_left(self._sorted, (offset,))
        if at < len(self._sorted) and self._sorted[at].offset == offset:
            return self._sorted[at]
        return None

    def around(self, offset: int) -> tuple[Mark | None, Mark | None]:
        """The nearest marks at or below, and above."""
        at = bisect_left(self._sorted, (offset + 1,))
        below = self._sorted[at - 1] if at else None
        above = self._sorted[at] if at < len(self._sorted) else None
        return below, above
