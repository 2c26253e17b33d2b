"""A table that a program writes to while groups read it: ids are given before they commit.

Writers take ids, commit and roll back whenever they like, also while somebody reads. The judge
knows which offsets of which partition have no row, as soon as that is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from pxrs.clock import Clock
from pxrs.core.routing import md5
from pxrs.errors import TopicNotFound
from pxrs.sources.log import LogWithSources, StoresWithSources
from pxrs.sources.table import OpenTable, Table
from pxrs.sources.tables.api import Look, Record
from pxrs.sources.virtual import VirtualLog
from pxrs.stores.api import Stores
from pxrs.types import Topic
from simulator.groups.judge import Ledger

_MOST_WRITERS = 4
_EVENTS = Table("events", key="key", value="value")


class SimulatedTable:
    """One table, for the world; see `TableDatabase` for those who read it."""

    place = "the world"
    gives_rows = False

    def __init__(self, topic: Topic, ledger: Ledger, rng: Random) -> None:
        self._topic = topic
        self._accounts = [each for each in ledger.accounts.values() if each.topic_id == topic.id]
        self._rng = rng
        self._is_quiet = False
        self._given = 0
        self._rows: dict[int, bytes] = {}
        self._writers: dict[str, dict[int, bytes]] = {}
        self._begun = 0
        # There is no id 0.
        self._has_none(0, None)

    def write(self) -> None:
        """One step of one writer."""
        if self._is_quiet:
            return
        if len(self._writers) < _MOST_WRITERS and self._rng.random() < 0.4:
            self._begun += 1
            self._writers[f"w{self._begun}"] = {}
        elif self._writers:
            name = self._rng.choice(sorted(self._writers))
            if self._rng.random() < 0.6:
                for _ in range(self._rng.randint(1, 4)):
                    self._given += 1
                    self._writers[name][self._given] = b"%d" % self._rng.randrange(30)
            else:
                self._end(name, commits=self._rng.random() < 0.7)

    def end_all(self) -> None:
        """Every writer ends, one way or the other, and nobody begins."""
        self._is_quiet = True
        for name in sorted(self._writers):
            self._end(name, commits=self._rng.random() < 0.7)

    def _end(self, name: str, *, commits: bool) -> None:
        for number, key in self._writers.pop(name).items():
            if commits:
                self._rows[number] = key
            self._has_none(number, md5(key, self._topic.partitions) if commits else None)

    def _has_none(self, number: int, partition: int | None) -> None:
        """No partition but this one has a row with this id."""
        for account in self._accounts:
            if account.part.partition != partition:
                account.empty.add(number)

    @property
    def end(self) -> int:
        return max(self._rows, default=-1) + 1

    # For those who read it

    def check(self) -> None: ...

    def look(self) -> Look:
        top = max(self._rows, default=-1)
        self._others_go_on()
        return Look(top, frozenset(self._writers))

    def _others_go_on(self) -> None:
        while self._rng.random() < 0.5:
            self.write()

    def select(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> list[Record]:
        self._others_go_on()
        return [
            (number, 0, self._rows[number], b"%d" % number)
            for number in sorted(self._rows)
            if first <= number <= last
        ][:limit]

    def ids(self, after: int, limit: int) -> list[int]:
        self._others_go_on()
        return sorted(number for number in self._rows if number > after)[:limit]

    def last_keys(
        self, first: int, last: int, limit: int, partition: int | None = None
    ) -> list[Record]:
        rows = [(number, self._rows[number]) for number in sorted(self._rows, reverse=True)]
        return [row for row in rows if first <= row[0] <= last][:limit]

    def first_at(self, timestamp: int) -> int | None:
        return None

    def changes(self) -> object:
        return self.end

    def close(self) -> None: ...


def reading(
    stores: Stores, tables: Callable[[], dict[str, tuple[Topic, SimulatedTable]]], clock: Clock
) -> Stores:
    """The stores of one process, which reads these tables by itself."""

    def open_log(topic_id: str) -> VirtualLog:
        if topic_id not in tables():
            raise TopicNotFound(topic_id)
        topic, table = tables()[topic_id]
        return VirtualLog(topic, OpenTable(_EVENTS, table, clock))

    return StoresWithSources(stores, LogWithSources(stores.log, open_log))
