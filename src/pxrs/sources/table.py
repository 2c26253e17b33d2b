"""A table or view that producers write to already, as a source.

`Table` says which one it is and which of its columns are what; `OpenTable` reads it. A row is
delivered once it is final (`core/settling.py`): no row with a lower id can appear any more.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import public
from pxrs.core.settling import Settling, following
from pxrs.errors import Closed, ConfigError, InvalidRequest, PxrsError, SourceChanged, quoted
from pxrs.forks import Origin
from pxrs.sources.api import SourceRead
from pxrs.sources.sizing import RowsPerRead
from pxrs.sources.tables.api import Columns, Record, TableDatabase
from pxrs.sources.values import as_bytes, as_json
from pxrs.sources.watching import PollingWatch
from pxrs.stores.api import Watch
from pxrs.types import Bounds, Row

# Ids that are looked at for one without a gap while a writer has to be waited for.
_IDS = 1000
_MOST_SECONDS = 24 * 3600.0
# A look at the table, seconds: soon after something happened, and when it is quiet.
_SOON, _QUIET = 0.005, 0.25


@dataclasses.dataclass(frozen=True)
class Table:
    """A table or view, in the store's own database or at `url`.

    `offset` is its id: an integer that is unique and rises, given by the database
    (AUTOINCREMENT, a sequence, an identity). Rows with one `key` stay in order; without a key they
    are all in one partition. `value` is one column, or several, which become a JSON object.
    `timestamp` is a time, or a number of seconds or milliseconds since 1970. `partition` is a
    column with the row's partition, if the table has one: members then read only their own rows.

    `settle` is how many seconds a missing id is waited for where the database does not tell who is
    writing: longer than the longest transaction that writes to the table.
    """

    name: str
    offset: str = "id"
    key: str | None = None
    value: str | Sequence[str] = ()
    timestamp: str | None = None
    partition: str | None = None
    settle: float | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        columns = [self.offset, *self.values]
        columns += [each for each in (self.key, self.timestamp, self.partition) if each is not None]
        for text in (self.name, *columns):
            if not isinstance(text, str) or not text or not text.isprintable() or len(text) > 200:
                raise InvalidRequest(
                    f"tables and columns must be named by printable text, got {quoted(text)}"
                )
        if not self.values:
            raise InvalidRequest(
                f"value must name at least one column of {self.name!r}: value=['payload']"
            )
        if self.settle is not None and not (
            isinstance(self.settle, int | float) and 0 <= self.settle <= _MOST_SECONDS
        ):
            raise InvalidRequest(
                f"settle must be seconds from 0 to {_MOST_SECONDS:.0f}, got {quoted(self.settle)}"
            )

    @property
    def values(self) -> tuple[str, ...]:
        return (self.value,) if isinstance(self.value, str) else tuple(self.value)

    # What a row's key is hashed with: databases can compute it, too.
    partitioner = "md5"

    def settings(self) -> dict[str, Any]:
        """The settings that are kept with the virtual topic; without a password."""
        kept: dict[str, Any] = {
            "kind": "table",
            "name": self.name,
            "offset": self.offset,
            "key": self.key,
            "value": list(self.values),
            "timestamp": self.timestamp,
            "partition": self.partition,
            "settle": self.settle,
            "url": None if self.url is None else public(self.url),
        }
        return {name: value for name, value in kept.items() if value is not None}

    @property
    def columns(self) -> Columns:
        return Columns(
            self.name, self.offset, self.key, self.values, self.timestamp, self.partition
        )

    def open(self, store_url: str) -> OpenTable:
        """Connect to the database; the store's own, unless the table is elsewhere."""
        from pxrs.sources.opening import open_table_database

        return OpenTable(self, open_table_database(self.url or store_url, self.columns))


