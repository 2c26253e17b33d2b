"""Passes requests on to the node that has to answer them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace

import aiohttp
from yarl import URL

from pxrs.server.cluster import NodeInfo
from pxrs.server.node_auth import PassedOn, digest, is_signed, sign
from pxrs.server.rest.problems import HttpError
from pxrs.server.rest.routes import Answer

_FORWARDED = "X-Pxrs-Forwarded"
_TOKEN = "X-Pxrs-Token"
_BODY = "X-Pxrs-Body"
_SIGNATURE = "X-Pxrs-Signature"
FOLLOWS = "X-Pxrs-Follows"
LEADER = "X-Pxrs-Leader"
# The code of a request that did not leave this node; after any other failure it may have been done.
NOT_SENT = "leader_unreachable"
_LOST, _GONE = "leader_lost", "leader_gone"
# The other node may have executed the request.
MAYBE_DONE = (_LOST, _GONE)
_KEPT = ("Content-Type", "X-Request-Id")


class Forwarding:
    """Connections to the other nodes. Used by one event loop.

    `here` is this node, `secret` what all nodes of the store sign with.
    """

    def __init__(
        self,
        here: NodeInfo,
        nodes: Callable[[], Iterable[NodeInfo]],
        secret: bytes,
        timeout: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._here = here
        self._nodes = nodes
        self._secret = secret
        self._tls = tls
        self._waiting: dict[asyncio.Task[Answer], str] = {}
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    def knows(self, address: str) -> bool:
        """Whether a node that is there has published this address as its own."""
        return any(node.address == address for node in self._nodes())

    def received(self, method: str, path: str, headers: Mapping[str, str]) -> PassedOn | None:
        """The request that another node signed and passed on; None if a client sent it."""
        if _FORWARDED not in headers:
            return None
        parts = (headers.get(name, "") for name in (_TOKEN, _BODY))
        request = PassedOn(self._here.address, headers[_FORWARDED], method, path, *parts)
        if is_signed(self._secret, request, headers.get(_SIGNATURE, "")):
            return request
        raise HttpError(401, "bad_signature", "no node of this store has passed this on")

    async def send(
        self,
        address: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        token: str,
    ) -> Answer:
        """The answer of the node at `address`; 503 if it can't be reached, or goes meanwhile.

        `token` is the name of the client's token.
        """
        request = PassedOn(address, self._here.name, method, path, token, digest(body))
        asked = asyncio.ensure_future(self._request(request, headers, body))
        asked.add_done_callback(_note_outcome)
        self._waiting[asked] = address
        try:
            await asyncio.wait([asked])
        finally:
            del self._waiting[asked]
            if not asked.done():
                asked.cancel()
        if not asked.cancelled():
            return asked.result()
        raise HttpError(503, _GONE, f"the node at {address}, which had to answer this, is gone")

    def give_up_on_others(self, addresses: Collection[str]) -> None:
        """Wait no longer for nodes other than these: a frozen one never answers."""
        for asked, address in self._waiting.items():
            if address not in addresses:
                asked.cancel()

    async def _request(self, request: PassedOn, headers: Mapping[str, str], body: bytes) -> Answer:
        address = request.target
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                auto_decompress=False,
                trace_configs=[_sent_trace()],
                middlewares=[_send_once],
            )
        sent = asyncio.Event()
        signed = {
            _FORWARDED: request.node,
            _TOKEN: request.token,
            _BODY: request.body,
            _SIGNATURE: sign(self._secret, request),
        }
        try:
            async with self._session.request(
                request.method,
                URL(
                    f"{'http' if self._tls is None else 'https'}://{address}{request.path}",
                    encoded=True,
                ),
                ssl=True if self._tls is None else self._tls,
                headers={name: headers[name] for name in _KEPT if name in headers} | signed,
                data=body or None,
                allow_redirects=False,
                trace_request_ctx=sent,
            ) as answer:
                kind = answer.headers.get("Content-Type", "application/json").partition(";")[0]
                return Answer(await answer.read(), answer.status, kind, {LEADER: address})
        except (aiohttp.ClientError, TimeoutError) as error:
            raise HttpError(
                503,
                _LOST if sent.is_set() else NOT_SENT,
                f"the node at {address}, which has to answer this, can't be reached: {error}",
            ) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _note_outcome(asked: asyncio.Task[Answer]) -> None:
    """Keeps asyncio from logging the failure of a request whose client has gone."""
    if not asked.cancelled():
        asked.exception()


async def _send_once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Keeps aiohttp from sending a PUT or a DELETE again when the connection breaks.

    The first one may have been executed: a put would happen twice, a conditional one be refused.
    """
    try:
        return await handler(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        if request.method == "GET":
            raise
        raise aiohttp.ClientConnectionError(str(error)) from error


def _sent_trace() -> aiohttp.TraceConfig:
    """Sets a request's event when its first bytes are sent."""
    trace = aiohttp.TraceConfig()

    async def note(session: object, context: SimpleNamespace, about: object) -> None:
        context.trace_request_ctx.set()

    trace.on_request_headers_sent.append(note)
    return trace
