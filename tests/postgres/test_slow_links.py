"""Over a slow link all goes on, as slowly as it has to."""

from __future__ import annotations

import os

import pytest

import pxrs
from support.child import PATIENCE
from support.proxy import Proxy

pytestmark = [pytest.mark.engine("postgres"), pytest.mark.long]
RATE = 400_000


def test_what_takes_longer_than_a_session_passes_a_slow_link(postgres_url: str) -> None:
    """Sessions are renewed on a connection of their own, beside what is on its way."""
    value = os.urandom(900_000)
    server, _, database = postgres_url.rpartition("/")
    with (
        Proxy(int(server.rpartition(":")[2])) as proxy,
        pxrs.connect(f"postgresql://postgres@{proxy.address}/{database}") as px,
    ):
        px.topics.create("t", 1)
        px.queues.create("q")
        with px.producer() as producer, px.consumer("t", "g", session_ttl=1.0) as consumer:
            producer.send("t", b"first").result()
            assert consumer.poll(timeout=PATIENCE)
            generation = px.groups.describe("g").generation
            proxy.slow(RATE)
            producer.send("t", value).result()
            (message,) = consumer.poll(timeout=PATIENCE)
            assert message.value == value
            consumer.commit()
            assert px.groups.describe("g").generation == generation
        px.put("q", value)
        with px.transaction() as tx:
            item = tx.take("q", timeout=PATIENCE)
            assert item is not None
            assert item.value == value
        assert px.queues.describe("q").depth == 0
