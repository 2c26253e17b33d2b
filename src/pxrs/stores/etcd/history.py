"""Checks whether the cluster that answers is still the one that this handle has known.

A cluster whose data was wiped comes back at the same addresses, with the same cluster id if it has
the same flags, and counts revisions from the beginning. Then a version that was read before may be
that of a different write, a watch waits for revisions that are far away, and no lease is known. So
the first commit under a prefix leaves a *mark* there, a random word, and every transaction is
conditional on it. Three things show that history was lost: another mark or none, another cluster
id, and a read or transaction that is answered with a lower revision than one which was answered
before it was sent (as after a restored backup).

Then what this handle knows may be wrong, and it can't find out which part. So it refuses everything
from then on; a handle that is opened afterwards starts with the data that is in the cluster.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pxrs.errors import StoreDamaged
from pxrs.stores.etcd.nodes import Node, Nodes, Words
from pxrs.stores.etcd.wire import first_kv, get_op, has_value, put_op, rpc, txn, unchanged

_LOG = logging.getLogger("pxrs.etcd")


class History:
    """The mark at `key`, and the highest revision that an answer has shown."""

    def __init__(self, nodes: Nodes, key: bytes, lost: Callable[[], None]) -> None:
        self.key = key
        self._nodes = nodes
        self._lost = lost
        self._lock = threading.Lock()
        self._mark: bytes | None = None
        self._cluster: int | None = None
        self._revision = 0

    def ask(self, method: Callable[[Node], Any], request: Any) -> Any:
        """Send a read or transaction; returns its answer after checking its history."""
        return self.follow(lambda: self._nodes.ask(method, request))

    def follow(self, request: Callable[[], Any]) -> Any:
        """As `ask`, for a request that is sent in another way."""
        # Read before sending: of two requests that are under way, either may be answered first.
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

    def read(self, request: Callable[[], Any]) -> Any:
        """Read records; `request` makes the request for each try.

        As long as this handle knows no mark, it reads that in the same transaction. So it never
        knows the version of a record without the mark of the history that the version is of.
        """
        if self._mark is not None:
            return self.follow(
                lambda: self._nodes.call(
                    lambda node, left, words: node.kv.Range(request(), timeout=left, metadata=words)
                )
            )
        known = self._mark

        def send(node: Node, left: float, words: Words) -> Any:
            both = txn([], [get_op(self.key), rpc.RequestOp(request_range=request())], [])
            return node.kv.Txn(both, timeout=left, metadata=words)

        answer = self.follow(lambda: self._nodes.call(send))
        self._compare(known, first_kv(answer.responses[0]))
        return answer.responses[1].response_range

    def read_along(self, operations: Sequence[Any]) -> Sequence[Any]:
        """Read several keys in one transaction that reads the mark, too; returns the responses."""
        known = self._mark
        request = txn([], [get_op(self.key), *operations], [])
        answer = self.ask(lambda node: node.kv.Txn, request)
        self._compare(known, first_kv(answer.responses[0]))
        responses: Sequence[Any] = answer.responses[1:]
        return responses

    def condition(self) -> Any:
        """A comparison that holds while the mark is the same. The first call makes the mark."""
        mark = self._mark
        if mark is None:
            made = secrets.token_hex(8).encode()
            request = txn([unchanged(self.key, 0)], [put_op(self.key, made)], [get_op(self.key)])
            answer = self.ask(lambda node: node.kv.Txn, request)
            found = None if answer.succeeded else first_kv(answer.responses[0])
            mark = made if found is None else bytes(found.value)
            self._learn(mark)
        return has_value(self.key, mark)

    def check(self) -> None:
        """Read the mark and compare it; raises `StoreDamaged` if it is another one."""
        known = self._mark
        found = self.ask(lambda node: node.kv.Range, rpc.RangeRequest(key=self.key)).kvs
        self._compare(known, found[0] if found else None)

    def compare(self, found: Any | None) -> None:
        """Compare the mark as a transaction with `condition` has read it."""
        self._compare(self._mark, found)

    def _compare(self, known: bytes | None, found: Any | None) -> None:
        """Compare the mark as it was read; raises `StoreDamaged` if it is another one.

        `known`: what this handle knew before it read. If that was nothing, and nothing was there,
        another thread may have made the mark since.
        """
        if known is not None or found is not None:
            self._learn(None if found is None else bytes(found.value))

    def _learn(self, mark: bytes | None) -> None:
        with self._lock:
            if self._mark is None:
                self._mark = mark
            if mark == self._mark:
                return
        self._lose(f"{self.key.decode()} is {'gone' if mark is None else 'another one'}")

    def _lose(self, sign: str) -> None:
        error = StoreDamaged(
            f"etcd has lost its data: {sign}; restore it, or start this program again to go on "
            "with the data that it has now (topics that are gone must be created again)"
        )
        if self._nodes.fail(error):
            _LOG.error("%s", error)
            self._lost()
        raise error
