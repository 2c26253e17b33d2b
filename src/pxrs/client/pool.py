"""The streams of one client: one to each node that it talks to, made when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from pxrs.client import frames
from pxrs.client.frames import Method
from pxrs.client.stats import PoolStats
from pxrs.client.stream import Pending, Stream
from pxrs.clock import Clock
from pxrs.config import RemoteSettings
from pxrs.errors import Closed, ConfigError, StoreUnavailable

# A node that does not greet within these seconds counts as gone.
_GREETING = 3.0


class Pool:
    """Streams by address. Thread-safe; several threads that want the same one wait for one."""

    def __init__(
        self,
        settings: RemoteSettings,
        greeting: Method,
        woken: Callable[[int | None], None],
        is_heard: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._greeting = greeting
        self._woken = woken
        self._is_heard = is_heard
        self._clock = clock
        self._numbers = count(frames.HELLO + 1)
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        self._opening: dict[str, threading.Lock] = {}
        # Those that another one has replaced, until the calls on them have their answers.
        self._ending: list[Stream] = []
        self._opened = self._broken = 0
        self._closed = False
        # Why the last node that was tried can't be reached.
        self.trouble = ""

    def next_number(self) -> int:
        """A number for a call or a watch, of any stream."""
        return next(self._numbers)

    def at(self, address: str, ends: float) -> Stream | None:
        """The stream to the node at this address; None if no node answers there.

        Raises `ConfigError` if the node refuses this client.
        """
        stream = self._streams.get(address)
        if stream is not None and stream.is_usable:
            return stream
        with self._lock:
            opening = self._opening.setdefault(address, threading.Lock())
        if not opening.acquire(timeout=max(0.0, ends - self._clock.monotonic())):
            return None
        try:
            stream = self._streams.get(address)
            if stream is None or not stream.is_usable:
                stream = self._open(address, ends)
            return stream
        finally:
            opening.release()

    def to_node(self, node: str, address: str, ends: float) -> Stream | None:
        """The stream to the node of this name, by whichever address it was opened."""
        for stream in list(self._streams.values()):
            if stream.hello.node == node and stream.is_usable:
                return stream
        return self.at(address, ends)

    def close(self, *, in_child: bool = False) -> None:
        """End all streams. In a child process of a fork they belong to the parent."""
        with self._lock:
            self._closed = True
            streams, self._streams = [*self._streams.values(), *self._ending], {}
        if not in_child:
            for stream in streams:
                stream.close()

    @property
    def stats(self) -> PoolStats:
        """How many streams there are, and were."""
        alive = sum(not stream.is_broken for stream in list(self._streams.values()))
        return PoolStats(alive, self._opened, self._broken)

    def _open(self, address: str, ends: float) -> Stream | None:
        if self._closed:
            raise Closed("the store was closed")
        from pxrs.client.websocket import connect

        try:
            connection = connect(self._settings, address, self._left(ends))
        except StoreUnavailable as error:
            self.trouble = str(error)
            return None
        stream = Stream(connection, self._woken, address, self._is_heard)
        try:
            greeting = Pending(frames.HELLO, self._greeting, frames.NOTHING)
            if not stream.answered(greeting, self._left(ends)):
                stream.close()
                self.trouble = f"{address}: {stream.trouble or 'did not answer'}"
                if stream.refusal:
                    raise ConfigError(f"the node at {address} refuses: {stream.refusal}")
                return None
            stream.hello = frames.decode_hello(greeting.body)
        except BaseException:
            stream.close()
            raise
        with self._lock:
            if self._closed:
                stream.close()
                raise Closed("the store was closed")
            old, self._streams[address] = self._streams.get(address), stream
            self._ending = [each for each in self._ending if not each.is_broken]
            if old is not None and old.is_left:
                self._ending.append(old)
            self._opened += 1
        if old is not None:
            self._broken += 1
            if not old.is_left:
                old.close()
        return stream

    def _left(self, ends: float) -> float:
        return min(_GREETING, max(0.1, ends - self._clock.monotonic()))
