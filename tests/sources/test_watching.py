"""How often those who wait for a quiet source ask it whether something has come."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest

import pxrs
from pxrs.sources import watching
from pxrs.sources.watching import PollingWatch
from pxrs.types import LogPartition
from support.lines_source import Lines

# Minutes, of which no second passes.
LONG = 300.0


class Time:
    """Passes only while a watch waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, time: Time) -> None:
        self._time = time
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            # Never so little that the clock stands still.
            self._time.now += max(timeout, 1e-6)
        return self._is_set


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(watching, "monotonic", found.monotonic)
    monkeypatch.setattr(watching, "threading", SimpleNamespace(Event=found.event))
    return found


def wait_for_long(watch: pxrs.stores.api.Watch, time: Time, each: float) -> None:
    end = time.now + LONG
    while time.now < end:
        assert not watch.wait(each)


@pytest.mark.parametrize("each", [0.001, 0.05, 1.0, 60.0])
def test_one_source(time: Time, each: float) -> None:
    lines = Lines()
    with closing(lines.watch()) as watch:
        wait_for_long(watch, time, each)
        assert lines.looks <= LONG / watching.QUIET + 10
        lines.append(b"one")
        before = time.now
        assert watch.wait(60)
        assert time.now - before <= watching.QUIET
        # And soon after that.
        lines.append(b"two")
        before = time.now
        assert watch.wait(60)
        assert time.now - before <= 2 * watching.SOON


@pytest.mark.parametrize("count", [2, 5])
def test_several_sources(time: Time, count: int) -> None:
    """Each is asked as seldom as if it were alone."""
    with pxrs.connect("memory://") as px:
        sources = [Lines() for _ in range(count)]
        topics = [
            px.attach(f"events-{number}", lines, partitions=1)
            for number, lines in enumerate(sources)
        ]
        with closing(px._stores.log.watch(*(LogPartition(each.id, 0) for each in topics))) as watch:
            wait_for_long(watch, time, 1.0)
            assert all(lines.looks <= LONG / watching.QUIET + 10 for lines in sources)
            sources[-1].append(b"one")
            before = time.now
            assert watch.wait(60)
            # Those before it are waited for in turn.
            assert time.now - before <= watching.QUIET + 0.05 * count


def test_a_change_before_the_first_wait_ends_it_at_once(time: Time) -> None:
    lines = Lines()
    with closing(PollingWatch(lines._look)) as watch:
        lines.append(b"one")
        before = time.now
        assert watch.wait(60)
        assert time.now == before
