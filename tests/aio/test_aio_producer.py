"""Sending from an event loop: order, outcomes, back-pressure and group commits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

import pxrs
from pxrs import aio
from pxrs.codec.batches import new_builder
from pxrs.producing.handles import PendingBatch
from support.loops import Store, elsewhere, run

pytestmark = pytest.mark.engine("sqlite")

SMALL = 64 * 2**10


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@asynccontextmanager
async def opened(store: Store, partitions: int = 1) -> AsyncIterator[aio.Pxrs]:
    async with store.open() as px:
        await px.topics.create("orders", partitions)
        yield px


async def values(px: aio.Pxrs, partition: int = 0) -> list[bytes]:
    reader = await px.reader("orders")
    return [message.value for message in await reader.read(partition, 0, 1_000_000)]


async def send_on(producer: aio.Producer, accepted: list[aio.Sent]) -> None:
    while True:
        accepted.append(await producer.send("orders", b"x" * 1000))


async def ticks(count: int) -> None:
    """Return when the loop has come round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_round_trip(store: Store) -> None:
    async def main() -> None:
        async with opened(store, 4) as px, px.producer(serde=pxrs.JSON()) as producer:
            sent = await producer.send(
                "orders", {"n": 1}, key="a", partition=3, headers=[("h", b"1")], timestamp=5
            )
            position = await sent
            assert position == ("orders", 3, 0)
            assert sent.done()
            assert await sent.result(timeout=0) == position
            reader = await px.reader("orders", serde=pxrs.JSON())
            [message] = await reader.read(3, 0)
            assert (message.key, message.value, message.timestamp) == (b"a", {"n": 1}, 5)
            assert message.headers == (("h", b"1"),)

    run(main())


