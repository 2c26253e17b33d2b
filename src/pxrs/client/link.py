"""Calls to whichever of the nodes answers, and watches that go on through another one.

When a stream breaks, calls that may be repeated are made again through another node; of the others
that had been sent nobody knows whether they were done: `OutcomeUnknown`, which the code above
resolves as it does on every engine, by asking the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

from pxrs.client.frames import Hello, Method
from pxrs.client.pool import Pool
from pxrs.client.retry import RetryPolicy, Tries
from pxrs.client.stats import Latencies
from pxrs.client.stream import Pending, Stream
from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import RemoteSettings
from pxrs.core.retry import Backoff
from pxrs.errors import Closed, OutcomeUnknown, PxrsError, StoreUnavailable
from pxrs.forks import Origin

_LOG = logging.getLogger("pxrs.remote")


class Link:
    """Calls of the methods to any node. Thread-safe."""

    def __init__(
        self, settings: RemoteSettings, methods: Mapping[str, Method], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.origin = Origin()
        self.methods = methods
        backoff = Backoff(settings.retry_first, settings.retry_longest, attempts=settings.attempts)
        self.retry = RetryPolicy(backoff, settings.timeout, clock)
        self.latencies = Latencies()
        self.pool = Pool(settings, methods["coord.get"], self._wake, clock)
        self._hosts = settings.hosts
        self._connecting = threading.Lock()
        self._stream: Stream | None = None
        self._next = 0
        self._closed = False
        self._hello: Hello | None = None
        # The sessions that nodes hold for this client.
        self.sessions: Callable[[], list[str]] = list
        # By number: what is to be woken, and how it is armed again through another node.
        self._watches: dict[int, Armed] = {}
        self._watch_lock = threading.Lock()
        self._arming = threading.Lock()
        self._going_on = threading.Lock()
        self._armed_on: Stream | None = None

    @property
    def hello(self) -> Hello:
        """What the nodes' store can do."""
        if self._hello is None:
            self.connected(self.retry.begin())
        assert self._hello is not None
        return self._hello

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """The answer to a call of a method; raises the node's error.

        Raises `StoreUnavailable` if no node answered in time and nothing was done, and
        `OutcomeUnknown` if it was sent and no answer came.
        """
        method = self.methods[name]
        arguments = method.encode(method.bound(given, named))
        tries = self.retry.begin()
        while True:
            stream = self.connected(tries)
            pending = Pending(self.pool.next_number(), method, arguments)
            if self.answered(stream, pending, tries.left):
                return method.decode_answer(pending.body)
            if pending.was_sent and not method.repeatable:
                raise OutcomeUnknown(f"no answer came from the node at {stream.name} to {name}")
            if not pending.is_lost:
                raise StoreUnavailable(f"the node at {stream.name} did not answer {name} in time")

    def answered(self, stream: Stream, pending: Pending, timeout: float) -> bool:
        """One attempt at a call; whether the node has answered it."""
        began = perf_counter()
        answered = stream.answered(pending, timeout)
        self.latencies.add(pending.method.name, perf_counter() - began)
        return answered

    def watch(self, name: str, *arguments: Any) -> Armed:
        """A watch on a node, armed on return, and again whenever another node answers."""
        armed = Armed(self, self.pool.next_number(), name, arguments)
        with self._watch_lock:
            self._watches[armed.number] = armed
        try:
            armed.arm()
        except BaseException:
            self.unwatch(armed.number)
            raise
        return armed

    def unwatch(self, number: int) -> None:
        """Nobody waits for this watch any more; the node is told, if it can be."""
        with self._watch_lock:
            if self._watches.pop(number, None) is None:
                return
        stream = self._stream
        if stream is not None:
            method = self.methods["node.unwatch"]
            stream.send(Pending(self.pool.next_number(), method, method.encode([number])))

    def close(self) -> None:
        """End the streams. What waits is told that it was closed."""
        self._closed = True
        self._stream = None
        with self._watch_lock:
            watches, self._watches = list(self._watches.values()), {}
        for armed in watches:
            armed.close()
        self.pool.close(in_child=self.origin.is_parent)

    # Connecting

    def connected(self, tries: Tries) -> Stream:
        """The stream to a node that answers; raises `RetryExhausted` if none does in time."""
        self.origin.refuse_child()
        stream = self._stream
        if stream is not None and not stream.is_broken:
            if self._armed_on is not stream and not self._connecting.locked():
                self._arm_again(tries)
            return stream
        with self._connecting:
            while True:
                if self._closed:
                    raise Closed("the store was closed")
                if self._stream is not None and not self._stream.is_broken:
                    return self._stream
                if (stream := self._greeted(tries)) is not None:
                    self._stream, self._hello = stream, stream.hello
                    break
                hosts, why = ", ".join(self._hosts), self.pool.trouble
                why = f" ({why})" if why else ""
                tries.again(StoreUnavailable(f"no node can be reached at {hosts}{why}"))
        # Another node knows nothing of them; and what watches missed may have changed.
        self._arm_again(tries)
        return stream

    def _greeted(self, tries: Tries) -> Stream | None:
        """A stream to the next node that answers."""
        for _ in self._hosts:
            host = self._hosts[self._next % len(self._hosts)]
            # The others first if its stream breaks: a frozen one takes connections, but greets not.
            self._next += 1
            stream = self.pool.at(host, tries.ends)
            if stream is not None:
                return stream
        return None

    def _wake(self, number: int | None) -> None:
        """Wakes a watch; all of them after a stream broke: their next look finds another node."""
        with self._watch_lock:
            found = self._watches.get(number) if number is not None else None
            woken = list(self._watches.values()) if number is None else [found]
        for armed in woken:
            if armed is not None:
                armed.wake()
        if number is None and self._has_lost_sessions and self._going_on.acquire(blocking=False):
            # Not by the thread that noticed: it may be about to connect.
            try:
                threading.Thread(target=self._go_on, name="pxrs-remote", daemon=True).start()
            except RuntimeError:  # the program ends
                self._going_on.release()

    @property
    def _has_lost_sessions(self) -> bool:
        """Whether the node is gone that holds sessions for us."""
        stream = self._stream
        return stream is not None and stream.is_broken and bool(self.sessions())

    def _go_on(self) -> None:
        """Go to another node at once: the one that we lost soon ends what it holds for us."""
        try:
            with suppress(PxrsError):
                self.connected(self.retry.begin())
        finally:
            self._going_on.release()

    def _arm_again(self, tries: Tries) -> None:
        """Tells the node of now of all sessions and watches; again if its stream breaks meanwhile.

        What is not done in time the next call does: a node may break every stream that it gets.
        One thread does it. Its own calls come here too when the stream breaks: it is at it already.
        """
        if not self._arming.acquire(blocking=False):
            return
        try:
            while self._armed_on is not (stream := self._stream) and not self._closed:
                if tries.left <= 0:
                    return
                for session in self.sessions():
                    # Who has it finds out when it is lost.
                    with suppress(PxrsError):
                        self.call("node.renew_session", session)
                with self._watch_lock:
                    watches = list(self._watches.values())
                for armed in watches:
                    try:
                        armed.arm()
                    except PxrsError as error:
                        _LOG.warning("a watch could not be armed again: %s", error)
                    armed.wake()
                self._armed_on = stream
        finally:
            self._arming.release()


class Armed:
    """A `Watch` on a node."""

    def __init__(self, link: Link, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        self._link = link
        self.number = number
        self._name = name
        self._arguments = arguments
        self._closed = False
        self._changed = threading.Event()

    def arm(self) -> None:
        self._link.call(self._name, self.number, *self._arguments)

    def wait(self, timeout: float | None = None) -> bool:
        self._link.origin.refuse_child()
        if self._closed:
            return True
        woken = self._changed.wait(timeout)
        if woken and not self._closed:
            self._changed.clear()
        return woken

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._changed.set()
            self._link.unwatch(self.number)
