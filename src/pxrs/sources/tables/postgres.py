"""A table in PostgreSQL.

Ids come from a sequence, before their rows are committed. `nextval` locks the sequence, and an
insert its table, until the transaction ends; so `pg_locks` names every transaction that may have an
id whose row can't be seen yet, even one that has only taken an id. Any role may read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row
from psycopg.types.string import ByteaBinaryLoader

from pxrs.errors import ConfigError
from pxrs.sources.tables.api import (
    PARTITION_COLUMN,
    Columns,
    Look,
    Preparation,
    Reading,
    Record,
    can_not_be_hashed,
    first_odd_one,
    ids_run_out,
    key_depends_on_settings,
    key_to_hash,
    no_index_on_times,
    odd_one,
    parts,
    quoted_name,
    require_integers,
    require_own,
    require_table,
)
from pxrs.sources.tables.postgres_notified import NotifiedWatch
from pxrs.sources.tables.postgres_prepare import HASHED, TRIGGER, Statements
from pxrs.sources.tables.postgres_writers import WRITERS, SeenWriters
from pxrs.stores.api import Watch
from pxrs.stores.findings import Finding, warning
from pxrs.stores.postgres.failures import DRIVER_ERRORS, read_conninfo, translate

_INTEGERS = ("int2", "int4", "int8")
_NUMBERS = (*_INTEGERS, "numeric", "float4", "float8")
# Types that are delivered as the text that the server makes of them; and bytes.
_AS_TEXT = ("text", "varchar", "json", "jsonb", *_INTEGERS)
_AS_IT_IS = (*_AS_TEXT, "bytea")
# What the name means now, and the sequences that the column's default, or identity, takes ids from.
_MEANING = """
SELECT c.oid, c.relkind::text AS kind, c.relfilenode::bigint AS file,
    ARRAY(SELECT s.oid FROM pg_class s WHERE s.oid = ANY(q.own) ORDER BY 1) AS sequences,
    ARRAY(SELECT format('%%I.%%I', n.nspname, s.relname) FROM pg_class s
        JOIN pg_namespace n ON n.oid = s.relnamespace WHERE s.oid = ANY(q.own) ORDER BY s.oid),
    ARRAY(SELECT s.relfilenode::bigint FROM pg_class s WHERE s.oid = ANY(q.own) ORDER BY s.oid),
    (SELECT coalesce(max(s.seqincrement), 1) FROM pg_sequence s WHERE s.seqrelid = ANY(q.own)),
    EXISTS (SELECT FROM pg_subscription_rel r WHERE r.srrelid = c.oid
        OR r.srrelid IN (SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = c.oid))
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = %s
CROSS JOIN LATERAL (SELECT ARRAY(
    SELECT s.seqrelid FROM pg_depend d JOIN pg_sequence s ON s.seqrelid = d.objid
    WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid
        AND d.refobjsubid = a.attnum AND d.classid = 'pg_class'::regclass
        AND d.deptype IN ('i', 'a')
    UNION SELECT s.seqrelid FROM pg_attrdef f
    JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid
        AND d.refclassid = 'pg_class'::regclass
    JOIN pg_sequence s ON s.seqrelid = d.refobjid
    WHERE f.adrelid = c.oid AND f.adnum = a.attnum)) AS q (own)
WHERE c.oid = to_regclass(%s)
"""
_TABLE = "SELECT to_regclass(%s)::oid"
_COLUMNS = """
SELECT a.attname, t.typname, a.attnotnull, EXISTS (
    SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid
        AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = 1
        AND i.indkey[0] = a.attnum)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
"""
_SEQUENCES = """
SELECT seqcache, seqincrement, seqcycle FROM pg_sequence WHERE seqrelid = %s
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


