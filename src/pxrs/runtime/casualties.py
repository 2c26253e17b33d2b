"""Messages that kill the process that handles them: counted, tried alone, put aside.

A handler that crashes its process raises nothing, so nobody would count its attempts. Each worker
process notes on a board, in memory that it shares with its parent, what is in hand. When it dies
the parent counts a death for each of these messages and tells the next processes. There such a
message is handled while no other is: if it kills again, it has killed alone. After as many deaths
as it has attempts its handler is not called any more: it fails, and goes the way of those.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from typing import Any

from pxrs.errors import HandlerFailed
from pxrs.types import Message, Position

# Whether it is in hand, partition, offset, length of the topic's name, and that.
_HEAD = struct.Struct("=?xxxIqH")
_NAME = 1024
_SLOT = _HEAD.size + _NAME
# The first time it may have been in hand by chance, beside another one.
_FEWEST_DEATHS = 2


class Board:
    """What the threads of one process have in hand, for whoever looks after its death."""

    def __init__(self, context: SpawnContext, threads: int) -> None:
        self._memory: Any = context.RawArray("B", threads * _SLOT)
        self.threads = threads

    def begin(self, thread: int, place: Position) -> None:
        """Note that this thread has it in hand."""
        name = place.topic.encode()
        start = thread * _SLOT
        self._memory[start + _HEAD.size : start + _HEAD.size + len(name)] = name
        _HEAD.pack_into(self._memory, start, True, place.partition, place.offset, len(name))

    def end(self, thread: int) -> None:
        """Note that it has nothing in hand."""
        self._memory[thread * _SLOT] = 0

    def in_hand(self) -> list[Position]:
        """What the threads have in hand, or had when they died."""
        found = []
        for start in range(0, self.threads * _SLOT, _SLOT):
            busy, partition, offset, length = _HEAD.unpack_from(self._memory, start)
            if busy:
                name = bytes(self._memory[start + _HEAD.size : start + _HEAD.size + length])
                found.append(Position(name.decode(), partition, offset))
        return found


class Casualties:
    """In the parent: which messages were in hand when a worker process died, and how often."""

    def __init__(self, context: SpawnContext, threads: int, attempts: int | None) -> None:
        self._context = context
        self._threads = threads
        self._most = None if attempts is None else max(attempts, _FEWEST_DEATHS)
        self._boards: dict[int, Board] = {}
        self._deaths: Counter[Position] = Counter()

    def watched(self, number: int, handler: Callable[[Message], Any]) -> Watched:
        """The handler for a new worker process."""
        board = self._boards[number] = Board(self._context, self._threads)
        return Watched(handler, board, dict(self._deaths), self._most)

    def count(self, number: int) -> list[Position]:
        """Count what was in hand when this worker died; what that was."""
        found = self._boards[number].in_hand()
        self._deaths.update(found)
        return found


class Watched:
    """In a worker process: a handler that notes what it is at, and knows what has killed before."""

    def __init__(
        self,
        handler: Callable[[Message], Any],
        board: Board,
        deaths: Mapping[Position, int],
        most: int | None,
    ) -> None:
        self._told = (handler, board, deaths, most)
        self._handler = handler
        self._board = board
        self._deaths = deaths
        self._most = most
        self._turn = threading.Condition()
        self._free = list(range(board.threads))
        self._alone = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Watched, self._told

    def __call__(self, message: Message) -> Any:
        place = Position(message.topic, message.partition, message.offset)
        deaths = self._deaths.get(place, 0)
        if self._most is not None and deaths >= self._most:
            raise HandlerFailed(f"{deaths} worker processes have died with this message in hand")
        with self._thread(alone=deaths > 0) as thread:
            self._board.begin(thread, place)
            try:
                return self._handler(message)
            finally:
                self._board.end(thread)

    @contextmanager
    def _thread(self, *, alone: bool) -> Iterator[int]:
        """A number for this thread; alone, once the others have finished."""
        with self._turn:
            self._turn.wait_for(lambda: self._free and not self._alone)
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
