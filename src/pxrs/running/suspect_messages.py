"""Messages that kill the process that handles them: tried alone, counted, put aside.

A handler that crashes its process raises nothing, so its attempts would not be counted. Each worker
process notes on a board, in memory that it shares with its parent, what is in hand. When it dies,
everything on its board is suspect: the parent notifies all worker processes, also those that live
and may get these messages next. A suspect is handled while its process handles nothing else, so
that if it kills again it has killed alone.

Only a death with one message in hand is counted, for that message: a message in hand beside a
killer is never blamed, whichever processes die with both before they learn of the first death.
After as many counted deaths as it has attempts its handler is not called any more: it fails, and
goes the way of those.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from typing import Any

from pxrs.codec.messages import Decoder
from pxrs.errors import HandlerFailed
from pxrs.types import Message, Position

# A number, partition, offset, length of the topic's name, and that.
_HEAD = struct.Struct("=IIqH")
_NUMBER = struct.Struct("=I")
_NAME = 1024
_SLOT = _HEAD.size + _NAME
# The first death may have another cause: an operator, the out-of-memory killer.
_FEWEST_DEATHS = 2
# How many deaths a process can fall behind before it misses some of them.
_LATEST = 64


class _Slots:
    """Shared memory for `count` messages, each with a number about it."""

    def __init__(self, context: SpawnContext, count: int) -> None:
        self._memory: Any = context.RawArray("B", count * _SLOT)
        self.count = count

    def write(self, slot: int, number: int, place: Position) -> None:
        name = place.topic.encode()
        start = slot * _SLOT
        self._memory[start + _HEAD.size : start + _HEAD.size + len(name)] = name
        _HEAD.pack_into(self._memory, start, number, place.partition, place.offset, len(name))

    def clear(self, slot: int) -> None:
        _NUMBER.pack_into(self._memory, slot * _SLOT, 0)

    def read(self, slot: int) -> tuple[int, Position]:
        start = slot * _SLOT
        number, partition, offset, length = _HEAD.unpack_from(self._memory, start)
        name = bytes(self._memory[start + _HEAD.size : start + _HEAD.size + length])
        return number, Position(name.decode(), partition, offset)


class Board:
    """Records what the threads of one process have in hand, to be read after its death."""

    def __init__(self, context: SpawnContext, threads: int) -> None:
        self._slots = _Slots(context, threads)
        self.threads = threads

    def begin(self, thread: int, place: Position) -> None:
        """Note that this thread has it in hand."""
        self._slots.write(thread, 1, place)

    def end(self, thread: int) -> None:
        """Note that it has nothing in hand."""
        self._slots.clear(thread)

    def in_hand(self) -> list[Position]:
        """Returns what the threads have in hand, or had when they died."""
        noted = [self._slots.read(thread) for thread in range(self.threads)]
        return [place for busy, place in noted if busy]


class News:
    """The latest deaths. The parent writes them, all its worker processes read them.

    An entry has the number of its message's deaths, not one more: read twice, it does no harm.
    """

    def __init__(self, context: SpawnContext) -> None:
        self._slots = _Slots(context, _LATEST)
        self._written: Any = context.RawValue("Q", 0)

    @property
    def written(self) -> int:
        """The number of entries so far; the last `_LATEST` of them can be read."""
        return int(self._written.value)

    def write(self, place: Position, deaths: int) -> None:
        """Publish that a message was in hand at a death, and how many deaths are put down to it."""
        written = self.written
        self._slots.write(written % _LATEST, deaths, place)
        # Last, so that a process that sees the number finds the entry.
        self._written.value = written + 1

    def since(self, read: int, written: int) -> dict[Position, int]:
        """The deaths of the messages of these entries."""
        entries = range(max(read, written - _LATEST), written)
        noted = [self._slots.read(entry % _LATEST) for entry in entries]
        return {place: deaths for deaths, place in noted}


class SuspectMessages:
    """In the parent: the messages that were in hand when a worker process died.

    A suspect has an entry: how many processes have died with it and nothing else in hand.
    """

    def __init__(
        self,
        context: SpawnContext,
        threads: int,
        attempts: int | None,
        decoder: Decoder | None = None,
    ) -> None:
        self._context = context
        self._threads = threads
        self._most = None if attempts is None else max(attempts, _FEWEST_DEATHS)
        self._decoder = decoder or Decoder()
        self._boards: dict[int, Board] = {}
        self._suspects: dict[Position, int] = {}
        self._news = News(context)

    def watched(self, number: int, handler: Callable[[Message], Any]) -> Watched:
        """The handler for a new worker process."""
        board = self._boards[number] = Board(self._context, self._threads)
        known = dict(self._suspects)
        return Watched(
            handler, self._decoder, board, self._news, self._news.written, known, self._most
        )

    def count(self, number: int) -> list[Position]:
        """Suspect the messages that were in hand when this worker died, and return them."""
        found = self._boards[number].in_hand()
        for place in found:
            deaths = self._suspects.get(place, 0) + (1 if len(found) == 1 else 0)
            self._suspects[place] = deaths
            self._news.write(place, deaths)
        return found


class Watched:
    """In a worker process: a handler that notes its message, and knows which are suspect.

    It decodes, too: a message that kills while it is decoded is in hand by then.
    """

    def __init__(
        self,
        handler: Callable[[Message], Any],
        decoder: Decoder,
        board: Board,
        news: News,
        read: int,
        suspects: Mapping[Position, int],
        most: int | None,
    ) -> None:
        self._told = (handler, decoder, board, news, read, suspects, most)
        self._handler = handler
        self._decoder = decoder
        self._board = board
        self._news = news
        self._read = read
        self._suspects = dict(suspects)
        self._most = most
        self._turn = threading.Condition()
        self._free = list(range(board.threads))
        self._alone = False
        # Called once a message has its turn: the wait for it is no time of the handler's.
        self.turn_came: Callable[[], None] = _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return Watched, self._told

    def __call__(self, message: Message) -> Any:
        place = Position(message.topic, message.partition, message.offset)
        with self._thread(place) as thread:
            self.turn_came()
            self._board.begin(thread, place)
            try:
                return self._handler(self._decoder.deserialize(message))
            finally:
                self._board.end(thread)

    @contextmanager
    def _thread(self, place: Position) -> Iterator[int]:
        """A number for this thread; for a suspect, after waiting until the others have finished."""
        with self._turn:
            self._turn.wait_for(lambda: self._free and not self._alone)
            alone = self._is_suspect(place)
            thread = self._free.pop()
            if alone:
                self._alone = True
                self._turn.wait_for(lambda: len(self._free) == self._board.threads - 1)
        try:
            yield thread
        finally:
            with self._turn:
                self._free.append(thread)
                self._alone = self._alone and not alone
                self._turn.notify_all()

    def _is_suspect(self, place: Position) -> bool:
        """Whether it has to be handled alone; raises if it has killed too often."""
        written = self._news.written
        if written != self._read:
            self._suspects.update(self._news.since(self._read, written))
            self._read = written
        deaths = self._suspects.get(place)
        if deaths is not None and self._most is not None and deaths >= self._most:
            raise HandlerFailed(
                f"{deaths} worker processes have died with this message in hand and no other"
            )
        return deaths is not None


def _nothing() -> None:
    """Stands for a runner that measures no handlers."""
