"""`px.client`: what a program can know of its nodes, and calls to one of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pxrs.client.link import Armed, Link
from pxrs.client.metrics import families
from pxrs.client.retry import Tries
from pxrs.client.router import Router
from pxrs.client.stats import ClientStats
from pxrs.client.stream import Pending
from pxrs.client.topology import NodeAddress, NodesView, Topology, TopologyChange
from pxrs.errors import Closed, NotLeader, OutcomeUnknown, PxrsError, StoreUnavailable

_LOG = logging.getLogger("pxrs.remote")
# A call leaves a node that is silent this long, if another node can answer it.
_SILENCE = 2.0
# How often the view is read even if the watch has reported no change.
_LOOK = 30.0
# How long it waits for the next attempt if the view could not be read.
_PAUSE = 1.0


class Client:
    """The nodes behind a `pxrs://` URL. Thread-safe."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._topology = Topology()
        self._router = Router(self._topology, link.retry.clock)
        self._following = threading.Lock()
        self._watch: Armed | None = None
        self._closed = threading.Event()

    def view(self) -> NodesView:
        """The nodes, and which one leads each slot, as this client knows it now."""
        self._follow()
        return self._topology.view

    def on_change(self, listener: Callable[[TopologyChange], object]) -> Callable[[], None]:
        """Call `listener` with each change of the nodes; call the returned function to stop.

        It is called by a thread of the client's, so it should not take long.
        """
        self._follow()
        return self._topology.on_change(listener)

    def stats(self) -> ClientStats:
        """The statistics since the client was opened."""
        link = self._link
        return ClientStats(
            self._router.stats,
            link.pool.stats,
            self._topology.stats,
            link.retry.stats,
            link.latencies.stats,
        )

    def collect(self) -> Iterator[Any]:
        """`stats` for Prometheus: `prometheus_client.REGISTRY.register(px.client)`."""
        return families(self.stats())

    # For keys

    def _node_for(self, key: bytes, tries: Tries) -> NodeAddress | None:
        """The node that leads the key; None if any will do."""
        self._follow(tries)
        return self._router.node_for(key)

    def _now(self) -> float:
        return self._link.retry.clock.monotonic()

    def _begin(self, ends: float | None = None) -> Tries:
        return self._link.retry.begin(ends)

    def _ask(self, node: NodeAddress | None, name: str, values: list[Any], tries: Tries) -> Any:
        """One attempt at a call to this node, or to any; raises the error that it is answered.

        Without an answer it raises `OutcomeUnknown` if the call may have been executed, else
        `StoreUnavailable`; the node is avoided for a while. The leader that `NotLeader` names is
        noted.
        """
        link, epoch = self._link, self._topology.view.epoch
        link.origin.refuse_child()
        method = link.methods[name]
        stream = None
        if node is not None:
            stream = link.pool.to_node(node.name, node.address, tries.ends)
            if stream is None:
                self._router.avoid(node)
                raise StoreUnavailable(f"the node at {node.address} can't be reached")
        else:
            stream = link.connected(tries)
        pending = Pending(link.pool.next_number(), method, method.encode(values))
        if link.answered(stream, pending, min(_SILENCE, tries.left)):
            try:
                return method.decode_answer(pending.body)
            except NotLeader as error:
                self._router.learn(error.key, NodeAddress(error.node, error.address), epoch)
                raise
            except StoreUnavailable:
                # Another node may reach the store.
                self._router.avoid(node) if node is not None else link.leave(stream)
                raise
        if node is not None:
            self._router.avoid(node)
        kind = OutcomeUnknown if pending.was_sent else StoreUnavailable
        raise kind(f"no answer came from the node at {stream.name} to {name}")

    # The view

    def _follow(self, tries: Tries | None = None) -> None:
        """Gets the view, and each change of it from then on. One thread asks, others wait for it.

        Each of them only until its own deadline: the thread that asks may have a later one.
        """
        if self._watch is not None:
            return
        tries = tries or self._begin()
        while not self._following.acquire(timeout=tries.left):
            tries.again(StoreUnavailable("no node has told in time which nodes there are"))
        try:
            if self._watch is None:
                watch = self._link.watch("node.watch_view", tries=tries)
                try:
                    self._topology.update(self._link.call_within(tries, "node.view"))
                except BaseException:
                    watch.close()
                    raise
                self._watch = watch
                follower = threading.Thread(
                    target=self._follow_changes, args=(watch,), name="pxrs-topology", daemon=True
                )
                follower.start()
        finally:
            self._following.release()

    def _follow_changes(self, watch: Armed) -> None:
        is_behind = False
        while not self._closed.is_set():
            try:
                # Changes from before the view was read are in it.
                if not is_behind:
                    watch.wait(_LOOK)
                # Until the view was read: the watch does not report this change again.
                is_behind = True
                if not self._closed.is_set():
                    self._topology.update(self._link.call("node.view"))
                is_behind = False
            except Closed:
                return
            except PxrsError as error:
                _LOG.debug("the view of the nodes could not be read: %s", error)
                self._closed.wait(_PAUSE)
            except Exception:  # noqa: BLE001 - logged, and tried again
                # A bug of ours. Without this thread the view would stay as it is.
                _LOG.exception("a look at the view of the nodes failed")
                self._closed.wait(_PAUSE)

    def _close(self) -> None:
        self._closed.set()
        if self._watch is not None:
            self._watch.wake()
