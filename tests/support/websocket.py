"""WebSockets byte by byte, for clients of a node that do what no library would."""

from __future__ import annotations

import os
import socket
from base64 import b64encode
from collections.abc import Iterator
from types import TracebackType

import msgspec

from pxrs.client import frames
from support.child import PATIENCE

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
# A frame that no node can read: it ends the stream.
NONSENSE = b"\xc1"


def message(data: bytes, kind: int = BINARY, *, masked: bool = True, first: int = 0x80) -> bytes:
    """A message with a mask of zeros; `first`: the bits before its kind."""
    bit = 0x80 if masked else 0
    if len(data) < 126:
        size = bytes([bit | len(data)])
    elif len(data) < 2**16:
        size = bytes([bit | 126]) + len(data).to_bytes(2)
    else:
        size = bytes([bit | 127]) + len(data).to_bytes(8)
    return bytes([first | kind]) + size + (bytes(4) if masked else b"") + data


def request(*headers: str, path: str = frames.PATH) -> bytes:
    """What opens a stream."""
    lines = [
        f"GET {path} HTTP/1.1", "Host: node", "Upgrade: websocket", "Connection: Upgrade",
        "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {b64encode(os.urandom(16)).decode()}",
        *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode()


class RawStream:
    """A stream to a node. `status` is what it was answered, 101 if it is open.

    `closed`: the code with which the node has closed it, 0 if it said none, None until then.
    """

    def __init__(self, address: str, *headers: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), PATIENCE)
        self._in = self.socket.makefile("rb")
        self.closed: int | None = None
        self.socket.sendall(request(*headers))
        line = self._in.readline().split()
        self.status = int(line[1]) if line else 0
        while self._in.readline().strip():
            pass

    def __enter__(self) -> RawStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._in.close()
        self.socket.close()

    def send(self, *sent: bytes) -> None:
        """Send frames, each as a message."""
        self.socket.sendall(b"".join(map(message, sent)))

    def receive(self) -> bytes | None:
        """The next message; None once it was closed."""
        head = self._in.read(2)
        if len(head) < 2:
            self.closed = 0
            return None
        size = head[1] & 0x7F
        if size > 125:
            size = int.from_bytes(self._in.read(2 if size == 126 else 8))
        data = self._in.read(size)
        if head[0] & 15 == CLOSE:
            self.closed = int.from_bytes(data[:2])
            return None
        return data

    def answers(self) -> Iterator[tuple[int, int, msgspec.Raw]]:
        """What comes until it is closed, but for signs of life."""
        while (data := self.receive()) is not None:
            for number, kind, body in frames.decode_answers(data):
                if (number, kind) != (frames.HELLO, frames.WOKEN):
                    yield number, kind, body
