"""One connection: runs statements and returns rows. Raises errors of pxrs (`failures.py`).

Statements are text as MariaDB and MySQL take it, with `%(name)s` for values. `oracle.py` translates
them for Oracle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, NamedTuple

import pymysql
from pymysql import converters
from pymysql.constants import FIELD_TYPE
from pymysql.cursors import Cursor

from pxrs.errors import InvalidRequest, OutcomeUnknown, StoreUnavailable
from pxrs.stores.mysql.failures import translated

Row = tuple[Any, ...]

# Oracle takes a thousand values in a list.
_PIECE = 1000
_PLACE = re.compile(r"%\((\w+)\)s")


class Dialect(NamedTuple):
    """How a driver takes a statement that is written for MariaDB, with values by name."""

    render: Callable[[str], str]
    # The placeholder of a value; with its number, if the driver wants that.
    mark: str
    # The names of values that are sent as bytes.
    as_bytes: Container[str] = ()

    def one(self, statement: str, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """The text with a placeholder for each value, several for a list; the values in order."""
        before, *rest = _split(self.render(statement))
        parts, found = [before], list[Any]()

        def marks(value: Any) -> str:
            if isinstance(value, (list, tuple)):
                return f"({', '.join(map(marks, value))})"
            found.append(value)
            return self.mark.format(len(found))

        for name, after in zip(rest[::2], rest[1::2], strict=True):
            parts += (marks(self._sent(name, values[name])), after)
        return "".join(parts), found

    def many(
        self, statement: str, rows: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[list[Any]]]:
        """The same for many rows. None of their values is a list."""
        names = _split(self.render(statement))[1::2]
        found = [[self._sent(name, row[name]) for name in names] for row in rows]
        return self.one(statement, rows[0])[0], found

    def _sent(self, name: str, value: Any) -> Any:
        if name not in self.as_bytes or value is None:
            return value
        return value.encode() if isinstance(value, str) else [each.encode() for each in value]


class Connection:
    """Runs statements on a driver's connection. Rows are tuples, keys are text.

    Raises errors of pxrs; `Raced` if a record exists already. `refuse_large` raises one if the
    server takes no statement of so many bytes.
    """

    def __init__(
        self, driver: Any, place: str, dialect: Dialect, refuse_large: Callable[[int], None]
    ) -> None:
        self.driver = driver
        self._place = place
        self._dialect = dialect
        self._refuse_large = refuse_large

    def rows(self, statement: str, **values: Any) -> list[Row]:
        """Run a query; returns its rows."""
        text, marked = self._dialect.one(statement, values)
        with self._translating(text, marked), self._cursor() as cursor:
            cursor.execute(text, marked)
            # Oracle can't lock rows and limit them at once: there they are locked as fetched.
            limit = values.get("limit")
            found = cursor.fetchall() if limit is None else cursor.fetchmany(limit)
            return _with_text_keys(cursor.description, found)

    def value(self, statement: str, **values: Any) -> Any:
        """Run a query; returns the first column of its first row, or None if there is none."""
        found = self.rows(statement, **values)
        return found[0][0] if found else None

    def run(self, statement: str, **values: Any) -> int:
        """Run a statement that changes something; returns how many rows it matched."""
        text, marked = self._dialect.one(statement, values)
        with self._translating(text, marked), self._cursor() as cursor:
            cursor.execute(text, marked)
            return int(cursor.rowcount)

    def rows_in(self, statement: str, **values: Any) -> list[Row]:
        """As `rows`, but sends values that are lists in pieces of a thousand.

        If the lists are empty nothing is sent. Tuples are sent whole.
        """
        return [row for some in _in_pieces(values) for row in self.rows(statement, **some)]

    def run_in(self, statement: str, **values: Any) -> int:
        """As `run`, but sends values that are lists in pieces of a thousand."""
        return sum(self.run(statement, **some) for some in _in_pieces(values))

    def run_many(self, statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run it for each of the rows; PyMySQL inserts many at once."""
        if rows:
            text, marked = self._dialect.many(statement, rows)
            with self._translating(text, marked), self._cursor() as cursor:
                cursor.executemany(text, marked)

    def last_row(self, statements: str, values: Sequence[Any]) -> Row:
        """Send several statements at once; returns the row of the last. A failure ends them all."""
        with self._translating(statements, values), self._cursor() as cursor:
            cursor.execute(statements, values)
            row = cursor.fetchone()
            while cursor.nextset():
                row = cursor.fetchone()
            return tuple(row)

    def commit(self) -> None:
        """Commit; raises `OutcomeUnknown` if no answer comes."""
        try:
            with self._translating():
                self.driver.commit()
        except StoreUnavailable as error:
            raise OutcomeUnknown(f"no answer to a commit: {error}") from error

    def rollback(self) -> None:
        with self._translating():
            self.driver.rollback()

    def _cursor(self) -> AbstractContextManager[Any]:
        """A cursor whose rows are tuples, whatever the caller's connection is set to."""
        is_pymysql = isinstance(self.driver, pymysql.Connection)
        found: AbstractContextManager[Any] = self.driver.cursor(*[Cursor] if is_pymysql else [])
        return found

    @contextmanager
    def _translating(self, text: str = "", values: Sequence[Any] = ()) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raised = translated(error, self._place)
            if raised is None:
                raise
            # A server hangs up on a statement that is too large, often before it is all sent.
            if isinstance(raised, (StoreUnavailable, InvalidRequest)):
                self._refuse_large(len(text) + _size_of(values))
            raise raised from error


def _size_of(values: Sequence[Any]) -> int:
    """How many bytes the values take in the largest statement that PyMySQL makes of them.

    It packs many rows into statements of a bounded length, unless a single row is longer.
    """
    if values and isinstance(values[0], list):
        rows = [_size_of(row) for row in values]
        return max(*rows, min(sum(rows), int(Cursor.max_stmt_length)))
    return sum(len(converters.escape_item(value, "utf8mb4").encode()) for value in values)


def _in_pieces(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    lists = {name: each for name, each in values.items() if isinstance(each, list)}
    for start in range(0, max(map(len, lists.values())), _PIECE):
        some = {name: each[start : start + _PIECE] for name, each in lists.items()}
        yield {**values, **some}


@cache
def _split(statement: str) -> list[str]:
    return _PLACE.split(statement)


# Keys are bytes in the database (see `sql/tables.sql`) and text here. They are sent as bytes,
# because a caller's connection may have any character set.
_KEYS = {
    "first", "item_key", "key", "keys", "lane", "lanes", "last", "name", "names", "seen_key", "tx",
    "units",
}  # fmt: skip
MYSQL = Dialect(lambda statement: statement, "%s", _KEYS)


def _with_text_keys(columns: Sequence[Any], rows: Sequence[Row]) -> list[Row]:
    """The rows with keys as text; bodies, whose columns are of another type, stay bytes."""
    keys = {at for at, column in enumerate(columns) if column[1] == FIELD_TYPE.VAR_STRING}
    if not keys:
        return [tuple(row) for row in rows]
    return [
        tuple(
            value.decode() if at in keys and isinstance(value, bytes) else value
            for at, value in enumerate(row)
        )
        for row in rows
    ]
