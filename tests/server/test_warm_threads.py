"""Threads for short calls: the last one first, in order when all are busy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from pxrs.server.remote.warm_threads import WarmThreads

PATIENCE = 10.0


@pytest.fixture
def threads() -> Iterator[WarmThreads]:
    threads = WarmThreads(2, "test")
    yield threads
    threads.close()


def done(threads: WarmThreads, work: Callable[[], object] = lambda: None) -> str:
    """Has it done; the name of the thread that did it."""
    names: list[str] = []
    over = threading.Event()

    def do() -> None:
        work()
        names.append(threading.current_thread().name)
        over.set()

    threads.submit(do)
    assert over.wait(PATIENCE)
    await_idle(threads)
    return names[0]


def await_idle(threads: WarmThreads, wanted: int | None = None) -> None:
    ends = threading.Event()
    for _ in range(int(PATIENCE / 0.001)):
        with threads._lock:
            if len(threads._idle) == (wanted or threads._count):
                return
        ends.wait(0.001)
    raise AssertionError("the threads stay busy")


def test_one_thread_does_what_one_can(threads: WarmThreads) -> None:
    assert {done(threads) for _ in range(20)} == {"test_1"}


def test_the_one_used_last_is_used_first(threads: WarmThreads) -> None:
    hold, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        hold.set()
        assert go_on.wait(PATIENCE)

    threads.submit(wait)
    assert hold.wait(PATIENCE)
    second = threading.Event()
    threads.submit(second.set)
    assert second.wait(PATIENCE)
    await_idle(threads, 1)
    go_on.set()
    await_idle(threads)
    # The first one was busy longer.
    assert {done(threads) for _ in range(5)} == {"test_1"}


def test_what_waits_is_done_in_order() -> None:
    threads = WarmThreads(1, "one")
    go_on, over = threading.Event(), threading.Event()
    order: list[int] = []
    threads.submit(lambda: go_on.wait(PATIENCE))
    for number in range(50):
        threads.submit(partial(order.append, number))
    threads.submit(over.set)
    go_on.set()
    assert over.wait(PATIENCE)
    assert order == list(range(50))
    threads.close()


def test_few_work_at_a_time_until_work_is_late() -> None:
    threads = WarmThreads(4, "few", few=1)
    go_on = threading.Event()
    began: list[int] = []
    all_began = threading.Semaphore(0)

    def wait(number: int) -> None:
        began.append(number)
        all_began.release()
        assert go_on.wait(PATIENCE)

    for number in range(6):
        threads.submit(partial(wait, number))
    assert all_began.acquire(timeout=PATIENCE)
    threads.hurry()
    assert began == [0]
    # The same work is the first one that waits.
    threads.hurry()
    for _ in range(3):
        assert all_began.acquire(timeout=PATIENCE)
    # Four threads there are at most.
    assert sorted(began) == [0, 1, 2, 3]
    go_on.set()
    await_idle(threads)
    assert sorted(began) == list(range(6))
    # One at a time again: the thread that is busy does what is submitted meanwhile.
    go_on.clear()
    threads.submit(partial(wait, 6))
    for _ in range(3):
        assert all_began.acquire(timeout=PATIENCE)
    names: list[str] = []
    over = threading.Event()
    for _ in range(5):
        threads.submit(lambda: names.append(threading.current_thread().name))
    threads.submit(over.set)
    assert names == []
    go_on.set()
    assert over.wait(PATIENCE)
    assert len(set(names)) == 1
    threads.close()


def test_work_that_fails_ends_no_thread(
    threads: WarmThreads, caplog: pytest.LogCaptureFixture
) -> None:
    threads.submit(lambda: 1 / 0)
    assert done(threads) == "test_1" or threads._count == 2
    assert "work in a thread failed" in caplog.text


def test_closed_ones_do_what_there_is_and_end() -> None:
    threads = WarmThreads(1, "closing")
    go_on, last = threading.Event(), threading.Event()
    threads.submit(lambda: go_on.wait(PATIENCE))
    threads.submit(last.set)
    threads.close()
    with pytest.raises(RuntimeError, match="no more work"):
        threads.submit(last.set)
    go_on.set()
    assert last.wait(PATIENCE)
    for thread in threading.enumerate():
        if thread.name.startswith("closing"):
            thread.join(PATIENCE)
            assert not thread.is_alive()
