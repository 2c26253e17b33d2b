"""The nodes and which one leads each slot, as a client knows them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pxrs.client.stats import TopologyStats

_LOG = logging.getLogger("pxrs.remote")


class NodeAddress(NamedTuple):
    """A node that can be called."""

    name: str
    address: str


class NodesView(msgspec.Struct, frozen=True):
    """The nodes, and the name of the one that leads each slot. `epoch` rises with every change."""

    epoch: int = 0
    nodes: tuple[NodeAddress, ...] = ()
    slots: tuple[str | None, ...] = ()


class TopologyChange(NamedTuple):
    """A change of the view. `leaders`: slots with a new leader, and its name; None without one."""

    epoch: int
    added: tuple[NodeAddress, ...]
    removed: tuple[NodeAddress, ...]
    leaders: dict[int, str | None]


class Topology:
    """The latest view, and the leaders that nodes have named since. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.view = NodesView()
        self._nodes: dict[str, NodeAddress] = {}
        # By slot: nodes that another one has named as leader since the view.
        self._hints: dict[int, NodeAddress] = {}
        self._listeners: list[Callable[[TopologyChange], object]] = []
        self._changes = 0

    def leader_of(self, slot: int) -> NodeAddress | None:
        """The node that leads the slot; None if that is not known."""
        if (hinted := self._hints.get(slot)) is not None:
            return hinted
        view = self.view
        name = view.slots[slot] if slot < len(view.slots) else None
        return None if name is None else self._nodes.get(name)

    def learn(self, slot: int, leader: NodeAddress, epoch: int) -> None:
        """Note a leader that a node has named; it counts until the next view.

        `epoch`: of the view by which the node was asked. If another one came since, that counts.
        """
        with self._lock:
            if epoch == self.view.epoch:
                self._hints[slot] = leader

    def forget_hints(self, node: NodeAddress) -> None:
        """Drop the hints to a node that does not answer: the view counts again."""
        with self._lock:
            self._hints = {slot: it for slot, it in self._hints.items() if it.name != node.name}

    def update(self, view: NodesView) -> None:
        """Take a view, unless a later one is known, and call the listeners."""
        with self._lock:
            before = self.view
            if view.epoch <= before.epoch:
                return
            self._nodes = {node.name: node for node in view.nodes}
            self._hints = {}
            self.view = view
            self._changes += 1
            listeners = list(self._listeners)
        change = _difference(before, view)
        for listener in listeners:
            try:
                listener(change)
            except Exception:  # noqa: BLE001 - the program's error, not ours
                _LOG.exception("a listener for changes of the nodes failed")

    def on_change(self, listener: Callable[[TopologyChange], object]) -> Callable[[], None]:
        """Call the listener with each change; call the returned function to stop."""
        with self._lock:
            self._listeners.append(listener)

        def end() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return end

    @property
    def stats(self) -> TopologyStats:
        """The view's numbers, and the changes so far."""
        known = sum(name is not None for name in self.view.slots)
        return TopologyStats(self.view.epoch, known, self._changes)


def _difference(before: NodesView, now: NodesView) -> TopologyChange:
    old, new = set(before.nodes), set(now.nodes)
    return TopologyChange(
        now.epoch,
        tuple(sorted(new - old)),
        tuple(sorted(old - new)),
        {
            slot: leader
            for slot, leader in enumerate(now.slots)
            if slot >= len(before.slots) or before.slots[slot] != leader
        },
    )
