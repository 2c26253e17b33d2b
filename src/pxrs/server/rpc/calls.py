"""The steps of every gRPC call: identify the caller, check its rights, report failures."""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sized,
)
from contextlib import aclosing, asynccontextmanager
from time import perf_counter
from typing import Any, NamedTuple

import grpc
import grpc.aio

from pxrs import metrics as names
from pxrs.client.frames import MOST_FRAME_BYTES
from pxrs.errors import InvalidRequest, PxrsError, StoreError
from pxrs.server.metrics import Metrics
from pxrs.server.rest.guard import Guard, refuse
from pxrs.server.rest.problems import HttpError, Problem, problem_of
from pxrs.server.rest.routes import Need
from pxrs.server.rpc.transfers import Transfers
from pxrs.server.tokens import Identity

# As much as a frame of `pxrs://`: the largest value of a key, with its key and more.
LARGEST_MESSAGE = MOST_FRAME_BYTES
# The room that an answer needs while it is sent, in times its size: gRPC has a copy.
COPIES = 2
# The room for making an answer, in largest messages: as a record, a value and a message.
_LARGE_ANSWER = 3
FOLLOWS = "pxrs-follows"
_LOG = logging.getLogger("pxrs.serve")

_CODES = {
    "version_mismatch": grpc.StatusCode.FAILED_PRECONDITION,
    "already_exists": grpc.StatusCode.ALREADY_EXISTS,
}
_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    503: grpc.StatusCode.UNAVAILABLE,
    # The outcome is unknown. Clients would repeat DEADLINE_EXCEEDED, and write twice.
    504: grpc.StatusCode.UNKNOWN,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """Ends a call with this status."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(details)
        self.code = code
        self.metadata = metadata or {}


class Gone(Exception):  # noqa: N818 - no client is left to answer
    """The client is not there any more."""


class ProblemElsewhere(Exception):  # noqa: N818 - an answer, not a failure
    """The node that leads the key refused the call."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class Caller(NamedTuple):
    """The caller. `follows`: it goes to the leader itself when a refusal names it."""

    identity: Identity | None
    user_agent: str
    follows: bool

    def check(self, need: Need) -> None:
        """Raises `PermissionDenied` unless the caller may do this."""
        refuse(self.identity, [need])


Unary = Callable[[bytes, Caller], Awaitable[bytes]]
Stream = Callable[[bytes, Caller], AsyncGenerator[bytes, None]]


class Calls:
    """Makes handlers of gRPC from functions that take bytes and a caller. Used by one event loop.

    `needs_token`: false for a method that any client may call. All of them are registered as
    streams, which are the same on the wire: else gRPC would read the whole request before it calls
    us, a stranger's, too.
    """

    def __init__(self, guard: Guard, metrics: Metrics, transfers: Transfers) -> None:
        self._guard = guard
        self._metrics = metrics
        self._transfers = transfers

    def service(
        self,
        name: str,
        unary: Mapping[str, Unary],
        streams: Mapping[str, Stream] | None = None,
        *,
        needs_token: bool = True,
        large: str = "",
    ) -> grpc.GenericRpcHandler:
        """The handler of a service with these methods; answers of `large` can be the largest."""
        methods = {
            method: self._unary(f"/{name}/{method}", function, needs_token, method == large)
            for method, function in unary.items()
        } | {
            method: self._stream(f"/{name}/{method}", function, needs_token)
            for method, function in (streams or {}).items()
        }
        return grpc.method_handlers_generic_handler(name, methods)

    async def caller(self, context: Any, *, needs_token: bool = True) -> Caller:
        """The caller of a call; `HttpError` 401 without a token where one is needed."""
        given = _first_of_each(context.invocation_metadata())
        identity = None
        if needs_token:
            headers = {"Authorization": given.get("authorization", "")}
            if "origin" in given:
                headers["Origin"] = given["origin"]
            identity = await self._guard.identify(headers, None)
        return Caller(identity, given.get("user-agent", ""), FOLLOWS in given)

    def _unary(
        self, path: str, function: Unary, needs_token: bool, is_large: bool
    ) -> grpc.RpcMethodHandler:
        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            async with self._told(path, context):
                caller = await self.caller(context, needs_token=needs_token)
                room = self._transfers.room
                async with self._received(requests, context, is_large) as request:
                    answer = await function(request, caller)
                    room.add(size := COPIES * len(answer))
                try:
                    await self._send(context, answer)
                finally:
                    room.give_back(size)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _stream(self, path: str, function: Stream, needs_token: bool) -> grpc.RpcMethodHandler:
        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            async with self._told(path, context):
                caller = await self.caller(context, needs_token=needs_token)
                async with self._received(requests, context) as request:
                    pass
                async with aclosing(function(request, caller)) as answers:
                    async for answer in answers:
                        # The token may have been revoked while there was nothing to send.
                        await self.caller(context, needs_token=needs_token)
                        await self._send(context, answer)

        return grpc.stream_stream_rpc_method_handler(handle)

    @asynccontextmanager
    async def _received(
        self, requests: AsyncIterator[bytes], context: Any, is_large: bool = False
    ) -> AsyncIterator[bytes]:
        """The one request of a call; it has room until the block ends, and so has its answer."""
        room = self._transfers.room
        taken = LARGEST_MESSAGE * (_LARGE_ANSWER if is_large else 1)
        if not room.take(taken):
            await room.wait_for(taken, self._transfers.seconds)
        try:
            with self._transfers.moving(context.peer(), LARGEST_MESSAGE):
                request = await anext(aiter(requests), None)
            if request is None:
                raise InvalidRequest("the call must have a request, got none")
            if not is_large:
                room.give_back(taken - len(request))
                taken = len(request)
            yield request
        finally:
            room.give_back(taken)

    async def _send(self, context: Any, answer: Sized) -> None:
        with self._transfers.moving(context.peer(), len(answer)):
            try:
                await context.write(answer)
            except grpc.aio.InternalError:
                raise Gone from None

    @asynccontextmanager
    async def _told(self, path: str, context: Any) -> AsyncIterator[None]:
        """Ends the call with the status of what the block raises, and counts it."""
        began = perf_counter()
        status = grpc.StatusCode.CANCELLED
        try:
            try:
                yield
                status = grpc.StatusCode.OK
            except Gone:
                pass
            except Exception as error:  # noqa: BLE001 - the client gets an answer to any failure
                refused = _refusal(path, error)
                status = refused.code
                await context.abort(status, str(refused), tuple(refused.metadata.items()))
        finally:
            self._metrics.count(names.REQUESTS, "gRPC", path, status.name)
            self._metrics.observe(names.REQUEST_SECONDS, perf_counter() - began, path)


def _first_of_each(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in metadata or ():
        if isinstance(value, str):
            found.setdefault(name, value)
    return found


def _refusal(path: str, error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, ProblemElsewhere):
        problem = error.problem
    else:
        problem = problem_of(error, "")
        if not isinstance(error, PxrsError | HttpError):
            _LOG.error("a call of %s failed", path, exc_info=error)
        elif isinstance(error, StoreError) and not error.retryable:
            _LOG.warning("a call of %s failed: %s", path, error)
    code = _CODES.get(problem.code) or _STATUSES.get(problem.status, grpc.StatusCode.INTERNAL)
    return Refused(code, problem.detail or problem.title)
