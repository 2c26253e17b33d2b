"""`px.run(processes=N)` with real processes, one of which is killed at work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from support.child import PATIENCE, Child

pytestmark = pytest.mark.engine("sqlite")

COUNT = 60
_px: pxrs.Pxrs | None = None


def handle(message: pxrs.Message) -> None:
    """In a worker process: tell who has handled what, durably, through a topic."""
    global _px
    if _px is None:
        _px = pxrs.connect(os.environ["PXRS_TEST_URL"])
    with _px.producer() as producer:
        producer.send("done", f"{os.getpid()} {message.value.decode()}").result()


def give_up(message: pxrs.Message) -> None:
    raise ValueError("no")


def run_processes(url: str, handler: str) -> None:
    """In a child: the parent of the worker processes."""
    os.environ["PXRS_TEST_URL"] = url
    with pxrs.connect(url) as px:
        px.run(
            globals()[handler],
            topic="orders",
            group="g",
            processes=2,
            retry=pxrs.Backoff(attempts=1),
            on_failure=pxrs.Stop(),
        )


@pytest.fixture
def px(tmp_path: Path) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(f"sqlite:///{tmp_path}/run.db") as px:
        px.create_topic("orders", partitions=8)
        px.create_topic("done", partitions=1)
        yield px


def send(px: pxrs.Pxrs, start: int) -> None:
    with px.producer() as producer:
        for number in range(start, start + COUNT):
            producer.send("orders", str(number), partition=number % 8)


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(px: pxrs.Pxrs) -> None:
    handled: set[int] = set()
    pids: set[int] = set()
    with Child(run_processes, px.url, "handle") as parent:
        number = 0
        done = px.reader("done").follow(start="earliest", timeout=PATIENCE)
        while len(pids) < 2:
            # Until both have partitions.
            send(px, number)
            number += COUNT
            while len(handled) < number:
                pid, value = map(int, next(done).value.split())
                pids.add(pid)
                handled.add(value)
        before = set(pids)
        os.kill(min(before), signal.SIGKILL)
        while pids == before:
            # Another one takes its place, and gets a share.
            send(px, number)
            number += COUNT
            while len(handled) < number:
                pid, value = map(int, next(done).value.split())
                pids.add(pid)
                handled.add(value)
        parent.signal(signal.SIGTERM)
        assert parent.join() == 0
    assert handled == set(range(number))
    info = px.groups.describe("g")
    assert (info.lag, info.members) == (0, ())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_handler_that_gives_up_ends_them_all(px: pxrs.Pxrs) -> None:
    send(px, 0)
    with Child(run_processes, px.url, "give_up") as parent:
        assert parent.join() == 1
    assert px.groups.describe("g").members == ()
    assert px.groups.describe("g").lag == COUNT
