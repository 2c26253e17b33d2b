"""Whoever was told to stop keeps what is in hand to the last of it, however short its session.

In real time, on every engine: others wait for the same items for several times as long as the
session would live if nobody renewed it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import Item, Pxrs, UnitOfWork, aio
from pxrs.aio.threads import Threads
from pxrs.stores.open import open_stores
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent, wait_until_heard

pytestmark = pytest.mark.long

# The shortest that etcd grants under load.
TTL = 2.0
LONG = 2 * TTL


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


def opened(url: str) -> Pxrs:
    return Pxrs(open_stores(url), session_ttl=TTL)


class Slow:
    """A handler that goes on when it may; each item by itself."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.may_end = {value: threading.Event() for value in ("a", "b")}
        self.deliveries: list[tuple[str, int]] = []

    def __call__(self, item: Item, tx: UnitOfWork) -> None:
        self.deliveries.append((item.value, item.deliveries))
        self.began.release()
        assert self.may_end[item.value].wait(PATIENCE)


def nothing_is_free(px: Pxrs, queue: str) -> bool:
    with px.begin() as tx:
        return tx.take(queue, LONG) is None


HOW: dict[str, Callable[[Pxrs, Any], None]] = {
    "listener.stop": lambda px, listener: listener.stop(),
    "px.stop": lambda px, listener: px.stop(),
    "px.close": lambda px, listener: px.close(),
}


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        *(pytest.param("sqlite", how, marks=pytest.mark.engine("sqlite")) for how in HOW),
        *(
            pytest.param(name, "px.close", marks=[pytest.mark.engine(name), pytest.mark.thorough])
            for name in ("postgres", "mariadb", "etcd", "zookeeper")
        ),
    ],
)
def test_a_listener_that_drains_keeps_its_session_to_the_last_item(
    engine: str, how: str, request: pytest.FixtureRequest
) -> None:
    url = str(request.getfixturevalue(f"{engine}_url"))
    with opened(url) as other:
        drain(opened(url), other, HOW[how])


def drain(px: Pxrs, other: Pxrs, stop: Callable[[Pxrs, Any], None]) -> None:
    """Two items are in hand when it is told to stop; one ends before the other."""
    handler = Slow()
    with other.transaction() as tx:
        for value in ("a", "b"):
            tx.put("inbox", value)
    listener = px.listen("inbox", handler, workers=2)
    for _ in range(2):
        assert handler.began.acquire(timeout=PATIENCE)
    with ThreadPoolExecutor() as threads:
        stopping = threads.submit(stop, px, listener)
        assert nothing_is_free(other, "inbox")
        handler.may_end["a"].set()
        assert nothing_is_free(other, "inbox")
        handler.may_end["b"].set()
        stopping.result(PATIENCE)
    assert listener.join(PATIENCE)
    px.close()
    assert sorted(handler.deliveries) == [("a", 1), ("b", 1)]
    assert (listener.handled, listener.failed) == (2, 0)
    info = other.queues.describe("inbox")
    assert (info.depth, info.dead) == (0, 0)


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("how", ["stop", "close"])
def test_asyncios_listener_that_drains_keeps_its_session(sqlite_url: str, how: str) -> None:
    async def main() -> None:
        began, may_end = asyncio.Event(), asyncio.Event()

        async def handle(item: Item, tx: aio.UnitOfWork) -> None:
            began.set()
            await may_end.wait()

        px = aio.Pxrs(opened(sqlite_url), Threads())
        listener = px.listen("inbox", handle)
        await px.put("inbox", "x")
        await began.wait()
        if how == "stop":
            px.stop()
            stopping = asyncio.create_task(listener.join())
        else:
            stopping = asyncio.create_task(px.close())  # type: ignore[arg-type]
        with opened(sqlite_url) as other:
            assert await asyncio.to_thread(nothing_is_free, other, "inbox")
            may_end.set()
            await stopping
            assert (listener.handled, listener.failed) == (1, 0)
            assert other.queues.describe("inbox").depth == 0
        await px.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def listen_until_told(url: str) -> None:
    """In a child: SIGTERM comes while an item is in hand."""

    def handle(item: Item, tx: UnitOfWork) -> None:
        wait_until_heard(signal.SIGTERM)
        say(item.deliveries)
        wait_for_parent()

    with opened(url) as px:
        px.listen("inbox", handle).join()
    say("drained")


@pytest.mark.engine("sqlite")
def test_a_program_that_drains_after_sigterm_keeps_its_session(sqlite_url: str) -> None:
    with opened(sqlite_url) as other, Child(listen_until_told, sqlite_url) as child:
        other.put("inbox", "x")
        assert child.read() == 1
        child.signal(signal.SIGTERM)
        assert nothing_is_free(other, "inbox")
        child.tell()
        assert child.rest() == ["drained"]
        assert other.queues.describe("inbox").depth == 0


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("how", ["px.stop", "px.close"])
def test_a_run_that_drains_keeps_its_partitions_to_the_last_message(
    sqlite_url: str, how: str
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def handle(message: pxrs.Message) -> None:
        began.set()
        assert may_end.wait(PATIENCE)

    px = opened(sqlite_url)
    with opened(sqlite_url) as other, ThreadPoolExecutor() as threads:
        other.topics.create("orders", partitions=1)
        with other.producer() as producer:
            producer.send("orders", "x").result()
        running = px.run(handle, topic="orders", group="g", session_ttl=TTL)
        assert began.wait(PATIENCE)
        stopping = threads.submit(HOW[how], px, None)
        with other.consumer("orders", "g", session_ttl=TTL) as consumer:
            assert consumer.poll(timeout=LONG) == []
            may_end.set()
            assert running.join(PATIENCE)
            stopping.result(PATIENCE)
            while not consumer.assignment:
                assert consumer.poll(timeout=0.1) == []
            assert consumer.poll(timeout=0) == []
        assert other.groups.describe("g").lag == 0
    px.close()
