"""The network between the nodes of an engine, of which any pair can be cut off from each other.

    with Network() as network, started("etcd", nodes=3, advertise=network.advertise) as etcd:
        network.joins(etcd)
        network.isolate(0)

Each node is known to the others by the port of a door here. A connection that comes in is passed on
by the proxy of the pair: which node has made it is known by the process that its port belongs to.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from types import TracebackType

import psutil

import engines
from support.proxy import Proxy

_HOST = "127.0.0.1"


class Network:
    """Doors and pairs; a pair is two nodes by their numbers, whoever has called whom."""

    def __init__(self) -> None:
        self._engine: engines.Engine | None = None
        self._joined = threading.Event()
        self._lock = threading.Lock()
        self._doors: list[socket.socket] = []
        self._proxies: dict[tuple[int, int], Proxy] = {}
        self._cut: set[frozenset[int]] = set()
        self._closed = threading.Event()

    def advertise(self, port: int) -> int:
        """A door to the node that listens at this port; an engine's `advertise`."""
        door = socket.create_server((_HOST, 0))
        self._doors.append(door)
        threading.Thread(target=self._accept, args=(door, port), daemon=True).start()
        advertised: int = door.getsockname()[1]
        return advertised

    def joins(self, engine: engines.Engine) -> None:
        """These are the nodes. Before they are started: they don't find each other till then."""
        self._engine = engine
        self._joined.set()

    def cut(self, one: int, other: int) -> None:
        """Nothing passes between these two any more, and nothing is said about it."""
        with self._lock:
            self._cut.add(frozenset((one, other)))
            for proxy in self._between(one, other):
                proxy.cut()

    def isolate(self, node: int) -> None:
        """Cut it off from all others."""
        assert self._engine is not None
        for other in range(len(self._engine.nodes)):
            if other != node:
                self.cut(node, other)

    def heal(self, reset: bool = False) -> None:
        """Everything passes again; `reset`: over new connections only."""
        with self._lock:
            self._cut.clear()
            for proxy in self._proxies.values():
                if reset:
                    proxy.reset()
                proxy.heal()

    def close(self) -> None:
        self._closed.set()
        self._joined.set()
        for door in self._doors:
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
            door.close()
        with self._lock:
            for proxy in self._proxies.values():
                proxy.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _between(self, one: int, other: int) -> Iterator[Proxy]:
        for pair in ((one, other), (other, one)):
            if pair in self._proxies:
                yield self._proxies[pair]

    def _accept(self, door: socket.socket, port: int) -> None:
        while not self._closed.is_set():
            try:
                client, address = door.accept()
            except OSError:
                return
            threading.Thread(target=self._enter, args=(client, address[1], port)).start()

    def _enter(self, client: socket.socket, source: int, port: int) -> None:
        self._joined.wait()
        caller = self._owner_of(source)
        if caller is None:
            client.close()
            return
        self._pair(caller, port).join(client)

    def _pair(self, caller: int, port: int) -> Proxy:
        assert self._engine is not None
        called = next(number for number in count() if port in self._ports_of(self._engine, number))
        with self._lock:
            if (caller, called) not in self._proxies:
                proxy = self._proxies[caller, called] = Proxy(port)
                if frozenset((caller, called)) in self._cut:
                    proxy.cut()
                if self._closed.is_set():
                    proxy.close()
            return self._proxies[caller, called]

    def _owner_of(self, source: int) -> int | None:
        """Which node has a connection from this port."""
        assert self._engine is not None
        for number, node in enumerate(self._engine.nodes):
            with suppress(psutil.Error, AssertionError):
                for each in psutil.Process(node.pid).net_connections("tcp4"):
                    if each.laddr and each.laddr.port == source:
                        return number
        return None

    @staticmethod
    def _ports_of(engine: engines.Engine, number: int) -> list[int]:
        each = len(engine.ports) // len(engine.nodes)
        return engine.ports[each * number : each * (number + 1)]
