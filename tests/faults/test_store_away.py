"""While the store is away, `poll` and a first `send` wait, and tell when their time is over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import pxrs
from pxrs import Pxrs, aio
from pxrs.aio.threads import Threads
from pxrs.producing.buffer import ThreadBuffers
from pxrs.types import Topic
from support.proxy import Proxy

pytestmark = pytest.mark.engine("postgres")
PATIENCE = 30.0
TTL = 1.0


@pytest.fixture
def proxy(postgres_url: str) -> Iterator[Proxy]:
    with Proxy(int(postgres_url.rpartition("/")[0].rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def px(postgres_url: str, proxy: Proxy) -> Iterator[Pxrs]:
    """Behind the proxy."""
    with pxrs.connect(postgres_url) as px:
        px.topics.create("t", 1)
    database = postgres_url.rpartition("/")[2]
    with pxrs.connect(f"postgresql://postgres@{proxy.address}/{database}") as px:
        yield px
        proxy.heal()


def send(url: str) -> None:
    with pxrs.connect(url) as px, px.producer() as producer:
        producer.send("t", "x").result()


def test_a_poll_whose_session_is_over(postgres_url: str, proxy: Proxy, px: Pxrs) -> None:
    with px.consumer("t", "g", debounce=0.0, session_ttl=TTL) as consumer:
        while not consumer.assignment:
            consumer.poll(timeout=0.05)
        proxy.refuse()
        for _ in range(2):
            with pytest.raises(pxrs.StoreUnavailable):
                consumer.poll(timeout=2 * TTL)
        proxy.heal()
        send(postgres_url)
        assert len(consumer.poll(timeout=PATIENCE)) == 1


def test_a_poll_without_a_partition(postgres_url: str, proxy: Proxy, px: Pxrs) -> None:
    with (
        pxrs.connect(postgres_url) as there,
        there.consumer("t", "g", debounce=0.0) as first,
    ):
        while not first.assignment:
            first.poll(timeout=0.05)
        with px.consumer("t", "g", debounce=0.0) as second:
            assert second.poll(timeout=0) == []
            proxy.refuse()
            # Its session lasts for longer: its background thread has noticed.
            with pytest.raises(pxrs.StoreUnavailable):
                for _ in range(100):
                    assert second.poll(timeout=0.2) == []
            proxy.heal()


class Away:
    """Tells when somebody has asked for a topic in vain."""

    def __init__(self, buffers: ThreadBuffers) -> None:
        self._find = buffers.find
        self.noticed = threading.Event()

    def find(self, topic: str) -> Topic:
        try:
            return self._find(topic)
        except pxrs.StoreUnavailable:
            self.noticed.set()
            raise


@pytest.mark.parametrize("many", [False, True], ids=["send", "send_many"])
def test_a_first_send(proxy: Proxy, px: Pxrs, monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    with px.producer() as producer, ThreadPoolExecutor(1) as another:
        away = Away(producer._buffers)
        monkeypatch.setattr(producer._buffers, "find", away.find)
        proxy.refuse()
        if many:
            sent = another.submit(lambda: producer.send_many("t", [(None, "x")]).result())
        else:
            sent = another.submit(lambda: [producer.send("t", "x").result()])
        assert away.noticed.wait(PATIENCE)
        proxy.heal()
        assert [each.offset for each in sent.result(PATIENCE)] == [0]


def test_a_first_send_gives_up(proxy: Proxy, px: Pxrs) -> None:
    with px.producer(delivery_timeout=0.1) as producer:
        proxy.refuse()
        with pytest.raises(pxrs.DeliveryFailed, match="'t' could not be looked up") as told:
            producer.send("t", "x")
        assert isinstance(told.value.__cause__, pxrs.StoreUnavailable)
        with pytest.raises(pxrs.InvalidRequest):
            producer.send("no topic!", "x")
        proxy.heal()
        assert producer.send("t", "x").result().offset == 0


def test_closing_ends_the_wait_of_a_first_send(
    proxy: Proxy, px: Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with px.producer() as producer, ThreadPoolExecutor(1) as another:
        away = Away(producer._buffers)
        monkeypatch.setattr(producer._buffers, "find", away.find)
        proxy.refuse()
        sent = another.submit(lambda: producer.send("t", "x"))
        assert away.noticed.wait(PATIENCE)
        producer.close()
        with pytest.raises(pxrs.Closed):
            sent.result(PATIENCE)


def test_a_first_send_of_asyncio(proxy: Proxy, px: Pxrs, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        producer = aio.Pxrs(px, Threads()).producer()
        away = Away(producer._buffers)
        monkeypatch.setattr(producer._buffers, "find", away.find)
        proxy.refuse()
        sending = asyncio.create_task(producer.send("t", "x"))
        assert await asyncio.to_thread(away.noticed.wait, PATIENCE)
        proxy.heal()
        assert (await (await sending)).offset == 0
        await producer.close()

    asyncio.run(main())
