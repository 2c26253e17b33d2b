"""HTTP on aiohttp: connections, limits, bodies, problems, and a stop that lets requests finish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import msgspec
from aiohttp import web

from pxrs import metrics as names
from pxrs.errors import NotLeader, PxrsError, StoreError
from pxrs.server.groups.service import HeldElsewhere
from pxrs.server.metrics import Metrics
from pxrs.server.node_auth import digest
from pxrs.server.rest.connections import (
    MOST_HEADER_BYTES,
    Connections,
    Refusing,
    id_of,
    unless_lost,
)
from pxrs.server.rest.forwarding import FOLLOWS, LEADER, MAYBE_DONE, Forwarding
from pxrs.server.rest.guard import Guard, check
from pxrs.server.rest.problems import PROBLEM, HttpError, problem_of
from pxrs.server.rest.room import Room
from pxrs.server.rest.routes import Answer, Call, Match, Route, Router, Talk
from pxrs.server.rest.websockets import converse
from pxrs.server.settings import Endpoint, ServeSettings
from pxrs.server.tokens import Identity

_LOG = logging.getLogger("pxrs.serve")
# How long an idle connection is kept, and so how long a client may take to send its headers.
_KEEP_ALIVE = 75.0
# How long a client may take to agree on TLS; it counts as no connection before.
_HANDSHAKE = 10.0
# How long the rest of a body that was refused is read and thrown away.
_LINGER = 10.0
# The largest body of a request that needs no token, or whose route takes no body.
_SMALL_BODY = 64 * 2**10
# An answer of at least this size takes room while it is sent.
_LARGE_ANSWER = 2**18
_RETRY_AFTER = {"Retry-After": "1"}


class HttpServer:
    """Serves routes on one address. Used by one event loop."""

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self._router = Router(())
        self._talks: Mapping[str, Talk] = {}
        self._metrics = metrics
        self._settings = settings
        self._guard: Guard | None = None
        self.room = Room(settings.max_inflight)
        self._busy = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._stopping = False
        self._server = Connections(
            self._handle,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE,
            max_line_size=MOST_HEADER_BYTES,
            max_field_size=MOST_HEADER_BYTES,
            auto_decompress=False,
            lingering_time=_LINGER,
        )
        self._listening: asyncio.Server | None = None

    def route(
        self,
        routes: Iterable[Route],
        forwarding: Forwarding,
        guard: Guard | None,
        talks: Mapping[str, Talk] | None = None,
    ) -> None:
        """Serve these routes; until then, every request is answered 503 `starting`.

        `talks`: what serves a WebSocket, by its path.
        """
        self._router = Router(routes)
        self._talks = talks or {}
        self._forwarding = forwarding
        self._guard = guard

    @property
    def busy(self) -> int:
        """How many requests are under way."""
        return self._busy

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._server)

    @property
    def held(self) -> int:
        """How many bytes the node holds for clients."""
        return self.room.taken

    async def start(self) -> Endpoint:
        """Listen; returns where. Raises `OSError` if the port is taken."""
        endpoint = self._settings.endpoint
        loop = asyncio.get_running_loop()
        tls = self._settings.server_tls()
        self._listening = await loop.create_server(
            self._connect, endpoint.host, endpoint.port, ssl=tls, reuse_port=False, backlog=1024,
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE,
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
        if len(self._server) >= self._settings.max_connections:
            return Refusing()
        return self._server()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        request_id = id_of(request)
        began = perf_counter()
        # A slash that is part of a name stays encoded: it must not lead to another route.
        match = self._router.find(request.rel_url.path_safe)
        if (talk := self._talks.get(request.path)) is not None:
            try:
                return await self._talk(request, talk)
            except Exception as error:  # noqa: BLE001 - the client gets an answer to any failure
                return _response(self._refusal(error, request_id), request_id)
        self._busy += 1
        self._quiet.clear()
        try:
            answer = await self._answer(request, match)
        except Exception as error:  # noqa: BLE001 - the client gets an answer to any failure
            answer = self._refusal(error, request_id)
        finally:
            self._busy -= 1
            if not self._busy:
                self._quiet.set()
        # Not the path as it was sent: strangers could make up as many labels as they like.
        path = next(iter(match.methods.values())).path if match is not None else "none"
        method = request.method if match is not None and request.method in match.methods else ""
        self._metrics.count(names.REQUESTS, method, path, str(answer.status))
        self._metrics.observe(names.REQUEST_SECONDS, perf_counter() - began, path)
        response = _response(answer, request_id)
        if self._stopping:
            response.force_close()
        if len(answer.body) >= _LARGE_ANSWER:
            await self._send(request, response, len(answer.body))
        return response

    async def _talk(self, request: web.BaseRequest, talk: Talk) -> web.StreamResponse:
        """Serves a WebSocket until one side ends it; a node that stops does not wait for it."""
        if self._stopping:
            raise HttpError(503, "stopping", "this node is stopping; try another one", _RETRY_AFTER)
        assert self._guard is not None
        identify = partial(self._guard.identify, request.headers, None)
        await identify()
        if request.method != "GET":
            raise _not_allowed(request, ["GET"])
        self._metrics.count(names.REQUESTS, "GET", request.path, "101")
        return await converse(request, talk, identify, self.room, self._settings.request_timeout)

    async def _send(self, request: web.BaseRequest, response: web.Response, size: int) -> None:
        """Send a large answer; a client that does not take it in time is disconnected."""
        self.room.add(size)
        try:
            async with self.room.moving(size, self._settings.request_timeout):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.room.give_back(size)

    async def _answer(self, request: web.BaseRequest, match: Match | None) -> Answer:
        if self._stopping:
            raise HttpError(503, "stopping", "this node is stopping; try another one", _RETRY_AFTER)
        route = match.methods.get(request.method) if match is not None else None
        if not self._router.routes:
            raise HttpError(503, "starting", "this node is starting; try again", _RETRY_AFTER)
        # Before any other answer: a client without a token must learn nothing.
        passed_on = self._forwarding.received(request.method, request.path_qs, request.headers)
        identity = None
        if self._guard is not None:
            identity = await self._guard.identify(request.headers, route, passed_on)
        if match is None:
            raise HttpError(404, "no_such_path", f"there is nothing at {_shown(request)}")
        if route is None:
            raise _not_allowed(request, match.methods)
        query = route.parse_query(dict(request.query) if request.query_string else {})
        most = self._settings.max_body
        if route.open or route.body is None:
            most = min(most, _SMALL_BODY)
        length = _check_length(request, most)
        if not self.room.take(length):
            await self.room.wait_for(length, self._settings.request_timeout)
        try:
            data = await self._read_body(request, length, most)
            if passed_on is not None and digest(data) != passed_on.body:
                raise HttpError(401, "bad_signature", "no node of this store has sent this body")
            body = _decoded(data, route) if route.body is not None else None
            call = Call(match.parameters, query, body, request.headers, identity)
            check(route, call)
            try:
                answer = await (
                    unless_lost(request, route.handler(call))
                    if route.waits
                    else route.handler(call)
                )
            except (HeldElsewhere, NotLeader) as elsewhere:
                if passed_on is not None:
                    raise HttpError(
                        503, "leader_moving", "the nodes do not agree yet who leads; try again"
                    ) from None
                try:
                    answer = await self._pass_on(elsewhere.address, request, data, identity)
                except HttpError as lost:
                    if not route.once or lost.code not in MAYBE_DONE:
                        raise
                    raise HttpError(
                        504, "outcome_unknown", f"{lost}; whether this was done is not known"
                    ) from None
        finally:
            self.room.give_back(length)
        if not isinstance(answer, Answer):
            answer = Answer(answer, route.status)
        if isinstance(answer.body, bytes | bytearray):
            return answer
        if answer.body is None:
            return answer._replace(body=b"")
        return answer._replace(body=msgspec.json.encode(answer.body))

    async def _pass_on(
        self, address: str, request: web.BaseRequest, body: bytes, identity: Identity | None
    ) -> Answer:
        """Let another node answer, unless the client goes there itself."""
        if not self._forwarding.knows(address):
            # Only to addresses that nodes have published: a request and its token go nowhere else.
            raise HttpError(503, "leader_moving", "the node that answers this is not there (yet)")
        if FOLLOWS in request.headers:
            raise HttpError(
                421, "not_leader", f"the node at {address} answers this", {LEADER: address}
            )
        token = "" if identity is None else identity.name
        return await self._forwarding.send(
            address, request.method, request.path_qs, request.headers, body, token
        )

    async def _read_body(self, request: web.BaseRequest, length: int, most: int) -> bytes:
        if request.content.is_eof():
            # All of it came with the headers, as most bodies do: there is nothing to wait for.
            data = request.content.read_nowait()
            if len(data) > most:
                raise _too_large(most)
            return data
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        try:
            async with self.room.moving(length, self._settings.request_timeout):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > most:
                        raise _too_large(most)
        except TimeoutError:
            raise HttpError(408, "request_timeout", "the body took too long to arrive") from None
        except (ConnectionError, web.RequestPayloadError):
            raise HttpError(400, "broken_body", "the body ended before it was whole") from None
        return bytes(body)

    def _refusal(self, error: Exception, request_id: str) -> Answer:
        problem = problem_of(error, request_id)
        headers = dict(error.headers) if isinstance(error, HttpError) else {}
        if problem.status == 503:
            headers |= _RETRY_AFTER
        if not isinstance(error, PxrsError | HttpError):
            _LOG.error("request %s failed", request_id, exc_info=error)
        elif isinstance(error, StoreError) and not error.retryable:
            _LOG.warning("request %s failed: %s", request_id, error)
        return Answer(msgspec.json.encode(problem), problem.status, PROBLEM, headers)


def _decoded(body: bytes, route: Route) -> Any:
    if route.body is bytes:
        return body
    if route.usual is not None:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(body, type=route.usual)
    try:
        return msgspec.json.decode(body, type=route.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, "invalid_body", f"the body is wrong: {error}") from None
    except RecursionError:
        raise HttpError(400, "invalid_body", "the body is nested too deeply") from None


def _check_length(request: web.BaseRequest, most: int) -> int:
    """How long the body may be; refuses one that is too long or compressed."""
    length = request.content_length
    if length is not None and length > most:
        raise _too_large(most)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise HttpError(415, "content_encoding", "bodies must not be compressed")
    if length is None:
        # A body of unknown length is counted with the most that it may have.
        return most if request.body_exists else 0
    return length


def _not_allowed(request: web.BaseRequest, methods: Iterable[str]) -> HttpError:
    allowed = ", ".join(sorted(methods))
    return HttpError(
        405, "method_not_allowed", f"{_shown(request)} takes {allowed}", {"Allow": allowed}
    )


def _response(answer: Answer, request_id: str) -> web.Response:
    return web.Response(
        body=answer.body,
        status=answer.status,
        headers={**answer.headers, "X-Request-Id": request_id, "Server": "pxrs"},
        content_type=answer.content_type,
    )


def _too_large(most: int) -> HttpError:
    return HttpError(413, "body_too_large", f"the body must be at most {most} bytes")


def _shown(request: web.BaseRequest) -> str:
    """The path as it was sent: decoded, it may hold what JSON can't."""
    return request.rel_url.raw_path[:200]
