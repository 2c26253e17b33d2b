"""What a file remembers of producers, and by which time it forgets them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pxrs.errors import PxrsError
from pxrs.stores.sqlite import schema
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.conformance.tools import batch
from pxrs.types import Append, Appended, LogPartition

pytestmark = pytest.mark.engine("sqlite")

HERE = LogPartition("t", 0)
DAY = 24 * 3600.0


class HandMovedClock:
    """Both of a host's clocks, which the test sets, also back."""

    def __init__(self, uptime: float = 100.0) -> None:
        self.uptime = uptime
        self.wall = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.uptime

    def wall_ms(self) -> int:
        return int(self.wall * 1000)

    def advance(self, seconds: float) -> None:
        self.uptime += seconds
        self.wall += seconds


Open = Callable[[HandMovedClock], SqliteStores]


@pytest.fixture
def clock() -> HandMovedClock:
    return HandMovedClock()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the file as one process after the other would."""
    handles: list[SqliteStores] = []

    def open_again(clock: HandMovedClock) -> SqliteStores:
        handles.append(SqliteStores(str(tmp_path / "s.db"), clock=clock))
        handles[-1].log.create("t", 1)
        return handles[-1]

    yield open_again
    for stores in handles:
        stores.close()


def send(stores: SqliteStores, producer: int, sequence: int = 0) -> Appended | PxrsError:
    (answer,) = stores.log.append([Append(HERE, batch(b"x", producer=(producer, 0, sequence)))])
    return answer


REPEAT = Appended(0, duplicate=True)


def test_a_clock_that_leaps_ahead_makes_nobody_forgotten(
    opened: Open, clock: HandMovedClock
) -> None:
    stores = opened(clock)
    assert send(stores, 1) == Appended(0)
    clock.wall += 8 * DAY
    assert send(stores, 2) == Appended(1)
    assert send(stores, 1) == REPEAT


def test_a_clock_that_is_back_to_right_makes_nobody_forgotten(
    opened: Open, clock: HandMovedClock
) -> None:
    """What was noted while it was wrong does not count either."""
    stores = opened(clock)
    clock.wall -= 8 * DAY
    assert send(stores, 1) == Appended(0)
    clock.wall += 8 * DAY
    assert send(stores, 2) == Appended(1)
    assert send(stores, 1) == REPEAT


@pytest.mark.parametrize("uptime", [0.0, 8 * DAY, 1000 * DAY])
def test_another_host_or_another_start_of_it_makes_nobody_forgotten(
    opened: Open, clock: HandMovedClock, uptime: float
) -> None:
    stores = opened(clock)
    assert send(stores, 1) == Appended(0)
    stores.close()
    stores = opened(HandMovedClock(uptime))
    assert send(stores, 2) == Appended(1)
    assert send(stores, 1) == REPEAT


def test_who_was_silent_for_a_week_of_use_is_forgotten(opened: Open, clock: HandMovedClock) -> None:
    """Short programs count together: each opens the file, sends once and is gone."""
    stores = opened(clock)
    assert send(stores, 1) == Appended(0)
    for number in range(1, 14):
        clock.advance(DAY / 2)
        stores.close()
        stores = opened(clock)
        assert send(stores, 99, number) == Appended(number)
    send(stores, 2)
    assert remembered(stores) == [1, 2, 99]
    clock.advance(DAY / 2 + 1)
    send(stores, 3)
    assert remembered(stores) == [2, 3, 99]


def test_seconds_count_though_they_are_not_noted_each(opened: Open, clock: HandMovedClock) -> None:
    stores = opened(clock)
    assert send(stores, 1) == Appended(0)
    for number in range(1, 1000):
        clock.advance(1)
        send(stores, 99, number)
    with stores.database.reading() as connection:
        ((ms, read),) = connection.execute("SELECT ms, read FROM pxrs_age").fetchall()
    assert 999_000 - 60_000 <= ms <= 999_000
    assert read - ms == 100_000


def remembered(stores: SqliteStores) -> list[int]:
    with stores.database.reading() as connection:
        rows = connection.execute(
            "SELECT producer FROM pxrs_log_producers ORDER BY producer"
        ).fetchall()
    return [producer for (producer,) in rows]


def test_a_file_of_version_5_keeps_its_producers(tmp_path: Path, clock: HandMovedClock) -> None:
    """Their times were a wall clock's, which says nothing now."""
    path = str(tmp_path / "old.db")
    stores = SqliteStores(path, clock=clock)
    stores.log.create("t", 1)
    assert send(stores, 1) == Appended(0)
    stores.close()
    mine = sqlite3.connect(path, isolation_level=None)
    mine.execute("DROP TABLE pxrs_age")
    mine.execute("DROP TABLE pxrs_queue_ended")
    mine.execute("UPDATE pxrs_log_producers SET used = 1000")
    mine.execute("UPDATE pxrs_meta SET value = 5 WHERE name = 'schema'")
    mine.close()
    stores = SqliteStores(path, clock=clock)
    assert send(stores, 2) == Appended(1)
    assert send(stores, 1) == REPEAT
    assert remembered(stores) == [1, 2]
    with stores.database.reading() as connection:
        assert schema.found_version(connection) == schema.VERSION
    stores.close()
