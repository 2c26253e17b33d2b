"""Handles of a log on a real server, for its tests."""

from __future__ import annotations

import asyncio

import pytest

import nats
from pxrs.config import nats_settings, parse_url
from pxrs.errors import StoreFull
from pxrs.stores.jetstream.failures import full
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.stores.jetstream.wire import ApiError
from pxrs.testing.conformance.tools import batch
from pxrs.types import Append, Appended, LogPartition
from support.child import PATIENCE


def opened(url: str) -> JetStreamLog:
    return JetStreamLog(nats_settings(parse_url(url)))


def leader_of(url: str, stream: str) -> int:
    """The number of the node that leads the stream."""

    async def ask() -> str:
        client = await nats.connect(url.removeprefix("nats://").split(","))
        try:
            info = await client.jetstream().stream_info(stream)
        finally:
            await client.close()
        assert info.cluster is not None
        assert info.cluster.leader is not None
        return info.cluster.leader

    return int(asyncio.run(ask()).removeprefix("n"))


def little_room(size: int) -> dict[str, object]:
    """Settings of servers that keep so many bytes for all who come without a name."""
    account = {
        "jetstream": {"max_file": size, "max_mem": 0},
        "users": [{"user": "a", "password": "a"}],
    }
    return {"accounts": {"A": account}, "no_auth_user": "a"}


def fill(log: JetStreamLog, where: LogPartition) -> int:
    """Append until there is no room for the smallest batch, nor for another message; the end."""
    end = 0
    for size in (60_000, 1_000, 100, 1):
        while True:
            (outcome,) = log.append([Append(where, batch(b"x" * size))])
            if not isinstance(outcome, Appended):
                assert isinstance(outcome, StoreFull)
                break
            end = outcome.base + 1
    stuff(log, where.topic_id)
    return end


def stuff(log: JetStreamLog, topic_id: str) -> None:
    """Leave no room for the smallest message. Those that fill it are on a subject nobody reads."""
    topic = log._run(log._topics.find(topic_id))
    for size in (10_000, 1_000, 100, 0):
        with pytest.raises(ApiError) as refused:
            while True:
                publish = log._topics._streams.publish
                log._run(publish(f"{topic.root}.x", bytes(size), {}, PATIENCE))
        assert full(refused.value)
