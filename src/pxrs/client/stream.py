"""One stream to one node: the calls of all threads, and their answers.

What threads want to send while a frame is on its way goes with the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pxrs.client import frames
from pxrs.client.frames import Hello, Method
from pxrs.config import RemoteSettings
from pxrs.errors import ConfigError

if TYPE_CHECKING:
    import grpc

_LOG = logging.getLogger("pxrs.remote")
# How much of what gRPC says is quoted.
_LONGEST = 300
_OPTIONS = [
    # One answer, with its number.
    ("grpc.max_receive_message_length", frames.MOST_ANSWER_BYTES + 2**10),
    ("grpc.max_send_message_length", frames.MOST_FRAME_BYTES),
    # A node that is frozen answers no pings: it is left before the sessions end that it holds. By
    # itself gRPC would wait for a minute, and stop asking who sends nothing.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
]


class Pending:
    """A call until its answer comes. `was_sent`: it may have reached the node."""

    def __init__(self, number: int, method: Method, arguments: Any) -> None:
        self.number = number
        self.method = method
        self.arguments = arguments
        self.size = len(memoryview(arguments))
        self.was_sent = False
        self.is_lost = False
        self._kind = -1
        self._body: Any = None
        self._done = threading.Lock()
        self._done.acquire()

    def settle(self, kind: int, body: Any) -> None:
        self._kind, self._body = kind, body
        self._done.release()

    def lose(self) -> None:
        self.is_lost = True
        self._done.release()

    def wait(self, timeout: float) -> bool:
        """Whether there is an answer, or there will be none."""
        return self._done.acquire(timeout=max(0.0, timeout))

    @property
    def body(self) -> Any:
        """What the node answered; raises the error that it told."""
        if self._kind == frames.ERROR:
            raise frames.decode_error(self._body)
        return self._body


class Stream:
    """One connection to one node.

    `woken` is called with the number of a watch, and with None when the stream has broken.
    """

    def __init__(
        self, channel: grpc.Channel, metadata: Any, woken: Callable[[int | None], None], name: str
    ) -> None:
        self.name = name
        # What the node has told of itself; set once it has.
        self.hello: Hello
        self._channel = channel
        self._woken = woken
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._outgoing: SimpleQueue[Pending | None] = SimpleQueue()
        self.is_broken = False
        # Why the node does not talk to us, if it said so; and why it can't be reached.
        self.refusal = self.trouble = ""
        call = channel.stream_stream(frames.METHOD)
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

    def answered(self, pending: Pending, timeout: float) -> bool:
        """Sends a call and waits; whether the node has answered it."""
        self.send(pending)
        answered = False
        try:
            answered = pending.wait(timeout) and not pending.is_lost
        finally:
            if not answered:
                self.forget(pending)
        return answered

    def forget(self, pending: Pending) -> None:
        """Nobody waits for its answer any more."""
        with self._lock:
            self._pending.pop(pending.number, None)

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
            while size < frames.MOST_PIECE_BYTES and not self._outgoing.empty():
                following = self._outgoing.get()
                if following is None:
                    self._outgoing.put(None)
                    break
                batch.append(following)
                size += following.size
            for pending in batch:
                pending.was_sent = True
            yield from frames.encode_calls(
                [(it.number, it.method.name, it.arguments) for it in batch]
            )

    def _read(self) -> None:
        try:
            for frame in self._call:
                for number, kind, body in frames.decode_answers(frame):
                    self._take_answer(number, kind, body)
        except Exception as error:  # noqa: BLE001 - whatever ends it, it is over
            _LOG.debug("the stream to %s broke: %s", self.name, error)
            self.refusal = _refusal(error)
            self.trouble = _trouble(error)
        finally:
            self._break()
            self._outgoing.put(None)
            # It may have broken here: what the node sends can't be read.
            self._call.cancel()
            self._channel.close()

    def _take_answer(self, number: int, kind: int, body: Any) -> None:
        if kind == frames.WOKEN:
            self._woken(number)
            return
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.settle(kind, body)

    def _break(self) -> None:
        with self._lock:
            is_news, self.is_broken = not self.is_broken, True
            lost, self._pending = self._pending, {}
        for pending in lost.values():
            pending.lose()
        if is_news:
            self._woken(None)


def open_stream(
    settings: RemoteSettings, address: str, woken: Callable[[int | None], None]
) -> Stream:
    """A stream to the node at this address, which need not be there."""
    import grpc

    if settings.tls is None:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        channel = grpc.secure_channel(address, _credentials(settings), options=_OPTIONS)
    token = settings.token
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    return Stream(channel, metadata, woken, address)


def _refusal(error: Exception) -> str:
    """What a node says that will not talk to this client, however often it tries."""
    import grpc

    final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    if isinstance(error, grpc.Call) and error.code() in final:
        return str(error.details())
    return ""


def _trouble(error: Exception) -> str:
    """What gRPC says of a connection that came to nothing, such as a certificate it refuses."""
    import grpc

    return str(error.details() or "")[:_LONGEST] if isinstance(error, grpc.Call) else ""


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
