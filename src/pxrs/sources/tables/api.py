"""What `table.py` asks of a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

Record = tuple[Any, ...]


class Columns(NamedTuple):
    """A table or view, and its columns as the user has named them."""

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
    """The highest id that was given, and who was seen writing after that was read.

    `writers` is None where the database does not tell.
    """

    top: int
    writers: frozenset[str] | None


class TableDatabase(Protocol):
    """One table in one database. For one thread at a time; errors are those of pxrs."""

    # Its name for people, without a password.
    place: str
    # Whether no row can appear below one that was read.
    in_order: bool
    # The right that a user needs to see who is writing; empty where everyone sees it.
    right: str

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

    def first_at(self, timestamp: int) -> int | None:
        """The lowest id of a row of this time (ms) or later."""
        ...

    def changes(self) -> object:
        """Something that differs once rows may have come; it costs little to ask."""
        ...

    def close(self) -> None: ...


def parts(table: str) -> list[str]:
    """The names in `schema.table`."""
    return table.split(".")


def quoted_name(name: str, quote: str) -> str:
    """A name as it stands in a statement."""
    return quote + name.replace(quote, quote * 2) + quote
