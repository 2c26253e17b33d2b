"""Messages that a transaction will send: routed at once, encoded and appended at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pxrs.clock import Clock
from pxrs.codec.batches import encode
from pxrs.core.routing import hasher
from pxrs.errors import MessageTooLarge, PartitionNotFound
from pxrs.producing.records import NO_HEADERS, checked_headers
from pxrs.serde import to_bytes
from pxrs.topics import Topics
from pxrs.types import Append, Header, LogPartition, Topic

_MOST_BYTES = 2**20
_Record = tuple[bytes | None, bytes | None, list[Header], int]


class Outgoing:
    """Collects messages. They carry no producer id: a rollback would leave a gap."""

    def __init__(self, topics: Topics, clock: Clock) -> None:
        self._topics = topics
        self._clock = clock
        self._known: dict[str, Topic] = {}
        self._records: defaultdict[LogPartition, list[_Record]] = defaultdict(list)
        self._loose = 0

    def send(
        self,
        topic: str,
        value: Any,
        key: Any,
        partition: int | None,
        headers: Sequence[Header] | None,
    ) -> None:
        """Add a message; bad input raises here, not at the end."""
        if topic not in self._known:
            self._known[topic] = self._topics.find(topic)
        found = self._known[topic]
        body = None if value is None else to_bytes(value, "value")
        name = None if key is None else to_bytes(key, "key")
        if len(body or b"") + len(name or b"") > _MOST_BYTES:
            raise MessageTooLarge(f"over {_MOST_BYTES} bytes; send it outside of the transaction")
        if partition is None:
            partition = self._route(found, name)
        elif not 0 <= partition < found.partitions:
            raise PartitionNotFound(topic, partition, found.partitions)
        record = (
            name,
            body,
            checked_headers(headers) if headers else NO_HEADERS,
            self._clock.wall_ms(),
        )
        self._records[LogPartition(found.id, partition)].append(record)

    def appends(self) -> list[Append]:
        """One batch per partition, sorted: transactions that meet never wait in a circle."""
        return [Append(where, encode(self._records[where])) for where in sorted(self._records)]

    def _route(self, topic: Topic, key: bytes | None) -> int:
        if key is not None:
            return hasher("xxhash", topic.partitions)(key) % topic.partitions
        self._loose += 1
        return self._loose % topic.partitions
