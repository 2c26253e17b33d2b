"""Requests that another node has to answer."""

from __future__ import annotations

import asyncio

import pytest

from pxrs.server.rest.forwarding import Forwarding
from pxrs.server.rest.problems import HttpError
from support.child import PATIENCE


def test_nobody_waits_for_a_node_that_is_gone() -> None:
    async def forward() -> None:
        asked = asyncio.Event()

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            asked.set()
            await reader.read()
            writer.close()

        frozen = await asyncio.start_server(hang, "127.0.0.1", 0)
        address = "{}:{}".format(*frozen.sockets[0].getsockname())
        forwarding = Forwarding("here", tuple, PATIENCE, None)
        answer = asyncio.ensure_future(forwarding.send(address, "GET", "/v1/topics", {}, b""))
        await asked.wait()
        forwarding.give_up_on_others({address})
        await asyncio.sleep(0)
        assert not answer.done()
        forwarding.give_up_on_others({"127.0.0.1:1"})
        with pytest.raises(HttpError, match="is gone") as refused:
            await answer
        assert (refused.value.status, refused.value.code) == (503, "leader_gone")
        await forwarding.close()
        frozen.close()
        await frozen.wait_closed()

    asyncio.run(asyncio.wait_for(forward(), PATIENCE))
