"""HTTP on aiohttp: connections, limits, bodies, problems, and a stop that lets requests finish."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Iterable
from itertools import count
from time import perf_counter
from typing import Any

import msgspec
from aiohttp import web

from pxrs import metrics as names
from pxrs.errors import PxrsError
from pxrs.server.groups import HeldElsewhere
from pxrs.server.metrics import Metrics
from pxrs.server.rest.forwarding import FOLLOWS, FORWARDED, LEADER, Forwarding
from pxrs.server.rest.guard import Guard, check
from pxrs.server.rest.problems import PROBLEM, HttpError, Problem, problem_of
from pxrs.server.rest.routes import Answer, Call, Match, Route, Router
from pxrs.server.settings import Endpoint, ServeSettings

_LOG = logging.getLogger("pxrs.serve")
# How long an idle connection is kept, and so how long a client may take to send its headers.
_KEEP_ALIVE = 75.0
_MOST_HEADER_BYTES = 16 * 2**10
_RETRY_AFTER = {"Retry-After": "1"}


class HttpServer:
    """Serves routes on one address. Used by one event loop."""

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self._router = Router(())
        self._metrics = metrics
        self._guard: Guard | None = None
        self._settings = settings
        self._room = Room(settings.max_inflight)
        self._busy = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._stopping = False
        self._server = web.Server(
            self._handle,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE,
            max_line_size=_MOST_HEADER_BYTES,
            max_field_size=_MOST_HEADER_BYTES,
            auto_decompress=False,
        )
        self._listening: asyncio.Server | None = None

    def route(self, routes: Iterable[Route], forwarding: Forwarding, guard: Guard | None) -> None:
        """Serve these; before, every request is answered that there is nothing."""
        self._router = Router(routes)
        self._forwarding = forwarding
        self._guard = guard

    async def start(self) -> Endpoint:
        """Listen; where. A port that is taken is an `OSError`."""
        endpoint = self._settings.endpoint
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            self._connect, endpoint.host, endpoint.port,
            ssl=self._settings.server_tls(), reuse_port=False, backlog=1024,
        )  # fmt: skip
        address = self._listening.sockets[0].getsockname()
        return Endpoint(address[0], address[1])

    async def stop(self) -> None:
        """Accept nothing more, let requests finish for a while, close all connections."""
        self._stopping = True
        if self._listening is not None:
            self._listening.close()
        try:
            async with asyncio.timeout(self._settings.drain):
                await self._quiet.wait()
        except TimeoutError:
            _LOG.warning("stopping: %d requests did not finish in time", self._busy)
        await self._server.shutdown(timeout=1.0)

    def _connect(self) -> asyncio.BaseProtocol:
        if len(self._server.connections) >= self._settings.max_connections:
            return _Refusing()
        return self._server()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = _request_id(request)
        began = perf_counter()
        self._busy += 1
        self._quiet.clear()
        match = self._router.find(request.path)
        try:
            answer = await self._answer(request, match)
        except Exception as error:  # noqa: BLE001 - a client is told of every failure
            answer = self._refusal(error, request_id)
        finally:
            self._busy -= 1
            if not self._busy:
                self._quiet.set()
        # Not the path as it was sent: strangers could make up as many as they like.
        path = next(iter(match.methods.values())).path if match is not None else "none"
        method = request.method if match is not None and request.method in match.methods else ""
        self._metrics.count(names.REQUESTS, method, path, str(answer.status))
        self._metrics.observe(names.REQUEST_SECONDS, perf_counter() - began, path)
        response = web.Response(
            body=answer.body,
            status=answer.status,
            headers={**answer.headers, "X-Request-Id": request_id},
            content_type=answer.content_type,
        )
        if self._stopping:
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest, match: Match | None) -> Answer:
        if self._stopping:
            raise HttpError(503, "stopping", "this node is stopping; try another one", _RETRY_AFTER)
        route = match.methods.get(request.method) if match is not None else None
        identity = None
        if self._guard is not None:
            # Before anything else is told: without a token there is nothing to be seen.
            identity = await self._guard.identify(request.headers, route)
        if match is None:
            raise HttpError(404, "no_such_path", f"there is nothing at {request.path[:200]}")
        if route is None:
            allowed = ", ".join(sorted(match.methods))
            raise HttpError(
                405,
                "method_not_allowed",
                f"{request.path[:200]} takes {allowed}",
                {"Allow": allowed},
            )
        query = route.parse_query(dict(request.query) if request.query_string else {})
        length = self._check_length(request, route)
        if not self._room.take(length):
            await self._room.wait_for(length, self._settings.request_timeout)
        try:
            data = await self._read_body(request)
            body = _decoded(data, route.body) if route.body is not None else None
            call = Call(match.parameters, query, body, request.headers, identity)
            check(route, call)
            try:
                answer = await route.handler(call)
            except HeldElsewhere as elsewhere:
                answer = await self._pass_on(elsewhere.address, request, data)
        finally:
            self._room.give_back(length)
        if not isinstance(answer, Answer):
            answer = Answer(answer, route.status)
        if isinstance(answer.body, bytes | bytearray):
            return answer
        if answer.body is None:
            return answer._replace(body=b"")
        return answer._replace(body=msgspec.json.encode(answer.body))

    def _check_length(self, request: web.BaseRequest, route: Route) -> int:
        length = request.content_length
        most = self._settings.max_body
        if length is not None and length > most:
            raise HttpError(413, "body_too_large", f"the body must be at most {most} bytes")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise HttpError(415, "content_encoding", "bodies must not be compressed")
        if route.body is None:
            return 0
        # One that does not say its length may have all of it.
        return most if length is None else length

    async def _pass_on(self, address: str, request: web.BaseRequest, body: bytes) -> Answer:
        """Let another node answer, unless the client goes there itself."""
        if FOLLOWS in request.headers:
            raise HttpError(
                421, "not_leader", f"the node at {address} answers this", {LEADER: address}
            )
        if FORWARDED in request.headers:
            raise HttpError(503, "leader_moving", "the nodes do not agree yet who leads; try again")
        return await self._forwarding.send(
            address, request.method, request.path_qs, request.headers, body
        )

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        most = self._settings.max_body
        too_large = HttpError(413, "body_too_large", f"the body must be at most {most} bytes")
        if request.content.is_eof():
            # All of it came with the headers, as most do: there is nothing to wait for.
            data = request.content.read_nowait()
            if len(data) > most:
                raise too_large
            return data
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise HttpError(408, "request_timeout", "the body took too long to arrive") from None
        return bytes(body)

    def _refusal(self, error: Exception, request_id: str) -> Answer:
        problem = problem_of(error, request_id)
        headers = dict(error.headers) if isinstance(error, HttpError) else {}
        if problem.status == 503:
            headers |= _RETRY_AFTER
        if not isinstance(error, PxrsError | HttpError):
            _LOG.error("request %s failed", request_id, exc_info=error)
        return Answer(msgspec.json.encode(problem), problem.status, PROBLEM, headers)


class Room:
    """Bytes of requests that may be worked on at a time; those that wait come in order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, size: int) -> bool:
        """Take room for a request; false if it has to wait. One of any size finds room alone."""
        if self._waiting or (self._taken and self._taken + size > self._most):
            return False
        self._taken += size
        return True

    async def wait_for(self, size: int, timeout: float) -> None:
        """Wait until there is room, and take it; 503 if that takes too long."""
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, given))
        try:
            async with asyncio.timeout(timeout):
                await given
        except TimeoutError:
            self._take_back(size, given)
            raise HttpError(503, "overloaded", "too many requests are being worked on") from None
        except BaseException:
            self._take_back(size, given)
            raise

    def _take_back(self, size: int, given: asyncio.Future[None]) -> None:
        """Room that was given in the very moment in which its request gave up."""
        if given.done() and not given.cancelled():
            self.give_back(size)
        else:
            given.cancel()
            self._give()

    def give_back(self, size: int) -> None:
        """A request that had so much is done."""
        self._taken -= size
        self._give()

    def _give(self) -> None:
        while self._waiting:
            size, given = self._waiting[0]
            if not given.done():
                if self._taken and self._taken + size > self._most:
                    return
                self._taken += size
                given.set_result(None)
            self._waiting.popleft()


class _Refusing(asyncio.Protocol):
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


def _decoded(body: bytes, kind: Any) -> Any:
    if kind is bytes:
        return body
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, "invalid_body", f"the body is wrong: {error}") from None


_PROCESS = secrets.token_hex(6)
_NUMBERS = count(1)


def _request_id(request: web.BaseRequest) -> str:
    """The client's own id if it is sane, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return f"{_PROCESS}-{next(_NUMBERS)}"
