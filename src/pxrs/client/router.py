"""Which node a key goes to: its hash, its shard, the shard's slot, the slot's leader."""

from __future__ import annotations

import threading

from pxrs.client.stats import RouterStats
from pxrs.client.topology import NodeAddress, Topology
from pxrs.clock import Clock
from pxrs.core.kv import SHARDS, shard_of, slot_of_shard

# How long a node that did not answer is avoided, unless the view changes.
_AVOIDED = 3.0


class Router:
    """Finds the node for a key. Thread-safe."""

    def __init__(self, topology: Topology, clock: Clock) -> None:
        self._topology = topology
        self._clock = clock
        self._lock = threading.Lock()
        self._avoided: dict[str, float] = {}
        self._to_leader = self._elsewhere = self._hints = 0

    def node_for(self, key: bytes) -> NodeAddress | None:
        """The node that leads the key; None if any node will do."""
        leader = self._topology.leader_of(slot_of_shard(shard_of(key)))
        found = leader is not None and not self._is_avoided(leader.name)
        with self._lock:
            self._to_leader += found
            self._elsewhere += not found
        return leader if found else None

    def learn(self, key: bytes, leader: NodeAddress, epoch: int) -> None:
        """Note that a node has named another one as the leader of this key. See `Topology`."""
        with self._lock:
            self._hints += 1
        self._topology.learn(slot_of_shard(shard_of(key)), leader, epoch)

    def avoid(self, node: NodeAddress) -> None:
        """Note that the node does not answer."""
        with self._lock:
            self._avoided[node.name] = self._clock.monotonic() + _AVOIDED
        self._topology.forget_hints(node)

    def _is_avoided(self, name: str) -> bool:
        until = self._avoided.get(name)
        return until is not None and self._clock.monotonic() < until

    @property
    def stats(self) -> RouterStats:
        """The counts so far."""
        nodes = len(self._topology.view.nodes)
        return RouterStats(nodes, SHARDS, self._to_leader, self._elsewhere, self._hints)
