"""A node's store service on a real port, without the rest of the node, for `pxrs://` labs."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pxrs.client import frames
from pxrs.client.topology import NodesView
from pxrs.clock import SYSTEM_CLOCK
from pxrs.config import parse_url, remote_settings
from pxrs.kv.store import KeyValues
from pxrs.server.rpc.calls import Caller
from pxrs.server.rpc.node_keys import NodeKeys
from pxrs.server.rpc.stores import StoreService
from pxrs.stores.api import Session, Stores
from pxrs.stores.open import open_stores
from pxrs.stores.remote.stores import RemoteStores
from pxrs.testing.conformance import await_end
from support.child import PATIENCE


async def _anybody() -> Caller:
    return Caller(None, "", follows=False)


class ServedStores:
    """Serves stores on loopback until it is closed."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(PATIENCE)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        size = frames.MOST_FRAME_BYTES
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", -1),
                ("grpc.http2.max_ping_strikes", 0),
            ]
        )
        keys = NodeKeys(KeyValues(self._stores.coord, SYSTEM_CLOCK))
        service = StoreService(self._stores, "lab", keys, NodesView)

        async def talk(frames: Any, context: Any) -> AsyncIterator[bytes]:
            async for frame in service.talk(frames, _anybody):
                yield frame

        handler = grpc.stream_stream_rpc_method_handler(talk)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(frames.SERVICE, {frames.CALL: handler}),)
        )
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._started.set()
        await self._stop.wait()
        await service.close()
        await server.stop(0.5)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        self._stores.close()


class RemoteLab:
    """A place behind a node; every handle is a client of its own."""

    patience = 10.0

    def __init__(self, url: str | None = None, ttl: float = 0.5) -> None:
        self.ttl = ttl
        self._folder = Path(tempfile.mkdtemp(prefix="pxrs-remote-"))
        self._served = ServedStores(open_stores(url or f"sqlite:///{self._folder}/lab.db"))
        self._opened: list[RemoteStores] = []

    @property
    def url(self) -> str:
        return f"pxrs://127.0.0.1:{self._served.port}"

    def open(self) -> Stores:
        stores = RemoteStores(remote_settings(parse_url(self.url)))
        self._opened.append(stores)
        return stores

    def let_expire(self, session: Session) -> None:
        await_end(self.open(), session, self.patience)

    def close(self) -> None:
        for stores in self._opened:
            stores.close()
        self._served.close()
        shutil.rmtree(self._folder)
