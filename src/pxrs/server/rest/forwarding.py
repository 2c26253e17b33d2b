"""Passes requests on to the node that has to answer them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping

import aiohttp

from pxrs.server.cluster import NodeInfo
from pxrs.server.rest.problems import HttpError
from pxrs.server.rest.routes import Answer

FORWARDED = "X-Pxrs-Forwarded"
FOLLOWS = "X-Pxrs-Follows"
LEADER = "X-Pxrs-Leader"
_PASSED_ON = ("Authorization", "Content-Type", "X-Request-Id")


class Forwarding:
    """Connections to the other nodes. Used by one event loop."""

    def __init__(
        self,
        node: str,
        nodes: Callable[[], Iterable[NodeInfo]],
        timeout: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._node = node
        self._nodes = nodes
        self._tls = tls
        self._waiting: dict[asyncio.Task[Answer], str] = {}
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    def knows(self, address: str) -> bool:
        """Whether a node that is there has published this address as its own."""
        return any(node.address == address for node in self._nodes())

    async def send(
        self, address: str, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        """What the node at `address` answers; 503 if it can't be reached, or goes meanwhile."""
        asked = asyncio.ensure_future(self._request(address, method, path, headers, body))
        self._waiting[asked] = address
        try:
            await asyncio.wait([asked])
        finally:
            del self._waiting[asked]
            if not asked.done():
                asked.cancel()
        if not asked.cancelled():
            return asked.result()
        raise HttpError(
            503, "leader_gone", f"the node at {address}, which had to answer this, is gone"
        )

    def give_up_on_others(self, addresses: Collection[str]) -> None:
        """Wait no longer for nodes other than these: a frozen one never answers."""
        for asked, address in self._waiting.items():
            if address not in addresses:
                asked.cancel()

    async def _request(
        self, address: str, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Answer:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, auto_decompress=False)
        passed = {name: headers[name] for name in _PASSED_ON if name in headers}
        try:
            async with self._session.request(
                method,
                f"{'http' if self._tls is None else 'https'}://{address}{path}",
                ssl=True if self._tls is None else self._tls,
                headers=passed | {FORWARDED: self._node},
                data=body or None,
                allow_redirects=False,
            ) as answer:
                kind = answer.headers.get("Content-Type", "application/json").partition(";")[0]
                return Answer(await answer.read(), answer.status, kind, {LEADER: address})
        except (aiohttp.ClientError, TimeoutError) as error:
            raise HttpError(
                503,
                "leader_unreachable",
                f"the node at {address}, which has to answer this, can't be reached: {error}",
            ) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
