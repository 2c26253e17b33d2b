"""Sessions that outlive the process that opened them: leases with a key that names their handle.

etcd lets any client keep a lease alive, and revoke it. So each lent lease has a key, bound to it
and readable with etcdctl, and a handle that adopts the session writes that key again. A handle does
not revoke the lease if another handle has written the key since; and a lease without that key is
not a lent session of pxrs.
"""

from __future__ import annotations

from typing import Any

from pxrs.clock import Clock
from pxrs.errors import SessionLost
from pxrs.stores.etcd.nodes import Nodes
from pxrs.stores.etcd.sessions import EtcdSession, lease_of, open_session
from pxrs.stores.etcd.wire import delete_op, exists, put_op, rpc, txn, unchanged


class LentSessions:
    """Opens and adopts them."""

    def __init__(self, nodes: Nodes, clock: Clock, folder: bytes) -> None:
        self._nodes = nodes
        self._clock = clock
        self._folder = folder

    def lend(self, ttl: float) -> LentEtcdSession:
        """Open a new session, which any process may adopt."""
        sent = self._clock.monotonic()
        session = open_session(self._nodes, self._clock, ttl, lambda _: None).id
        lease = lease_of(session)
        answer = self._send([], [put_op(self._key(session), repr(ttl).encode(), lease)])
        return self._session(lease, ttl, sent, answer)

    def adopt(self, session: str) -> LentEtcdSession:
        """Take over a living session; raises `SessionLost` if it is over."""
        lease, key = lease_of(session), self._key(session)
        found = self._nodes.ask(lambda node: node.kv.Range, rpc.RangeRequest(key=key)).kvs
        if not found:
            raise _lost(session)
        value = bytes(found[0].value)
        answer = self._send([exists(key)], [put_op(key, value, lease)])
        if not answer.succeeded:
            raise _lost(session)
        # The handle counts it as having no time left until it is renewed.
        adopted = self._session(lease, float(value), -float(value), answer)
        adopted.renew()
        return adopted

    def _session(self, lease: int, ttl: float, sent: float, answer: Any) -> LentEtcdSession:
        return LentEtcdSession(
            self._nodes, self._clock, lease, ttl, sent, self._folder, answer.header.revision
        )

    def _send(self, compares: list[Any], writes: list[Any]) -> Any:
        return self._nodes.ask(lambda node: node.kv.Txn, txn(compares, writes, []))

    def _key(self, session: str) -> bytes:
        return self._folder + session.encode()


class LentEtcdSession(EtcdSession):
    """See `pxrs.stores.api.LentSession`. `mark`: the revision of this handle's write of the key."""

    def __init__(
        self,
        nodes: Nodes,
        clock: Clock,
        lease: int,
        ttl: float,
        sent: float,
        folder: bytes,
        mark: int,
    ) -> None:
        super().__init__(nodes, clock, lease, ttl, sent, lambda _: None)
        self._key = folder + self.id.encode()
        self._mark = mark

    def abandon(self) -> None:
        self._over = True
        # A later adopter finds no key; one that has adopted it already has written the key again.
        mine = txn([unchanged(self._key, self._mark)], [delete_op(self._key)], [])
        if self._nodes.ask(lambda node: node.kv.Txn, mine).succeeded:
            self.close()


def _lost(session: str) -> SessionLost:
    return SessionLost(f"session {session} is over, or was not lent; open a new one")
