"""Sessions are leases: etcd itself removes the records of a lease that was not kept alive."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pxrs.clock import Clock
from pxrs.errors import SessionLost
from pxrs.stores.api import validate_ttl
from pxrs.stores.etcd.nodes import Node, Nodes
from pxrs.stores.etcd.wire import rpc


class EtcdSession:
    """A `Session`. Its id is that of its lease, as `etcdctl lease list` shows it."""

    def __init__(
        self,
        nodes: Nodes,
        clock: Clock,
        lease: int,
        ttl: float,
        sent: float,
        ended: Callable[[EtcdSession], None],
    ) -> None:
        self._nodes = nodes
        self._clock = clock
        self.id = session_id(lease)
        self.ttl = ttl
        self._lease = lease
        self._safe_until = sent + ttl
        self._over = False
        self._ended = ended

    def renew(self) -> None:
        if self._over or self._nodes.failed:
            raise SessionLost(f"session {self.id} is over; open a new one")
        sent = 0.0

        def send(node: Node, left: float, words: list[tuple[str, str]]) -> Any:
            nonlocal sent
            # Set again at each try: only the try that was answered counts.
            sent = self._clock.monotonic()
            stream = node.leases.LeaseKeepAlive(
                iter([rpc.LeaseKeepAliveRequest(ID=self._lease)]), timeout=left, metadata=words
            )
            return next(stream)

        if self._nodes.call(send).TTL <= 0:
            self._over = True
            self._ended(self)
            raise SessionLost(f"session {self.id} was not renewed in time; open a new one")
        self._safe_until = max(self._safe_until, sent + self.ttl)

    def remaining(self) -> float:
        if self._over or self._nodes.failed:
            return 0.0
        return max(0.0, self._safe_until - self._clock.monotonic())

    def close(self) -> None:
        self._over = True
        self._ended(self)
        if self._nodes.failed:
            return
        request = rpc.LeaseRevokeRequest(ID=self._lease)
        try:
            self._nodes.ask(lambda node: node.leases.LeaseRevoke, request, self._nodes.farewell())
        except SessionLost:
            # The lease has expired, or an earlier try was applied.
            return


def open_session(
    nodes: Nodes, clock: Clock, ttl: float, ended: Callable[[EtcdSession], None]
) -> EtcdSession:
    """Open a new lease. etcd counts whole seconds: it lives a little longer than `ttl`."""
    validate_ttl(ttl)
    sent = 0.0

    def send(node: Node, left: float, words: list[tuple[str, str]]) -> Any:
        nonlocal sent
        sent = clock.monotonic()
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl))
        return node.leases.LeaseGrant(request, timeout=left, metadata=words)

    granted = nodes.call(send)
    return EtcdSession(nodes, clock, granted.ID, ttl, sent, ended)


def session_id(lease: int) -> str:
    """A lease's number as etcd's own tools write it."""
    return f"{lease:x}"


def lease_of(session: str) -> int:
    """The lease of a session id; raises `SessionLost` if the id can't be a lease's."""
    try:
        lease = int(session, 16)
    except ValueError:
        lease = 0
    if not 0 < lease < 2**63:
        raise SessionLost(f"there is no session {session!r}")
    return lease
