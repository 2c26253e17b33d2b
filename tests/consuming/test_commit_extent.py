"""A commit covers what had been handed out when it was called, however late its turn comes.

`PXRS_ROUNDS=10000 ./run test tests/consuming/test_commit_extent.py -k race` attacks for longer.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import pxrs
from pxrs import Pxrs, aio
from pxrs.aio.threads import Threads

PATIENCE = 30.0
ROUNDS = int(os.environ.get("PXRS_ROUNDS", "10"))


@pytest.fixture
def px(engine_url: str) -> Iterator[Pxrs]:
    with pxrs.connect(engine_url) as px:
        px.topics.create("t", 1)
        with px.producer() as producer:
            producer.send_many("t", [(None, b"x")] * 20 * ROUNDS)
        yield px


def join(px: Pxrs, **settings: Any) -> pxrs.Consumer:
    defaults: dict[str, Any] = {"debounce": 0.0, "auto_commit": False}
    return px.consumer("t", "g", **defaults | settings)


def take(consumer: pxrs.Consumer, number: int = 10) -> int:
    """So many messages; the offset after the last of them."""
    found: list[pxrs.Message] = []
    while len(found) < number:
        some = consumer.poll(number - len(found), timeout=PATIENCE)
        assert some, f"only {len(found)} of {number} came"
        found += some
    return found[-1].offset + 1


def checkpoint(px: Pxrs) -> int | None:
    return px.groups.describe("g").partitions[0].checkpoint


class TestInTheBackground:
    def test_what_later_polls_return_does_not_go_along(self, px: Pxrs) -> None:
        with join(px) as consumer:
            take(consumer)
            with consumer._steps.owned_claims.lock:
                # Its turn comes when this block is left.
                committed = consumer.commit_async()
                take(consumer)
                take(consumer)
            committed.result(PATIENCE)
            assert checkpoint(px) == 10
        assert checkpoint(px) == 10

    def test_in_a_loop(self, px: Pxrs) -> None:
        with join(px) as consumer:
            messages = iter(consumer)
            next(messages)
            with consumer._steps.owned_claims.lock:
                committed = consumer.commit_async()
                for _ in range(5):
                    next(messages)
            committed.result(PATIENCE)
            assert checkpoint(px) == 1

    def test_the_last_of_several_counts(self, px: Pxrs) -> None:
        with join(px) as consumer:
            take(consumer)
            with consumer._steps.owned_claims.lock:
                first = consumer.commit_async()
                take(consumer)
                second = consumer.commit_async()
                take(consumer)
            first.result(PATIENCE)
            second.result(PATIENCE)
            assert checkpoint(px) == 20

    def test_a_seek_after_it_stands(self, px: Pxrs) -> None:
        with join(px) as consumer:
            take(consumer)
            with consumer._steps.owned_claims.lock:
                committed = consumer.commit_async()
                consumer.seek("t", 0, 3)
            committed.result(PATIENCE)
            assert checkpoint(px) == 3

    def test_polls_race_with_it(self, px: Pxrs) -> None:
        with join(px) as consumer:
            for number in range(1, ROUNDS + 1):
                assert take(consumer) == 20 * number - 10
                committed = consumer.commit_async()
                assert take(consumer) == 20 * number
                committed.result(PATIENCE)
                assert checkpoint(px) == 20 * number - 10


class TestFromAnotherThread:
    def test_what_is_polled_while_it_waits_does_not_go_along(self, px: Pxrs) -> None:
        with join(px) as consumer:
            take(consumer)
            with elsewhere(consumer, consumer.commit):
                take(consumer)
            assert checkpoint(px) == 10

    def test_up_to_one_message(self, px: Pxrs) -> None:
        with join(px) as consumer:
            (message,) = consumer.poll(1, timeout=PATIENCE)
            with elsewhere(consumer, lambda: consumer.commit(message)):
                take(consumer)
                take(consumer)
            assert checkpoint(px) == 1

    def test_what_a_loop_has_gone_on_to_is_for_the_next_commit(self, px: Pxrs) -> None:
        with join(px) as consumer:
            messages = iter(consumer)
            next(messages)
            with elsewhere(consumer, consumer.commit):
                next(messages)
            assert checkpoint(px) == 1
            consumer.commit()
            assert checkpoint(px) == 2

    def test_a_seek_after_it_stands(self, px: Pxrs) -> None:
        with join(px) as consumer:
            take(consumer)
            with elsewhere(consumer, consumer.commit):
                consumer.seek("t", 0, 3)
            assert checkpoint(px) == 3


def test_for_asyncio_what_is_polled_before_it_is_awaited_does_not_go_along(
    px: Pxrs,
) -> None:
    async def main() -> None:
        also = aio.Pxrs(px, Threads())
        async with also.consumer("t", "g", debounce=0.0, auto_commit=False) as consumer:
            for number, commit in enumerate((consumer.commit, consumer.commit_async)):
                assert len(await consumer.poll(10, timeout=PATIENCE)) == 10
                committed = commit()
                assert len(await consumer.poll(10, timeout=PATIENCE)) == 10
                await committed
                assert checkpoint(px) == 20 * number + 10

    asyncio.run(main())


@contextmanager
def elsewhere(consumer: pxrs.Consumer, commit: Callable[[], None]) -> Iterator[None]:
    """Commit in another thread, whose turn comes when the block is left."""
    owned_claims = consumer._steps.owned_claims
    lock = owned_claims.lock = Announcing(owned_claims.lock)  # type: ignore[assignment]
    another = threading.Thread(target=commit)
    lock.awaited = another
    with lock:
        another.start()
        assert lock.asked.wait(PATIENCE)
        yield
    another.join(PATIENCE)
    assert not another.is_alive()


class Announcing:
    """A lock that tells when a thread is about to wait for it."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._is_owned = lock._is_owned  # type: ignore[attr-defined]
        self.awaited: threading.Thread | None = None
        self.asked = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is self.awaited:
            self.asked.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