class _Meaning(NamedTuple):
    """The relation under the table's name; sequences by oid, with their names and files."""

    oid: int
    kind: str
    file: int
    sequences: list[int]
    names: list[str]
    files: list[int]
    # The largest increment of the sequences; whether rows come from another server.
    increment: int
    is_subscribed: bool

    @property
    def late_ids(self) -> str:
        """Why an id may come though nobody in this database is in a transaction that has it."""
        if self.is_subscribed:
            return "its rows come by logical replication, from where other transactions give ids"
        if self.increment > 1:
            # As Hibernate does by default (`allocationSize`): with one call of `nextval` a program
            # takes many ids, and uses them up in later transactions.
            return (
                f"its sequence has INCREMENT BY {self.increment}, so programs may take ids in "
                "blocks and use them up much later"
            )
        return ""

    @property
    def is_view(self) -> bool:
        return self.kind in ("v", "m")

    def gives_ids_anew(self, before: _Meaning) -> bool:
        """Whether ids are given again that were given `before`.

        It is another table; or it was truncated and its counter, too: both have new files then.
        One of them alone is harmless: VACUUM FULL, CLUSTER and ALTER TABLE write a table anew,
        TRUNCATE alone leaves the counter where it is, and ALTER SEQUENCE has many other options
        than RESTART. A partitioned table has no file of its own: its sequence decides.
        """
        if self.is_view:
            # It has no counter; those who read it see one that went back.
            return False
        if self.oid != before.oid:
            return True
        restarted = self.sequences == before.sequences and self.files != before.files
        return restarted and (self.file != before.file or not self.file)


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
        # The table's columns by name.
        self._types: dict[str, tuple[str, bool, bool]] = {}
        self._meaning: _Meaning
        self._replaced = 0
        self._writers = SeenWriters()
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
            db = self._connection()
            return db.execute(statement, values or None, prepare=True).fetchall()

    def _connection(self) -> psycopg.Connection[Any]:
        if self._db is None or self._db.closed:
            self._db = self._connected()
            self._db.execute(
                "SELECT set_config('default_transaction_isolation', 'read committed', false), "
                "set_config('default_transaction_read_only', 'on', false), "
                "set_config('client_encoding', 'UTF8', false)"
            )
        return self._db

    # The table's schema

    def _learn(self) -> None:
        if self._rows(_TABLE, [self._name]) == [(None,)]:
            raise ConfigError(
                f"there is no table or view {self._columns.table!r} in {self.place}; "
                "name its schema, too, if it is not in the search_path: 'schema.table'"
            )
        self._learn_columns()
        self._meaning = _Meaning(*self._rows(_MEANING, self._place_of_ids)[0])

    @property
    def _place_of_ids(self) -> list[str]:
        return [self._columns.offset, self._name]

    @property
    def _oid(self) -> int:
        return self._meaning.oid

    @property
    def _is_view(self) -> bool:
        return self._meaning.is_view

    def replaced(self) -> int:
        found = self._rows(_MEANING, self._place_of_ids)
        if found:
            self._mean(_Meaning(*found[0]))
        return self._replaced

    def _mean(self, meaning: _Meaning) -> None:
        """Take note of what stands under the name now."""
        before, self._meaning = self._meaning, meaning
        if meaning.gives_ids_anew(before):
            self._replaced += 1
        if meaning.oid != before.oid:
            self._statements = None
            self._learn_columns()

    def _learn_columns(self) -> None:
        self._types = {
            name: (kind, required, unique)
            for name, kind, required, unique in self._rows(_COLUMNS, [self._name])
        }
        for name in self._columns.all:
            if name not in self._types:
                raise ConfigError(
                    f"{self._columns.table!r} has no column {name!r}; it has "
                    f"{', '.join(sorted(self._types))}"
                )

    def check(self) -> None:
        table, offset = self._columns.table, self._columns.offset
        kind, required, unique = self._types[offset]
        if kind not in _INTEGERS:
            raise ConfigError(
                f"offset must be a column of integers; {offset!r} of {table!r} is {kind}"
            )
        if self._meaning.kind == "m":
            # Rows whose transactions were open at one REFRESH come with the next.
            raise ConfigError(
                f"{table!r} is a materialized view: each REFRESH may add rows below those that "
                "were read, and they would be lost. Attach the table or view that it is made of"
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
        for oid, name in zip(self._meaning.sequences, self._meaning.names, strict=True):
            [(cache, increment, cycle)] = self._rows(_SEQUENCES, [oid])
            if cache != 1:
                raise ConfigError(
                    f"the sequence {name} gives {cache} ids at a time to a connection (CACHE), "
                    "which uses them up much later: rows would appear below those that were read. "
                    f"ALTER SEQUENCE {name} CACHE 1, and reconnect the writers"
                )
            if increment < 1 or cycle:
                raise ConfigError(f"ids must rise: the sequence {name} goes down, or in circles")

    # Its rows

    def look(self) -> Look:
        while True:
            # Before the writers are read: one that has an id up to there is among them, or ended.
            known, counter = self._meaning, self._counter()
            # What the name means is asked in the statement that reads the table by this name, and
            # the locks of that are looked at. They are read while the statement runs, so after its
            # snapshot was taken.
            [(highest, found, is_replica, *meaning)] = self._rows(
                f"SELECT (SELECT max({self._id}) FROM {self._name}), "
                f"ARRAY({WRITERS} {self._of_this_table()}), pg_is_in_recovery(), m.* "
                f"FROM ({_MEANING}) m",
                self._place_of_ids,
            )
            self._mean(_Meaning(*meaning))
            if self._meaning == known:
                break
            # The counter was another one's.
        top = max(-1 if highest is None else highest, counter)
        if known.late_ids:
            return Look(top, None, replaced=self._replaced, because=known.late_ids)
        if (not known.sequences and not self._is_view) or is_replica:
            # Who takes ids, and when, can't be seen: it happens elsewhere, or on the primary.
            return Look(top, None, replaced=self._replaced)
        return Look(top, self._writers.seen(found), replaced=self._replaced)

    def _counter(self) -> int:
        highest = -1
        for name in self._meaning.names:
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
            # The view may show any table: anyone who writes anything.
            return ""
        return "AND (l.relation = m.oid OR l.relation = ANY(m.sequences))"

    def select(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> list[Record]:
        statement, values = self._reading().rows(first, last, limit, partition)
        if not self.gives_rows:
            return self._rows(statement, values)
        with self._translated():
            # Text stays the bytes that came: decoded, it would only be encoded again.
            cursor = self._connection().cursor(binary=True)
            cursor.adapters.register_loader("text", ByteaBinaryLoader)
            return cursor.execute(statement, values, prepare=True).fetchall()

    @property
    def gives_rows(self) -> bool:
        values = self._columns.values
        return len(values) == 1 and self._types[values[0]][0] in _AS_IT_IS

    def _reading(self) -> Reading:
        if self._statements is None:
            wanted = self._columns
            others = [
                "0" if wanted.timestamp is None else f"coalesce({self._time()}, 0)",
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
        """As text, if it is the whole value, which would become text anyway."""
        as_text = self.gives_rows and self._types[column][0] in _AS_TEXT
        return f"{_name(column)}::text" if as_text else _name(column)

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
        require_integers(self._columns, kind in _INTEGERS, kind)
        return odd_one(self._rows, _name(column), self._name, partitions)

    def first_odd(self, first: int, last: int, partitions: int) -> tuple[int, object] | None:
        columns = self._id, _name(self._columns.partition or "")
        return first_odd_one(self._rows, columns, self._name, [first, last], partitions, "%s")

    def preparation(self, partitions: int) -> Preparation:
        require_table(self._columns, self._is_view)
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
            # An index that could not be finished is in the way.
            broken = [each for _, each, valid in indexes if each == prepare.index_name]
            wanted += [*([prepare.drop_index()] if broken else []), prepare.index(kind != "p")]
        if not self._rows(_TRIGGER, [self._oid, TRIGGER]):
            wanted += [prepare.function(), prepare.trigger()]
        return Preparation(wanted, column, prepare.channel)

    def _has_column(self, partitions: int) -> bool:
        """Whether the column is there already; refuses one for another number of partitions."""
        found = self._rows(_COMMENT, [self._oid, PARTITION_COLUMN])
        if found:
            require_own(self._columns, found[0][0], partitions)
        return bool(found)

    def _hashed_key(self) -> tuple[str, bool]:
        """The key's column, and whether it is bytes."""
        key = key_to_hash(self._columns)
        kind = self._types[key][0]
        if kind not in HASHED:
            raise can_not_be_hashed(key, kind, "PostgreSQL")
        return key, kind == "bytea"

    def execute(self, statement: str) -> None:
        with (
            self._translated(),
            self._connected() as db,
        ):
            # Other transactions wait behind one that waits for the table.
            db.execute(f"SET lock_timeout = '{_LOCK_WAIT}s'")
            db.execute(statement)

    # What may go wrong later

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
        for oid, name in zip(self._meaning.sequences, self._meaning.names, strict=True):
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
