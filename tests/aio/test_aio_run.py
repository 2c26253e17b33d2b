"""`aio`'s `run`: coroutine functions as handlers, stopping and cancelling."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import Backoff, Message, aio
from support.loops import PATIENCE, run

pytestmark = pytest.mark.engine("sqlite")

ONCE = Backoff(attempts=1)


@asynccontextmanager
async def sent(folder: Path, count: int) -> AsyncIterator[aio.Pxrs]:
    async with aio.connect(f"sqlite:///{folder}/store.db") as px:
        await px.topics.create("orders", 2)
        async with px.producer() as producer:
            for number in range(count):
                await producer.send("orders", str(number), key=f"k{number}")
        yield px


async def left_behind(px: aio.Pxrs) -> int:
    info = await px.groups.describe("g")
    assert info.members == ()
    return info.lag


def test_a_coroutine_function_handles_and_stop_drains(tmp_path: Path) -> None:
    async def main() -> None:
        seen: list[int] = []
        async with sent(tmp_path, 50) as px:

            async def handle(message: Message) -> None:
                await asyncio.sleep(0)
                seen.append(int(message.value))
                if len(seen) == 50:
                    px.stop()

            await px.run(handle, topic="orders", group="g").join()
            assert sorted(seen) == list(range(50))
            assert await left_behind(px) == 0

    run(main())


def test_as_many_are_awaited_as_there_are_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with sent(tmp_path, 8) as px:
            together = asyncio.Barrier(8)

            async def handle(message: Message) -> None:
                await together.wait()
                px.stop()

            await px.run(handle, topic="orders", group="g", workers=8, parallel="key").join()
            assert await left_behind(px) == 0

    run(main())


def test_a_handler_may_close_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.running.handle._PATIENCE", 3600.0)

    async def main() -> None:
        async with sent(tmp_path, 1) as px:
            await px.run(lambda message: px.close(), topic="orders", group="g").join()

    run(main())


def test_a_plain_function_is_called_by_threads(tmp_path: Path) -> None:
    async def main() -> None:
        async with sent(tmp_path, 5) as px:
            seen: list[bytes] = []

            def handle(message: Message) -> None:
                seen.append(message.value)
                if len(seen) == 5:
                    px.stop()

            await px.run(handle, topic="orders", group="g").join()
            assert await left_behind(px) == 0

    run(main())


def test_a_run_whose_end_is_cancelled_leaves_its_messages_to_others(tmp_path: Path) -> None:
    """What was awaited is neither handled nor failed: it is not even the last attempt."""

    async def main() -> None:
        async with sent(tmp_path, 2) as px:
            began, leaving, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def handle(message: Message) -> None:
                began.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            async def handle_until_cancelled() -> None:
                async with px.run(handle, topic="orders", group="g", retry=ONCE):
                    await began.wait()
                    leaving.set()

            task = asyncio.create_task(handle_until_cancelled())
            await leaving.wait()
            await asyncio.sleep(0)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended.is_set()
            assert await left_behind(px) == 2
            assert [topic.name for topic in await px.topics.list()] == ["orders"]

    run(main())


def test_a_run_cancelled_before_it_has_begun_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with sent(tmp_path, 1) as px:
            seen: list[Message] = []

            async def handle(message: Message) -> None:
                seen.append(message)

            async def handle_until_cancelled() -> None:
                async with px.run(handle, topic="orders", group="g") as running:
                    await running.join()

            task = asyncio.create_task(handle_until_cancelled())
            await asyncio.sleep(0)  # one turn: the run is made, its thread may not have begun
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with px.consumer("orders", "g") as consumer:
                assert len(seen) + len(await consumer.poll(timeout=PATIENCE)) >= 1

    run(main())


def test_who_waits_no_longer_leaves_the_run_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with sent(tmp_path, 1) as px:
            began, may_end = asyncio.Event(), asyncio.Event()

            async def handle(message: Message) -> None:
                began.set()
                await may_end.wait()

            running = px.run(handle, topic="orders", group="g", retry=ONCE)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(running.join(), 0.01)
            assert not await running.join(timeout=0.01)
            await began.wait()
            assert [each.ok for each in running.health().values()] == [True]
            running.stop()
            may_end.set()
            assert await running.join()
            assert (running.handled, running.failed, running.health()) == (1, 0, {})
            assert await left_behind(px) == 0

    run(main())


def test_a_loop_that_ends_fails_no_message(tmp_path: Path) -> None:
    """Not even with one attempt: nobody was left to handle it."""
    opened: list[aio.Pxrs] = []

    async def forget() -> None:
        async with sent(tmp_path, 2) as px:
            pass
        px = await aio.connect(px.url)
        opened.append(px)
        began = asyncio.Event()

        async def handle(message: Message) -> None:
            began.set()
            await asyncio.Event().wait()

        px.run(handle, topic="orders", group="g", retry=ONCE)
        await began.wait()

    asyncio.run(forget())
    opened[0]._blocking.close()
    with pxrs.connect(opened[0].url) as px:
        assert [topic.name for topic in px.topics.list()] == ["orders"]
        assert px.groups.describe("g").lag == 2


def test_a_loop_that_has_stopped_and_is_closed_later_keeps_no_worker(tmp_path: Path) -> None:
    """It takes what is to be awaited, and never begins it."""
    called, stopped = threading.Event(), threading.Event()

    async def nothing() -> None:
        pass

    def handle(message: Message) -> Any:
        called.set()
        assert stopped.wait(PATIENCE)
        return nothing()

    async def begin() -> tuple[pxrs.Pxrs, pxrs.Running]:
        async with sent(tmp_path, 1) as px:
            pass
        px = await aio.connect(px.url)
        return px._blocking, px.run(handle, topic="orders", group="g", retry=ONCE)._blocking

    loop = asyncio.new_event_loop()
    px, running = loop.run_until_complete(begin())
    with px:
        assert called.wait(PATIENCE)
        stopped.set()
        assert not running.join(0.1)
        loop.close()
        assert running.join(PATIENCE)
    with pxrs.connect(px.url) as px:
        assert px.groups.describe("g").lag == 1


def test_a_handler_that_raises_goes_through_the_policy(tmp_path: Path) -> None:
    async def main() -> None:
        async with sent(tmp_path, 3) as px:
            bad = asyncio.CancelledError, ValueError, pxrs.PxrsError
            tries: list[bytes] = []

            async def handle(message: Message) -> None:
                tries.append(message.value)
                if len(tries) == 3:
                    px.stop()
                raise bad[int(message.value)]("no")

            await px.run(handle, topic="orders", group="g", retry=ONCE).join()
            assert await left_behind(px) == 0
            assert (await px.topics.describe("orders.dlq")).messages == 3
            with pytest.raises(pxrs.HandlerFailed):
                async with px.producer() as producer:
                    await producer.send("orders", "1")
                await px.run(
                    handle, topic="orders", group="g", retry=ONCE, on_failure=pxrs.Stop()
                ).join()
            assert await left_behind(px) == 1

    run(main())


def test_the_blocking_run_refuses_coroutine_functions() -> None:
    async def handle(message: Message) -> None:
        pass

    with pxrs.connect("memory://") as px:
        px.topics.create("orders", 1)
        with pytest.raises(pxrs.InvalidRequest, match="aio"):
            px.run(handle, topic="orders", group="g")


def test_dead_letters_go_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with sent(tmp_path, 3) as px:

            async def fail(message: Message) -> None:
                seen.append(message)
                if len(seen) == 3:
                    px.stop()
                raise ValueError("no")

            seen: list[Message] = []
            await px.run(fail, topic="orders", group="g", retry=ONCE).join()
            assert len(await px.topics.dead("orders")) == 3
            assert await px.topics.redrive("orders") == 3
            assert (await px.topics.describe("orders")).messages == 6

    run(main())
