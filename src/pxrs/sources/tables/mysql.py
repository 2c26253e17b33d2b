"""A table in MySQL or MariaDB.

Ids come from the table's counter, before their rows are committed; a statement may even take many
ahead (`INSERT … SELECT`). `mysql_writers.py` finds out which writers may still have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import pymysql
from pymysql.cursors import Cursor

from pxrs.config import SqlSettings
from pxrs.errors import ConfigError, StoreError
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
    mark_of,
    no_index_on_times,
    odd_one,
    parts,
    quoted_name,
    require_integers,
    require_own,
    require_table,
)
from pxrs.sources.tables.mysql_writers import (
    ListTruncated,
    MetadataLocks,
    TransactionsAndStatements,
    Writers,
)
from pxrs.stores.findings import Finding
from pxrs.stores.mysql.failures import Raced, translated
from pxrs.stores.mysql.tls import Connecting
from pxrs.urls import about_options

_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
_MOST = {"tinyint": 2**7 - 1, "smallint": 2**15 - 1, "mediumint": 2**23 - 1, "int": 2**31 - 1}
_NUMBERS = (*_INTEGERS, "decimal", "float", "double")
_BINARY = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob", "bit")
_TEXTS = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "uuid")
# Keys whose text is the same for every connection.
_HASHED = (*_INTEGERS, "decimal", *_TEXTS, *_BINARY[:-1])
# Seconds that a change of the table waits for transactions that use it: others wait behind it.
_LOCK_WAIT = 5
_COMMENTS = """
SELECT lower(COLUMN_NAME), COLUMN_COMMENT FROM information_schema.COLUMNS
WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
"""
_INDEXES = """
SELECT group_concat(COLUMN_NAME ORDER BY SEQ_IN_INDEX), INDEX_NAME
FROM information_schema.STATISTICS
WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s GROUP BY INDEX_NAME
"""
# No such table or column; no right to it; no right to see others.
_MISSING, _DENIED, _NO_PROCESS = (1146, 1054, 1356), (1142, 1143, 1044), 1227
_TABLE = """
SELECT TABLE_SCHEMA, TABLE_NAME, ENGINE, TABLE_TYPE FROM information_schema.TABLES
WHERE TABLE_SCHEMA = coalesce(%s, DATABASE()) AND TABLE_NAME = %s
"""
_COLUMNS = """
SELECT COLUMN_NAME, lower(DATA_TYPE), IS_NULLABLE = 'NO', EXTRA LIKE '%%auto_increment%%'
FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
"""
# Indexes of one whole column.
_UNIQUE = """
SELECT max(COLUMN_NAME) FROM information_schema.STATISTICS
WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND NON_UNIQUE = 0
GROUP BY INDEX_NAME HAVING count(*) = 1 AND max(SUB_PART) IS NULL
"""
_COUNTER = """
SELECT AUTO_INCREMENT FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s
"""
# In these clusters each node gives ids by itself, and does not see the others' transactions.
_CLUSTER = """
SHOW GLOBAL VARIABLES WHERE (Variable_name = 'wsrep_on' AND Value = 'ON')
    OR (Variable_name = 'group_replication_single_primary_mode' AND Value = 'OFF')
