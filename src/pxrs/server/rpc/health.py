"""gRPC's own health service: load balancers and clients ask it without a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress

import grpc

from pxrs.server.rpc.calls import Caller, Calls, Refused
from pxrs.server.rpc.protos import decoded, message_classes

_SERVICE = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
# How often a watch checks whether the node is still well.
_LOOK = 1.0


class Health:
    """Reports whether the node should get calls. `services`: those that it knows by name.

    A node that stops answers every watch a last time, and ends it.
    """

    def __init__(
        self, calls: Calls, is_well: Callable[[], bool], services: Collection[str]
    ) -> None:
        self._calls = calls
        self._is_well = is_well
        self._services = {"", _SERVICE, *services}
        self._ended = asyncio.Event()
        kinds = message_classes("health")
        self._request, self._response = kinds["HealthCheckRequest"], kinds["HealthCheckResponse"]

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        return [
            self._calls.service(
                _SERVICE, {"Check": self.check}, {"Watch": self.watch}, needs_token=False
            )
        ]

    def end_watches(self) -> None:
        """Let every stream end: the node is stopping."""
        self._ended.set()

    async def check(self, request: bytes, caller: Caller) -> bytes:
        status = self._status(request)
        if status == _UNKNOWN:
            raise Refused(grpc.StatusCode.NOT_FOUND, "this node has no such service")
        return self._answer(status)

    async def watch(self, request: bytes, caller: Caller) -> AsyncGenerator[bytes, None]:
        told = 0
        while not self._ended.is_set():
            status = self._status(request)
            if status != told:
                told = status
                yield self._answer(status)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._ended.wait()
        if told == _SERVING:
            yield self._answer(_NOT_SERVING)

    def _status(self, request: bytes) -> int:
        if decoded(self._request, request).service not in self._services:
            return _UNKNOWN
        return _SERVING if self._is_well() else _NOT_SERVING

    def _answer(self, status: int) -> bytes:
        answer: bytes = self._response(status=status).SerializeToString()
        return answer
