"""One WebSocket to a node, for threads that block.

The protocol is that of `websockets`, which does no IO; this is the socket below it, and TLS. One
thread receives. Any thread may send, but the caller must let only one do so at a time.
"""

from __future__ import annotations

import json
import logging
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import WebSocketURI

from pxrs.client import frames
from pxrs.client.stream import Refused
from pxrs.config import RemoteSettings, TlsFiles
from pxrs.errors import ConfigError, StoreUnavailable

_CHUNK = 2**16
# Its debugging lines would show the token.
_LOG = logging.getLogger("pxrs.remote.websocket")
_LOG.setLevel(logging.CRITICAL)
# A node that is there sends something every second. A node that sends nothing, or takes nothing,
# for this long is frozen or cut off: the client leaves it before the sessions end that it holds.
SILENCE = 4.0
# The first byte of such a frame; the second one if its size stands in the two behind it; and how
# short a frame is at least.
_WHOLE_BINARY = 0x82
_TWO_BYTES = 126
_SHORT = 4
# The close code of a refusal, after which to try again is no use.
_POLICY = 1008
_FINAL = (401, 403, 404)


def connect(settings: RemoteSettings, address: str, timeout: float) -> WebSocket:
    """Connect to the node at this address. Raises `StoreUnavailable` if it is not there."""
    try:
        return WebSocket(address, settings.token, settings.tls, timeout)
    except Refused as refused:
        raise ConfigError(f"the node at {address} refuses: {refused}") from None
    except (OSError, ValueError) as error:
        # The address may be what another node told.
        raise StoreUnavailable(f"{address}: {error}") from None


class WebSocket:
    """See `stream.Connection`. Open when it was made, which takes `timeout` seconds at most."""

    def __init__(
        self, address: str, token: str | None, tls: TlsFiles | None, timeout: float
    ) -> None:
        where = urlsplit(f"//{address}")
        host, port = where.hostname or "", where.port or 0
        self._lock = threading.Lock()
        self._protocol = ClientProtocol(
            WebSocketURI(tls is not None, host, port, frames.PATH, "", None, None),
            max_size=frames.MOST_ANSWER_BYTES + 2**10,
            logger=_LOG,
        )
        # One deadline for all of it: a node may send byte by byte, each in time.
        self._ends: float | None = time.monotonic() + timeout
        self._socket = socket.create_connection((host, port), timeout)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._tls = None if tls is None else _secured(self._socket, tls, host, self._hurry)
            self._shake_hands(token)
            self._ends = None
            # Not `settimeout`: that would ask the kernel twice for everything.
            self._socket.settimeout(None)
            bound = struct.pack("ll", int(SILENCE), 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        except BaseException:
            self._socket.close()
            raise

    def _hurry(self) -> None:
        """Until it is open, nothing waits beyond the deadline."""
        if self._ends is not None:
            left = self._ends - time.monotonic()
            if left <= 0:
                raise TimeoutError("the node took too long to open a stream")
            self._socket.settimeout(left)

    def _shake_hands(self, token: str | None) -> None:
        request = self._protocol.connect()
        if token is not None:
            request.headers["Authorization"] = f"Bearer {token}"
        self._protocol.send_request(request)
        self._send_all(self._taken())
        while self._protocol.state is State.CONNECTING and self._protocol.handshake_exc is None:
            if data := self._receive():
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
        error = self._protocol.handshake_exc
        if isinstance(error, InvalidStatus) and error.response.status_code in _FINAL:
            raise Refused(_told(error.response))
        if error is not None:
            raise ConnectionError(f"the node opened no stream: {error}")
        # Frames that came with the answer are kept for the first `receive`.
        self._came = [it for it in self._protocol.events_received() if isinstance(it, Frame)]
        if self._is_closed_by(self._came):
            raise ConnectionError("the node closed the stream at once")
        # How many bytes the protocol has of a frame that has not come whole. That is not known if
        # the node has sent some already, which ours never does.
        self._of_a_part = math.inf if self._came or self._protocol.reader.buffer else 0.0

    def send(self, frame: bytes) -> None:
        with self._lock:
            self._protocol.send_binary(frame)
            data = self._taken()
        self._send_all(data)

    def comes(self, until: float) -> bool:
        if self._came or (self._tls is not None and self._tls.has_some):
            return True
        return _comes(self._socket, until)

    def receive(self, until: float | None = None) -> list[bytes] | None:
        came, self._came = self._came, []
        while True:
            if came:
                if self._is_closed_by(came):
                    return []
                if any(it.opcode is Opcode.CONT or not it.fin for it in came):
                    raise ConnectionError("the node sent a message in parts")
                if found := [bytes(it.data) for it in came if it.opcode is Opcode.BINARY]:
                    return found
            data = self._receive(until)
            if not data:
                return None if data is None else []
            if not self._of_a_part and (alone := _alone(data)) is not None:
                return [alone]
            came = self._parsed(data)

    def _parsed(self, data: bytes) -> list[Frame]:
        """The frames that are whole with this data."""
        with self._lock:
            # Answers to pings go out with the next frame that is sent.
            self._protocol.receive_data(data)
            came = [it for it in self._protocol.events_received() if isinstance(it, Frame)]
            if self._protocol.close_sent is not None and not came:
                raise ConnectionError(f"the node broke the protocol: {self._protocol.close_sent}")
        self._of_a_part += len(data) - sum(map(_size, came))
        return came

    def _is_closed_by(self, came: list[Frame]) -> bool:
        """Whether the node has closed the connection; raises what it gave as the reason."""
        if not any(it.opcode is Opcode.CLOSE for it in came):
            return False
        closed = self._protocol.close_rcvd
        if closed is not None and closed.code == _POLICY:
            raise Refused(closed.reason)
        if closed is not None and closed.reason:
            raise ConnectionError(closed.reason)
        return True

    def _taken(self) -> bytes:
        return b"".join(self._protocol.data_to_send())

    def _receive(self, until: float | None = None) -> bytes | None:
        """What comes, or None if nothing has come until then."""
        try:
            if self._tls is not None:
                return self._tls.receive(until)
            self._hurry()
            return self._socket.recv(_CHUNK) if _comes(self._socket, until) else None
        except BlockingIOError:
            raise TimeoutError(f"the node sent nothing for {SILENCE:g} s") from None

    def _send_all(self, data: bytes) -> None:
        try:
            if self._tls is None:
                self._socket.sendall(data)
            else:
                self._tls.send(data)
        except BlockingIOError:
            raise TimeoutError(f"the node accepted no data for {SILENCE:g} s") from None

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self._socket.close()


class _Tls:
    """TLS on a socket that one thread reads while another writes, which OpenSSL leaves to us."""

    def __init__(
        self,
        raw: socket.socket,
        context: ssl.SSLContext,
        host: str,
        hurry: Callable[[], None],
    ) -> None:
        self._socket = raw
        self._hurry = hurry
        self._lock = threading.Lock()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=host)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                raw.sendall(self._out.read())
                self._hurry()
                self._feed(raw.recv(_CHUNK))
            else:
                raw.sendall(self._out.read())
                return

    @property
    def has_some(self) -> bool:
        """Whether a part of what was received has not been returned yet."""
        with self._lock:
            return self._tls.pending() > 0 or self._in.pending > 0

    def receive(self, until: float | None) -> bytes | None:
        while True:
            with self._lock, suppress(ssl.SSLWantReadError):
                try:
                    return self._tls.read(_CHUNK)
                except ssl.SSLZeroReturnError:
                    return b""
            self._hurry()
            if not _comes(self._socket, until):
                return None
            self._feed(self._socket.recv(_CHUNK))

    def send(self, data: bytes) -> None:
        with self._lock:
            self._tls.write(data)
            sealed = self._out.read()
        self._socket.sendall(sealed)

    def _feed(self, data: bytes) -> None:
        if not data:
            raise ConnectionError("the node closed the connection")
        with self._lock:
            self._in.write(data)


