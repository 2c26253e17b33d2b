"""HTTP/2 byte by byte, for clients of gRPC that do what no library would."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from types import TracebackType

from support.child import PATIENCE

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LARGEST = 2**31 - 1


def frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    head = len(payload).to_bytes(3) + bytes([kind, flags])
    return head + stream.to_bytes(4) + payload


def message(data: bytes, *, compressed: bool = False) -> bytes:
    """A message as gRPC puts it into a stream."""
    return bytes([compressed]) + len(data).to_bytes(4) + data


def _text(data: bytes) -> bytes:
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, out = len(data) - 127, bytearray([127])
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*out, rest]) + data


def headers(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in pairs)


class Http2:
    """One connection. It reads when it must in order to send on; `window`: what may come."""

    def __init__(self, address: str, window: int = _LARGEST) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), PATIENCE)
        self._in = self.socket.makefile("rb")
        self._window = 65535
        self._first_window = 65535
        self._windows: defaultdict[int, int] = defaultdict(lambda: self._first_window)
        self._next = 1
        self.received: Counter[int] = Counter()
        self.reset: set[int] = set()
        setting = (4).to_bytes(2) + window.to_bytes(4)
        try:
            self.socket.sendall(PREFACE + frame(SETTINGS, setting))
            if window:
                self.socket.sendall(frame(WINDOW, (_LARGEST - 65535).to_bytes(4)))
        except OSError:
            # The node has hung up.
            self.close()
            raise

    def __enter__(self) -> Http2:
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

    def open(self, path: str, *metadata: tuple[bytes, bytes]) -> int:
        """Begin a call; its number."""
        number, self._next = self._next, self._next + 2
        self.socket.sendall(
            frame(
                HEADERS,
                headers(
                    (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()),
                    (b":authority", b"a"), (b"content-type", b"application/grpc"),
                    (b"te", b"trailers"), *metadata,
                ),
                number, END_HEADERS,
            )
        )  # fmt: skip
        return number

    def send(self, number: int, data: bytes, *, end: bool = False) -> None:
        """Send it as far as the node lets us, which it must."""
        at = 0
        while at < len(data):
            room = min(self._window, self._windows[number], 16384)
            if room <= 0:
                self.read_frame()
                continue
            piece = data[at : at + room]
            self.socket.sendall(frame(DATA, piece, number))
            self._window -= len(piece)
            self._windows[number] -= len(piece)
            at += len(piece)
        if end:
            self.socket.sendall(frame(DATA, b"", number, END_STREAM))

    def read_frame(self) -> tuple[int, int, bytes]:
        """The next frame; `ConnectionError` if there comes none."""
        head = self._in.read(9)
        if len(head) < 9:
            raise ConnectionError("the connection was closed")
        kind, flags = head[3], head[4]
        number = int.from_bytes(head[5:]) & _LARGEST
        payload = self._in.read(int.from_bytes(head[:3]))
        if kind == SETTINGS and not flags & ACK:
            self._settings(payload)
            self.socket.sendall(frame(SETTINGS, flags=ACK))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, payload, flags=ACK))
        elif kind == WINDOW and number:
            self._windows[number] += int.from_bytes(payload)
        elif kind == WINDOW:
            self._window += int.from_bytes(payload)
        elif kind == DATA:
            self.received[number] += len(payload)
        elif kind == RESET:
            self.reset.add(number)
        return kind, number, payload

    def _settings(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            if payload[at : at + 2] == b"\x00\x04":
                wanted = int.from_bytes(payload[at + 2 : at + 6])
                for number in self._windows:
                    self._windows[number] += wanted - self._first_window
                self._first_window = wanted
