"""A log in tables: the queries that are the same on every engine that keeps its log in tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pxrs.errors import DamagedBatch, InvalidRequest, TopicExists, TopicNotFound
from pxrs.stores.api import validate_partitions
from pxrs.stores.rows import first_kept, storable
from pxrs.types import Bounds, LogPartition

# A dropped topic's partitions are renamed first, so that no reader finds them while they are being
# deleted. The new names differ: the same topic may be dropped again before the first ones are gone.
DELETED = "!"
# The row of `pxrs_meta`, before the topic's id, that names the store that made the topic.
OWNER = "log-owner/"
END = """coalesce((SELECT b.next FROM @.pxrs_log_batches b WHERE b.part = p.id
    ORDER BY b.base DESC LIMIT 1), p.floor)"""


class TableLog(ABC):
    """The part of a `LogStore` that only reads. `@.` stands for the schema, `%b` for a value."""

    @abstractmethod
    def _rows(self, statement: str, values: Sequence[object]) -> list[Any]: ...

    @abstractmethod
    def _part(self, where: LogPartition) -> int:
        """The row id of a partition; raises `TopicNotFound` or `PartitionNotFound`."""

    # Set by `owned_by`.
    _identity: Callable[[], str] | None = None

    @abstractmethod
    def trim(self, where: LogPartition, before: int) -> int: ...

    def owned_by(self, identity: Callable[[], str]) -> None:
        """See `pxrs.stores.api.KeepsOwners`."""
        self._identity = identity

    def owner(self) -> str:
        """See `pxrs.stores.api.KeepsOwners`. Empty for the store of this database itself."""
        return "" if self._identity is None else self._identity()

    def held(self) -> dict[str, str]:
        """See `pxrs.stores.api.KeepsOwners`."""
        rows = self._rows(
            "SELECT DISTINCT p.topic_id, coalesce(m.value, '') FROM @.pxrs_log_partitions p "
            "LEFT JOIN @.pxrs_meta m ON m.name = %b || p.topic_id "
            "WHERE substr(p.topic_id, 1, 1) <> %b ORDER BY 1",
            (OWNER, DELETED),
        )
        return {topic_id: str(owner) for topic_id, owner in rows}

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        rows = self._rows(
            f"SELECT p.partition, p.start, {END} FROM @.pxrs_log_partitions p "
            "WHERE p.topic_id = %b ORDER BY p.partition",
            (topic_id,),
        )
        if not rows:
            raise TopicNotFound(topic_id)
        return {row[0]: Bounds(row[1], row[2]) for row in rows}

    def size(self, where: LogPartition) -> int:
        statement = "SELECT coalesce(sum(size), 0) FROM @.pxrs_log_batches WHERE part = %b"
        return int(self._rows(statement, (self._part(where),))[0][0])

    def sizes(self, topic_id: str) -> dict[int, int]:
        rows = self._rows(
            "SELECT p.partition, coalesce((SELECT sum(b.size) FROM @.pxrs_log_batches b "
            "WHERE b.part = p.id), 0) FROM @.pxrs_log_partitions p WHERE p.topic_id = %b",
            (topic_id,),
        )
        if not rows:
            raise TopicNotFound(topic_id)
        return {row[0]: int(row[1]) for row in rows}

    def batch_at(self, where: LogPartition, timestamp: int) -> int | None:
        rows = self._rows(
            "SELECT base FROM @.pxrs_log_batches WHERE part = %b AND max_timestamp >= %b "
            "ORDER BY base LIMIT 1",
            (self._part(where), storable(timestamp)),
        )
        return rows[0][0] if rows else None

    def expire(
        self, where: LogPartition, before_timestamp: int | None, max_bytes: int | None
    ) -> int:
        rows = self._rows(
            "SELECT base, max_timestamp, size FROM @.pxrs_log_batches WHERE part = %b "
            "ORDER BY base",
            (self._part(where),),
        )
        return self.trim(where, first_kept(rows, before_timestamp, max_bytes))

    def _missing(self, where: LogPartition, part: int, offset: int, end: int) -> DamagedBatch:
        statement = "SELECT min(base) FROM @.pxrs_log_batches WHERE part = %b AND base > %b"
        ((following,),) = self._rows(statement, (part, offset))
        next_offset = end if following is None else following
        return DamagedBatch(*where, offset, next_offset, "it is not there")

    def _dropped(self) -> list[int]:
        """The row ids of partitions that were dropped and are not deleted yet."""
        statement = "SELECT id FROM @.pxrs_log_partitions WHERE topic_id >= %b AND topic_id < %b"
        rows = self._rows(statement, (DELETED, chr(ord(DELETED) + 1)))
        return [part for (part,) in rows]


def of_another_store(topic_id: str) -> TopicExists:
    """The error for a topic that another store has made, or an unknown one, under the same id."""
    return TopicExists(
        f"log {topic_id} was made by another store; use another database for one of them"
    )


def validate_topic(topic_id: str, partitions: int) -> None:
    """Refuse a topic that no table could hold, or that would count as dropped."""
    validate_partitions(partitions)
    if topic_id.startswith(DELETED):
        raise InvalidRequest(f"topic id must not start with {DELETED}, got {topic_id!r}")
