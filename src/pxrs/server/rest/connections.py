"""Connections of clients: refuses what is not HTTP, and notices when a client has gone.

No part of a request that could not be read is logged or sent back: it may be a secret.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from pxrs.server.rest.problems import PROBLEM, HttpError, Problem, problem_of

_LOG = logging.getLogger("pxrs.serve")
MOST_HEADER_BYTES = 16 * 2**10
# How long the kernel keeps what a client does not acknowledge, or has no room for.
_UNTAKEN_MS = 60_000


_PROCESS = secrets.token_hex(6)
_NUMBERS = count(1)


def id_of(request: web.BaseRequest) -> str:
    """The client's request id if it is valid, else a new one. An unreadable request has none."""
    given = request.headers.get("X-Request-Id", "")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return f"{_PROCESS}-{next(_NUMBERS)}"


class Connections(web.Server):
    """Makes the protocol of each connection."""

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    def __len__(self) -> int:
        return len(self._connections)


class Connection(web.RequestHandler):
    """The connection of one client."""

    on_lost: Callable[[], object] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN_MS)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that could not be read, or whose handling failed, and close."""
        request_id = id_of(request)
        if status != 400:
            _LOG.error("request %s failed", request_id, exc_info=exc)
            problem = problem_of(RuntimeError(), request_id)
        else:
            problem = problem_of(self._misread(exc, message or ""), request_id)
        response = web.Response(
            body=msgspec.json.encode(problem),
            status=problem.status,
            headers={"X-Request-Id": request_id, "Server": "pxrs"},
            content_type=PROBLEM,
        )
        response.force_close()
        return response

    def _misread(self, exc: BaseException | None, message: str) -> HttpError:
        if isinstance(exc, LineTooLong) or "Too many headers" in message:
            return HttpError(
                431,
                "headers_too_large",
                f"the request line and each header must be at most {MOST_HEADER_BYTES} bytes, "
                f"and there must be at most {self.max_headers} headers",
            )
        return HttpError(
            400,
            "malformed_request",
            "the request must be HTTP/1.1 (RFC 9112); send it with an HTTP library",
        )


class Refusing(asyncio.Protocol):
    """Answers a connection over the limit, whatever it asks, and closes it."""

    def connection_made(self, transport: Any) -> None:
        problem = Problem(
            title="too many connections", status=503, code="too_many_connections", retryable=True
        )
        body = msgspec.json.encode(problem)
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
            f"Content-Type: {PROBLEM}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()


async def unless_lost(request: web.BaseRequest, work: Awaitable[Any]) -> Any:
    """Awaits `work`, and cancels it once its client has gone: no one would get the answer."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    task = asyncio.ensure_future(work)
    connection.on_lost = task.cancel
    if connection.transport is None:
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        if connection.transport is not None:
            raise
        raise HttpError(400, "client_gone", "the client did not wait for the answer") from None
    finally:
        connection.on_lost = None