"""
_EPOCH = "'1970-01-01 00:00:00'"


class MysqlTable:
    """See `TableDatabase`."""

    gives_rows = False

    def __init__(
        self,
        settings: SqlSettings,
        columns: Columns,
        connect: Callable[[], Any] | None = None,
    ) -> None:
        self.place = settings.shown
        self._of_the_user = connect
        self._by_url = Connecting(settings.options, settings.tls, self.place)
        self._url = settings.url
        self._columns = columns
        self._name = ".".join(map(_name, parts(columns.table)))
        self._id = _name(columns.offset)
        self._db: Any = None
        # Schema and name; of each column: type, NOT NULL, given by the counter.
        self._table = ("", "")
        self._types: dict[str, tuple[str, bool, bool]] = {}
        self._engine = ""
        self._is_view = False
        self._counted = -1
        self._statements: Reading | None = None
        try:
            self._learn()
        except BaseException:
            self.close()
            raise

    # The connection

    def _connect(self, **more: Any) -> Any:
        db = self._of_the_user() if self._of_the_user else self._connect_by_url(**more)
        db.autocommit(True)
        db.cursorclass = Cursor
        with db.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute("SET SESSION time_zone = '+00:00'")
            with suppress(pymysql.Error):
                # MySQL would show a counter that is up to a day old; MariaDB does not know this.
                cursor.execute("SET SESSION information_schema_stats_expiry = 0")
        return db

    def _connect_by_url(self, **more: Any) -> Any:
        try:
            return self._by_url.connect(**more)
        except (TypeError, ValueError) as error:
            said = about_options(self._url, f"the driver does not take an option: {error}")
            raise ConfigError(f"{self.place}: {said}") from None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except pymysql.Error as error:
            code = error.args[0] if error.args else None
            if code in _MISSING:
                raise ConfigError(
                    f"{self._columns.table!r} can't be read: {error.args[-1]}"
                ) from error
            if code in _DENIED:
                raise ConfigError(
                    f"this user may not read all it needs: {error.args[-1]}; GRANT SELECT ON "
                    f"{self._columns.table} TO it"
                ) from error
            self.close()
            raised = translated(error, self.place)
            if raised is None or isinstance(raised, Raced):
                raise StoreError(f"{self.place}: {error}") from error
            raise raised from error

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Record]:
        with self._translated():
            if self._db is None:
                self._db = self._connect()
            with self._db.cursor() as cursor:
                cursor.execute(statement, tuple(values))
                return list(cursor.fetchall())

    # The table's schema

    def _learn(self) -> None:
        *schema, name = parts(self._columns.table)
        found = self._rows(_TABLE, [schema[0] if schema else None, name])
        if not found:
            raise ConfigError(f"there is no table or view {self._columns.table!r} in {self.place}")
        self._table = found[0][0], found[0][1]
        self._engine = str(found[0][2])
        self._is_view = "VIEW" in found[0][3]
        self._learn_columns()
        version = str(self._rows("SELECT VERSION()")[0][0])
        self._sees = not self._rows(_CLUSTER)
        self._writers: Writers = (
            TransactionsAndStatements(self._rows)
            if "MariaDB" in version
            else MetadataLocks(self._rows, None if self._is_view else self._table)
        )

    def _learn_columns(self) -> None:
        # Names of columns are the same in any case.
        self._types = {
            column.lower(): (kind, bool(required), bool(counted))
            for column, kind, required, counted in self._rows(_COLUMNS, self._table)
        }
        for column in self._columns.all:
            if column.lower() not in self._types:
                raise ConfigError(
                    f"{self._columns.table!r} has no column {column!r}; it has "
                    f"{', '.join(sorted(self._types))}"
                )

    def _type(self, column: str) -> str:
        return self._types[column.lower()][0]

    def check(self) -> None:
        table, offset = self._columns.table, self._columns.offset
        kind, required, _ = self._types[offset.lower()]
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
        if self._engine.lower() != "innodb":
            raise ConfigError(
                f"{table!r} is a table of {self._engine}; pxrs can tell only with InnoDB which "
                f"rows are there: ALTER TABLE {table} ENGINE = InnoDB"
            )
        unique = {str(row[0]).lower() for row in self._rows(_UNIQUE, self._table)}
        if not (required and offset.lower() in unique):
            raise ConfigError(
                f"offset must be unique and NOT NULL; {offset!r} of {table!r} is not: name its "
                "primary key, or make a unique index"
            )

    # Its rows

    def look(self) -> Look:
        # Before the writers are read: one that has an id up to there is among them, or has ended.
        counter = self._counter()
        [(highest, read_only)] = self._rows(
            f"SELECT max({self._id}), @@global.read_only FROM {self._name}"
        )
        top = max(-1 if highest is None else highest, counter)
        counted = self._is_view or self._types[self._columns.offset.lower()][2]
        if not counted or not self._sees or int(read_only):
            # Ids are given elsewhere: on other nodes, or on the primary of this replica.
            return Look(top, None)
        try:
            return Look(top, self._writers.look())
        except ListTruncated:
            return Look(top, None, passes=True)
        except (ConfigError, StoreError) as error:
            cause = error.__cause__
            code = cause.args[0] if isinstance(cause, pymysql.Error) and cause.args else None
            if code == _NO_PROCESS or code in _DENIED:
                return Look(top, None, self._writers.right)
            raise

    def _counter(self) -> int:
        if not self._types[self._columns.offset.lower()][2]:
            return -1
        found = self._rows(_COUNTER, self._table)
        # NULL while an ALTER TABLE has it: then it is where it was.
        if found and found[0][0] is not None:
            self._counted = int(found[0][0]) - 1
        return self._counted

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
                *map(_name, wanted.values),
            ]
            partition = None if wanted.partition is None else _name(wanted.partition)
            self._statements = Reading(self._name, self._id, others, partition)
        return self._statements

    def _text(self, column: str) -> str:
        """A key as text or bytes, as the database can hash it, too."""
        if self._type(column) in _BINARY:
            return _name(column)
        # Whether CHAR is padded depends on settings of the connection.
        name = f"RTRIM({_name(column)})" if self._type(column) == "char" else _name(column)
        return f"CONVERT({name} USING utf8mb4)"

    def _time(self) -> str:
        name = _name(self._columns.timestamp or "")
        if self._type(self._columns.timestamp or "") in _NUMBERS:
            return f"CAST(IF({name} < 100000000000, {name} * 1000, {name}) AS SIGNED)"
        return f"TIMESTAMPDIFF(MICROSECOND, {_EPOCH}, {name}) DIV 1000"

    def ids(self, after: int, limit: int) -> list[int]:
        return [row[0] for row in self._rows(self._reading().ids, [after, limit])]

    def last_keys(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> list[Record]:
        return self._rows(*self._reading().last(first, last, limit, partition))

    def first_at(self, timestamp: int) -> int | None:
        # Whole milliseconds: a row of the same one counts.
        name = _name(self._columns.timestamp or "")
        where, value = f"{self._time()} >= %s", timestamp
        if self._type(self._columns.timestamp or "") not in _NUMBERS:
            # So that an index helps.
            where, value = f"{name} >= {_EPOCH} + INTERVAL %s MICROSECOND", timestamp * 1000
        [(found,)] = self._rows(f"SELECT min({self._id}) FROM {self._name} WHERE {where}", [value])
        return None if found is None else int(found)

    def changes(self) -> object:
        return self._rows(f"SELECT max({self._id}) FROM {self._name}")[0][0]

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
        kind = self._type(column)
        require_integers(self._columns, kind in _INTEGERS, kind)
        return odd_one(self._rows, _name(column), self._name, partitions)

    def first_odd(self, first: int, last: int, partitions: int) -> tuple[int, object] | None:
        columns = self._id, _name(self._columns.partition or "")
        return first_odd_one(self._rows, columns, self._name, [first, last], partitions, "%s")

    def preparation(self, partitions: int) -> Preparation:
        require_table(self._columns, self._is_view)
        own = None if self._columns.partition == PARTITION_COLUMN else self._columns.partition
        column = own or PARTITION_COLUMN
        missing = self._missing_index(column)
        if own is None and not self._has_column(partitions):
            missing.insert(0, self._new_column(partitions))
        name = ".".join(map(_plain, self._table))
        statements = [f"ALTER TABLE {name} {', '.join(missing)}"] if missing else []
        return Preparation(statements, own or column)

    @property
    def _offset(self) -> str:
        return self._columns.offset

    def _has_column(self, partitions: int) -> bool:
        """Whether the column is there already; refuses one for another number of partitions."""
        comments: dict[str, str] = dict(self._rows(_COMMENTS, self._table))
        if PARTITION_COLUMN not in comments:
            return False
        require_own(self._columns, comments[PARTITION_COLUMN], partitions)
        return True

    def _missing_index(self, column: str) -> list[str]:
        indexes = self._rows(_INDEXES, self._table)
        if any(str(row[0]).lower() == f"{column},{self._offset}".lower() for row in indexes):
            return []
        name = _plain(PARTITION_COLUMN)
        # The rest of an index whose column was dropped is in the way.
        left = [f"DROP INDEX {name}" for _, index in indexes if index == PARTITION_COLUMN]
        return [*left, f"ADD INDEX {name} ({_plain(column)}, {_plain(self._offset)})"]

    def _new_column(self, partitions: int) -> str:
        key = key_to_hash(self._columns)
        kind = self._type(key)
        if kind not in _HASHED:
            raise can_not_be_hashed(key, kind, "the server")
        text = self._text(key).replace("%%", "%")
        number = f"CAST(CONV(LEFT(MD5({text}), 8), 16, 10) AS UNSIGNED) % {partitions}"
        mark = mark_of(key, partitions).replace("\\", "\\\\").replace("'", "''")
        # Invisible: an INSERT that names no columns goes on as before.
        return (
            f"ADD COLUMN {_plain(PARTITION_COLUMN)} int GENERATED ALWAYS AS "
            f"(COALESCE({number}, 0)) STORED INVISIBLE COMMENT '{mark}'"
        )

    def execute(self, statement: str) -> None:
        with self._translated():
            # A large table takes its time.
            db = self._connect(read_timeout=None)
            with closing(db), db.cursor() as cursor:
                cursor.execute(f"SET SESSION lock_wait_timeout = {_LOCK_WAIT}")
                cursor.execute(statement)

    # What may go wrong later

    def findings(self, check: str) -> list[Finding]:
        wanted = self._columns
        found: list[Finding] = []
        if wanted.timestamp is not None and not self._is_view:
            indexes = [str(row[0]).lower() for row in self._rows(_INDEXES, self._table)]
            if not any(each.split(",")[0] == wanted.timestamp.lower() for each in indexes):
                found.append(no_index_on_times(check, wanted.table, wanted.timestamp))
        if wanted.key is not None and self._type(wanted.key) not in _HASHED:
            found.append(key_depends_on_settings(check, wanted.key, self._type(wanted.key)))
        kind = self._type(wanted.offset)
        if kind in _MOST:
            found += ids_run_out(check, wanted.offset, kind, self.look().top, _MOST[kind])
        return found

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(Exception):
                db.close()


def _plain(name: str) -> str:
    return quoted_name(name, "`")


def _name(name: str) -> str:
    """A name that stands in a statement with placeholders."""
    return quoted_name(name, "`").replace("%", "%%")
