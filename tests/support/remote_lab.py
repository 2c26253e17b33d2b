"""A node's store service on a real port, without the rest of the node, for `pxrs://` labs."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from pathlib import Path

from aiohttp import web

from pxrs.client.topology import NodesView
from pxrs.clock import SYSTEM_CLOCK
from pxrs.config import parse_url, remote_settings
from pxrs.kv.store import KeyValues
from pxrs.server.remote.node_keys import NodeKeys
from pxrs.server.remote.stores import StoreService
from pxrs.server.rest.websockets import converse
from pxrs.stores.api import Session, Stores
from pxrs.stores.open import open_stores
from pxrs.stores.remote.stores import RemoteStores
from pxrs.testing.conformance import await_end
from support.child import PATIENCE


async def _anybody() -> None:
    return None


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
        keys = NodeKeys(KeyValues(self._stores.coord, SYSTEM_CLOCK))
        service = StoreService(self._stores, "lab", keys, NodesView)

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            return await converse(request, service.talk, _anybody, service.room, PATIENCE)

        server = web.Server(answer)
        listening = await self._loop.create_server(server, "127.0.0.1", 0)
        self.port = listening.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        listening.close()
        await service.close()
        await server.shutdown(0.5)

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
