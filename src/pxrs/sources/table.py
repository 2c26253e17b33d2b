"""A table or view that producers write to already, as a source.

`Table` names it and the roles of its columns; `OpenTable` reads it. A row is
delivered once it is final (`core/settling.py`): no row with a lower id can appear any more.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.core.settling import Settling, following
from pxrs.errors import (
    Closed,
    ConfigError,
    DamagedBatch,
    InvalidRequest,
    PxrsError,
    SourceChanged,
    quoted,
)
from pxrs.forks import Origin
from pxrs.sources.api import LastKeys, SourceRead
from pxrs.sources.rows import RowsPerRead, as_bytes, as_json, named
from pxrs.sources.tables.api import (
    Columns,
    KeepsPartitions,
    Look,
    NoticesAnother,
    Preparation,
    Record,
    TableDatabase,
    TellsOfRows,
)
from pxrs.sources.tables.engines import check_engine, open_on_engine, recorded_url
from pxrs.sources.watching import PollingWatch
from pxrs.stores.api import Watch
from pxrs.types import Bounds, Row
from pxrs.urls import check_url, public

if TYPE_CHECKING:
    from sqlalchemy import Engine

# How many ids are checked for a gap while a writer has to be waited for.
_IDS = 1000
_MOST_SECONDS = 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class Table:
    """A table or view, in the store's own database or at `url`.

    `offset` is its id: an integer that is unique and rises, given by the database
    (AUTOINCREMENT, a sequence, an identity). Rows with one `key` stay in order; without a key they
    are all in one partition. `value` is one column, or several, which become a JSON object.
    `timestamp` is a time, or a number of seconds or milliseconds since 1970. `partition` is a
    column with the row's partition, if the table has one: members then read only their own rows.

    `engine` is a SQLAlchemy engine for that database, instead of `url`: this process reads on its
    connections. Its URL is recorded, without a password, for processes that do not bring one.

    `settle` is how many seconds a missing id is waited for where the database does not show which
    transactions are writing: longer than the longest one that writes to the table.
    """

    name: str
    offset: str = "id"
    key: str | None = None
    value: str | Sequence[str] = ()
    timestamp: str | None = None
    partition: str | None = None
    settle: float | None = None
    url: str | None = None
    engine: Engine | None = dataclasses.field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.engine is not None:
            if self.url is not None:
                raise InvalidRequest(
                    f"{self.name!r} is in one database: give url= or engine=, not both"
                )
            check_engine(self.engine)
        if self.url is not None:
            check_url(self.url)
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
        return named(self.value)

    # The hash of a row's key: databases can compute it, too.
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
            "url": self._public_url,
        }
        return {name: value for name, value in kept.items() if value is not None}

    @property
    def _public_url(self) -> str | None:
        if self.engine is not None:
            return recorded_url(self.engine)
        return None if self.url is None else public(self.url)

    def __repr__(self) -> str:
        return f"Table({self.settings()})"

    @property
    def columns(self) -> Columns:
        return Columns(
            self.name, self.offset, self.key, self.values, self.timestamp, self.partition
        )

    def open(self, store_url: str) -> OpenTable:
        """Connect to the table's database: the store's own, without `url` and `engine`."""
        from pxrs.sources.tables.opening import open_table_database

        if self.engine is not None:
            return OpenTable(self, open_on_engine(self.engine, self.columns))
        return OpenTable(self, open_table_database(self.url or store_url, self.columns))


class OpenTable:
    """See `Source`. One connection, which threads use in turn."""

    streams = 1

    def __init__(self, table: Table, database: TableDatabase, clock: Clock = SYSTEM_CLOCK) -> None:
        self.table = table
        self.database = database
        self._clock = clock
        self._origin = Origin("source")
        self._lock = threading.RLock()
        self._settling = Settling()
        self._top = -1
        # How often other rows were seen to stand where those stood that were read, and the last
        # time's account; what the database has noticed of that.
        self._incarnation = 0
        self._why = ""
        self._replaced = 0
        self._notices = database if isinstance(database, NoticesAnother) else None
        self._rows = RowsPerRead()
        self._make = _maker(table)
        self._closed = False
        self._filters = table.partition is not None
        self._channel: str | None = None
        # Those of the virtual topic; first and last id between which all rows name one of them.
        self._partitions: int | None = None
        self._sound = (0, -1)
        # How many rows the database has returned.
        self.rows_read = 0

    def use(
        self, partitions: int, partition: str | None = None, channel: str | None = None
    ) -> None:
        """Use what `prepare` has added to the table, without a column that is gone.

        `partitions` is how many the virtual topic has.
        """
        with self._use():
            self._partitions = partitions
            if partition is not None and self.table.partition is None:
                with suppress(ConfigError):
                    self._keeping().filter_by(partition)
                    self._filters = True
            self._channel = channel

    def check_partitions(self, partitions: int) -> None:
        """Refuse a partition column with values that name no partition."""
        if self.table.partition is None:
            return
        with self._use():
            odd = self._keeping().odd_partition(partitions)
        if odd is not None:
            raise ConfigError(
                f"{self.table.partition!r} of {self.table.name!r} must be a partition from 0 to "
                f"{partitions - 1} in every row, and is {odd} in some: rows of others would never "
                "be delivered. Attach it with more partitions, or mend the rows and add a CHECK"
            )

    def preparation(self, partitions: int) -> Preparation:
        """The changes that `prepare` has to make to the table."""
        with self._use():
            return self._keeping().preparation(partitions)

    def execute(self, statement: str) -> None:
        """Execute one statement of `preparation`."""
        with self._use():
            self._keeping().execute(statement)

    def _keeping(self) -> KeepsPartitions:
        if not isinstance(self.database, KeepsPartitions):
            raise ConfigError(f"{self.database.place} can't keep the partitions of rows")
        return self.database

    def check(self) -> None:
        """Refuse a table that can't be read in parallel."""
        with self._lock:
            self.database.check()
            if self.database.select(-(2**63), -1, 1):
                raise ConfigError(
                    f"offset must be 0 or more; {self.table.offset!r} of {self.table.name!r} is "
                    "negative in some rows, which would never be delivered: attach a view that "
                    f"leaves them out (WHERE {self.table.offset} >= 0)"
                )
            self._settle_of(self.database.look())

    def _settle_of(self, look: Look) -> float:
        """How many seconds to wait for a missing id; 0 where the writers are known."""
        if look.writers is not None:
            return 0.0
        if self.table.settle is None:
            if look.passes:
                return math.inf
            grant = f"GRANT {look.right} to this user, or " if look.right else ""
            why = f"{self.database.place} does not show who writes to {self.table.name!r}"
            if look.because:
                why = f"{self.table.name!r} in {self.database.place}: {look.because}"
            raise ConfigError(
                f"{why}, so a missing id may still come: {grant}give settle=, the seconds to wait "
                "for it, longer than the longest transaction that writes to it"
            )
        return self.table.settle

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        with self._use():
            return self._read(offset, limit, until, None)

    def read_partition(
        self, stream: int, partition: int, offset: int, limit: int
    ) -> SourceRead | None:
        """See `FiltersPartitions`."""
        if not self._filters:
            return None
        with self._use():
            read = self._read(offset, limit, None, partition)
            return self._before_odd_ones(offset, read)

    def _before_odd_ones(self, offset: int, read: SourceRead) -> SourceRead:
        """The rows that were read, up to the first one that names no partition.

        No reader would find such a row, so none may go past it: `DamagedBatch` at its id. Only a
        column that programs fill needs this; the one of `prepare` is computed by the database.
        """
        if self.table.partition is None or self._partitions is None or read.next == offset:
            return read
        first, last = self._sound
        if first <= offset and read.next - 1 <= last:
            return read
        goes_on = first <= offset <= last + 1
        odd = self._keeping().first_odd(
            last + 1 if goes_on else offset, read.next - 1, self._partitions
        )
        end = read.next if odd is None else odd[0]
        self._sound = (first if goes_on else offset, end - 1)
        if odd is None:
            return read
        if odd[0] == offset:
            says = f"its {self.table.partition!r} is {'NULL' if odd[1] is None else odd[1]}"
            raise DamagedBatch(
                self.table.name,
                0,
                offset,
                offset + 1,
                f"{says} and must be from 0 to {self._partitions - 1}: no consumer would get the "
                "row; UPDATE it, and add a CHECK to the table",
            )
        return SourceRead([row for row in read.rows if row[0] < end], end)

    def last_keys(
        self, stream: int, start: int, end: int, limit: int, partition: int | None = None
    ) -> LastKeys | None:
        """See `TellsLastKeys`."""
        if partition is not None and not self._filters:
            return None
        with self._use():
            found = self.database.last_keys(start, end - 1, limit, partition)
        rows = [(offset, as_bytes(key)) for offset, key in reversed(found)]
        return LastKeys(rows, rows[0][0] if len(rows) == limit else start)

    def _read(
        self, offset: int, limit: int, until: int | None, partition: int | None
    ) -> SourceRead:
        incarnation = self._incarnation
        final = self._settling.final
        if offset > final:
            final = self._look()
        if offset > final:
            # Rows that follow without a gap are final, even if others are still writing.
            final = following(offset - 1, self.database.ids(offset - 1, min(limit, _IDS)))
        last = final if until is None else min(final, until - 1)
        if last < offset:
            return SourceRead([], offset)
        most = min(limit, self._rows.count)
        found = self.database.select(offset, last, most, partition)
        if self._notices is not None:
            # After it has read by the table's name: up to here it was the same table.
            self._notice(self._notices.replaced())
        self.incarnation(stream=0, since=incarnation)
        self._refuse_repeats(found, most)
        # Making one tuple of another for each row is a fifth of the cost of reading it.
        rows: list[Row] = found if self.database.gives_rows else self._make(found)  # type: ignore[assignment]
        self.rows_read += len(rows)
        fitting = self._rows.fitting(rows)
        if fitting == len(rows) < most:
            return SourceRead(rows, last + 1, self._rows.size)
        return SourceRead(rows[:fitting], rows[fitting - 1][0] + 1, self._rows.size)

    def _refuse_repeats(self, found: Sequence[Record], limit: int) -> None:
        """A view may have an id twice. A checkpoint stands behind the one, and before the other.

        If there may be more rows, the last one's double may be the first that was left out.
        """
        numbers = set(map(itemgetter(0), found))
        last = found[-1][0] if len(found) == limit else None
        if len(numbers) < len(found) or (
            last is not None and self.database.ids(last - 1, 2) == [last, last]
        ):
            raise SourceChanged(
                f"{self.table.offset!r} of {self.table.name!r} is not unique: two rows have the "
                "same id, and a checkpoint could not stand between them. Name a column that is "
                "unique"
            )

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
        look = self.database.look()
        top, writers = look.top, look.writers
        before = self._settling.final
        if top < before:
            self._replaced = look.replaced
            self._begin_anew(f"was read up to id {before}, and its highest id is {top} now: it")
        else:
            self._notice(look.replaced)
        # A right may have been taken away since it was attached.
        settle = self._settle_of(look)
        self._top = top
        final = self._settling.look(top, writers, self._clock.monotonic(), settle)
        if final < top and final >= 0:
            final = self._settling.follow(self.database.ids(final, _IDS))
        return final

    def _notice(self, replaced: int) -> None:
        """`replaced`: what the database has noticed, see there."""
        if replaced != self._replaced:
            self._replaced = replaced
            if self._top >= 0:
                self._begin_anew("is not the one that was read: it")

    def _begin_anew(self, why: str) -> None:
        """Nothing that was known holds for the rows that are there now.

        Whoever stands at an offset of the rows that were there learns it by `incarnation`; those
        who begin now, and an operator who wants to know where to continue, may read them.
        """
        self._incarnation += 1
        self._why = why
        self._settling = Settling()
        self._top = -1
        self._sound = (0, -1)

    def incarnation(self, stream: int, since: int | None = None) -> int:
        """See `NoticesAnother`."""
        if since is not None and since != self._incarnation:
            raise SourceChanged(
                f"{self.table.name!r} in {self.database.place} {self._why} was truncated, restored "
                "or made anew. Rows with ids up to there would never be delivered. Detach the "
                "topic and attach the table under another name, or reset the groups to where they "
                "are to continue"
            )
        return self._incarnation

    def offset_at(self, stream: int, timestamp: int) -> int | None:
        with self._use():
            if self.table.timestamp is None:
                raise InvalidRequest(
                    f"{self.table.name!r} was attached without timestamp=, so offsets can't be "
                    "looked up by time"
                )
            return self.database.first_at(timestamp)

    def watch(self) -> Watch:
        if self._channel is not None and isinstance(self.database, TellsOfRows):
            return self.database.watch(
                self._changes, lambda: self._settling.is_waiting, self._channel
            )
        return PollingWatch(self._changes)

    def _changes(self) -> object:
        """A value that differs when there may be more to read; errors are left to reads."""
        with suppress(PxrsError), self._use():
            if self._settling.is_waiting:
                # A writer that rolls back changes nothing else that could be seen.
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


def _maker(table: Table) -> Callable[[Sequence[Record]], list[Row]]:
    """Returns a function that makes messages of records."""
    names = table.values

    def several(records: Sequence[Record]) -> list[Row]:
        return [
            Row(offset, time or 0, as_bytes(key), as_json(dict(zip(names, values, strict=True))))
            for offset, time, key, *values in records
        ]

    return _of_one_column if len(names) == 1 else several


def _of_one_column(records: Sequence[Record]) -> list[Row]:
    # Plain tuples in the order of a Row, of which making one takes three times as long; and the
    # usual types without a call.
    return [
        (  # type: ignore[misc]
            offset,
            time or 0,
            key if type(key) is bytes else key.encode() if type(key) is str else as_bytes(key),
            value
            if type(value) is bytes
            else value.encode()
            if type(value) is str
            else as_bytes(value),
            (),
        )
        for offset, time, key, value in records
    ]
