"""Consuming from an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

import pxrs
from pxrs import aio
from pxrs.stores.api import Session
from pxrs.types import TopicPartition
from support.loops import PATIENCE, Store, elsewhere, run

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@asynccontextmanager
async def opened(store: Store, partitions: int = 1) -> AsyncIterator[aio.Pxrs]:
    async with store.open() as px:
        await px.topics.create("orders", partitions)
        yield px


async def send(px: aio.Pxrs, *values: bytes, partition: int = 0) -> None:
    async with px.producer() as producer:
        for value in values:
            await producer.send("orders", value, partition=partition)


async def take(consumer: aio.Consumer, number: int) -> list[bytes]:
    seen: list[bytes] = []
    while len(seen) < number:
        found = await consumer.poll(number - len(seen), PATIENCE)
        assert found, f"only {seen} came"
        seen += [message.value for message in found]
    return seen


async def checkpoints(px: aio.Pxrs) -> list[int | None]:
    return [part.checkpoint for part in (await px.groups.describe("g")).partitions]


def test_poll_and_commit(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px:
            await send(px, b"a", b"b", b"c")
            async with px.consumer("orders", "g", debounce=0.0, auto_commit=False) as consumer:
                assert await take(consumer, 2) == [b"a", b"b"]
                assert consumer.assignment == {TopicPartition("orders", 0)}
                await consumer.commit()
                assert await checkpoints(px) == [2]
                (message,) = await consumer.poll(timeout=PATIENCE)
                await consumer.commit(message)
                assert await consumer.poll(timeout=0.01) == []
                (member,) = (await px.groups.describe("g")).members
                assert member.name == consumer.member
                with pytest.raises(pxrs.InvalidRequest):
                    await consumer.poll(0)
            assert await checkpoints(px) == [3]
            assert (await px.groups.describe("g")).state == "EMPTY"

    run(main())


def test_awaiting_it_joins_too(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px:
            await send(px, b"a")
            consumer = await px.consumer("orders", "g", debounce=0.0)
            assert await take(consumer, 1) == [b"a"]
            consumer.commit_async()
            await consumer.close()
            assert await checkpoints(px) == [1]
            with pytest.raises(pxrs.Closed):
                await consumer.poll()

    run(main())


def test_a_message_is_handled_when_the_next_one_is_asked_for(store: Store) -> None:
    async def main() -> None:
        async with opened(store, 2) as px:
            for number in range(2):
                await send(px, b"a", b"b", b"c", partition=number)
            async with px.consumer("orders", "g", debounce=0.0) as consumer:
                seen = []
                async for message in consumer:
                    seen.append(message.value)
                    if len(seen) == 2:
                        break
                assert seen == [b"a", b"b"]
            assert sorted(await checkpoints(px), key=str) == [0, 1]
            async with px.consumer("orders", "g", debounce=0.0) as consumer:
                async for _ in consumer:
                    break
                assert sorted(await take(consumer, 5)) == [b"a", b"b", b"b", b"c", b"c"]

    run(main())


def test_batches(store: Store) -> None:
    async def main() -> None:
        async with opened(store, 2) as px:
            for number in range(2):
                await send(px, b"a", b"b", partition=number)
            async with px.consumer("orders", "g", debounce=0.0) as consumer:
                seen = []
                async for batch in consumer.batches():
                    seen.append([(message.partition, message.value) for message in batch])
                    if len(seen) == 2:
                        break
                assert sorted(seen) == [[(0, b"a"), (0, b"b")], [(1, b"a"), (1, b"b")]]
            assert sorted(await checkpoints(px), key=str) == [0, 2]

    run(main())


def test_a_cancelled_poll_loses_nothing(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.consumer("orders", "g", debounce=0.0) as consumer:
            polling = asyncio.create_task(consumer.poll())
            await elsewhere(store.wait_began.acquire)
            polling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await polling
            await send(px, b"a", b"b")
            assert await take(consumer, 2) == [b"a", b"b"]

    run(main())


def test_polls_cancelled_at_any_moment_lose_nothing(store: Store) -> None:
    async def main() -> None:
        seen: list[list[int]] = [[], []]

        def note(messages: list[pxrs.Message]) -> None:
            for message in messages:
                seen[message.partition].append(int(message.value))

        async with (
            opened(store, 2) as px,
            px.producer() as producer,
            px.consumer("orders", "g", debounce=0.0) as consumer,
        ):
            for number in range(200):
                await producer.send("orders", b"%d" % number, partition=number % 2)
                polling = asyncio.create_task(consumer.poll(3))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                polling.cancel()
                with suppress(asyncio.CancelledError):
                    note(await polling)
            while sum(map(len, seen)) < 200:
                note(await consumer.poll(timeout=PATIENCE))
        assert seen == [list(range(0, 200, 2)), list(range(1, 200, 2))]

    run(main())


def test_a_cancelled_step_of_a_loop_loses_nothing(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.consumer("orders", "g", debounce=0.0) as consumer:
            await send(px, b"a")
            messages = aiter(consumer)
            assert (await anext(messages)).value == b"a"
            step = asyncio.ensure_future(anext(messages))
            await elsewhere(store.wait_began.acquire)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            await send(px, b"b")
            assert (await anext(messages)).value == b"b"

    run(main())


def test_callbacks_run_on_the_loop(store: Store) -> None:
    async def main() -> None:
        told: list[tuple[str, object, int]] = []
        async with opened(store, 2) as px:
            await send(px, b"a")

            def assigned(parts: dict[TopicPartition, int | None]) -> None:
                told.append(("assigned", parts, threading.get_ident()))

            async def revoked(parts: set[TopicPartition]) -> None:
                await first.commit()
                told.append(("revoked", parts, threading.get_ident()))

            async with px.consumer(
                "orders", "g", debounce=0.0, auto_commit=False,
                on_assigned=assigned, on_revoked=revoked,
            ) as first:  # fmt: skip
                assert await take(first, 1) == [b"a"]
                async with px.consumer("orders", "g", debounce=0.0) as second:
                    while not second.assignment:
                        await first.poll(timeout=0.01)
                        await second.poll(timeout=0.01)
                    (gone,) = second.assignment
        assert told[0] == (
            "assigned",
            {TopicPartition("orders", 0): None, TopicPartition("orders", 1): None},
            threading.get_ident(),
        )
        assert told[1] == ("revoked", {gone}, threading.get_ident())

    run(main())


def test_a_failing_callback_is_told_to_whoever_polls(store: Store) -> None:
    async def main() -> None:
        async def assigned(parts: dict[TopicPartition, int | None]) -> None:
            raise KeyError(len(parts))

        async with (
            opened(store) as px,
            px.consumer("orders", "g", debounce=0.0, on_assigned=assigned) as consumer,
        ):
            with pytest.raises(KeyError, match="1"):
                await consumer.poll()

    run(main())


def test_seek_pause_and_resume(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px:
            async with px.producer() as producer:
                for number in range(5):
                    await producer.send("orders", b"%d" % number, timestamp=1000 * number)
            async with px.consumer("orders", "g", debounce=0.0) as consumer:
                await take(consumer, 5)
                await consumer.seek("orders", 0, 3)
                assert await take(consumer, 2) == [b"3", b"4"]
                await consumer.seek_to_time(1500)
                assert await take(consumer, 3) == [b"2", b"3", b"4"]
                (part,) = consumer.assignment
                consumer.pause(part)
                await send(px, b"later")
                assert await consumer.poll(timeout=0.01) == []
                polling = asyncio.create_task(consumer.poll())
                await asyncio.sleep(0)
                consumer.resume(part)
                assert [message.value for message in await polling] == [b"later"]

    run(main())


def test_seeking_after_a_cancelled_poll(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.consumer("orders", "g", debounce=0.0) as consumer:
            await send(px, b"a", b"b")
            await take(consumer, 2)
            polling = asyncio.create_task(consumer.poll())
            await elsewhere(store.wait_began.acquire)
            polling.cancel()
            await consumer.seek("orders", 0, 0)
            assert await take(consumer, 2) == [b"a", b"b"]

    run(main())


def test_mistakes_are_told_where_it_joins(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px:
            with pytest.raises(pxrs.TopicNotFound):
                await px.consumer("nope", "g")
            with pytest.raises(pxrs.ConfigError):
                async with px.consumer("orders", "g", start="middle"):  # type: ignore[arg-type]
                    pass
            assert await px.groups.list() == []

    run(main())


def test_a_cancelled_join_leaves_no_member(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()
    session = store.stores.coord.session

    def slow_session(ttl: float) -> Session:
        assert cancelled.wait(PATIENCE)
        return session(ttl)

    monkeypatch.setattr(store.stores.coord, "session", slow_session)

    async def main() -> None:
        async with opened(store) as px:
            watch = store.stores.coord.watch("members/g/")
            joining = asyncio.ensure_future(px.consumer("orders", "g")._open())
            await asyncio.sleep(0)
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining
            cancelled.set()
            while not await px.groups.list() or (await px.groups.list())[0].members:
                await asyncio.to_thread(watch.wait, 1.0)
            watch.close()

    run(main())


def test_closing_the_store_ends_a_poll(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px:
            consumer = await px.consumer("orders", "g", debounce=0.0)
            polling = asyncio.create_task(consumer.poll())
            await elsewhere(store.wait_began.acquire)
        with pytest.raises(pxrs.Closed):
            await polling

    run(main())


def test_groups(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px:
            await send(px, b"a", b"b")
            async with px.consumer("orders", "g", debounce=0.0) as consumer:
                await take(consumer, 2)
                with pytest.raises(pxrs.GroupNotEmpty):
                    await px.groups.delete("g")
            (group,) = await px.groups.list()
            assert (group.name, group.state) == ("g", "EMPTY")
            (change,) = await px.groups.reset("g", "orders", to=1)
            assert change.after == 1
            assert (await px.groups.describe("g", lag_seconds=False)).lag == 1
            told = await px.groups.explain("g", limit=2)
            assert (len(told.rebalances), len(told.resets)) == (1, 1)
            await px.groups.delete("g")
            with pytest.raises(pxrs.GroupNotFound):
                await px.groups.describe("g")

    run(main())


def test_seeking_and_committing_in_callbacks(store: Store) -> None:
    """The thread that waits for messages waits for the callback: neither may wait for it."""

    async def main() -> None:
        async with opened(store) as px:
            await send(px, b"a", b"b", b"c")
            told: list[str] = []

            async def on_assigned(parts: dict[TopicPartition, int | None]) -> None:
                for part in parts:
                    await consumer.seek(part.topic, part.partition, 1)
                told.append("assigned")

            async def on_revoked(parts: set[TopicPartition]) -> None:
                await consumer.commit()
                told.append("revoked")

            joining = px.consumer(
                "orders",
                "g",
                debounce=0.0,
                auto_commit=False,
                on_assigned=on_assigned,
                on_revoked=on_revoked,
            )
            async with joining as consumer:
                assert await take(consumer, 2) == [b"b", b"c"]
                assert await consumer.poll(1, 0) == []
            assert told == ["assigned", "revoked"]
            assert await checkpoints(px) == [3]

    run(main())


def test_a_second_task_is_refused(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.consumer("orders", "g", debounce=0.0) as consumer:
            first = asyncio.ensure_future(consumer.poll(timeout=PATIENCE))
            await asyncio.sleep(0)
            with pytest.raises(pxrs.InvalidRequest, match="one consumer per task"):
                await consumer.poll(timeout=0)
            with pytest.raises(pxrs.InvalidRequest, match="one consumer per task"):
                consumer.batches()
            await send(px, b"a")
            assert [message.value for message in await first] == [b"a"]

    run(main())
