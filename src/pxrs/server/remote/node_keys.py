"""Keys and values for `pxrs://` clients: batches of writes, on the node that leads the keys."""

from __future__ import annotations

import re

from pxrs.client.topology import NodeAddress, NodesView
from pxrs.core import kv
from pxrs.core.kv import Change, KeyBatch, Writer, Written
from pxrs.errors import InvalidRequest, PxrsError, quoted
from pxrs.kv.store import KeyValues, check_version
from pxrs.server.cluster import Cluster
from pxrs.types import Entry

# What one answer holds; it ends with the value that goes beyond.
_MOST_READ = 100
_MOST_READ_BYTES = 2**18
_WRITER = re.compile(r"[0-9a-f]{16}\.[0-9]{1,9}")


class NodeKeys:
    """See `pxrs.stores.remote.wire.KeyCalls`. Without a cluster it leads every key. Thread-safe."""

    def __init__(self, keys: KeyValues, cluster: Cluster | None = None) -> None:
        self._keys = keys
        self._cluster = cluster

    def write(
        self, writer: str, number: int, changes: list[Change], again: bool
    ) -> list[Written | PxrsError]:
        """Writes a batch, once. One that is sent again is taken whoever leads its keys."""
        if not _WRITER.fullmatch(writer) or not 1 <= number < 2**53 or not changes:
            raise InvalidRequest(
                f"a batch needs a writer, a number and writes, got {quoted(writer)}"
            )
        for change in changes:
            self._check(change)
            if self._cluster is not None and not again:
                self._cluster.refuse_led_elsewhere(change.key)
        if kv.count_together(changes, self._keys._coord.limits) < len(changes):
            raise InvalidRequest("a batch of writes is larger than one commit of the store can be")
        (answers,) = self._keys._do_all([KeyBatch(changes, Writer(writer, number, again))])
        if isinstance(answers, BaseException):
            raise answers
        return answers

    def read(self, keys: list[bytes]) -> list[Entry | None]:
        """The present entries of the first of these keys, as many as an answer holds."""
        if not keys:
            raise InvalidRequest("a read needs keys")
        found: list[Entry | None] = []
        size = 0
        for key in keys[:_MOST_READ]:
            found.append(entry := self._keys.get(key))
            size += len(entry.value) if entry is not None else 0
            if size > _MOST_READ_BYTES:
                break
        return found

    def _check(self, change: Change) -> None:
        if change.expired:
            raise InvalidRequest("only a node can delete what has expired")
        check_version(change.if_match)
        if change.value is None and change.ttl_ms:
            raise InvalidRequest("a delete has no ttl")
        self._keys._ttl_ms(change.ttl_ms / 1000 if change.ttl_ms else None)
        kv.check_change(change, self._keys._coord.limits)


def view_of(cluster: Cluster) -> NodesView:
    """The nodes, and who leads each slot."""
    view = cluster.view
    nodes = [NodeAddress(it.name, it.address) for it in view.nodes]
    return NodesView(view.epoch, tuple(sorted(nodes)), view.slots)
