"""A TCP proxy that can be cut: what a client sees of a network that fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

_HOST = "127.0.0.1"
_CHUNK = 1 << 16
# A slow link takes so much, or more, before it has passed it on; it does so that often in a second.
_LITTLE = 1 << 14
_OFTEN = 50


class Proxy:
    """Passes bytes on to a port. `cut` stops them without a word, as a lost cable does.

    `hold_answers` lets requests through and keeps what comes back; `reset` breaks all
    connections, and what was kept is lost; `refuse` does so and lets nobody connect again.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._lock = threading.Lock()
        self._requests_flow = threading.Event()
        self._answers_flow = threading.Event()
        self._requests_flow.set()
        self._answers_flow.set()
        self._asked = threading.Event()
        # The request with the awaited words was passed on; the server said something since.
        self._passed = threading.Event()
        self._answered = threading.Event()
        # How often somebody has asked for something: a request is one piece, unless it is large.
        self.requests = 0
        self._hold_at = 0
        self._needle = self._lost = b""
        self._at_needle: Callable[[], None] = self.cut
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server((_HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._refusing = False
        self._rate = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"{_HOST}:{self.port}"

    def cut(self) -> None:
        """Nothing passes in either direction; connections stay open."""
        self._asked.clear()
        self._requests_flow.clear()
        self._answers_flow.clear()

    def slow(self, bytes_per_second: int) -> None:
        """New connections pass at most so much, in each direction."""
        self._rate = bytes_per_second
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._takes())

    def _takes(self) -> int:
        """How much a slow link takes at once. If that is little, a fast one is slow, too."""
        return max(_LITTLE, self._rate // 12)

    def hold_answers(self) -> None:
        """Requests pass, answers do not."""
        self._asked.clear()
        self._answers_flow.clear()

    def hold_answers_to(self, nth: int) -> None:
        """The nth request from now passes, its answer and all after it do not."""
        self._asked.clear()
        with self._lock:
            self._hold_at = self.requests + nth

    def hold_request_with(self, words: bytes) -> None:
        """Requests pass until one has these words in it; that one and all after it do not."""
        self._asked.clear()
        self._at_needle = self.cut
        self._needle = words

    def hold_answers_from(self, words: bytes) -> None:
        """Answers pass until a request has these words in it; its own and later ones do not."""
        for each in (self._asked, self._passed, self._answered):
            each.clear()
        self._at_needle = self.hold_answers
        self._needle = words

    def reset_at(self, words: bytes) -> None:
        """Break all connections whenever a request has these words in it."""
        self._at_needle = self.reset
        self._needle = words

    def lose_requests_with(self, words: bytes) -> None:
        """Everything passes but pieces with these words in them, which are lost."""
        self._asked.clear()
        self._lost = words

    def await_request(self, patience: float = 20.0) -> None:
        """Block until something was asked since answers no longer pass."""
        assert self._asked.wait(patience), "nothing was asked"

    def await_answer(self, patience: float = 20.0) -> None:
        """Block until the server has the request of `hold_answers_from`, and has answered."""
        assert self._passed.wait(patience), "nothing was passed on"
        assert self._answered.wait(patience), "nothing was answered"

    def heal(self) -> None:
        """Everything passes, also what was kept."""
        self._refusing = False
        self._needle = self._lost = b""
        self._requests_flow.set()
        self._answers_flow.set()

    def reset(self) -> None:
        """Break every connection; new ones can be made."""
        with self._lock:
            broken, self._open = self._open, set()
        for each in broken:
            _end(each)

    def refuse(self) -> None:
        """Break every connection; new ones are broken at once."""
        self._refusing = True
        self.reset()

    def close(self) -> None:
        self._closed.set()
        _end(self._listener)
        self.reset()
        self.heal()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self.join, args=(client,), daemon=True).start()

    def join(self, client: socket.socket) -> None:
        """Connect it, as if it had come by the port of this proxy."""
        # A connection that is made while it is cut does not come to stand either.
        self._requests_flow.wait()
        try:
            server = socket.create_connection((_HOST, self._target))
        except OSError:
            _end(client)
            return
        for each in (client, server):
            # A piece is passed on at once, not when the one before it was acknowledged.
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {client, server}
        if self._refusing:
            self.reset()
        for source, goal, flow in (
            (client, server, self._requests_flow),
            (server, client, self._answers_flow),
        ):
            threading.Thread(target=self._pass, args=(source, goal, flow), daemon=True).start()

    def _pass(self, source: socket.socket, goal: socket.socket, flow: threading.Event) -> None:
        chunk = max(1, self._rate // _OFTEN) if self._rate else _CHUNK
        if self._rate:
            source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._takes())
        with suppress(OSError):
            while data := source.recv(chunk):
                if self._rate and self._closed.wait(len(data) / self._rate):
                    break
                struck = False
                if flow is self._requests_flow:
                    with self._lock:
                        self.requests += 1
                        held = self.requests == self._hold_at
                    if held:
                        self.hold_answers()
                    if self._lost and self._lost in data:
                        self._asked.set()
                        continue
                    if struck := bool(self._needle) and self._needle in data:
                        self._at_needle()
                elif not flow.is_set():
                    self._answered.set()
                if flow is self._requests_flow and not self._answers_flow.is_set():
                    self._asked.set()
                flow.wait()
                goal.sendall(data)
                if struck:
                    self._passed.set()
        _end(source)
        _end(goal)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
