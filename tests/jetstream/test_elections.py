"""Around an election several servers may answer, and one of them may not know what is there."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import nats.errors
import pytest
from nats.aio.msg import Msg

import nats
from engines import Engine
from pxrs.config import nats_settings, parse_url
from pxrs.errors import TopicNotFound
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.testing.conformance.tools import append, batch
from pxrs.types import Bounds, LogPartition
from support.child import PATIENCE
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("nats")

HERE = LogPartition("t-1", 0)
_ROUNDS = 10
_NOT_FOUND = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}


@pytest.fixture
def cluster(new_engine: NewEngine) -> Engine:
    return new_engine("nats", nodes=3)


def opened(cluster: Engine) -> JetStreamLog:
    return JetStreamLog(nats_settings(parse_url(f"{cluster.url}?replicas=3")))


@contextmanager
def deposed(cluster: Engine, subject: str) -> Iterator[list[str]]:
    """Somebody on every server who answers, too, and knows of no stream; what it was asked."""
    asked: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def answer(message: Msg) -> None:
        asked.append(message.subject)
        await message.respond(json.dumps(_NOT_FOUND).encode())

    async def serve() -> None:
        clients = [await nats.connect(f"127.0.0.1:{port}") for port in cluster.ports[::3]]
        for client in clients:
            await client.subscribe(subject, cb=answer)
            await client.flush()
        ready.set()
        await asyncio.to_thread(stop.wait)
        for client in clients:
            await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield asked
    finally:
        stop.set()
        thread.join(PATIENCE)


def await_everywhere(cluster: Engine, stream: str) -> None:
    """Until each server knows who keeps the stream: that gets around after it was made."""

    async def ask() -> None:
        for port in cluster.ports[::3]:
            client = await nats.connect(f"127.0.0.1:{port}")
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                try:
                    await client.request(f"$JS.API.DIRECT.GET.{stream}", b'{"seq":1}', timeout=1)
                    break
                except nats.errors.Error:
                    continue
            else:
                raise AssertionError(f"nobody answers for {stream} on {port}")
            await client.close()

    asyncio.run(ask())


def test_who_knows_of_no_stream_is_not_believed_while_others_keep_it(cluster: Engine) -> None:
    with closing(opened(cluster)) as log:
        log.create(HERE.topic_id, 1)
        append(log, HERE, batch(b"a", b"b"), batch(b"c"))
        log.trim(HERE, 2)
        await_everywhere(cluster, "pxrs_t-1")
        with deposed(cluster, "$JS.API.STREAM.*.pxrs_t-1") as asked:
            for _ in range(_ROUNDS):
                with closing(opened(cluster)) as cold:
                    assert cold.bounds(HERE.topic_id) == {0: Bounds(2, 3)}
        assert len(asked) >= _ROUNDS
        log.drop(HERE.topic_id)


def test_of_two_answers_the_first_counts(cluster: Engine) -> None:
    with closing(opened(cluster)) as log, closing(opened(cluster)) as other:
        with deposed(cluster, "$JS.API.STREAM.*.pxrs_none"):
            for _ in range(_ROUNDS):
                with pytest.raises(TopicNotFound):
                    log.bounds("none")
        log.create("none", 1)
        assert other.bounds("none") == {0: Bounds(0, 0)}
        other.drop("none")
        with pytest.raises(TopicNotFound):
            log.bounds("none")
