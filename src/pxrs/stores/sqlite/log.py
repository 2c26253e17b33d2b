"""LogStore on SQLite: one row per batch.

Offsets are given inside the transaction that appends, under the file's one writer. An append
of any number of batches to any number of partitions takes three statements between BEGIN and
COMMIT: beside a computing thread every statement can cost 5 ms, to get the interpreter lock back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from pxrs.clock import Clock
from pxrs.codec.batches import set_base_offset
from pxrs.core.sequences import Duplicate, is_first, judge_packed
from pxrs.errors import (
    InvalidRequest,
    OffsetOutOfRange,
    PartitionNotFound,
    PxrsError,
    TopicExists,
    TopicNotFound,
)
from pxrs.stores.api import validate_batch
from pxrs.stores.rows import storable, up_to_a_hole
from pxrs.stores.sqlite.age import DAY_MS, Age, note
from pxrs.stores.sqlite.change_counters import slot
from pxrs.stores.sqlite.change_listener import ChangeListener, SlotWatch
from pxrs.stores.sqlite.database import Database, Turn, in_chunks
from pxrs.stores.table_log import DELETED, END, OWNER, TableLog, of_another_store, validate_topic
from pxrs.types import Append, Appended, Fetched, LogPartition

PRODUCER_MEMORY_MS = 7 * DAY_MS
_CHUNK = 500
# How many batches one fetch returns at most, and how many it reads before it adds up sizes: adding
# them up costs more than reading a few batches.
_MOST_BATCHES, _FIRST_LOOK = 1024, 16

_END = END.replace("@.", "")
_HEADS = f"""SELECT p.id, {_END}, s.state, a.ms, a.read FROM pxrs_age a, pxrs_log_partitions p
    LEFT JOIN pxrs_log_producers s ON s.part = p.id AND s.producer = ?
    WHERE substr(p.topic_id, 1, 1) <> '{DELETED}' AND p.id IN ("""
_PLACE = f"""SELECT p.start, {_END},
    (SELECT max(base) FROM pxrs_log_batches WHERE part = p.id AND base <= ?)
    FROM pxrs_log_partitions p WHERE p.id = ? AND p.topic_id = ?"""
# As many of some rows as fit, for the parameters that `_read` gives.
_FETCH = """SELECT base, next, data FROM pxrs_log_batches WHERE part = ? AND base >= ?
    AND base < coalesce((SELECT base FROM (
        SELECT base, sum(size) OVER (ORDER BY base) AS total FROM pxrs_log_batches
        WHERE part = ? AND base >= ? ORDER BY base LIMIT ?)
        WHERE total > ? AND base > ? ORDER BY base LIMIT 1), ?)
    ORDER BY base LIMIT ?"""


class _Place(NamedTuple):
    """A partition's row id and the slot whose change counter its appends raise."""

    id: int
    slot: int


class SqliteLog(TableLog):
    """See `pxrs.stores.api.LogStore`."""

    def __init__(self, database: Database, changes: ChangeListener, clock: Clock) -> None:
        self._database = database
        self._changes = changes
        self._clock = clock
        self._places: dict[LogPartition, _Place] = {}

    def create(self, topic_id: str, partitions: int) -> None:
        validate_topic(topic_id, partitions)
        self._sweep_deleted()
        rows = [(topic_id, number) for number in range(partitions)]
        owner = self.owner()

        def work(turn: Turn) -> None:
            held: int = turn.connection.execute(
                "SELECT count(*) FROM pxrs_log_partitions WHERE topic_id = ?", (topic_id,)
            ).fetchone()[0]
            if held not in (0, partitions):
                raise TopicExists(f"log {topic_id} has {held} partitions, not {partitions}")
            if held:
                if _owner_of(turn, topic_id) != owner:
                    raise of_another_store(topic_id)
                return
            turn.connection.execute(
                "INSERT OR REPLACE INTO pxrs_meta (name, value) VALUES (?, ?)",
                (OWNER + topic_id, owner),
            )
            turn.connection.executemany(
                "INSERT INTO pxrs_log_partitions (topic_id, partition, start, floor) "
                "VALUES (?, ?, 0, 0)",
                rows,
            )

        self._database.write(work)

    def drop(self, topic_id: str) -> None:
        owner = self.owner()

        def work(turn: Turn) -> list[int]:
            if _owner_of(turn, topic_id) not in ("", owner):
                return []
            turn.connection.execute("DELETE FROM pxrs_meta WHERE name = ?", (OWNER + topic_id,))
            rows = turn.connection.execute(
                "UPDATE pxrs_log_partitions SET topic_id = ? || id || ? || topic_id "
                "WHERE topic_id = ? RETURNING partition",
                (DELETED, DELETED, topic_id),
            ).fetchall()
            turn.slots |= {_slot_of(LogPartition(topic_id, row[0])) for row in rows}
            return [row[0] for row in rows]

        for partition in self._database.write(work):
            self._places.pop(LogPartition(topic_id, partition), None)
        self._sweep_deleted()

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        return self._database.write(lambda turn: self.apply(turn, appends))

    def apply(self, turn: Turn, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        """`append` inside the caller's write transaction."""
        heads = _Heads(turn, appends, self._resolve(turn.connection, appends))
        if heads.gone:
            # Another process dropped them, and perhaps made them again.
            for where in heads.gone:
                self._places.pop(where, None)
            heads = _Heads(turn, appends, self._resolve(turn.connection, appends))
        results = [heads.place(append) for append in appends]
        heads.store(int(self._clock.monotonic() * 1000))
        return results

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        with self._database.reading() as connection:
            before: tuple[int, ...] | None = None
            while True:
                part = self._place(connection, where).id
                row = connection.execute(
                    _PLACE, (storable(offset), part, where.topic_id)
                ).fetchone()
                if row is None:
                    # Another process dropped it: look whether it was made again.
                    self._places.pop(where, None)
                    continue
                start, end, first = row
                if not start <= offset <= end:
                    raise OffsetOutOfRange(where.topic_id, where.partition, offset, start, end)
                if offset == end:
                    return Fetched([], start, end)
                rows = _read(connection, part, first, end, storable(max_bytes))
                if rows and rows[0][0] <= offset < rows[0][1]:
                    return Fetched(up_to_a_hole(rows), start, end)
                # Retention may have removed the batch between the two statements: look again.
                if row == before:
                    raise self._missing(where, part, offset, end)
                before = row

    def trim(self, where: LogPartition, before: int) -> int:
        part = self._part(where)
        while True:
            trimmed = self._database.write(
                lambda turn: _trim(turn.connection, part, storable(before))
            )
            if trimmed is None:
                raise TopicNotFound(where.topic_id)
            if not trimmed.more:
                return trimmed.start

    def watch(self, *where: LogPartition) -> SlotWatch:
        return self._changes.watch(frozenset(map(_slot_of, where)), sessions=False)

    def close(self) -> None:
        self._places.clear()

    def _rows(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with self._database.reading() as connection:
            text = statement.replace("@.", "").replace("%b", "?")
            return connection.execute(text, values).fetchall()

    def _part(self, where: LogPartition) -> int:
        """Read the partition's present row id, past the cache."""
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT id FROM pxrs_log_partitions WHERE topic_id = ? AND partition = ?", where
            ).fetchone()
            return row[0] if row is not None else self._find(connection, where).id

    def _place(self, connection: sqlite3.Connection, where: LogPartition) -> _Place:
        return self._places.get(where) or self._find(connection, where)

    def _find(self, connection: sqlite3.Connection, where: LogPartition) -> _Place:
        rows = connection.execute(
            "SELECT id, partition FROM pxrs_log_partitions WHERE topic_id = ?", (where.topic_id,)
        ).fetchall()
        if not rows:
            raise TopicNotFound(where.topic_id)
        for number, partition in rows:
            key = LogPartition(where.topic_id, partition)
            self._places[key] = _Place(number, _slot_of(key))
        if where.partition not in {partition for _, partition in rows}:
            raise PartitionNotFound(where.topic_id, where.partition, len(rows))
        return self._places[where]

    def _resolve(
        self, connection: sqlite3.Connection, appends: Sequence[Append]
    ) -> dict[LogPartition, _Place | PxrsError]:
        places: dict[LogPartition, _Place | PxrsError] = {}
        for append in appends:
            where = append.where
            if where not in places:
                try:
                    places[where] = self._place(connection, where)
                except InvalidRequest as error:
                    places[where] = error
        return places

    def _sweep_deleted(self) -> None:
        """Give back the space of dropped partitions, a piece at a time."""
        parts = self._dropped()
        while parts:
            parts = parts[self._database.write(partial(_delete_some, parts)) :]


def _owner_of(turn: Turn, topic_id: str) -> str:
    """The store that made the topic; empty for this database's own, and of earlier releases."""
    row = turn.connection.execute(
        "SELECT value FROM pxrs_meta WHERE name = ?", (OWNER + topic_id,)
    ).fetchone()
    return "" if row is None else str(row[0])


class _Heads:
    """The ends of the partitions that one append touches, and what it adds to them."""

    def __init__(
        self,
        turn: Turn,
        appends: Sequence[Append],
        places: dict[LogPartition, _Place | PxrsError],
    ) -> None:
        self._turn = turn
        self._connection = turn.connection
        self._places = places
        self._ends: dict[int, int] = {}
        self._age = Age(0, None)
        # The packed state of each producer in each partition.
        self._states: dict[tuple[int, int], bytes] = {}
        self._changed: dict[tuple[int, int], bytes] = {}
        self._rows: list[tuple[int, int, int, int, int, bytearray]] = []
        # The same batch object twice is two rows: each needs its own base offset in its bytes.
        self._placed: set[int] = set()
        parts = [place.id for place in places.values() if isinstance(place, _Place)]
        for producer in {append.batch.producer_id for append in appends}:
            for some in in_chunks(parts):
                self._load(producer, some)

    def _load(self, producer: int, parts: Sequence[int]) -> None:
        query = _HEADS + ",".join("?" * len(parts)) + ")"
        found = self._connection.execute(query, (producer, *parts)).fetchall()
        for part, end, state, *age in found:
            self._ends[part] = end
            self._age = Age(*age)
            if state is not None:
                self._states[part, producer] = state

    @property
    def gone(self) -> list[LogPartition]:
        """Partitions whose remembered row no longer exists."""
        return [
            where
            for where, place in self._places.items()
            if isinstance(place, _Place) and place.id not in self._ends
        ]

    def place(self, append: Append) -> Appended | PxrsError:
        """Give the batch its offset, or return the error why it can't have one."""
        where, batch = append
        place = self._places[where]
        if not isinstance(place, _Place):
            return place
        try:
            validate_batch(batch)
        except InvalidRequest as error:
            return error
        base = self._ends.get(place.id)
        if base is None:
            return TopicNotFound(where.topic_id)
        if batch.producer_id >= 0:
            key = (place.id, batch.producer_id)
            verdict = judge_packed(self._states.get(key), batch, base)
            if isinstance(verdict, Duplicate):
                return Appended(verdict.base, duplicate=True)
            if not isinstance(verdict, bytes):
                return verdict
            self._states[key] = self._changed[key] = verdict
        data = batch.data
        if id(data) in self._placed:
            data = bytearray(data)
        self._placed.add(id(data))
        set_base_offset(data, base)
        size = len(data)
        end = self._ends[place.id] = base + batch.count
        self._rows.append((place.id, base, end, batch.max_timestamp, size, data))
        self._turn.slots.add(place.slot)
        self._turn.weight += size
        return Appended(base)

    def store(self, now: int) -> None:
        """Write the batches and the states of their producers.

        `now`: the monotonic clock, in ms.
        """
        for rows in in_chunks(self._rows):
            marks = ",".join(["(?,?,?,?,?,?)"] * len(rows))
            values = [value for row in rows for value in row]
            self._connection.execute(f"INSERT INTO pxrs_log_batches VALUES {marks}", values)
        if not self._changed:
            return
        age = self._age.at(now)
        if self._age.is_due(now):
            note(self._connection, age)
        self._forget_producers(age.ms)
        for changed in in_chunks(list(self._changed.items())):
            marks = ",".join(["(?,?,?,?)"] * len(changed))
            states: list[object] = []
            for (part, producer), state in changed:
                states += (part, producer, state, age.ms)
            self._connection.execute(
                f"INSERT INTO pxrs_log_producers VALUES {marks} "
                "ON CONFLICT DO UPDATE SET state = excluded.state, used = excluded.used",
                states,
            )

    def _forget_producers(self, age: int) -> None:
        """If a producer is new, forget those that sent nothing while the file aged by a week."""
        parts = {part for (part, _), state in self._changed.items() if is_first(state)}
        for some in in_chunks(list(parts)):
            marks = ",".join("?" * len(some))
            self._connection.execute(
                f"DELETE FROM pxrs_log_producers WHERE part IN ({marks}) AND used < ?",
                (*some, age - PRODUCER_MEMORY_MS),
            )


def _read(
    connection: sqlite3.Connection, part: int, first: int | None, end: int, max_bytes: int
) -> list[tuple[int, int, bytes]]:
    """Read the batches from `first` on that fit into `max_bytes`: at least one if there is one."""
    rows: list[tuple[int, int, bytes]] = []
    always, look = first, _FIRST_LOOK
    while True:
        found = connection.execute(
            _FETCH, (part, first, part, first, look, max_bytes, always, end, look)
        ).fetchall()
        rows += found
        if len(found) < look or len(rows) == _MOST_BATCHES:
            return rows
        max_bytes -= sum(len(data) for _, _, data in found)
        first, always = found[-1][1], -1
        look = min(8 * look, _MOST_BATCHES - len(rows))


def _slot_of(where: LogPartition) -> int:
    return slot(f"log/{where.topic_id}/{where.partition}")


class _Trimmed(NamedTuple):
    start: int
    more: bool


def _trim(connection: sqlite3.Connection, part: int, before: int) -> _Trimmed | None:
    row = connection.execute(
        f"SELECT {_END} FROM pxrs_log_partitions p WHERE p.id = ?", (part,)
    ).fetchone()
    if row is None:
        return None
    end = row[0]
    gone = connection.execute(
        "DELETE FROM pxrs_log_batches WHERE rowid IN (SELECT rowid FROM pxrs_log_batches "
        "WHERE part = ? AND base < ? AND next <= ? ORDER BY base LIMIT ?)",
        (part, before, before, _CHUNK),
    ).rowcount
    connection.execute(
        "UPDATE pxrs_log_partitions SET floor = ?, start = coalesce("
        "(SELECT min(base) FROM pxrs_log_batches WHERE part = ?), ?) WHERE id = ?",
        (end, part, end, part),
    )
    start: int = connection.execute(
        "SELECT start FROM pxrs_log_partitions WHERE id = ?", (part,)
    ).fetchone()[0]
    return _Trimmed(start, gone == _CHUNK)


def _delete_some(parts: Sequence[int], turn: Turn) -> int:
    """Deletes about `_CHUNK` rows of these partitions; returns how many of them are gone."""
    connection = turn.connection
    left = _CHUNK
    for done, part in enumerate(parts):
        left -= connection.execute(
            "DELETE FROM pxrs_log_batches WHERE rowid IN "
            "(SELECT rowid FROM pxrs_log_batches WHERE part = ? LIMIT ?)",
            (part, left),
        ).rowcount
        if left <= 0:
            return done
        connection.execute("DELETE FROM pxrs_log_producers WHERE part = ?", (part,))
        connection.execute("DELETE FROM pxrs_log_partitions WHERE id = ?", (part,))
        left -= 1
    return len(parts)
