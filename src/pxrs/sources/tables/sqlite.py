"""A table in a SQLite file. It has one writer at a time, so ids are committed in order."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pxrs.errors import ConfigError
from pxrs.sources.tables.api import (
    PARTITION_COLUMN,
    Columns,
    Look,
    Preparation,
    Reading,
    Record,
    first_odd_one,
    no_index_on_times,
    odd_one,
    quoted_name,
    require_integers,
)
from pxrs.stores.findings import Finding, warning
from pxrs.stores.sqlite.beside import check_links
from pxrs.stores.sqlite.failures import DRIVER_ERRORS, translate

_NUMBERS = ("INT", "REAL", "FLOA", "DOUB", "NUM", "DEC")


class SqliteTable:
    """See `TableDatabase`."""

    def __init__(
        self,
        path: str,
        columns: Columns,
        busy_timeout: float = 10.0,
        connect: Callable[[], sqlite3.Connection] | None = None,
    ) -> None:
        self.place = path
        self._columns = columns
        self._name = _name(columns.table)
        if not Path(path).exists():
            raise ConfigError(f"there is no file {path}; is the path right?")
        # The file itself: a link is followed once, and checked.
        self._file = os.path.realpath(path)
        self._busy_timeout = busy_timeout
        self._connect = connect
        self._replaced = 0
        self._inode = self._inode_now()
        with self._translated():
            self._db = self._reading_connection()
        self._id = _name(columns.offset)
        # The counter of AUTOINCREMENT keeps rising when rows are deleted.
        self._has_counter: bool | None = None
        self._statements: Reading | None = None

    def _check_links(self) -> None:
        """Refuse links beside the file: SQLite follows them, and root gives away what it opens.

        A reader of a file with a rollback journal looks for that journal in each transaction, so
        this is checked before each statement. Who swaps a file for a link in between is not
        noticed; `docs/security.md` says so.
        """
        check_links(self.place, self._file)

    def _reading_connection(self) -> sqlite3.Connection:
        self._check_links()
        if self._connect is not None:
            db = self._connect()
            db.isolation_level = None
            db.execute("PRAGMA query_only = ON")
            return db
        return sqlite3.connect(
            f"file:{quote(self._file)}?mode=ro",
            uri=True,
            timeout=self._busy_timeout,
            isolation_level=None,
            check_same_thread=False,
        )

    def _writing_connection(self) -> sqlite3.Connection:
        self._check_links()
        if self._connect is not None:
            return self._connect()
        return sqlite3.connect(self._file, timeout=10.0)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DRIVER_ERRORS as error:
            raise translate(error, self.place) from error

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Record]:
        self._check_links()
        with self._translated():
            return self._db.execute(statement, values).fetchall()

    def check(self) -> None:
        table = self._columns.table
        kind = self._rows("SELECT type FROM sqlite_master WHERE name = ? COLLATE NOCASE", (table,))
        if not kind:
            raise ConfigError(f"there is no table or view {table!r} in {self.place}")
        found = {
            name.lower(): (kind, bool(required), key)
            for _, name, kind, required, _, key in self._rows(f"PRAGMA table_info({self._name})")
        }
        for name in self._columns.all:
            if name.lower() not in found:
                raise ConfigError(
                    f"{table!r} has no column {name!r}; it has {', '.join(sorted(found))}"
                )
        if kind[0][0] == "view":
            self._check_view()
            return
        declared, required, key = found[self._columns.offset.lower()]
        alone = sum(1 for _, _, place in found.values() if place) == 1
        if declared.upper() == "INTEGER" and key and alone:
            return
        if "INT" not in declared.upper():
            raise ConfigError(
                f"offset must be a column of integers; {self._columns.offset!r} of {table!r} is "
                f"{declared or 'of no declared type'}"
            )
        if not (required and self._is_unique(alone and bool(key))):
            raise ConfigError(
                f"offset must be unique and NOT NULL; {self._columns.offset!r} of {table!r} is "
                "not: name its INTEGER PRIMARY KEY"
            )

    def _check_view(self) -> None:
        if self._rows(f"SELECT 1 FROM {self._name} WHERE {self._id} IS NULL LIMIT 1"):
            raise ConfigError(
                f"offset must not be NULL; {self._columns.offset!r} of the view "
                f"{self._columns.table!r} is in some rows: leave them out with WHERE"
            )

    def _is_unique(self, key: bool) -> bool:
        wanted = [self._columns.offset.lower()]
        indexes = self._rows(f"PRAGMA index_list({self._name})")
        return key or any(
            [str(each[2]).lower() for each in self._rows(f"PRAGMA index_info({_name(index)})")]
            == wanted
            for _, index, unique, _, partial in indexes
            if unique and not partial
        )

    def _inode_now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._file)
        except OSError:
            # Not there for a moment, or not a file of its own (`:memory:`).
            return None
        return found.st_dev, found.st_ino

    def replaced(self) -> int:
        """Whether another file stands at the path: the connection reads the old one for ever.

        Its inode is read before it is opened: if it is replaced in between, that is noticed again.
        """
        found = self._inode_now()
        if found is not None and found != self._inode:
            with self._translated():
                db = self._reading_connection()
            self._db.close()
            self._db, self._inode = db, found
            self._has_counter, self._statements = None, None
            self._replaced += 1
        return self._replaced

    def look(self) -> Look:
        replaced = self.replaced()
        highest = self._rows(f"SELECT max({self._id}) FROM {self._name}")[0][0]
        top = max(-1 if highest is None else highest, self._counter())
        return Look(top, frozenset(), replaced=replaced)

    def _counter(self) -> int:
        if self._has_counter is None:
            self._has_counter = bool(
                self._rows("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_sequence'")
            )
        if not self._has_counter:
            return -1
        found = self._rows(
            "SELECT seq FROM sqlite_sequence WHERE name = ? COLLATE NOCASE", (self._columns.table,)
        )
        return int(found[0][0]) if found else -1

    def select(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> list[Record]:
        return self._rows(*self._reading().rows(first, last, limit, partition))

    @property
    def gives_rows(self) -> bool:
        return len(self._columns.values) == 1

    def _reading(self) -> Reading:
        if self._statements is None:
            wanted = self._columns
            others = [
                "0" if wanted.timestamp is None else f"coalesce({self._time()}, 0)",
                "NULL" if wanted.key is None else _bytes(wanted.key),
                # As bytes, unless it becomes JSON: text would be decoded only to be encoded.
                *map(_bytes if len(wanted.values) == 1 else _name, wanted.values),
            ]
            partition = None if wanted.partition is None else _name(wanted.partition)
            self._statements = Reading(self._name, self._id, others, partition, mark="?")
        return self._statements

    def _time(self) -> str:
        """An expression for the time in milliseconds."""
        column = self._columns.timestamp or ""
        name, declared = _name(column), self._declared(column)
        if any(part in declared for part in _NUMBERS):
            return f"CAST({name} * iif({name} < 100000000000, 1000, 1) AS INTEGER)"
        return f"CAST(round((julianday({name}) - 2440587.5) * 86400000) AS INTEGER)"

    def _declared(self, column: str) -> str:
        """A column's type, in capitals."""
        columns = self._rows(f"PRAGMA table_info({self._name})")
        return next(str(row[2]).upper() for row in columns if row[1].lower() == column.lower())

    def ids(self, after: int, limit: int) -> list[int]:
        return [row[0] for row in self._rows(self._reading().ids, [after, limit])]

    def last_keys(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> list[Record]:
        return self._rows(*self._reading().last(first, last, limit, partition))

    def first_at(self, timestamp: int) -> int | None:
        if self._columns.timestamp is None:
            return None
        found = self._rows(
            f"SELECT min({self._id}) FROM {self._name} WHERE {self._time()} >= ?", (timestamp,)
        )
        return None if found[0][0] is None else int(found[0][0])

    def changes(self) -> object:
        return self._rows("PRAGMA data_version")[0][0]

    # Partitions in the database

    def filter_by(self, column: str) -> None:
        self._columns = self._columns._replace(partition=column)
        self._statements = None

    def odd_partition(self, partitions: int) -> object:
        column = self._columns.partition or ""
        declared = self._declared(column)
        require_integers(self._columns, "INT" in declared, declared or "of no declared type")
        return odd_one(self._rows, _name(column), self._name, partitions)

    def first_odd(self, first: int, last: int, partitions: int) -> tuple[int, object] | None:
        columns = self._id, _name(self._columns.partition or "")
        return first_odd_one(self._rows, columns, self._name, [first, last], partitions, "?")

    def preparation(self, partitions: int) -> Preparation:
        partition = self._columns.partition
        if partition is None:
            raise ConfigError(
                "SQLite has no md5, so it can't keep the partitions of keys in a column: every "
                "member reads the whole file, which is fast where it is local. If producers write "
                "the partition into a column of integers, attach the table with partition="
            )
        if self._has_index([partition, self._columns.offset]):
            return Preparation([])
        index = _name(f"{PARTITION_COLUMN}_{self._columns.table}")
        return Preparation(
            [f"CREATE INDEX {index} ON {self._name} ({_name(partition)}, {self._id})"]
        )

    def execute(self, statement: str) -> None:
        with self._translated(), closing(self._writing_connection()) as db:
            db.execute(statement)
            db.commit()

    # What may go wrong later

    def findings(self, check: str) -> list[Finding]:
        wanted = self._columns
        kind, text = self._rows(
            "SELECT type, sql FROM sqlite_master WHERE name = ? COLLATE NOCASE", (wanted.table,)
        )[0]
        if kind == "view":
            return []
        found: list[Finding] = []
        if "AUTOINCREMENT" not in text.upper():
            found.append(
                warning(
                    check,
                    "the table has no AUTOINCREMENT: SQLite gives the ids of the newest rows again "
                    "once these are deleted, and a row with an id that was passed is not delivered",
                    "make its id INTEGER PRIMARY KEY AUTOINCREMENT, or never delete the newest row",
                )
            )
        if wanted.timestamp is not None and not self._has_index([wanted.timestamp]):
            found.append(no_index_on_times(check, wanted.table, wanted.timestamp))
        return found

    def _has_index(self, columns: Sequence[str]) -> bool:
        """Whether an index begins with these columns."""
        wanted = [column.lower() for column in columns]
        return any(
            [str(row[2]).lower() for row in self._rows(f"PRAGMA index_info({_name(index)})")][
                : len(wanted)
            ]
            == wanted
            for _, index, _, _, partial in self._rows(f"PRAGMA index_list({self._name})")
            if not partial
        )

    def close(self) -> None:
        self._db.close()


def _bytes(name: str) -> str:
    return f"CAST({_name(name)} AS BLOB)"


def _name(name: str) -> str:
    return quoted_name(name, '"')