class OpenTable:
    """See `Source`. One connection, which threads take in turn."""

    streams = 1

    def __init__(self, table: Table, database: TableDatabase, clock: Clock = SYSTEM_CLOCK) -> None:
        self.table = table
        self.database = database
        self._clock = clock
        self._origin = Origin("source")
        self._lock = threading.RLock()
        self._settling = Settling()
        self._top = -1
        self._rows = RowsPerRead()
        self._row = _maker(table)
        self._closed = False

    def check(self) -> None:
        """Refuse a table that can't be read in parallel."""
        with self._lock:
            self.database.check()
            look = self.database.look()
            if look.writers is None and self.table.settle is None:
                raise ConfigError(
                    f"{self.database.place} does not tell who writes to {self.table.name!r}, so a "
                    "missing id may still come: say with settle= for how many seconds, longer than "
                    "the longest transaction that writes to it"
                )

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        with self._use():
            return self._read(offset, limit, until, None)

    def read_partition(
        self, stream: int, partition: int, offset: int, limit: int
    ) -> SourceRead | None:
        """See `FiltersPartitions`."""
        if self.table.partition is None:
            return None
        with self._use():
            return self._read(offset, limit, None, partition)

    def _read(
        self, offset: int, limit: int, until: int | None, partition: int | None
    ) -> SourceRead:
        final = self._settling.final
        if offset > final:
            final = self._look()
        if offset > final:
            # Rows that follow without a gap are final, whoever is still writing.
            final = following(offset - 1, self.database.ids(offset - 1, min(limit, _IDS)))
        last = final if until is None else min(final, until - 1)
        if last < offset:
            return SourceRead([], offset)
        most = min(limit, self._rows.count)
        found = self.database.select(offset, last, most, partition)
        _refuse_repeats(found, self.table)
        rows = list(map(self._row, found))
        fitting = self._rows.fitting(rows)
        if fitting == len(rows) < most:
            return SourceRead(rows, last + 1)
        return SourceRead(rows[:fitting], rows[fitting - 1][0] + 1)

    def bounds(self, stream: int) -> Bounds:
        with self._use():
            self._look()
            return Bounds(0, max(self._top, self._settling.final) + 1)

    def final(self, stream: int) -> int | None:
        with self._use():
            if self._look() < 0 and self._settling.is_waiting:
                return None
            return self._settling.final + 1

    def _look(self) -> int:
        """Find out up to which id rows are final."""
        top, writers = self.database.look()
        before = self._settling.final
        if top < before:
            raise SourceChanged(
                f"{self.table.name!r} in {self.database.place} was read up to id {before}, and its "
                f"highest id is {top} now: it was truncated, restored or made anew. Rows with ids "
                "up to there would never be delivered. Detach the topic and attach the table under "
                "another name, or reset the groups to where they are to go on"
            )
        self._top = top
        settle = (self.table.settle or 0.0) if writers is None else 0.0
        final = self._settling.look(top, writers or frozenset(), self._clock.monotonic(), settle)
        if final < top and final >= 0:
            final = self._settling.follow(self.database.ids(final, _IDS))
        return final

    def offset_at(self, stream: int, timestamp: int) -> int | None:
        with self._use():
            if self.table.timestamp is None:
                raise InvalidRequest(
                    f"{self.table.name!r} was attached without timestamp=, so there is no going to "
                    "a time in it"
                )
            return self.database.first_at(timestamp)

    def watch(self) -> Watch:
        return PollingWatch(self._changes, _SOON, _QUIET)

    def _changes(self) -> object:
        """Something new when there may be more to read; trouble is for those who read."""
        with suppress(PxrsError), self._use():
            if self._settling.is_waiting:
                # A writer that rolls back changes nothing that could be seen.
                return (self._look(), self.database.changes())
            return (self._settling.final, self.database.changes())
        return None

    def close(self) -> None:
        if self._origin.is_parent:
            return
        with self._lock:
            self._closed = True
            self.database.close()

    @contextmanager
    def _use(self) -> Iterator[None]:
        self._origin.refuse_child()
        with self._lock:
            if self._closed:
                raise Closed(f"the source over {self.table.name!r} was closed")
            yield


def _refuse_repeats(found: Sequence[Record], table: Table) -> None:
    """A view may have an id twice: half of such a pair would be skipped at a chunk's end."""
    if len({row[0] for row in found}) < len(found):
        raise SourceChanged(
            f"{table.offset!r} of {table.name!r} is not unique: two rows have the same id, and a "
            "checkpoint could not stand between them. Name a column that is unique"
        )


def _maker(table: Table) -> Callable[[Record], Row]:
    """Returns a function that makes a message of a record."""
    if len(table.values) == 1:

        def single(record: Record) -> Row:
            offset, time, key, value = record
            return (  # type: ignore[return-value]  # a Row, which would take three times as long
                offset,
                time or 0,
                key.encode() if type(key) is str else as_bytes(key),
                value.encode() if type(value) is str else as_bytes(value),
                (),
            )

        return single
    names = table.values

    def several(record: Record) -> Row:
        offset, time, key, *values = record
        return Row(offset, time or 0, as_bytes(key), as_json(dict(zip(names, values, strict=True))))

    return several
