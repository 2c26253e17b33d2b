"""The nodes behind a `pxrs://` URL, for asyncio."""

from __future__ import annotations

from pxrs.aio.threads import Threads, awaiting, passing
from pxrs.client import client as blocking


class Client:
    """The nodes, and the leaders of slots. See `pxrs.Client`."""

    def __init__(self, client: blocking.Client, threads: Threads) -> None:
        self._blocking = client
        self._threads = threads
        self._call = threads.call

    view = awaiting(blocking.Client.view)
    on_change = awaiting(blocking.Client.on_change)
    stats = passing(blocking.Client.stats)
    collect = passing(blocking.Client.collect)
