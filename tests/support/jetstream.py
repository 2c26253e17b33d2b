"""Handles of a log on a real server, for its tests."""

from __future__ import annotations

import asyncio

import nats
from pxrs.config import nats_settings, parse_url
from pxrs.stores.jetstream.log import JetStreamLog


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
