"""A table in PostgreSQL.

Ids come from a sequence, before their rows are committed. `nextval` locks the sequence, and an
insert its table, until the transaction ends; so `pg_locks` names everyone who may have an id whose
row can't be seen yet, even those who have only asked for one. Anyone may read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from pxrs.errors import ConfigError
from pxrs.sources.tables.api import (
    PARTITION_COLUMN,
    Columns,
    Look,
    Preparation,
    Reading,
    Record,
    first_odd_one,
    ids_run_out,
    key_depends_on_settings,
    mark_of,
    no_index_on_times,
    odd_ones,
    parts,
    quoted_name,
)
from pxrs.sources.tables.postgres_notified import NotifiedWatch
from pxrs.sources.tables.postgres_prepare import HASHED, TRIGGER, Statements
from pxrs.stores.api import Watch
from pxrs.stores.findings import Finding, warning
from pxrs.stores.postgres.failures import DRIVER_ERRORS, read_conninfo, translate

_INTEGERS = ("int2", "int4", "int8")
_NUMBERS = (*_INTEGERS, "numeric", "float4", "float8")
_TABLE = """
SELECT c.oid, c.relkind::text FROM pg_class c WHERE c.oid = to_regclass(%s)
"""
_COLUMNS = """
SELECT a.attname, t.typname, a.attnotnull, EXISTS (
    SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid
        AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = 1
        AND i.indkey[0] = a.attnum)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
"""
# The sequences that the column's default, or identity, takes ids from.
_SEQUENCES = """
SELECT s.seqrelid, s.seqcache, s.seqincrement, s.seqcycle, format('%%I.%%I', n.nspname, c.relname)
FROM pg_attribute a
JOIN pg_depend d ON
    (d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass
        AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum AND d.deptype IN ('i', 'a'))
    OR (d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass
        AND d.objid = (SELECT oid FROM pg_attrdef WHERE adrelid = a.attrelid AND adnum = a.attnum))
JOIN pg_sequence s ON s.seqrelid IN (d.objid, d.refobjid)
JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE a.attrelid = %s AND a.attname = %s
"""
# Read while the statement runs, so after its snapshot was taken.
_WRITERS = """
SELECT DISTINCT l.virtualtransaction || '@' || l.pid FROM pg_locks l
WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_DETAILS = """
SELECT n.nspname::text, c.relname::text, c.relkind::text, current_setting('server_encoding'),
    current_setting('server_version_num')::int
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s
"""
_COMMENT = """
SELECT col_description(attrelid, attnum) FROM pg_attribute
WHERE attrelid = %s AND attname = %s AND NOT attisdropped
"""
# The columns of indexes without expressions or conditions; of those that are not valid, none.
_INDEXES = """
SELECT CASE WHEN i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL THEN ARRAY(
        SELECT a.attname::text FROM unnest(i.indkey) WITH ORDINALITY k (num, place)
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.num
        WHERE place <= i.indnkeyatts ORDER BY place) END,
    c.relname::text, i.indisvalid
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE i.indrelid = %s
"""
_TRIGGER = "SELECT FROM pg_trigger WHERE tgrelid = %s AND tgname = %s AND NOT tgisinternal"
_GENERATED_COLUMNS = 120000
_MOST = {"int2": 2**15 - 1, "int4": 2**31 - 1}
# Seconds.
_LOCK_WAIT = 5


