"""`px.stop()`, SIGTERM and SIGINT: they stop every run and every listener of their `px`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import aio
from support.child import PATIENCE, Child
from support.handlers import pass_on_at_once
from support.inside import default, say, signal_when_heard
from support.running import Running

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]


@pytest.fixture
def px(tmp_path: Path) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db") as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            producer.send("orders", "x").result()
        for queue in ("first", "second"):
            px.put(queue, "x")
        yield px


def nothing(*_: Any) -> None:
    """A handler."""


# px.stop


def test_stop_ends_runs_and_listeners(px: pxrs.Pxrs) -> None:
    began = threading.Barrier(4)

    def handle(*_: Any) -> None:
        began.wait(PATIENCE)

    listeners = [px.listen(queue, handle) for queue in ("first", "second")]
    running = Running(px, handle, topic="orders")
    began.wait(PATIENCE)
    px.stop()
    running.join()
    assert running.error is None
    assert all(listener.join(PATIENCE) for listener in listeners)
    # It stops what runs, not what comes later.
    px.put("first", "later")
    later = threading.Event()
    with px.listen("first", lambda item, tx: later.set()):
        assert later.wait(PATIENCE)


def test_stop_ends_listeners_in_processes(px: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    listener = px.listen("first", pass_on_at_once, processes=1)
    with px.begin() as tx:
        assert tx.take("outbox", PATIENCE) is not None
    px.stop()
    assert listener.join(PATIENCE)


def test_asyncios_stop_ends_runs_and_listeners(px: pxrs.Pxrs) -> None:
    async def main() -> None:
        async with aio.connect(px.url) as apx:
            began = asyncio.Barrier(4)

            async def handle(*_: Any) -> None:
                await began.wait()

            listeners = [apx.listen(queue, handle) for queue in ("first", "second")]
            running = apx.run(handle, topic="orders", group="g")
            await began.wait()
            apx.stop()
            assert await running.join(PATIENCE)
            assert [await listener.join(PATIENCE) for listener in listeners] == [True, True]

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


# Signals


def join_one_after_the_other(url: str, number: int) -> None:
    """In a child: two listeners. The signal comes while the first one is waited for."""
    with pxrs.connect(url) as px:
        listeners = [px.listen(queue, nothing) for queue in ("first", "second")]
        signal_when_heard(number)
        say([listener.join() for listener in listeners])


def run_beside_a_listener(url: str, number: int) -> None:
    """In a child: the signal comes while the main thread runs, and a listener is not waited for."""
    with pxrs.connect(url) as px:
        listener = px.listen("first", nothing)
        signal_when_heard(number)
        px.run(nothing, topic="orders", group="g").join()
        say([listener.join(), signal.getsignal(number) == default(number)])


def join_in_a_loop(url: str, number: int) -> None:
    """In a child: the same, with asyncio, waited for side by side."""

    async def main() -> None:
        async with aio.connect(url) as px:
            listeners = [px.listen(queue, nothing) for queue in ("first", "second")]
            signal_when_heard(number)
            say(await asyncio.gather(*(listener.join() for listener in listeners)))
            assert signal.getsignal(number) == default(number)

    asyncio.run(main())


def run_in_a_loop(url: str, number: int) -> None:
    """In a child: asyncio's run, and a listener beside it."""

    async def main() -> None:
        async with aio.connect(url) as px:
            listener = px.listen("first", nothing)
            signal_when_heard(number)
            await px.run(nothing, topic="orders", group="g").join()
            say([await listener.join(), signal.getsignal(number) == default(number)])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("program", "number"),
    [
        (join_one_after_the_other, signal.SIGTERM),
        (join_one_after_the_other, signal.SIGINT),
        (run_beside_a_listener, signal.SIGTERM),
        (run_beside_a_listener, signal.SIGINT),
        # SIGINT is asyncio.run's: it cancels what is awaited.
        (join_in_a_loop, signal.SIGTERM),
        (run_in_a_loop, signal.SIGTERM),
    ],
)
def test_a_signal_stops_all_that_runs(px: pxrs.Pxrs, program: Any, number: int) -> None:
    with Child(program, px.url, number) as child:
        assert child.rest() == [[True, True]]
        assert child.join() == 0


def hear_it_oneself(url: str) -> None:
    """In a child: the program has a handler of its own, before and after."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(number)

    signal.signal(signal.SIGTERM, hear)
    with pxrs.connect(url) as px:
        listener = px.listen("first", nothing)
        signal_when_heard(signal.SIGTERM, hear)
        say([listener.join(), heard, signal.getsignal(signal.SIGTERM) == hear])


def hear_it_in_the_loop(url: str) -> None:
    """In a child: the loop has a handler of its own, before and after."""

    async def main() -> None:
        heard: list[int] = []
        called = asyncio.Event()

        def hear() -> None:
            heard.append(int(signal.SIGTERM))
            called.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, hear)
        before = signal.getsignal(signal.SIGTERM)
        async with aio.connect(url) as px:
            signal_when_heard(signal.SIGTERM, before)
            joined = await px.listen("first", nothing).join()
            # The loop calls its handlers in turn, perhaps after the listener has ended.
            await asyncio.wait_for(called.wait(), PATIENCE)
            say([joined, heard, signal.getsignal(signal.SIGTERM) == before])

    asyncio.run(main())


@pytest.mark.parametrize("program", [hear_it_oneself, hear_it_in_the_loop])
def test_a_handler_of_the_programs_own_is_called_too(px: pxrs.Pxrs, program: Any) -> None:
    with Child(program, px.url) as child:
        assert child.rest() == [[True, [signal.SIGTERM], True]]
        assert child.join() == 0


def install_another_meanwhile(url: str) -> None:
    """In a child: the program installs a handler while pxrs listens: that one stays."""

    def hear(number: int, frame: Any) -> None:
        px.stop()

    def replace(item: Any, tx: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, lambda *_: install())

    def install() -> None:
        signal.signal(signal.SIGTERM, hear)
        os.kill(os.getpid(), signal.SIGTERM)

    with pxrs.connect(url) as px:
        listener = px.listen("first", replace)
        say([listener.join(), signal.getsignal(signal.SIGTERM) == hear])


def test_a_handler_that_is_installed_meanwhile_stays(px: pxrs.Pxrs) -> None:
    with Child(install_another_meanwhile, px.url) as child:
        assert child.rest() == [[True, True]]
        assert child.join() == 0