def test_an_awaited_message_does_not_linger(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.producer(linger=1000) as producer:
            assert (await (await producer.send("orders", b"x"))).offset == 0

    run(main())


def test_a_hundred_who_wait_share_commits(store: Store) -> None:
    async def main() -> None:
        async with opened(store, 4) as px, px.producer() as producer:

            async def one(number: int) -> pxrs.Position:
                return await (await producer.send("orders", b"x", key=str(number)))

            before = store.appends
            positions = await asyncio.gather(*(one(number) for number in range(100)))
            assert len(set(positions)) == 100
            assert store.appends - before <= 10

    run(main())


def test_order_survives_look_ups_and_a_full_buffer(store: Store) -> None:
    """The first message waits for its topic, later ones for room: none may be overtaken."""

    async def main() -> None:
        async with opened(store) as px:
            async with px.producer(buffer_bytes=SMALL, max_message_bytes=SMALL) as producer:
                for number in range(1000):
                    await producer.send("orders", b"%d" % number + b"." * 1000, key="k")
                await producer.send_many(
                    "orders", [("k", b"%d" % number + b"." * 1000) for number in range(1000, 1500)]
                )
                await producer.send("orders", b"1500.", key="k")
            found = [int(value.partition(b".")[0]) for value in await values(px)]
            assert found == list(range(1501))

    run(main())


def test_a_failed_send_raises_what_happened(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.producer(linger=1000) as producer:
            await (await producer.send("orders", b"1"))
            lost = await producer.send("orders", b"2")
            await px.topics.delete("orders")
            for wait in (lost, lost.result(timeout=30)):
                with pytest.raises(pxrs.TopicNotFound, match="orders"):
                    await wait
            with pytest.raises(pxrs.TopicNotFound):
                await producer.send("orders", b"3")
            await px.topics.create("orders", 1)
            assert (await (await producer.send("orders", b"4"))).offset == 0
            assert await values(px) == [b"4"]

    run(main())


@pytest.mark.parametrize("end", ["flush", "close", "async with", "px.close", "async with px"])
def test_who_never_asks_is_told_at_the_end_and_once(store: Store, end: str) -> None:
    async def main() -> None:
        px = store.open()
        await px.topics.create("orders", 1)
        producer = px.producer(linger=1000)
        await producer.send_many("orders", [("k", b"1"), ("k", b"2")])
        await px.topics.delete("orders")
        with pytest.raises(pxrs.DeliveryFailed, match="2 messages to 'orders'"):
            if end == "flush":
                await producer.flush()
            elif end == "close":
                await producer.close()
            elif end == "px.close":
                await px.close()
            else:
                async with producer if end == "async with" else px:
                    pass
        if end in ("flush", "close"):
            await producer.flush()
        await producer.close()
        await px.close()

    run(main())


def test_who_asked_is_not_told_again_and_who_gave_up_is(store: Store) -> None:
    async def main() -> None:
        async with store.open() as px:
            await px.topics.create("orders", 2)
            producer = px.producer(linger=1000)
            sent = await producer.send("orders", b"1", partition=0)
            many = await producer.send_many("orders", [(str(n), b"2") for n in range(20)])
            await px.topics.delete("orders")
            store.may_append.clear()
            waiting = [asyncio.create_task(each.result()) for each in (sent, many)]
            await elsewhere(store.append_began.acquire)
            store.may_append.set()
            for task in waiting:
                with pytest.raises(pxrs.TopicNotFound):
                    await task
            await producer.flush()
            await px.topics.create("orders", 2)
            sent = await producer.send("orders", b"3")
            await px.topics.delete("orders")
            store.may_append.clear()
            with pytest.raises(TimeoutError):
                await sent.result(timeout=0.01)
            store.may_append.set()
            with pytest.raises(pxrs.DeliveryFailed, match="1 message to 'orders'"):
                await producer.close()

    run(main())


def test_an_error_on_its_way_is_not_replaced(store: Store) -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            async with opened(store) as px, px.producer(linger=1000) as producer:
                await producer.send("orders", b"1")
                await px.topics.delete("orders")
                raise ZeroDivisionError
        assert "1 message to 'orders'" in caught.value.__notes__[0]

    run(main())


def test_a_topic_made_again_with_other_partitions(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.producer(linger=1000) as producer:
            lost = await producer.send("orders", b"1")
            await px.topics.delete("orders")
            await px.topics.create("orders", 2)
            with pytest.raises(pxrs.TopicNotFound):
                await lost
            with pytest.raises(pxrs.TopicExists, match="send again"):
                await producer.send("orders", b"2")
            assert (await (await producer.send("orders", b"3", partition=1))).partition == 1

    run(main())


def test_bad_input_is_refused(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.producer(max_message_bytes=10) as producer:
            with pytest.raises(pxrs.TopicNotFound):
                await producer.send("missing", b"x")
            with pytest.raises(pxrs.TopicNotFound):
                await producer.send_many("missing", [])
            with pytest.raises(pxrs.MessageTooLarge):
                await producer.send("orders", b"x" * 11)
            with pytest.raises(pxrs.PartitionNotFound):
                await producer.send("orders", b"x", partition=1)
            with pytest.raises(pxrs.MessageTooLarge):
                await producer.send_many("orders", [("k", b"x")] * 500 + [("k", b"x" * 11)])
            await producer.flush()
            assert await values(px) == []

    run(main())


def test_a_full_buffer_does_not_block_the_loop(store: Store) -> None:
    async def main() -> None:
        async with (
            opened(store) as px,
            px.producer(buffer_bytes=SMALL, max_message_bytes=SMALL) as producer,
        ):
            await producer.send("orders", b"first")
            await producer.flush()
            store.may_append.clear()

            async def send_all() -> None:
                for _ in range(500):
                    await producer.send("orders", b"x" * 1000)

            sending = asyncio.create_task(send_all())
            await elsewhere(store.append_began.acquire)
            await ticks(1000)
            assert not sending.done()
            store.may_append.set()
            await sending
            await producer.flush()
            assert len(await values(px)) == 501

    run(main())


def test_sending_without_end_lets_others_run(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.producer() as producer:
            enough = asyncio.Event()

            async def send_much() -> None:
                while not enough.is_set():
                    await producer.send("orders", b"x" * 100)

            def endless() -> Iterator[tuple[None, bytes]]:
                while not enough.is_set():
                    yield None, b"x" * 100

            tasks = [
                asyncio.create_task(send_much()),
                asyncio.create_task(producer.send_many("orders", endless())),
            ]
            await ticks(50)
            enough.set()
            await asyncio.gather(*tasks)

    run(main())


def test_a_buffer_that_stays_full_is_an_error(store: Store) -> None:
    async def main() -> None:
        async with (
            opened(store) as px,
            px.producer(buffer_bytes=SMALL, max_message_bytes=SMALL, max_block=0.05) as producer,
        ):
            store.may_append.clear()
            accepted: list[aio.Sent] = []
            with pytest.raises(pxrs.BufferFull):
                await send_on(producer, accepted)
            store.may_append.set()
            await producer.flush()
            assert len(await values(px)) == len(accepted)

    run(main())


def test_a_send_many_cut_short_says_how_many_are_sent(store: Store) -> None:
    async def main() -> None:
        async with (
            opened(store) as px,
            px.producer(buffer_bytes=SMALL, max_message_bytes=SMALL, max_block=0.05) as producer,
        ):
            store.may_append.clear()
            with pytest.raises(pxrs.BufferFull) as caught:
                await producer.send_many("orders", [(None, b"x" * 1000)] * 1000)
            store.may_append.set()
            await producer.flush()
            count = len(await values(px))
            assert 0 < count < 1000
            assert f"the first {count} messages" in caught.value.__notes__[0]

    run(main())


def test_closing_while_somebody_waits_for_room(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px:
            producer = px.producer(buffer_bytes=SMALL, max_message_bytes=SMALL)
            store.may_append.clear()
            accepted: list[aio.Sent] = []
            sending = asyncio.create_task(send_on(producer, accepted))
            await elsewhere(store.append_began.acquire)
            closing = asyncio.create_task(producer.close())
            await ticks(10)
            store.may_append.set()
            await closing
            with pytest.raises(pxrs.Closed):
                await sending
            assert all(sent.done() for sent in accepted)
            assert len(await values(px)) == len(accepted)

    run(main())


def test_waiting_for_an_outcome_can_end_early(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.producer() as producer:
            store.may_append.clear()
            sent = await producer.send("orders", b"x")
            waiting = asyncio.create_task(sent.result())
            with pytest.raises(TimeoutError, match="still being tried"):
                await sent.result(timeout=0.01)
            many = await producer.send_many("orders", [(None, b"y")])
            with pytest.raises(TimeoutError, match="still being tried"):
                await many.result(timeout=0.01)
            with pytest.raises(TimeoutError):
                await producer.flush(timeout=0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            store.may_append.set()
            assert (await sent).offset == 0
            assert (await many)[0].offset == 1

    run(main())


def test_send_many(store: Store) -> None:
    async def main() -> None:
        async with opened(store, 3) as px, px.producer() as producer:
            pairs = [(f"k{number % 50}", b"%d" % number) for number in range(5000)]
            many = await producer.send_many("orders", iter(pairs))
            assert len(many) == 5000
            positions = await many
            assert await many[-1] == positions[-1]
            assert await many[10:12] == positions[10:12]
            assert [await sent for sent in many] == positions
            reader = await px.reader("orders")
            for number in range(0, 5000, 499):
                where = positions[number]
                [message] = await reader.read(where.partition, where.offset, 1)
                assert message.value == b"%d" % number

    run(main())


def test_many_wait_without_a_thread_each(store: Store) -> None:
    async def main() -> None:
        async with opened(store) as px, px.producer() as producer:
            store.may_append.clear()
            sent = [await producer.send("orders", b"x") for _ in range(200)]
            before = threading.active_count()
            waiting = asyncio.gather(*sent)
            await ticks(10)
            assert threading.active_count() == before
            store.may_append.set()
            assert len(await waiting) == 200

    run(main())


def test_a_loop_that_is_gone_harms_nobody(store: Store) -> None:
    """A callback for a loop that was closed must not disturb the commit it comes from."""
    px = store.open()

    async def give_up() -> aio.Sent:
        await px.topics.create("orders", 1)
        store.may_append.clear()
        sent = await px.producer().send("orders", b"x")
        with pytest.raises(TimeoutError):
            await sent.result(timeout=0.01)
        return sent

    async def look(sent: aio.Sent) -> None:
        store.may_append.set()
        assert (await sent).offset == 0
        await px.close()

    run(look(run(give_up())))


def test_each_callback_is_called_once_whoever_comes_first() -> None:
    """Settling and registering race; no callback may be lost or called twice."""

    class Nobody:
        def deliver(self, pending: PendingBatch, timeout: float | None) -> None: ...
        def hurry(self) -> None: ...

    def register(pending: PendingBatch, start: threading.Barrier, numbers: range) -> None:
        start.wait()
        for number in numbers:
            pending.when_settled(partial(calls.append, number))

    topic = pxrs.Topic(name="orders", id="1", partitions=1)
    calls: list[int] = []
    for _ in range(300):
        calls.clear()
        pending = PendingBatch(topic, 0, new_builder(1000, 0), Nobody(), 0.0)
        start = threading.Barrier(3)
        halves = (range(50), range(50, 100))
        threads = [
            threading.Thread(target=register, args=(pending, start, half)) for half in halves
        ]
        for thread in threads:
            thread.start()
        start.wait()
        pending.settle(0, None)
        for thread in threads:
            thread.join()
        assert sorted(calls) == list(range(100))
