"""A TCP proxy in front of an engine: a network that can be cut, silenced and mended."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType

_CHUNK = 64 * 2**10


class Proxy:
    """Forwards to `host:port` until told otherwise.

    `cut` ends all connections and refuses new ones. `silence` leaves them open and lets nothing
    through in either direction, like a firewall that drops packets; `mute` holds back only what
    the engine answers. `mend` undoes all of it; what was held back goes through then.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._refusing = False
        self._asking = threading.Event()
        self._answering = threading.Event()
        self._asking.set()
        self._answering.set()
        self._closed = False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        with self._lock:
            self._refusing = True
            self._end_connections()

    def silence(self) -> None:
        self._asking.clear()
        self._answering.clear()

    def mute(self) -> None:
        self._answering.clear()

    def mend(self) -> None:
        with self._lock:
            self._refusing = False
        self._let_flow()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end_connections()
        self._let_flow()
        with suppress(OSError):
            # Wakes the accepting thread; closing alone would not.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _let_flow(self) -> None:
        self._asking.set()
        self._answering.set()

    def _end_connections(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with self._lock:
                refused = self._refusing or self._closed
            try:
                server = None if refused else socket.create_connection(self._target)
            except OSError:
                server = None
            if server is None:
                client.close()
                continue
            self._connect(client, server)

    def _connect(self, client: socket.socket, server: socket.socket) -> None:
        with self._lock:
            self._sockets |= {client, server}
            if self._refusing or self._closed:
                self._end_connections()
        left = [2]
        ways = ((client, server, self._asking), (server, client, self._answering))
        for source, target, gate in ways:
            pump = threading.Thread(
                target=self._pump, args=(source, target, gate, left), daemon=True
            )
            self._threads.append(pump)
            pump.start()

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        gate: threading.Event,
        left: list[int],
    ) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                gate.wait()
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            if not left[0]:
                self._sockets -= {source, target}
                source.close()
                target.close()
