"""LogStore on PostgreSQL: one row per batch, appended by `pxrs_append` in one round trip.

Offsets are assigned under the lock of the partition's row, in the transaction that appends. That
row is locked but not written, and a batch's row is written once: so an old transaction, which keeps
dead rows from being removed, slows nothing down.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from typing import Any

from pxrs.core.sequences import fenced, gap
from pxrs.errors import (
    InvalidRequest,
    OffsetOutOfRange,
    PartitionNotFound,
    PxrsError,
    TopicExists,
    TopicNotFound,
)
from pxrs.stores.api import Watch, validate_batch
from pxrs.stores.postgres.arrays import Byteas, Int8s, Texts
from pxrs.stores.postgres.change_listener import ChangeListener
from pxrs.stores.postgres.database import Database, Pg, Row
from pxrs.stores.postgres.functions import APPENDED, DUPLICATE, FENCED, GAP, NO_TOPIC
from pxrs.stores.postgres.notifier import place_of
from pxrs.stores.rows import storable, up_to_a_hole
from pxrs.stores.table_log import DELETED, END, OWNER, TableLog, of_another_store, validate_topic
from pxrs.stores.wakeups import PARTITION
from pxrs.types import Append, Appended, Fetched, LogPartition

_CHUNK = 500
_PLAN = 1024

_APPEND = """SELECT status, r_base, detail FROM @.pxrs_append(%b::text[], %b::int8[], %b::int8[],
    %b::int8[], %b::int8[], %b::int8[], %b::int8[], %b::bytea[])"""
# One statement, so one snapshot: bounds and batches belong together.
_BATCHES = """(SELECT q.base, q.next, q.data FROM (
            SELECT b.base, b.next, b.size, b.data, sum(b.size) OVER (ORDER BY b.base) AS total
            FROM @.pxrs_log_batches b WHERE b.part = p.id AND b.base >= coalesce((
                SELECT max(o.base) FROM @.pxrs_log_batches o
                WHERE o.part = p.id AND o.base <= {offset}), 0)
            ORDER BY b.base LIMIT {most}) q
        WHERE q.total <= %b::int8 OR q.total = q.size) f"""
_FETCH = f"""SELECT p.start, {END}, f.base, f.next, f.data, p.id
    FROM @.pxrs_log_partitions p
    LEFT JOIN LATERAL {_BATCHES.format(offset="%b::int8", most=_PLAN)} ON true
    WHERE p.topic_id = %b AND p.partition = %b ORDER BY f.base"""
# Sorting moves no data: the server reads it from the TOAST table when it sends the row.
_FETCH_MANY = f"""SELECT u.n, p.start, {END}, f.base, f.next, f.data, p.id
    FROM unnest(%b::text[], %b::int4[], %b::int8[])
        WITH ORDINALITY AS u(topic, partition, at, n)
    LEFT JOIN @.pxrs_log_partitions p ON p.topic_id = u.topic AND p.partition = u.partition
    LEFT JOIN LATERAL {_BATCHES.format(offset="u.at", most=_PLAN)} ON true
    ORDER BY u.n, f.base"""


class PostgresLog(TableLog):
    """See `pxrs.stores.api.LogStore`."""

    def __init__(self, database: Database, changes: ChangeListener) -> None:
        self._database = database
        self._changes = changes

    def create(self, topic_id: str, partitions: int) -> None:
        validate_topic(topic_id, partitions)
        self._sweep_deleted()
        owner = self.owner()
        # Of two stores that make it at once, one waits for the other's first row and makes none:
        # the owner is the store that made the rows.
        self._database.write(
            "WITH made AS (INSERT INTO @.pxrs_log_partitions (topic_id, partition) "
            "SELECT %b::text, n FROM generate_series(0, %b - 1) n WHERE NOT EXISTS "
            "(SELECT 1 FROM @.pxrs_log_partitions WHERE topic_id = %b::text) "
            "ON CONFLICT DO NOTHING RETURNING partition) "
            "INSERT INTO @.pxrs_meta (name, value) SELECT %b::text, %b::text FROM made "
            "WHERE partition = 0 ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (topic_id, partitions, topic_id, OWNER + topic_id, owner),
        )
        held = len(self.bounds(topic_id))
        if held != partitions:
            raise TopicExists(f"log {topic_id} has {held} partitions, not {partitions}")
        if self._owner_of(topic_id) != owner:
            raise of_another_store(topic_id)

    def _owner_of(self, topic_id: str) -> str:
        """The store that made the topic; empty for this database's own, and of earlier releases."""
        rows = self._database.read(
            "SELECT value FROM @.pxrs_meta WHERE name = %b", (OWNER + topic_id,)
        )
        return str(rows[0][0]) if rows else ""

    def drop(self, topic_id: str) -> None:
        owner = self.owner()
        # The owner is read before the partitions are locked. But partitions that another store has
        # made in between are not in this statement's snapshot, as their owner is not.
        rows = self._database.write(
            "WITH held AS (SELECT id FROM @.pxrs_log_partitions WHERE topic_id = %b "
            "AND NOT EXISTS (SELECT 1 FROM @.pxrs_meta WHERE name = %b::text "
            "AND value NOT IN ('', %b::text)) ORDER BY partition FOR UPDATE), "
            "forgotten AS (DELETE FROM @.pxrs_meta WHERE name = %b::text "
            "AND value IN ('', %b::text)) "
            "UPDATE @.pxrs_log_partitions p SET topic_id = %b || p.id || '/' || topic_id "
            "FROM held WHERE p.id = held.id RETURNING partition",
            (topic_id, *(OWNER + topic_id, owner) * 2, DELETED),
        )
        self._changes.ring(PARTITION, [place_of(LogPartition(topic_id, row[0])) for row in rows])
        self._sweep_deleted()

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        sorted_out = _Order(appends)
        if sorted_out.good:
            sorted_out.answer(self._database.write(_APPEND, sorted_out.parameters()))
            self._changes.ring(PARTITION, map(place_of, sorted_out.changed()))
        return sorted_out.results

    def apply(self, connection: Pg, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        """`append` inside a transaction; the caller that commits must ring."""
        sorted_out = _Order(appends)
        if sorted_out.good:
            parameters = sorted_out.parameters()
            sorted_out.answer(self._database.run_inside(connection, _APPEND, parameters))
        return sorted_out.results

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        rows = self._database.read(
            _FETCH, (storable(offset), storable(max_bytes), where.topic_id, where.partition)
        )
        return self._fetched(where, offset, rows)

    def fetch_many(
        self, places: Sequence[tuple[LogPartition, int]], max_bytes: int
    ) -> Generator[Fetched | PxrsError]:
        """See `pxrs.stores.api.FetchesMany`."""
        parameters = (
            [where.topic_id for where, _ in places],
            [where.partition for where, _ in places],
            [storable(offset) for _, offset in places],
            storable(max_bytes),
        )
        answered = 0
        with closing(self._database.stream(_FETCH_MANY, parameters)) as coming:
            try:
                for number, rows in groupby(coming, key=itemgetter(0)):
                    where, offset = places[number - 1]
                    found = [row[1:] for row in rows]
                    try:
                        yield self._fetched(where, offset, found if found[0][0] is not None else [])
                    except PxrsError as error:
                        yield error
                    answered += 1
            except PxrsError as error:
                for _ in places[answered:]:
                    yield error

    def _fetched(self, where: LogPartition, offset: int, rows: list[Row]) -> Fetched:
        if not rows:
            raise self._not_there(where)
        start, end, first = rows[0][:3]
        if not start <= offset <= end:
            raise OffsetOutOfRange(where.topic_id, where.partition, offset, start, end)
        if offset == end:
            return Fetched([], start, end)
        if first is None or not first <= offset < rows[0][3]:
            raise self._missing(where, rows[0][5], offset, end)
        return Fetched(up_to_a_hole([row[2:5] for row in rows]), start, end)

    def trim(self, where: LogPartition, before: int) -> int:
        part = self._part(where)
        statement = "SELECT r_start, gone FROM @.pxrs_trim(%b, %b, %b)"
        while True:
            rows = self._database.write(statement, (part, storable(before), _CHUNK))
            if not rows:
                raise TopicNotFound(where.topic_id)
            start, gone = rows[0]
            if gone < _CHUNK:
                return int(start)

    def watch(self, *where: LogPartition) -> Watch:
        return self._changes.watch(PARTITION, map(place_of, where))

    def close(self) -> None:
        pass

    def _rows(self, statement: str, values: Sequence[object]) -> list[Row]:
        return self._database.read(statement, values)

    def _part(self, where: LogPartition) -> int:
        rows = self._database.read(
            "SELECT id FROM @.pxrs_log_partitions WHERE topic_id = %b AND partition = %b",
            (where.topic_id, storable(where.partition)),
        )
        if not rows:
            raise self._not_there(where)
        return int(rows[0][0])

    def _not_there(self, where: LogPartition) -> PxrsError:
        try:
            return PartitionNotFound(*where, len(self.bounds(where.topic_id)))
        except TopicNotFound as error:
            return error

    def _sweep_deleted(self) -> None:
        """Give back the space of dropped partitions, a piece at a time."""
        some = """WITH gone AS (DELETE FROM @.pxrs_log_batches WHERE part = %b AND base IN (
            SELECT base FROM @.pxrs_log_batches WHERE part = %b ORDER BY base LIMIT %b) RETURNING 1)
            SELECT count(*) FROM gone"""
        for part in self._dropped():
            while self._database.write(some, (part, part, _CHUNK))[0][0] == _CHUNK:
                pass
            for table, column in (("producers", "part"), ("partitions", "id")):
                self._database.write(f"DELETE FROM @.pxrs_log_{table} WHERE {column} = %b", (part,))


class _Order:
    """The batches of one append, ordered by partition: every append takes locks in this order."""

    def __init__(self, appends: Sequence[Append]) -> None:
        self._appends = appends
        self.results: list[Appended | PxrsError] = []
        self.good: list[int] = []
        for number, append in enumerate(appends):
            try:
                validate_batch(append.batch)
            except InvalidRequest as error:
                self.results.append(error)
            else:
                self.results.append(Appended(-1))
                self.good.append(number)
        self.good.sort(key=lambda number: appends[number].where)

    def parameters(self) -> tuple[list[Any], ...]:
        """One list per parameter of `pxrs_append`. The server fills in the base offset."""
        rows = [
            (
                *append.where,
                append.batch.count,
                append.batch.max_timestamp,
                append.batch.producer_id,
                append.batch.producer_epoch,
                append.batch.base_sequence,
                memoryview(append.batch.data)[8:],
            )
            for append in map(self._appends.__getitem__, self.good)
        ]
        topics, *numbers, batches = zip(*rows, strict=True)
        return Texts(topics), *map(Int8s, numbers), Byteas(batches)

    def answer(self, rows: Sequence[Row]) -> None:
        """Translates the answer of `pxrs_append`."""
        for number, row in zip(self.good, rows, strict=True):
            self.results[number] = _answer(self._appends[number], *row)

    def changed(self) -> set[LogPartition]:
        """The partitions that got new batches."""
        pairs = zip(self._appends, self.results, strict=True)
        return {append.where for append, result in pairs if isinstance(result, Appended)}


def _answer(
    append: Append, status: int, base: int | None, detail: int | None
) -> Appended | PxrsError:
    if status in (APPENDED, DUPLICATE) and base is not None:
        return Appended(base, duplicate=status == DUPLICATE)
    if status == NO_TOPIC or detail is None:
        return TopicNotFound(append.where.topic_id)
    if status == FENCED:
        return fenced(append.batch, detail)
    if status == GAP:
        return gap(append.batch, detail)
    return PartitionNotFound(*append.where, detail)
