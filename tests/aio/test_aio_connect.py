"""Opening, the verbs of topics, and closing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pxrs
from pxrs import aio, app
from pxrs.stores.open import open_stores
from support.loops import PATIENCE, elsewhere, run

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


def test_connect_can_be_awaited(url: str) -> None:
    async def main() -> None:
        px = await aio.connect(url)
        await px.topics.create("orders", 2)
        await px.close()

    run(main())
    with pxrs.connect(url) as px:
        assert [topic.name for topic in px.topics.list()] == ["orders"]


def test_connect_can_be_entered_and_closes(url: str) -> None:
    async def main() -> None:
        async with aio.connect(url) as px:
            assert px.url == url
        with pytest.raises(pxrs.Closed):
            await px.topics.list()
        await px.close()

    run(main())


def test_topics(url: str) -> None:
    async def main() -> None:
        async with aio.connect(url) as px:
            made = await px.topics.create("orders", partitions=2, retention_bytes=1000)
            assert await px.topics.list() == [made]
            await px.topics.apply_retention("orders")
            assert (await px.topics.describe("orders")).messages == 0
            with pytest.raises(pxrs.TopicExists):
                await px.topics.create("orders", 3)
            await px.topics.delete("orders")
            assert await px.topics.list() == []
            for call in (
                px.topics.describe,
                px.topics.delete,
                px.topics.apply_retention,
                px.reader,
            ):
                with pytest.raises(pxrs.TopicNotFound):
                    await call("orders")

    run(main())


def test_a_bad_url_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(pxrs.ConfigError):
            await aio.connect("sqlit:///x")
        with pytest.raises(pxrs.StoreUnavailable):
            async with aio.connect(f"sqlite:///{tmp_path}/missing/x.db"):
                pass

    run(main())


def test_a_store_that_nobody_waits_for_any_more_is_closed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_open, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(pxrs.Pxrs):
        def close(self) -> None:
            super().close()
            closed.set()

    def slow_connect(url: str, **_: str | None) -> pxrs.Pxrs:
        begun.set()
        assert may_open.wait(PATIENCE)
        return Slow(open_stores(url))

    monkeypatch.setattr(app, "connect", slow_connect)

    async def main() -> None:
        async def open_it() -> None:
            await aio.connect(url)

        task = asyncio.create_task(open_it())
        await elsewhere(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_open.set()
        await elsewhere(closed.wait)

    run(main())


def test_closing_flushes_producers_and_can_be_done_by_many(url: str) -> None:
    async def main() -> None:
        px = await aio.connect(url)
        await px.topics.create("orders", 1)
        producer = px.producer(linger=60)
        sent = await producer.send("orders", b"kept")
        await asyncio.gather(*(px.close() for _ in range(5)))
        assert sent.done()
        assert (await sent).offset == 0
        await producer.close()
        with pytest.raises(pxrs.Closed):
            await producer.send("orders", b"late")

    run(main())


def test_one_connection_in_two_loops(url: str) -> None:
    px = run(_opened(url))
    producer = px.producer()

    async def send_one() -> aio.Sent:
        return await producer.send("orders", b"x")

    async def send_and_wait() -> int:
        return (await (await send_one())).offset

    async def end(sent: aio.Sent) -> int:
        offset = (await sent).offset
        reader = await px.reader("orders")
        assert len(await reader.read(0, 0)) == 3
        await px.close()
        return offset

    async def read() -> None:
        reader = await px.reader("orders")
        messages = [message async for message in reader.follow(start="earliest", timeout=0)]
        assert len(messages) == 2

    assert run(send_and_wait()) == 0
    assert run(send_and_wait()) == 1
    run(read())
    assert run(end(run(send_one()))) == 2


async def _opened(url: str) -> aio.Pxrs:
    px = await aio.connect(url)
    await px.topics.create("orders", 1)
    return px


def test_it_needs_no_import_of_its_own() -> None:
    program = "import pxrs; print(pxrs.aio.connect.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"pxrs.aio.app"
