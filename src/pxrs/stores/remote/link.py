"""One stream to one of several nodes: calls of all threads, their answers, and failing over.

What threads want to send while a frame is on its way goes with the next one. When the stream
breaks, calls that may be repeated are made again through whichever node answers; of the others
that had been sent nobody knows whether they were done: `OutcomeUnknown`, which the code above
resolves as it does on every engine, by asking the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import RemoteSettings
from pxrs.errors import Closed, ConfigError, OutcomeUnknown, PxrsError, StoreUnavailable
from pxrs.forks import Origin
from pxrs.stores.remote import wire
from pxrs.stores.remote.wire import HELLO, METHODS, Hello, Method

if TYPE_CHECKING:
    import grpc

_LOG = logging.getLogger("pxrs.remote")
_OPTIONS = [
    # Answers are as large as what was asked for; calls are bounded where they are made.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", wire.MOST_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
]
_PAUSE = 0.05
# A node that does not greet within this is not there.
_GREETING = 3.0


class Pending:
    """A call until its answer comes. `was_sent`: it may have reached the node."""

    def __init__(self, number: int, method: Method, arguments: Any) -> None:
        self.number = number
        self.method = method
        self.arguments = arguments
        self.size = len(memoryview(arguments))
        self.was_sent = False
        self.is_lost = False
        self.kind = -1
        self.body: Any = None
        self._done = threading.Lock()
        self._done.acquire()

    def settle(self, kind: int, body: Any) -> None:
        self.kind, self.body = kind, body
        self._done.release()

    def lose(self) -> None:
        self.is_lost = True
        self._done.release()

    def wait(self, timeout: float) -> bool:
        return self._done.acquire(timeout=max(0.0, timeout))


class Stream:
    """One connection to one node. `woken` is called with the number of a watch."""

    def __init__(
        self, channel: grpc.Channel, metadata: Any, woken: Callable[[int], None], name: str
    ) -> None:
        self.name = name
        self._channel = channel
        self._woken = woken
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._outgoing: SimpleQueue[Pending | None] = SimpleQueue()
        self.is_broken = False
        # Why the node does not talk to us, if it said so.
        self.refusal = ""
        call = channel.stream_stream(wire.METHOD)
        self._call = call(self._frames(), metadata=metadata, wait_for_ready=False)
        self._reader = threading.Thread(target=self._read, name="pxrs-remote", daemon=True)
        self._reader.start()

    def send(self, pending: Pending) -> None:
        """Have a call sent; it is lost at once if the stream is broken."""
        with self._lock:
            if self.is_broken:
                pending.lose()
                return
            self._pending[pending.number] = pending
            self._outgoing.put(pending)

    def close(self) -> None:
        """End the stream; what has no answer yet is lost."""
        self._outgoing.put(None)
        self._call.cancel()
        self._break()
        self._channel.close()

    def _frames(self) -> Iterator[bytes]:
        """What waits, as frames, until the stream is closed. Called by the channel's thread."""
        while (first := self._outgoing.get()) is not None:
            batch, size = [first], first.size
            while size < wire.MOST_CALL_BYTES and not self._outgoing.empty():
                following = self._outgoing.get()
                if following is None:
                    self._outgoing.put(None)
                    break
                batch.append(following)
                size += following.size
            for pending in batch:
                pending.was_sent = True
            yield wire.encode_frame([(it.number, it.method.name, it.arguments) for it in batch])

    def _read(self) -> None:
        try:
            for frame in self._call:
                for number, kind, body in wire.decode_answers(frame):
                    self._answered(number, kind, body)
        except Exception as error:  # noqa: BLE001 - whatever ends it, it is over
            _LOG.debug("the stream to %s broke: %s", self.name, error)
            self.refusal = _refusal(error)
        finally:
            self._break()
            self._outgoing.put(None)

    def _answered(self, number: int, kind: int, body: Any) -> None:
        if kind == wire.WOKEN:
            self._woken(number)
            return
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.settle(kind, body)

    def _break(self) -> None:
        with self._lock:
            self.is_broken = True
            lost, self._pending = self._pending, {}
        for pending in lost.values():
            pending.lose()

    def forget(self, pending: Pending) -> None:
        """Nobody waits for its answer any more."""
        with self._lock:
            self._pending.pop(pending.number, None)


