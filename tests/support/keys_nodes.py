"""Nodes with clients of keys and values, and what can happen to the nodes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from random import Random
from time import monotonic

import pxrs
from pxrs.core.kv import shard_of, slot_of_shard
from pxrs.server.settings import Endpoint
from pxrs.stores.sqlite.stores import SqliteStores
from support.child import PATIENCE
from support.keys_clients import (
    ANSWER_WITHIN,
    GIVES_UP_AFTER,
    KeysClient,
    PxrsKeys,
    RestKeys,
    RpcKeys,
)
from support.keys_history import NOTHING, History, Seen, judge
from support.keys_load import Load, Ways, read, wait_for_key, wrote
from support.node import NodeProcess, looks

NODES = ("node-0", "node-1", "node-2")
FOURTH = "node-3"
# What a client's own clock may add to its deadline on a busy machine.
_SLACK = 5.0
DEADLINES = {
    "pxrs": GIVES_UP_AFTER + _SLACK,
    "rpc": ANSWER_WITHIN + _SLACK,
    "rest": ANSWER_WITHIN + _SLACK,
}
# The writes that have to succeed before the next thing happens.
_BETWEEN = 60


class World:
    """Nodes, their clients, and the store behind them.

    `broken` breaks every node. `session_ttl` is how long others wait for one that does not say that
    it is gone.
    """

    def __init__(
        self,
        url: str,
        stack: ExitStack,
        seed: int = 0,
        nodes: Sequence[str] = NODES,
        broken: Callable[[], None] | None = None,
        session_ttl: float = 2.0,
    ) -> None:
        self.url = url
        self._stack = stack
        self._broken = broken
        self._session_ttl = session_ttl
        self.rng = Random(seed)
        self.px = stack.enter_context(pxrs.connect(url))
        self.names = list(nodes)
        self.nodes: dict[str, NodeProcess] = {}
        self._places: dict[str, tuple[Endpoint, str]] = {}
        self.events: list[str] = []
        # How long after a leader was killed the next put to one of its keys succeeded.
        self.fail_overs: list[float] = []
        stack.callback(self._kill_all)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.start, self.names))
        self.await_slots(*self.names)
        self.history = History()
        self.remote = [self._connect() for _ in range(2)]
        self.load = Load(self.history, self._ways(), seed)
        stack.callback(self.load.stop)

    def _ways(self) -> list[Ways]:
        """Each node has a client of each of its APIs; the others go to any of them."""
        ways = [
            Ways(PxrsKeys(number, self.remote[number % 2]), self._by_http(number))
            for number in range(3)
        ]
        for number, name in enumerate(self.names):
            endpoint, address = self._places[name]
            ways.append(Ways(RpcKeys(number, address), self._by_http(number)))
            ways.append(Ways(RestKeys(number, endpoint), self._by_http(number)))
        return ways

    def _by_http(self, number: int) -> list[KeysClient]:
        return [RestKeys(number, self._places[name][0]) for name in self.names]

    def _connect(self) -> pxrs.Pxrs:
        addresses = ",".join(str(endpoint) for endpoint, _ in self._places.values())
        url = f"pxrs://{addresses}?timeout={GIVES_UP_AFTER:g}"
        return self._stack.enter_context(pxrs.connect(url))

    # Nodes

    def start(self, name: str) -> None:
        """Start a node, at its place if it had one."""
        place = self._places.get(name)
        listen, rpc = ("127.0.0.1:0", f"127.0.0.1:{free_port()}") if place is None else place
        node = NodeProcess(
            self.url, "--node-id", name, "--grpc-listen", rpc,
            listen=str(listen), broken=self._broken, session_ttl=self._session_ttl,
        )  # fmt: skip
        self.nodes[name] = node
        self.tell(f"{name} was started")
        self._places[name] = (node.endpoint, rpc)

    def await_slots(self, *names: str) -> None:
        """Until exactly these nodes share all slots, and each of them says so."""
        ends = monotonic() + PATIENCE
        for name in names:
            client = self.nodes[name].client()
            for _ in looks():
                shared = set(client.get("/v1/cluster").json["slots"])
                if shared == {*names}:
                    break
                assert monotonic() < ends, f"{name} says that {shared} share the slots"
            client.close()
        self.tell(f"the slots are shared by {', '.join(names)}")

    def slots(self) -> list[str]:
        """Who leads each slot."""
        client = self.nodes[self.names[0]].client()
        found: list[str] = client.get("/v1/cluster").json["slots"]
        client.close()
        return found

    def tell(self, what: str) -> None:
        """Note what happens to nodes, on the clock of the history."""
        self.events.append(f"{monotonic():.4f} {what}")

    def some_leader(self) -> str:
        """A node that leads a key to which everybody writes."""
        return self.slots()[slot_of(self.rng.choice(self.load.keys.hot()))]

    def others(self, name: str) -> list[str]:
        return [other for other in self.names if other != name]

    # What happens to them. Clients are at work all the time

    def kill(self) -> None:
        """SIGKILL to a leader, and a new start."""
        name = self.some_leader()
        slots = self.slots()
        key = wait_for_key(lambda key: slots[slot_of(key)] == name)
        self.tell(f"{name} is killed")
        self.nodes[name].kill()
        began = monotonic()
        # Its caller gets no error.
        self.remote[0].kv.put(key, "again")
        self.fail_overs.append(monotonic() - began)
        self.await_slots(*self.others(name))
        self.history.await_writes(_BETWEEN)
        self.start(name)
        self.await_slots(*self.names)

    def freeze(self) -> None:
        """SIGSTOP until others lead what it leads, and they were written to; then SIGCONT."""
        self.history.await_writes(2 * _BETWEEN)
        name = self.some_leader()
        node = self.nodes[name]
        self.tell(f"{name} is frozen")
        if isinstance(self.px.stores, SqliteStores):
            # One that is frozen inside a write stops the file for all, as docs/engines.md says.
            self.px.stores.database.write(lambda turn: node.freeze())
        else:
            node.freeze()
        try:
            self.await_slots(*self.others(name))
            self.history.await_writes(_BETWEEN)
            *to_read, written = self.load.keys.hot()
            late: list[LateRead | LatePut] = [LateRead(self.history, node, it) for it in to_read]
            late.append(LatePut(self.history, node, written))
        finally:
            self.tell(f"{name} is woken")
            node.wake()
        for each in late:
            each.finish()
        self.await_slots(*self.names)
        self.history.await_writes(_BETWEEN)

    def go_on(self) -> None:
        """Nothing."""
        self.history.await_writes(_BETWEEN)

    def restart(self) -> None:
        """SIGTERM, which hands the slots over, and a new start."""
        name = self.some_leader()
        self.tell(f"{name} is to end")
        logged = self.nodes[name].terminate()
        assert self.nodes[name].process.returncode == 0, logged
        self.await_slots(*self.others(name))
        self.history.await_writes(_BETWEEN)
        self.start(name)
        self.await_slots(*self.names)

    def join(self) -> None:
        """A fourth node takes its share of the slots, and gives it back."""
        self.start(FOURTH)
        self.await_slots(*self.names, FOURTH)
        self.history.await_writes(_BETWEEN)
        self.tell(f"{FOURTH} is to end")
        logged = self.nodes[FOURTH].terminate()
        assert self.nodes[FOURTH].process.returncode == 0, logged
        self.await_slots(*self.names)

    # Ending

    def broken_so_far(self) -> list[str]:
        """Which promises were broken until now."""
        return self.history.failures + judge(self.history.so_far())

    def finish(self) -> list[str]:
        """End the load; which promises were broken."""
        self.load.stop()
        final = self._final({did.key for did in self.history.so_far()})
        return self.history.failures + judge(self.history.so_far(), final, DEADLINES)

    def _final(self, keys: set[str]) -> dict[str, Seen]:
        """What each key is, as every node says, and the store too."""
        final = {
            entry.key.decode(): Seen(entry.value.decode(), entry.version)
            for entry in self.px.kv.scan()
        }
        ends: list[KeysClient] = [PxrsKeys(9, self.remote[0])]
        for name in self.names:
            endpoint, address = self._places[name]
            ends += [RestKeys(9, endpoint), RpcKeys(9, address)]
        for client in ends:
            for key in keys:
                called = monotonic()
                seen = client.get(key, "linearizable")
                assert seen is not None, f"{client.name} gets no answer"
                self.history.note(read(client, key, seen, called))
                if seen != final.get(key, NOTHING):
                    self.history.fail(f"{client.name} says {seen}, not {final.get(key)}")
            client.close()
        return final

    def _kill_all(self) -> None:
        for name, node in self.nodes.items():
            print(f"--- {name}\n{node.kill()}")


def slot_of(key: str) -> int:
    return slot_of_shard(shard_of(key.encode()))


class LateRead:
    """A read that comes to a frozen node, which does not know that others lead the key."""

    def __init__(self, history: History, node: NodeProcess, key: str) -> None:
        self._history = history
        self._key = key
        self._client = RestKeys(9, node.endpoint, PATIENCE)
        self._called = monotonic()
        self._failed = self._client.begin_get(key)

    def finish(self) -> None:
        """Waits until the node, which was woken, has answered."""
        seen = self._client.end_get(self._failed)
        if seen is not None:
            self._history.note(read(self._client, self._key, seen, self._called))
        self._client.close()


class LatePut:
    """As `LateRead`, with a put."""

    def __init__(self, history: History, node: NodeProcess, key: str) -> None:
        self._history = history
        self._key = key
        self._client = RestKeys(9, node.endpoint, PATIENCE)
        self._called = monotonic()
        self._value = f"late.{self._called}"
        self._failed = self._client.begin_put(key, self._value)

    def finish(self) -> None:
        """Waits until the node, which was woken, has answered."""
        written = self._client.end_put(self._failed)
        if written.outcome != "never":
            did = wrote(self._client, "put", self._key, self._value, written, self._called)
            self._history.note(did)
        self._client.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
