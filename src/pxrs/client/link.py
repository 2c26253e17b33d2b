"""Calls to any node that answers, and watches that go on through another one.

When a stream breaks, calls that may be repeated are made again through another node; others that
had been sent may or may not have been executed: they raise `OutcomeUnknown`, which the code above
resolves as it does on every engine, by asking the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from pxrs.chance import CHANCE
from pxrs.client.frames import Hello, Method
from pxrs.client.pool import Pool
from pxrs.client.retry import RetryPolicy, Tries
from pxrs.client.stats import Latencies
from pxrs.client.stream import Pending, Stream
from pxrs.clock import SYSTEM_CLOCK
from pxrs.config import RemoteSettings
from pxrs.core.retry import Backoff
from pxrs.errors import (
    Closed,
    OutcomeUnknown,
    PxrsError,
    SessionLost,
    StoreUnavailable,
)
from pxrs.forks import Origin

_LOG = logging.getLogger("pxrs.remote")
# How long a node may take to hear of one session or watch, and the pauses until it is told again:
# the node that had it before ends it after two seconds.
_HEARING = 3.0
_PAUSES = Backoff(0.05, 0.5)
# How long a node is tried after all others once its store was away.
_AVOIDED = 3.0


class Link:
    """Calls of the methods to any node. Thread-safe.

    Sockets are waited for in real time, so all deadlines of calls are real time, too.
    """

    def __init__(self, settings: RemoteSettings, methods: Mapping[str, Method]) -> None:
        self.origin = Origin()
        self.methods = methods
        backoff = Backoff(settings.retry_first, settings.retry_longest, attempts=settings.attempts)
        self.retry = RetryPolicy(backoff, settings.timeout, SYSTEM_CLOCK)
        self.latencies = Latencies()
        # How many threads wait for a watch.
        self._listeners = 0
        self.pool = Pool(
            settings, methods["coord.get"], self._wake, lambda: self._listeners > 0, SYSTEM_CLOCK
        )
        self._hosts = settings.hosts
        self._connecting = threading.Lock()
        self._stream: Stream | None = None
        self._next = 0
        self._clock = SYSTEM_CLOCK
        # By host: until when the others are tried first.
        self._avoided: dict[str, float] = {}
        self._closed = threading.Event()
        self._hello: Hello | None = None
        # The sessions that nodes hold for this client.
        self.sessions: Callable[[], list[str]] = list
        # By number: the watches to wake, and to arm again through another node.
        self._watches: dict[int, Armed] = {}
        self._watch_lock = threading.Lock()
        # Whether a thread hands over, and how often it was asked to begin from the start.
        self._hands_over = False
        self._asked = 0

    @property
    def hello(self) -> Hello:
        """The abilities and limits of the nodes' store."""
        if self._hello is None:
            self.connected(self.retry.begin())
        assert self._hello is not None
        return self._hello

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """The answer to a call of a method; raises the node's error.

        Raises `StoreUnavailable` if no node answered in time and the call was not sent, and
        `OutcomeUnknown` if it was sent and no answer came.
        """
        return self.call_within(self.retry.begin(), name, *given, **named)

    def call_within(self, tries: Tries, name: str, *given: Any, **named: Any) -> Any:
        """`call`, as a part of what has to be done within these tries."""
        method = self.methods[name]
        arguments = method.encode(method.bound(given, named))
        has_failed = False
        # A session ends if it is not renewed in time, so another node may have to do it.
        hurries = name == "node.renew_session" and len(self._hosts) > 1
        while True:
            stream = self.connected(tries)
            pending = Pending(self.pool.next_number(), method, arguments)
            patience = min(_HEARING, tries.left) if hurries else tries.left
            if self.answered(stream, pending, patience):
                try:
                    return method.decode_answer(pending.body)
                except StoreUnavailable:
                    # Nothing was done, and another node may reach the store.
                    if not self.leave(stream):
                        raise
                    continue
            if not pending.is_lost and patience >= _HEARING:
                self.leave(stream)
            if pending.was_sent and not method.repeatable:
                raise OutcomeUnknown(f"no answer came from the node at {stream.name} to {name}")
            if not pending.is_lost and not hurries:
                raise StoreUnavailable(f"the node at {stream.name} did not answer {name} in time")
            hurries = False
            # At once for the first time: another node is there already.
            lost = StoreUnavailable(f"the stream to the node at {stream.name} broke")
            tries.again(lost, at_once=not has_failed)
            has_failed = True

    def leave(self, stream: Stream) -> bool:
        """Leaves a node that seems not to reach its store; returns false if that would be no use.

        It is no use if every host was left, or not reached, a moment ago: a client leaves each host
        once in that time, so it never spins. Sessions that end with their node keep the client
        there while they live. Calls that are under way there go on.
        """
        with self._watch_lock:
            now = self._clock.monotonic()
            self._avoided[stream.name] = now + _AVOIDED
            if all(self._avoided.get(host, 0.0) > now for host in self._hosts):
                return False
            if "lends" not in stream.hello.abilities and self.sessions():
                return False
            if self._stream is stream:
                self._stream = None
        stream.leave()
        if self.sessions():
            self._hand_over()
        return True

    def answered(self, stream: Stream, pending: Pending, timeout: float) -> bool:
        """One attempt at a call; returns whether the node has answered it."""
        began = perf_counter()
        answered = stream.answered(pending, timeout)
        self.latencies.add(pending.method.name, perf_counter() - began)
        return answered

    def watch(self, name: str, *arguments: Any, tries: Tries | None = None) -> Armed:
        """A watch on a node, armed on return, and again whenever another node answers."""
        armed = Armed(self, self.pool.next_number(), name, arguments)
        with self._watch_lock:
            self._watches[armed.number] = armed
        try:
            armed.arm(tries)
        except BaseException:
            self.unwatch(armed.number)
            raise
        return armed

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While a thread waits for a watch, a stream's own thread reads all the time."""
        with self._watch_lock:
            self._listeners += 1
        try:
            if (stream := self._stream) is not None:
                stream.attend()
            yield
        finally:
            with self._watch_lock:
                self._listeners -= 1

    def unwatch(self, number: int) -> None:
        """End a watch; the node gets to know if there is a stream to it."""
        with self._watch_lock:
            if self._watches.pop(number, None) is None:
                return
        stream = self._stream
        if stream is not None:
            method = self.methods["node.unwatch"]
            stream.send(Pending(self.pool.next_number(), method, method.encode([number])))

    def close(self) -> None:
        """End the streams. Calls and watches that wait raise `Closed`."""
        self._closed.set()
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
            return stream
        # Another thread may be at it, for as long as its own call may take.
        while not self._connecting.acquire(timeout=tries.left):
            tries.again(self._unreachable())
        try:
            while True:
                if self._closed.is_set():
                    raise Closed("the store was closed")
                if self._stream is not None and not self._stream.is_broken:
                    return self._stream
                if (stream := self._greeted(tries)) is not None:
                    self._stream, self._hello = stream, stream.hello
                    break
                tries.again(self._unreachable())
        finally:
            self._connecting.release()
        # Another node knows nothing of watches; and they may have missed changes.
        if self._watches or self.sessions():
            self._hand_over()
        return stream

    def _unreachable(self) -> StoreUnavailable:
        hosts, why = ", ".join(self._hosts), self.pool.trouble
        return StoreUnavailable(f"no node can be reached at {hosts}{f' ({why})' if why else ''}")

    def _greeted(self, tries: Tries) -> Stream | None:
        """A stream to the next node that answers."""
        now = self._clock.monotonic()
        # If its stream breaks, try the others first: a frozen node accepts, but does not greet.
        in_turn = self._hosts[self._next :] + self._hosts[: self._next]
        for host in sorted(in_turn, key=lambda host: self._avoided.get(host, 0.0) > now):
            self._next = (self._hosts.index(host) + 1) % len(self._hosts)
            stream = self.pool.at(host, tries.ends)
            if stream is not None:
                return stream
            self._avoided[host] = self._clock.monotonic() + _AVOIDED
        return None

    def _wake(self, number: int | None) -> None:
        """Wakes a watch, or all after a stream broke: their next look finds another node."""
        with self._watch_lock:
            found = self._watches.get(number) if number is not None else None
            woken = list(self._watches.values()) if number is None else [found]
        for armed in woken:
            if armed is not None:
                armed.wake()
        # At once, not with the next call: the node that was lost soon ends this client's sessions.
        if number is None and self._has_lost_sessions:
            self._hand_over()

    @property
    def _has_lost_sessions(self) -> bool:
        """Whether the node that holds this client's sessions is gone."""
        stream = self._stream
        return stream is not None and stream.is_broken and bool(self.sessions())

    # Handing over. A thread of its own tells the current node of all sessions and watches, and goes
    # on until that node has heard of all of them, whatever fails meanwhile. Calls do not wait for
    # it: what is bound to a session is in the store, and a watch wakes once it is armed again, so
    # its owner looks again if it looked too early.

    def hand_over_again(self, since: Stream | None) -> None:
        """Has the current node told of a new session, unless it is the node that opened it.

        The thread may have told it of all sessions before this one was known. `since` is the stream
        that was the current one before the session was opened.
        """
        if self._stream is since and since is not None and not since.is_broken:
            return
        with self._watch_lock:
            self._asked += 1
        self._hand_over()

    @property
    def stream(self) -> Stream | None:
        """The current stream; it may be broken."""
        return self._stream

    def _hand_over(self) -> None:
        with self._watch_lock:
            if self._hands_over or self._closed.is_set():
                return
            self._hands_over = True
        try:
            threading.Thread(target=self._tell_all, name="pxrs-remote", daemon=True).start()
        except RuntimeError:  # the program ends
            self._hands_over = False

    def _tell_all(self) -> None:
        told: Stream | None = None
        before: Stream | None = None
        asked, failures = -1, 0
        heard: set[str | int] = set()
        try:
            while not self._has_told(told, asked):
                told, asked = None, self._asked
                try:
                    stream = self.connected(self.retry.begin())
                    if stream is not before:
                        before, heard = stream, set()
                    if self._tell(stream, heard):
                        told, failures = stream, 0
                        continue
                except PxrsError as error:
                    _LOG.debug("sessions and watches can't be handed over yet: %s", error)
                failures += 1
                self._closed.wait(_PAUSES.delay(failures, CHANCE))
        except BaseException:
            self._hands_over = False
            raise

    def _has_told(self, told: Stream | None, asked: int) -> bool:
        """Returns whether the thread that hands over is done.

        A thread that connects sets `_stream` first and then starts the thread that hands over,
        unless there is one. That is decided under the lock that is held here: either this thread
        sees the new stream, or it has ended and another one is started.
        """
        with self._watch_lock:
            stream = self._stream
            if stream is not None and not stream.is_broken:
                done = stream is told and asked == self._asked
            else:
                # Watches alone have time until the next call.
                done = not self.sessions()
            if done or self._closed.is_set():
                self._hands_over = False
                return True
        return False

    def _tell(self, stream: Stream, heard: set[str | int]) -> bool:
        """Tells a node what it has not heard of yet; returns whether it has heard of all now."""
        for session in self.sessions():
            if session not in heard:
                if not self._is_told(stream, "node.renew_session", session):
                    return False
                heard.add(session)
        with self._watch_lock:
            watches = list(self._watches.values())
        for armed in watches:
            if armed.number not in heard:
                if not self._is_told(stream, armed.name, armed.number, *armed.arguments):
                    return False
                heard.add(armed.number)
                armed.wake()
        return True

    def _is_told(self, stream: Stream, name: str, *arguments: Any) -> bool:
        """Tells a node of one session or watch; returns false if it has to be told again."""
        method = self.methods[name]
        pending = Pending(self.pool.next_number(), method, method.encode(list(arguments)))
        if not self.answered(stream, pending, _HEARING):
            return False
        try:
            method.decode_answer(pending.body)
        except SessionLost:
            # The owner of the session finds out.
            return True
        except PxrsError as error:
            if isinstance(error, StoreUnavailable):
                self.leave(stream)
            if error.retryable or isinstance(error, OutcomeUnknown):
                _LOG.debug("%s failed: %s", name, error)
                return False
            _LOG.warning("a session or a watch can't be handed over to another node: %s", error)
        return True


class Armed:
    """A `Watch` on a node."""

    def __init__(self, link: Link, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        self._link = link
        self.number = number
        self.name = name
        self.arguments = arguments
        self._closed = False
        self._changed = threading.Event()

    def arm(self, tries: Tries | None) -> None:
        tries = tries or self._link.retry.begin()
        self._link.call_within(tries, self.name, self.number, *self.arguments)

    def wait(self, timeout: float | None = None) -> bool:
        self._link.origin.refuse_child()
        if self._closed:
            return True
        with self._link.listening():
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