class PostgresTable:
    """See `TableDatabase`."""

    def __init__(
        self,
        conninfo: str,
        columns: Columns,
        connect: Callable[[], psycopg.Connection[Any]] | None = None,
        place: str | None = None,
    ) -> None:
        given = read_conninfo(conninfo) if conninfo else {}
        name = given.get("dbname") or given.get("user") or "postgres"
        self.place = place or f"database {name!r}"
        self._connect = connect or partial(psycopg.connect, conninfo)
        self._columns = columns
        self._name = ".".join(map(_name, parts(columns.table)))
        self._id = _name(columns.offset)
        self._db: psycopg.Connection[Any] | None = None
        # By name: what the table's columns are; its sequences and their ids.
        self._types: dict[str, tuple[str, bool, bool]] = {}
        self._sequences: list[tuple[int, str]] = []
        self._oid: int | None = None
        self._is_view = False
        self._statements: Reading | None = None
        try:
            self._learn()
        except BaseException:
            self.close()
            raise

    # The connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DRIVER_ERRORS as error:
            db, self._db = self._db, None
            if db is not None:
                db.close()
            if isinstance(error, psycopg.Error) and error.sqlstate in ("42P01", "42703"):
                # It was dropped, or a column of it.
                text = error.diag.message_primary or str(error)
                raise ConfigError(
                    f"{self._columns.table!r} can't be read any more: {text}"
                ) from error
            if isinstance(error, psycopg.Error) and error.sqlstate == "42501":
                raise ConfigError(
                    f"this role may not read {self._columns.table!r}: GRANT SELECT ON "
                    f"{self._columns.table} TO it"
                ) from error
            raise translate(error, self.place) from error

    def _connected(self) -> psycopg.Connection[Any]:
        db = self._connect()
        db.autocommit = True
        db.row_factory = tuple_row
        db.execute("SET application_name = 'pxrs source'")
        return db

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Record]:
        with self._translated():
            if self._db is None or self._db.closed:
                self._db = self._connected()
                self._db.execute(
                    "SELECT set_config('default_transaction_isolation', 'read committed', false), "
                    "set_config('default_transaction_read_only', 'on', false)"
                )
            return self._db.execute(statement, values or None, prepare=True).fetchall()

    # What the table is

    def _learn(self) -> None:
        found = self._rows(_TABLE, [self._name])
        if not found:
            raise ConfigError(
                f"there is no table or view {self._columns.table!r} in {self.place}; "
                "name its schema, too, if it is not in the search_path: 'schema.table'"
            )
        self._oid, kind = found[0]
        self._is_view = kind in ("v", "m")
        self._learn_columns()
        self._sequences = [(row[0], row[4]) for row in self._own_sequences()]

    def _learn_columns(self) -> None:
        self._types = {
            name: (kind, required, unique)
            for name, kind, required, unique in self._rows(_COLUMNS, [self._oid])
        }
        for name in self._columns.all:
            if name not in self._types:
                raise ConfigError(
                    f"{self._columns.table!r} has no column {name!r}; it has "
                    f"{', '.join(sorted(self._types))}"
                )

    def _own_sequences(self) -> list[Record]:
        return self._rows(_SEQUENCES, [self._oid, self._columns.offset])

    def check(self) -> None:
        table, offset = self._columns.table, self._columns.offset
        kind, required, unique = self._types[offset]
        if kind not in _INTEGERS:
            raise ConfigError(
                f"offset must be a column of integers; {offset!r} of {table!r} is {kind}"
            )
        if self._is_view:
            if self._rows(f"SELECT 1 FROM {self._name} WHERE {self._id} IS NULL LIMIT 1"):
                raise ConfigError(
                    f"offset must not be NULL; {offset!r} of the view {table!r} is in some rows: "
                    "leave them out with WHERE"
                )
            return
        if not (required and unique):
            raise ConfigError(
                f"offset must be unique and NOT NULL; {offset!r} of {table!r} is not: name its "
                "primary key, or make a unique index"
            )
        for _, cache, increment, cycle, name in self._own_sequences():
            if cache != 1:
                raise ConfigError(
                    f"the sequence {name} gives {cache} ids at a time to a connection (CACHE), "
                    "which uses them up much later: rows would appear below those that were read. "
                    f"ALTER SEQUENCE {name} CACHE 1, and reconnect the writers"
                )
            if increment < 1 or cycle:
                raise ConfigError(f"ids must rise: the sequence {name} goes down, or in circles")

    # What is in it

    def look(self) -> Look:
        # Before the writers are read: whoever has an id up to there is among them, or has ended.
        counter = self._counter()
        writers = f"ARRAY({_WRITERS} {self._of_this_table()})"
        [(highest, found, is_replica)] = self._rows(
            f"SELECT (SELECT max({self._id}) FROM {self._name}), {writers}, pg_is_in_recovery()"
        )
        top = max(-1 if highest is None else highest, counter)
        if (not self._sequences and not self._is_view) or is_replica:
            # Who makes the ids, and when, can't be seen: it is elsewhere, or on the primary.
            return Look(top, None)
        return Look(top, frozenset(found))

    def _counter(self) -> int:
        highest = -1
        for _, name in self._sequences:
            try:
                [(value, is_called)] = self._rows(
                    f"SELECT last_value, is_called FROM {_safe(name)}"
                )
            except ConfigError:
                # No right to read it: the highest id that is seen has to do.
                continue
            highest = max(highest, value if is_called else value - 1)
        return highest

    def _of_this_table(self) -> str:
        if self._is_view:
            # Whatever it is made of: anyone who writes anything.
            return ""
        relations = [self._oid, *(oid for oid, _ in self._sequences)]
        return f"AND l.relation IN ({', '.join(map(str, relations))})"

    def select(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> list[Record]:
        return self._rows(*self._reading().rows(first, last, limit, partition))

    def _reading(self) -> Reading:
        if self._statements is None:
            wanted = self._columns
            others = [
                "NULL" if wanted.timestamp is None else self._time(),
                "NULL" if wanted.key is None else self._text(wanted.key),
                *map(self._value, wanted.values),
            ]
            partition = None if wanted.partition is None else _name(wanted.partition)
            self._statements = Reading(
                self._name, self._id, others, partition, by_index=self._has_partition_index()
            )
        return self._statements

    def _has_partition_index(self) -> bool:
        wanted = [self._columns.partition, self._columns.offset]
        return any(found and found[:2] == wanted for found, *_ in self._rows(_INDEXES, [self._oid]))

    def _text(self, column: str) -> str:
        return _name(column) if self._types[column][0] == "bytea" else f"{_name(column)}::text"

    def _value(self, column: str) -> str:
        """JSON as it stands, where it is the whole value: it would only be made text again."""
        json = self._types[column][0] in ("json", "jsonb") and len(self._columns.values) == 1
        return f"{_name(column)}::text" if json else _name(column)

    def _time(self) -> str:
        name = _name(self._columns.timestamp or "")
        if self._types[self._columns.timestamp or ""][0] in _NUMBERS:
            return f"(CASE WHEN {name} < 100000000000 THEN {name} * 1000 ELSE {name} END)::bigint"
        return f"floor(extract(epoch FROM {name}) * 1000)::bigint"

    def ids(self, after: int, limit: int) -> list[int]:
        return [row[0] for row in self._rows(self._reading().ids, [after, limit])]

    def last_keys(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> list[Record]:
        return self._rows(*self._reading().last(first, last, limit, partition))

    def first_at(self, timestamp: int) -> int | None:
        # Written so that an index on a column of times helps.
        name, kind = (
            _name(self._columns.timestamp or ""),
            self._types[self._columns.timestamp or ""],
        )
        where = {
            "timestamptz": f"{name} >= to_timestamp(%s / 1000.0)",
            "timestamp": f"{name} >= to_timestamp(%s / 1000.0) AT TIME ZONE 'UTC'",
        }.get(kind[0], f"{self._time()} >= %s")
        [(found,)] = self._rows(
            f"SELECT min({self._id}) FROM {self._name} WHERE {where}", [timestamp]
        )
        return None if found is None else int(found)

    def changes(self) -> object:
        return self._rows(f"SELECT max({self._id}) FROM {self._name}")[0][0]

    def watch(
        self, changes: Callable[[], object], is_waiting: Callable[[], bool], channel: str
    ) -> Watch:
        return NotifiedWatch(self._connect, channel, changes, is_waiting)

    # Partitions in the database

    def filter_by(self, column: str) -> None:
        before = self._columns
        self._columns = before._replace(partition=column)
        try:
            self._learn_columns()
        except ConfigError:
            self._columns = before
            raise
        self._statements = None

    def odd_partition(self, partitions: int) -> object:
        column = self._columns.partition or ""
        kind = self._types[column][0]
        if kind not in _INTEGERS:
            raise ConfigError(
                f"partition must be a column of integers; {column!r} of {self._columns.table!r} "
                f"is {kind}"
            )
        found = self._rows(odd_ones(_name(column), self._name, partitions))
        return ("NULL" if found[0][0] is None else found[0][0]) if found else None

    def first_odd(self, first: int, last: int, partitions: int) -> tuple[int, object] | None:
        column = _name(self._columns.partition or "")
        found = self._rows(first_odd_one(column, self._name, self._id, partitions), [first, last])
        return (found[0][0], found[0][1]) if found else None

    def preparation(self, partitions: int) -> Preparation:
        if self._is_view:
            raise ConfigError(f"{self._columns.table!r} is a view; prepare the table that it shows")
        own = None if self._columns.partition == PARTITION_COLUMN else self._columns.partition
        column = own or PARTITION_COLUMN
        [(schema, name, kind, encoding, version)] = self._rows(_DETAILS, [self._oid])
        prepare = Statements(schema, name, column, self._columns.offset)
        wanted: list[str] = []
        if own is None and not self._has_column(partitions):
            if encoding != "UTF8" or version < _GENERATED_COLUMNS:
                raise ConfigError(
                    f"a partition column needs PostgreSQL 12 and a database in UTF8; {self.place} "
                    f"is {version // 10000} in {encoding}"
                )
            wanted.append(prepare.column(*self._hashed_key(), partitions))
        indexes = self._rows(_INDEXES, [self._oid])
        if not any(columns == [column, self._columns.offset] for columns, _, _ in indexes):
            # One that could not be finished is in the way.
            broken = [each for _, each, valid in indexes if each == prepare.index_name]
            wanted += [*([prepare.drop_index()] if broken else []), prepare.index(kind != "p")]
        if not self._rows(_TRIGGER, [self._oid, TRIGGER]):
            wanted += [prepare.function(), prepare.trigger()]
        return Preparation(wanted, column, prepare.channel)

    def _has_column(self, partitions: int) -> bool:
        """Whether it is there already; refuses one that has other partitions."""
        found = self._rows(_COMMENT, [self._oid, PARTITION_COLUMN])
        if found and found[0][0] != mark_of(self._columns.key or "", partitions):
            raise ConfigError(
                f"{self._columns.table!r} has a column {PARTITION_COLUMN!r} for another topic "
                f"({found[0][0] or 'without a comment'}): one topic of a table can be prepared"
            )
        return bool(found)

    def _hashed_key(self) -> tuple[str, bool]:
        """The key's column, and whether it is bytes."""
        key = self._columns.key
        if key is None:
            raise ConfigError(
                f"{self._columns.table!r} was attached without key=, so all its rows are in one "
                "partition and there is nothing to prepare"
            )
        kind = self._types[key][0]
        if kind not in HASHED:
            raise ConfigError(
                f"the text of {key!r}, which is {kind}, depends on settings of the connection: "
                "PostgreSQL can't keep its partition. Use a key of text, integers or bytes"
            )
        return key, kind == "bytea"

    def execute(self, statement: str) -> None:
        with (
            self._translated(),
            self._connected() as db,
        ):
            # Others wait behind one that waits for the table.
            db.execute(f"SET lock_timeout = '{_LOCK_WAIT}s'")
            db.execute(statement)

    # What may go wrong one day

    def findings(self, check: str) -> list[Finding]:
        wanted = self._columns
        found: list[Finding] = []
        if wanted.timestamp is not None and not self._is_view:
            indexes = self._rows(_INDEXES, [self._oid])
            if not any(columns and columns[0] == wanted.timestamp for columns, _, _ in indexes):
                found.append(no_index_on_times(check, wanted.table, wanted.timestamp))
        if wanted.key is not None and self._types[wanted.key][0] not in HASHED:
            found.append(key_depends_on_settings(check, wanted.key, self._types[wanted.key][0]))
        kind = self._types[wanted.offset][0]
        if kind in _MOST:
            found += ids_run_out(check, wanted.offset, kind, self.look().top, _MOST[kind])
        for oid, name in self._sequences:
            if not self._rows("SELECT has_sequence_privilege(%s, 'SELECT')", [oid])[0][0]:
                found.append(
                    warning(
                        check,
                        f"this role may not read the sequence {name}: if the newest rows are "
                        "deleted, the table looks as if it had been truncated",
                        f"GRANT SELECT ON SEQUENCE {name} to it",
                    )
                )
        return found

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _name(name: str) -> str:
    return _safe(quoted_name(name, '"'))


def _safe(text: str) -> str:
    """A text that stands in a statement with placeholders."""
    return text.replace("%", "%%")
