"""Tells whether the cluster that answers is still the one that this handle has known.

A cluster whose data was wiped comes back at the same addresses, with the same cluster id if it has
the same flags, and counts revisions from the beginning. A version that was read before may be that
of quite another write then, a watch waits for revisions that are long in coming, and no lease is
known. So the first commit under a prefix leaves a *mark* there, a random word, and every
transaction is conditional on it. Three things show that history was lost: another mark or none,
another cluster id, and a read or transaction that is answered with a lower revision than one which
was answered before it was sent (as after a restored backup).

What this handle knows is worth nothing then, and it can't tell which of it. It refuses everything
from then on; a handle that is opened afterwards starts with what is there.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

from pxrs.errors import StoreDamaged
from pxrs.stores.etcd.nodes import Node, Nodes
from pxrs.stores.etcd.wire import first_kv, get_op, has_value, put_op, rpc, txn, unchanged

_LOG = logging.getLogger("pxrs.etcd")


class History:
    """The mark at `key`, and the highest revision that an answer has shown."""

    def __init__(self, nodes: Nodes, key: bytes, lost: Callable[[], None]) -> None:
        self.key = key
        self._nodes = nodes
        self._lost = lost
        self._mark: bytes | None = None
        self._cluster: int | None = None
        self._revision = 0

    def ask(self, method: Callable[[Node], Any], request: Any) -> Any:
        """The answer to a read or transaction, of the history that is known."""
        return self.follow(lambda: self._nodes.ask(method, request))

    def follow(self, request: Callable[[], Any]) -> Any:
        """As `ask`: for what is sent in another way."""
        # Before it is sent: of two that are under way at once either may be answered first.
        known = self._revision
        answer = request()
        header = answer.header
        if self._cluster is None:
            self._cluster = header.cluster_id
        if header.cluster_id != self._cluster:
            self._lose(f"the cluster's id is {header.cluster_id:x}, and was {self._cluster:x}")
        if header.revision < known:
            self._lose(f"its revision is {header.revision}, and was {known}")
        self._revision = max(self._revision, header.revision)
        return answer

    def condition(self) -> Any:
        """Holds while history is what it was. The first who needs it makes the mark."""
        if self._mark is None:
            made = secrets.token_hex(8).encode()
            request = txn([unchanged(self.key, 0)], [put_op(self.key, made)], [get_op(self.key)])
            answer = self.ask(lambda node: node.kv.Txn, request)
            found = None if answer.succeeded else first_kv(answer.responses[0])
            self._mark = made if found is None else bytes(found.value)
        return has_value(self.key, self._mark)

    def check(self) -> None:
        """Read the mark and compare it; `StoreDamaged` if it is another one."""
        found = self.ask(lambda node: node.kv.Range, rpc.RangeRequest(key=self.key)).kvs
        self.compare(found[0] if found else None)

    def compare(self, found: Any | None) -> None:
        """Compare the mark as it was read; `StoreDamaged` if it is another one."""
        mark = None if found is None else bytes(found.value)
        if self._mark is None:
            self._mark = mark
        elif mark != self._mark:
            name = self.key.decode()
            self._lose(f"{name} is {'gone' if mark is None else 'another one'}")

    def _lose(self, sign: str) -> None:
        error = StoreDamaged(
            f"etcd has lost what was in it: {sign}; restore its data, or start this program again "
            "to go on with what is there now (topics that are gone must be created again)"
        )
        if self._nodes.fail(error):
            _LOG.error("%s", error)
            self._lost()
        raise error
