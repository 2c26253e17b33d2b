"""Fetches that wait for messages, over a log whose watch fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pxrs.errors import StoreUnavailable
from pxrs.server.arrivals import Arrivals
from pxrs.types import Bounds, Topic
from support.child import PATIENCE

TOPIC = Topic(id="t1", name="orders", partitions=1, created_ms=0)
LONG = 3600.0


class Watch:
    """Wakes when it is told to; fails if it has a failure."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure
        self.failing = threading.Event()
        self._woken = threading.Event()

    def wake(self) -> None:
        self._woken.set()

    def wait(self, timeout: float) -> bool:
        if self._failure is not None:
            assert self.failing.wait(PATIENCE)
            raise self._failure
        if not self._woken.wait(timeout):
            return False
        self._woken.clear()
        return True

    def close(self) -> None:
        pass


class Log:
    """A log of one partition with no messages yet."""

    def __init__(self, *failures: Exception | None) -> None:
        self._failures: Iterator[Exception | None] = iter(failures)
        self.held = {0: Bounds(0, 0)}
        self.may_arm = threading.Event()
        self.may_arm.set()
        self.watches: list[Watch] = []

    def watch(self, *places: object) -> Watch:
        assert self.may_arm.wait(PATIENCE)
        self.watches.append(Watch(next(self._failures, None)))
        return self.watches[-1]

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        return self.held


async def until(log: Log, count: int) -> Watch:
    while len(log.watches) < count:
        await asyncio.sleep(0)
    return log.watches[-1]


def test_any_failure_of_a_watch_wakes_its_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.server.arrivals._PAUSE", 0.0)

    async def walk() -> None:
        log: Any = Log(ValueError("a bug"))
        arrivals = Arrivals(log)
        async with asyncio.timeout(PATIENCE):
            async with arrivals.expect(TOPIC, 0, 0, LONG) as arrival:
                log.watches[0].failing.set()
                await arrival.wait()
            # The topic is watched again.
            async with arrivals.expect(TOPIC, 0, 0, LONG) as arrival:
                watch = await until(log, 2)
                log.held = {0: Bounds(0, 1)}
                watch.wake()
                await arrival.wait()
        arrivals.close()

    asyncio.run(walk())


def test_what_came_while_no_watch_was_armed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.server.arrivals._PAUSE", 0.0)

    async def walk() -> None:
        log: Any = Log(StoreUnavailable("for a test"))
        arrivals = Arrivals(log)
        async with asyncio.timeout(PATIENCE):
            async with arrivals.expect(TOPIC, 0, 0, LONG) as arrival:
                log.may_arm.clear()
                log.watches[0].failing.set()
                await arrival.wait()
            async with arrivals.expect(TOPIC, 0, 0, LONG) as arrival:
                log.held = {0: Bounds(0, 1)}
                log.may_arm.set()
                await arrival.wait()
        arrivals.close()

    asyncio.run(walk())


def test_a_partition_that_is_not_there_any_more_wakes_its_fetches() -> None:
    async def walk() -> None:
        log: Any = Log()
        arrivals = Arrivals(log)
        async with asyncio.timeout(PATIENCE):
            async with arrivals.expect(TOPIC, 0, 0, LONG) as arrival:
                log.held = {}
                log.watches[0].wake()
                await arrival.wait()
        arrivals.close()

    asyncio.run(walk())


def test_a_watch_that_is_never_armed_holds_up_no_fetch() -> None:
    async def walk() -> None:
        log: Any = Log()
        log.may_arm.clear()
        arrivals = Arrivals(log)
        async with asyncio.timeout(PATIENCE):
            async with arrivals.expect(TOPIC, 0, 0, 0.01) as arrival:
                await arrival.wait()
        arrivals.close()
        log.may_arm.set()

    asyncio.run(walk())