def _comes(raw: socket.socket, until: float | None) -> bool:
    """Waits until there is something to read; returns false if there is nothing until then."""
    if until is None:
        return True
    # A new one each time: a signal handler may come here while the same thread waits in another.
    poll = select.poll()
    poll.register(raw, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * (until - time.monotonic()))))


def _secured(raw: socket.socket, tls: TlsFiles, host: str, hurry: Callable[[], None]) -> _Tls:
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:
        raise ConfigError(f"a file of pxrs:// can't be read: {error}") from None
    return _Tls(raw, context, host, hurry)


def _alone(data: bytes) -> bytes | None:
    """The message, if these bytes are exactly one short binary frame: nearly all answers are.

    The protocol takes five times as long for it.
    """
    if len(data) < _SHORT or data[0] != _WHOLE_BINARY:
        return None
    if data[1] < _TWO_BYTES:
        head, size = 2, data[1]
    elif data[1] == _TWO_BYTES:
        head, size = 4, int.from_bytes(data[2:4])
    else:
        return None
    return data[head:] if len(data) == head + size else None


def _size(frame: Frame) -> int:
    """How many bytes a node's frame has on the wire."""
    size = len(frame.data)
    return size + (2 if size < _TWO_BYTES else 4 if size < 2**16 else 10)


def _told(response: Response) -> str:
    """The detail of a node's refusal, or its HTTP status if that can't be read."""
    with suppress(ValueError, TypeError, AttributeError):
        detail = json.loads(response.body or b"").get("detail")
        if isinstance(detail, str) and detail:
            return detail[:500]
    return f"HTTP {response.status_code}"
