"""Reading and following from an event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

import pxrs
from pxrs import aio
from support.loops import Store, elsewhere, run, waiting_threads

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@asynccontextmanager
async def opened(
    store: Store, partitions: int = 1
) -> AsyncIterator[tuple[aio.Pxrs, aio.Producer, aio.Reader]]:
    async with store.open() as px:
        await px.topics.create("orders", partitions)
        async with px.producer() as producer:
            yield px, producer, await px.reader("orders")


async def send(producer: aio.Producer, *values: bytes) -> None:
    await (await producer.send_many("orders", [(None, value) for value in values]))


async def threads_gone() -> None:
    for thread in waiting_threads():
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()


def test_read(store: Store) -> None:
    async def main() -> None:
        async with opened(store, 2) as (_, producer, reader):
            for number in range(5):
                await producer.send("orders", b"%d" % number, partition=1, timestamp=number * 10)
            await producer.flush()
            assert reader.topic.name == "orders"
            assert [m.value for m in await reader.read(1, 3)] == [b"3", b"4"]
            assert [m.value for m in await reader.read(1, 1, max_records=1)] == [b"1"]
            assert await reader.bounds(1) == (0, 5)
            assert await reader.offset_at(1, 25) == 3
            assert await reader.offset_at(1, 41) is None
            with pytest.raises(pxrs.OffsetOutOfRange):
                await reader.read(1, 6)
            with pytest.raises(pxrs.PartitionNotFound):
                await reader.bounds(2)

    run(main())


def test_follow_gets_what_comes(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as (_, producer, reader):
            await send(producer, b"old")
            seen = []
            follow = reader.follow(start="earliest")
            async for message in follow:
                seen.append(message.value)
                if len(seen) == 4:
                    break
                if len(seen) == 1:
                    await send(producer, b"a", b"b")
                if len(seen) == 3:
                    await send(producer, b"c")
            assert seen == [b"old", b"a", b"b", b"c"]

    run(main())


def test_awaiting_a_follow_fixes_its_positions(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as (_, producer, reader):
            await send(producer, b"before")
            follow = await reader.follow()
            await send(producer, b"after")
            assert (await anext(follow)).value == b"after"

    run(main())


def test_follow_ends_when_nothing_comes(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as (_, producer, reader):
            await send(producer, b"a", b"b")
            follow = reader.follow(start="earliest", timeout=0.01)
            assert [message.value async for message in follow] == [b"a", b"b"]
            assert [message async for message in follow] == []

    run(main())


def test_follow_refuses_bad_positions(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as (_, _, reader):
            with pytest.raises(pxrs.OffsetOutOfRange):
                await reader.follow(start=1)
            with pytest.raises(pxrs.PartitionNotFound):
                await reader.follow([1])
            with pytest.raises(pxrs.PartitionNotFound):
                await anext(reader.follow([1]))

    run(main())


def test_follow_tells_that_the_topic_is_gone(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as (px, _, reader):
            following = asyncio.create_task(_first(reader.follow()))
            await elsewhere(store.wait_began.acquire)
            await px.topics.delete("orders")
            with pytest.raises(pxrs.TopicNotFound, match="orders"):
                await following

    run(main())


def test_a_cancelled_follower_frees_its_thread_and_loses_nothing(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as (_, producer, reader):
            seen: list[pxrs.Message] = []

            async def follow_on() -> None:
                async for message in reader.follow(start="earliest"):
                    seen.append(message)  # noqa: PERF401 - a cancelled comprehension keeps nothing

            await send(producer, b"1", b"2")
            following = asyncio.create_task(follow_on())
            await elsewhere(store.wait_began.acquire)
            following.cancel()
            with pytest.raises(asyncio.CancelledError):
                await following
            await threads_gone()
            await send(producer, b"3", b"4")
            assert [message.value for message in seen] == [b"1", b"2"]
            rest = reader.follow(start=seen[-1].offset + 1, timeout=0)
            assert [message.value async for message in rest] == [b"3", b"4"]

    run(main())


def test_a_follow_goes_on_after_a_cancelled_step(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as (_, producer, reader):
            follow = await reader.follow()
            seen = []
            for number in range(100):
                step = asyncio.create_task(_first(follow))
                if number % 2:
                    await elsewhere(store.wait_began.acquire)
                await send(producer, b"%d" % number)
                step.cancel()
                try:
                    seen.append(await step)
                except asyncio.CancelledError:
                    seen.append(await anext(follow))
            assert [message.offset for message in seen] == list(range(100))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(follow), 0.01)
            await threads_gone()

    run(main())


def test_a_follow_that_is_left_stops_watching(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as (_, producer, reader):
            await send(producer, b"1", b"2")
            async with aclosing(reader.follow(start="earliest")) as follow:
                async for _ in follow:
                    break
            assert [message async for message in follow] == []
            async for _ in reader.follow(start="earliest"):
                break
            gc.collect()
            assert not store.watches

    run(main())


def test_fifty_followers_and_a_producer(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as (px, producer, reader):
            following = [asyncio.create_task(_first(await reader.follow())) for _ in range(50)]
            for _ in following:
                await elsewhere(store.wait_began.acquire)
            assert (await px.topics.describe("orders")).messages == 0
            await send(producer, b"to all")
            found = await asyncio.gather(*following)
            assert [message.value for message in found] == [b"to all"] * 50
        await threads_gone()

    run(main())


def test_closing_while_followers_wait(store: Store) -> None:
    async def main() -> None:
        async with opened(store, 4) as (px, _, reader):
            following = [asyncio.create_task(_first(await reader.follow())) for _ in range(20)]
            for _ in following:
                await elsewhere(store.wait_began.acquire)
            await px.close()
            for task in following:
                with pytest.raises(pxrs.Closed):
                    await task
            await threads_gone()

    run(main())


def test_what_stands_before_a_bad_message_is_handed_out(store: Store) -> None:
    class Digits:
        def encode(self, value: object) -> bytes:
            return str(value).encode()

        def decode(self, data: bytes) -> int:
            return int(data)

    async def main() -> None:
        async with opened(store) as (px, producer, _):
            for value in (b"1", b"2", b"not a number"):
                await send(producer, value)
            reader = await px.reader("orders", serde=Digits())
            follow = reader.follow(start="earliest")
            assert [(await anext(follow)).value for _ in range(2)] == [1, 2]
            for _ in range(2):
                with pytest.raises(ValueError, match="not a number"):
                    await anext(follow)

    run(main())


def test_a_busy_partition_does_not_keep_others_waiting(store: Store) -> None:
    async def main() -> None:
        async with opened(store, 2) as (_, producer, reader):
            big = b"x" * 500_000
            for _ in range(6):
                await (await producer.send("orders", big, partition=0))
            await (await producer.send("orders", b"small", partition=1))
            follow = reader.follow(start="earliest", timeout=0)
            order = [message.partition async for message in follow]
            assert order.index(1) < order.count(0)

    run(main())


async def _first(follow: aio.Follow) -> pxrs.Message:
    return await anext(follow)