class Link:
    """Calls to whichever node answers. Thread-safe."""

    def __init__(self, settings: RemoteSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self.origin = Origin()
        self._settings = settings
        self._clock = clock
        self._numbers = count(HELLO + 1)
        self._connecting = threading.Lock()
        self._stream: Stream | None = None
        self._next = 0
        self._closed = False
        self._hello: Hello | None = None
        # By number: what is to be woken, and how it is armed again through another node.
        self._watches: dict[int, Armed] = {}
        self._watch_lock = threading.Lock()
        self._arming = threading.Lock()
        self._armed_on: Stream | None = None

    @property
    def hello(self) -> Hello:
        """What the nodes' store can do."""
        if self._hello is None:
            self._connected(self._clock.monotonic() + self._settings.timeout)
        assert self._hello is not None
        return self._hello

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """The answer to a call of a seam's method; raises the node's error.

        Raises `StoreUnavailable` if no node answered in time and nothing was done, and
        `OutcomeUnknown` if it was sent and no answer came.
        """
        method = METHODS[name]
        arguments = method.encode(method.bound(given, named))
        ends = self._clock.monotonic() + self._settings.timeout
        while True:
            stream = self._connected(ends)
            pending = Pending(next(self._numbers), method, arguments)
            stream.send(pending)
            try:
                answered = pending.wait(ends - self._clock.monotonic())
            except BaseException:
                stream.forget(pending)
                raise
            if answered and not pending.is_lost:
                if pending.kind == wire.ANSWER:
                    return method.decode_answer(pending.body)
                raise wire.decode_error(pending.body)
            stream.forget(pending)
            if pending.was_sent and not method.repeatable:
                raise OutcomeUnknown(f"no answer came from the node at {stream.name} to {name}")
            if not answered:
                raise StoreUnavailable(f"the node at {stream.name} did not answer {name} in time")

    def watch(self, name: str, where: list[Any]) -> Armed:
        """A watch on a node, armed on return, and again whenever another node answers."""
        armed = Armed(self, next(self._numbers), name, where)
        with self._watch_lock:
            self._watches[armed.number] = armed
        try:
            armed.arm()
        except BaseException:
            self.unwatch(armed)
            raise
        return armed

    def unwatch(self, armed: Armed) -> None:
        with self._watch_lock:
            self._watches.pop(armed.number, None)

    def close(self) -> None:
        """End the stream. What waits is told that it was closed."""
        self._closed = True
        stream, self._stream = self._stream, None
        with self._watch_lock:
            watches, self._watches = list(self._watches.values()), {}
        for armed in watches:
            armed.close()
        if stream is not None and not self.origin.is_parent:
            stream.close()

    # Connecting

    def _connected(self, ends: float) -> Stream:
        self.origin.refuse_child()
        stream = self._stream
        if stream is not None and not stream.is_broken:
            return stream
        with self._connecting:
            while True:
                if self._closed:
                    raise Closed("the store was closed")
                if self._stream is not None and not self._stream.is_broken:
                    return self._stream
                if (stream := self._greeted(ends)) is not None:
                    self._stream = stream
                    break
                if self._clock.monotonic() >= ends:
                    hosts = ", ".join(self._settings.hosts)
                    raise StoreUnavailable(f"no node can be reached at {hosts}")
                threading.Event().wait(_PAUSE)
        # Another node knows nothing of the watches; and what they missed may have changed.
        self._arm_again()
        return stream

    def _greeted(self, ends: float) -> Stream | None:
        """A stream to the next node that answers."""
        for _ in self._settings.hosts:
            host = self._settings.hosts[self._next % len(self._settings.hosts)]
            stream = self._open(host)
            greeting = Pending(HELLO, METHODS["coord.get"], wire.NOTHING)
            stream.send(greeting)
            left = min(_GREETING, max(0.1, ends - self._clock.monotonic()))
            if greeting.wait(left) and not greeting.is_lost:
                if greeting.kind == wire.ERROR:
                    stream.close()
                    raise wire.decode_error(greeting.body)
                self._hello = wire.decode_hello(greeting.body)
                return stream
            stream.close()
            if stream.refusal:
                raise ConfigError(f"the node at {host} refuses: {stream.refusal}")
            self._next += 1
        return None

    def _open(self, host: str) -> Stream:
        import grpc

        if self._settings.tls is None:
            channel = grpc.insecure_channel(host, options=_OPTIONS)
        else:
            channel = grpc.secure_channel(host, _credentials(self._settings), options=_OPTIONS)
        token = self._settings.token
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        return Stream(channel, metadata, self._wake, host)

    def _wake(self, number: int) -> None:
        with self._watch_lock:
            armed = self._watches.get(number)
        if armed is not None:
            armed.wake()

    def _arm_again(self) -> None:
        """Arms all watches on the stream of now; again if that breaks meanwhile.

        One thread does it. Its own calls come here too when the stream breaks: it is at it already.
        """
        if not self._arming.acquire(blocking=False):
            return
        try:
            while self._armed_on is not (stream := self._stream) and not self._closed:
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

    def __init__(self, link: Link, number: int, name: str, where: list[Any]) -> None:
        self._link = link
        self.number = number
        self._name = name
        self._where = where
        self._closed = False
        self._changed = threading.Event()

    def arm(self) -> None:
        self._link.call(self._name, self.number, self._where)

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
        if self._closed:
            return
        self._closed = True
        self._changed.set()
        self._link.unwatch(self)
        stream = self._link._stream
        if stream is not None and not self._link._closed:
            method = METHODS["node.unwatch"]
            stream.send(Pending(next(self._link._numbers), method, method.encode([self.number])))


def _refusal(error: Exception) -> str:
    """What a node says that will not talk to this client, however often it tries."""
    import grpc

    final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    if isinstance(error, grpc.Call) and error.code() in final:
        return str(error.details())
    return ""


def _credentials(settings: RemoteSettings) -> grpc.ChannelCredentials:
    import grpc

    assert settings.tls is not None
    try:
        ca, cert, key = (
            None if path is None else _content(path)
            for path in (settings.tls.ca, settings.tls.cert, settings.tls.key)
        )
    except OSError as error:
        raise ConfigError(f"a file of pxrs:// can't be read: {error}") from None
    return grpc.ssl_channel_credentials(ca, key, cert)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
