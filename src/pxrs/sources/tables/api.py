"""The interface of a database to `table.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pxrs.errors import ConfigError
from pxrs.stores.api import Watch
from pxrs.stores.findings import Finding, note, warning

Record = tuple[Any, ...]


class Columns(NamedTuple):
    """A table or view, and its columns as the user named them."""

    table: str
    offset: str
    key: str | None
    values: tuple[str, ...]
    timestamp: str | None
    partition: str | None

    @property
    def all(self) -> list[str]:
        """All of them, each once."""
        named = (self.offset, self.key, *self.values, self.timestamp, self.partition)
        return list(dict.fromkeys(name for name in named if name is not None))


class Look(NamedTuple):
    """The highest id that was given, and the writers that were seen after it was read.

    `writers` is None where the database does not tell, for want of a `right` maybe. `passes`: it
    will tell again. `replaced`: see `NoticesAnother`.
    `because`: why writers that are shown would not be all who may have an id.
    """

    top: int
    writers: frozenset[str] | None
    right: str = ""
    passes: bool = False
    replaced: int = 0
    because: str = ""


# The column that `prepare` adds.
PARTITION_COLUMN = "pxrs_partition"


class Preparation(NamedTuple):
    """The statements that make reading cheaper, and what is there after them.

    `partition` is a column with the row's partition, of which members read only theirs. The
    database notifies `channel` of new rows.
    """

    statements: list[str]
    partition: str | None = None
    channel: str | None = None


class TableDatabase(Protocol):
    """One table in one database. For one thread at a time; errors are those of pxrs."""

    # Its name for people, without a password.
    place: str

    @property
    def gives_rows(self) -> bool:
        """Whether `select` returns rows as they are delivered: the time is 0 where there is none,
        key and value are bytes.
        """
        ...

    def check(self) -> None:
        """Refuse a table that can't be read in parallel: `ConfigError` says why and what to do."""
        ...

    def look(self) -> Look: ...

    def select(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> Sequence[Record]:
        """Rows from `first` to `last` by id: id, time in ms or None, key, values.

        With `partition` only those whose partition column says so.
        """
        ...

    def ids(self, after: int, limit: int) -> list[int]:
        """The ids above `after`, by size."""
        ...

    def last_keys(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> Sequence[Record]:
        """Id and key of the last rows from `first` to `last`, the highest id first.

        With `partition` only those whose partition column says so.
        """
        ...

    def first_at(self, timestamp: int) -> int | None:
        """The lowest id of a row of this time (ms) or later."""
        ...

    def changes(self) -> object:
        """A value that differs once rows may have come; cheap to read."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class KeepsPartitions(Protocol):
    """A `TableDatabase` that can keep the partition of each row in a column."""

    def filter_by(self, column: str) -> None:
        """Use this column as the row's partition from now on."""
        ...

    def odd_partition(self, partitions: int) -> object:
        """A value of the partition column that names no partition, or "NULL"; None if all do.

        `ConfigError` if it is no column of integers.
        """
        ...

    def first_odd(self, first: int, last: int, partitions: int) -> tuple[int, object] | None:
        """The lowest id from `first` to `last` whose row names no partition, and what it names."""
        ...

    def preparation(self, partitions: int) -> Preparation:
        """The changes that `prepare` has to make; `ConfigError` if they can't be made."""
        ...

    def execute(self, statement: str) -> None:
        """Execute a statement of `preparation`, on a connection that may write."""
        ...


@runtime_checkable
class NoticesAnother(Protocol):
    """A `TableDatabase` that notices when other rows stand under the table's name."""

    def replaced(self) -> int:
        """How often it was seen that ids up to those that were given are given anew.

        The table was truncated together with its counter, or is another one. It asks the database.
        """
        ...


@runtime_checkable
class KnowsItself(Protocol):
    """A `TableDatabase` that can report problems of the table."""

    def findings(self, check: str) -> list[Finding]:
        """Findings about what may cost time or rows one day, beyond what `check` refuses."""
        ...


@runtime_checkable
class TellsOfRows(Protocol):
    """A `TableDatabase` that can notify of new rows over a channel."""

    def watch(
        self, changes: Callable[[], object], is_waiting: Callable[[], bool], channel: str
    ) -> Watch:
        """A watch that wakes when `changes` may differ; while `is_waiting`, even without news."""
        ...


def mark_of(key: str, partitions: int) -> str:
    """The comment on a partition column, by which `prepare` recognises its own."""
    return f"pxrs: md5 of {key}, {partitions} partitions"


def require_table(columns: Columns, is_view: bool) -> None:
    """Refuse to prepare a view."""
    if is_view:
        raise ConfigError(f"{columns.table!r} is a view; prepare the table that it shows")


def require_integers(columns: Columns, are_integers: bool, kind: str) -> None:
    """Refuse a partition column of another type."""
    if not are_integers:
        raise ConfigError(
            f"partition must be a column of integers; {columns.partition!r} of {columns.table!r} "
            f"is {kind}"
        )


def require_own(columns: Columns, comment: str | None, partitions: int) -> None:
    """Refuse a partition column that was prepared for another topic, as its comment says."""
    if comment != mark_of(columns.key or "", partitions):
        raise ConfigError(
            f"{columns.table!r} has a column {PARTITION_COLUMN!r} for another topic "
            f"({comment or 'without a comment'}): one topic of a table can be prepared"
        )


def key_to_hash(columns: Columns) -> str:
    """The column by whose value rows have their partition."""
    if columns.key is None:
        raise ConfigError(
            f"{columns.table!r} was attached without key=, so all its rows are in one "
            "partition and there is nothing to prepare"
        )
    return columns.key


def can_not_be_hashed(key: str, kind: str, who: str) -> ConfigError:
    """The refusal of a key that is not the same text for every connection."""
    return ConfigError(
        f"the text of {key!r}, which is {kind}, depends on settings of the connection: "
        f"{who} can't keep its partition. Use a key of text, integers or bytes"
    )


def no_index_on_times(check: str, table: str, column: str) -> Finding:
    return note(
        check,
        f"there is no index on {column!r}: going to a time reads the whole table",
        f"CREATE INDEX ON {table} ({column}), or do without seeking by time",
    )


def key_depends_on_settings(check: str, key: str, kind: str) -> Finding:
    return warning(
        check,
        f"the text of the key {key!r}, which is {kind}, depends on settings of the connection: "
        "members with other settings would see a key in another partition",
        "attach it with a key of text, integers or bytes",
    )


def ids_run_out(check: str, column: str, kind: str, top: int, most: int) -> list[Finding]:
    """A finding where four fifths of the ids have been given."""
    if top < most * 0.8:
        return []
    says = f"{column!r} is {kind} and has reached {top:,} of {most:,}"
    return [warning(check, says, "make it a bigint before inserts fail")]


# Executes a query with its values.
Rows = Callable[..., Sequence[Record]]


def odd_one(rows: Rows, name: str, table: str, partitions: int) -> object:
    """A value of this partition column that is no partition, or "NULL"; None if there is none."""
    found = rows(f"SELECT {name} FROM {table} WHERE {_is_odd(name, partitions)} LIMIT 1")
    return ("NULL" if found[0][0] is None else found[0][0]) if found else None


def first_odd_one(
    rows: Rows, columns: tuple[str, str], table: str, ids: list[int], partitions: int, mark: str
) -> tuple[int, object] | None:
    """The first row between two ids whose value in this column is no partition, and the value."""
    offset, name = columns
    between = f"{offset} BETWEEN {mark} AND {mark} AND ({_is_odd(name, partitions)})"
    query = f"SELECT {offset}, {name} FROM {table} WHERE {between} ORDER BY {offset} LIMIT 1"
    found = rows(query, ids)
    return (found[0][0], found[0][1]) if found else None


def _is_odd(name: str, partitions: int) -> str:
    return f"{name} IS NULL OR {name} < 0 OR {name} >= {partitions:d}"


class Reading:
    """The statements that read a table, made of expressions in its database's own words.

    `mark` stands for a value. `by_index`: there is an index on partition and id, and the server has
    to use it. Otherwise PostgreSQL uses the index on ids, whose rows lie in order on the disk, and
    reads all rows for each partition.
    """

    def __init__(
        self,
        table: str,
        offset: str,
        others: Sequence[str],
        partition: str | None = None,
        mark: str = "%s",
        *,
        by_index: bool = False,
    ) -> None:
        columns = ", ".join([offset, *others])
        rest = f"{offset} BETWEEN {mark} AND {mark} ORDER BY {offset} LIMIT {mark}"
        self._all = f"SELECT {columns} FROM {table} WHERE {rest}"
        self._by_index = by_index
        self._filtered = f"SELECT {columns} FROM {table} WHERE {partition} = {mark} AND {rest}"
        # The key follows the time.
        keys = f"SELECT {offset}, {others[1]} FROM {table} WHERE"
        newest = f"{offset} BETWEEN {mark} AND {mark} ORDER BY {offset} DESC LIMIT {mark}"
        self._last = f"{keys} {newest}"
        self._last_filtered = f"{keys} {partition} = {mark} AND {newest}"
        if by_index:
            # No other index has this order.
            both = f"({partition}, {offset})"
            self._filtered = f"""SELECT {columns} FROM {table}
                WHERE {both} >= ({mark}, {mark}) AND {both} <= ({mark}, {mark})
                ORDER BY {partition}, {offset} LIMIT {mark}"""
        self.ids = f"SELECT {offset} FROM {table} WHERE {offset} > {mark} ORDER BY 1 LIMIT {mark}"

    def rows(
        self, first: int, last: int, limit: int, partition: int | None
    ) -> tuple[str, list[int]]:
        """The statement for `TableDatabase.select`, and its values."""
        if partition is None:
            return self._all, [first, last, limit]
        if self._by_index:
            return self._filtered, [partition, first, partition, last, limit]
        return self._filtered, [partition, first, last, limit]

    def last(
        self, first: int, last: int, limit: int, partition: int | None
    ) -> tuple[str, list[int]]:
        """The statement for `TableDatabase.last_keys`, and its values."""
        if partition is None:
            return self._last, [first, last, limit]
        return self._last_filtered, [partition, first, last, limit]


def parts(table: str) -> list[str]:
    """The names in `schema.table`."""
    return table.split(".")


def quoted_name(name: str, quote: str) -> str:
    """A name as it stands in a statement."""
    return quote + name.replace(quote, quote * 2) + quote
