"""One node of `pxrs serve`: opens the store, listens, and stops on request."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from pxrs import aio
from pxrs import metrics as names
from pxrs._version import __version__
from pxrs.client.frames import PATH as STREAM
from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import ConfigError, MissingExtra, PxrsError
from pxrs.redaction import hidden
from pxrs.server.cluster import Cluster
from pxrs.server.groups.host import Context
from pxrs.server.groups.service import GroupService
from pxrs.server.keys import KeyService
from pxrs.server.leases import Leases
from pxrs.server.limits import fit_open_files
from pxrs.server.messages import Messages
from pxrs.server.metrics import CONTENT_TYPE, Metrics
from pxrs.server.node_auth import shared_secret
from pxrs.server.node_session import NodeSession
from pxrs.server.remote.node_keys import NodeKeys, view_of
from pxrs.server.remote.stores import StoreService
from pxrs.server.rest.dmq import Dmq
from pxrs.server.rest.dmq_wire import NOTICE, DmqWire
from pxrs.server.rest.forwarding import Forwarding
from pxrs.server.rest.guard import Guard
from pxrs.server.rest.openapi import openapi
from pxrs.server.rest.routes import Answer, Call, Need, Route
from pxrs.server.rest.v1 import V1
from pxrs.server.rest.v1_groups import V1Groups
from pxrs.server.rest.v1_keys import V1Keys
from pxrs.server.rest.v1_queues import V1Queues
from pxrs.server.settings import Endpoint, ServeSettings
from pxrs.server.tokens import Tokens
from pxrs.urls import public

if TYPE_CHECKING:
    from pxrs.server.rpc.server import GrpcServer

_LOG = logging.getLogger("pxrs.serve")
# How often the node checks that the store answers, and how long it waits for the answer.
_CHECK_STORE = 5.0
# Likewise while it can't.
_CHECK_SOON = 1.0


class Ready(msgspec.Struct, frozen=True):
    """Whether the node should get requests, and why not."""

    ready: bool
    node_id: str
    reason: str = ""


class Alive(msgspec.Struct, frozen=True):
    """The process answers."""

    alive: bool
    version: str


class Node:
    """A running node. `serve` returns when it has stopped."""

    def __init__(self, settings: ServeSettings, notice: float = NOTICE) -> None:
        self._settings = settings
        self._notice = notice
        self._stop = asyncio.Event()
        self.node_id = ""
        self.routes: tuple[Route, ...] = ()
        self._store_trouble = "the store was not reached yet"

    def stop(self) -> None:
        """Finish the requests under way and end. On the event loop."""
        self._stop.set()

    async def serve(self, started: Callable[[Endpoint], None] | None = None) -> None:
        """Serve until `stop` is called."""
        from pxrs.server.rest.http import HttpServer

        async with aio.connect(self._settings.store_url) as px:
            self.px = px._blocking
            metrics = self._metrics = Metrics(SYSTEM_CLOCK)
            messages = self.messages = Messages(px, self._settings, metrics)
            server = self.server = HttpServer(self._settings, metrics)
            try:
                endpoint = await server.start()
            except OSError as error:
                await messages.close()
                raise ConfigError(
                    f"can't listen on {self._settings.listen}: {error.strerror}; "
                    "choose another --listen"
                ) from None
            try:
                rpc = self.rpc = self._bind_grpc()
            except ConfigError:
                await server.stop()
                await messages.close()
                raise
            self.node_id = self._settings.name(endpoint.port)
            address = str(self._settings.advertised(endpoint.port))
            context = Context(
                self.px.stores.coord, self.px.topics, SYSTEM_CLOCK,
                NodeSession(self.px.stores.coord, self._settings.session_ttl), address,
            )  # fmt: skip
            loop = asyncio.get_running_loop()
            cluster = self.cluster = Cluster(
                context, self.node_id, partial(loop.call_soon_threadsafe, self.stop),
                self._settings.session_ttl,
                "" if rpc is None else str(self._settings.grpc_advertised(rpc.endpoint.port)),
            )  # fmt: skip
            try:
                await px._threads.call(cluster.start)
            except PxrsError:
                await server.stop()
                if rpc is not None:
                    await rpc.stop()
                await messages.close()
                raise
            tokens = Tokens(self.px.stores.coord, SYSTEM_CLOCK)
            guard = self.guard = Guard(
                tokens, SYSTEM_CLOCK, px._threads.call, self._settings.auth == "tokens"
            )
            if self._settings.auth == "auto":
                await guard.ask_if_there_are_tokens()
            groups = GroupService(px, context, cluster, metrics)
            forwarding = Forwarding(
                cluster.here,
                lambda: cluster.view.nodes,
                await px._threads.call(partial(shared_secret, context.coord)),
                self._settings.request_timeout,
                self._settings.node_tls(),
            )
            cluster.on_change(
                lambda view: loop.call_soon_threadsafe(
                    forwarding.give_up_on_others, {node.address for node in view.nodes}
                )
            )
            timeout = self._settings.session_timeout
            v1 = V1(px, messages, cluster, self._settings.max_wait)
            dmq = Dmq(groups, cluster, timeout)
            wire = DmqWire(
                px, messages, groups, SYSTEM_CLOCK, cluster, timeout, self._settings.max_wait,
                self._notice, guard, self._scheme,
            )  # fmt: skip
            leases = Leases(px, cluster, address)
            keys = KeyService(px, cluster)
            parts = (
                v1,
                V1Groups(px, groups, metrics),
                V1Queues(px, leases, self._settings.max_wait),
                V1Keys(keys, cluster),
                dmq,
                wire,
            )
            served = [route for part in parts for route in part.routes()]

            async def show_metrics(call: Call) -> Answer:
                metrics.set(names.WAITING, messages.waiting)
                metrics.set(names.HELD_MEMBERS, groups.held)
                metrics.set(names.LEASES, leases.count)
                metrics.set(names.STORE_UP, 0 if self._store_trouble else 1)
                metrics.set(names.SLOTS_LED, cluster.view.slots.count(self.node_id))
                return Answer(await metrics.text(px), content_type=CONTENT_TYPE)

            served.append(
                Route(
                    method="GET", path="/metrics", handler=show_metrics,
                    needs=lambda _: [Need("cluster", "metrics", "read")],
                    summary="Metrics for Prometheus", answer=bytes, content_type=CONTENT_TYPE,
                )
            )  # fmt: skip
            stores = self.remote = StoreService(
                self.px.stores,
                self.node_id,
                NodeKeys(self.px.kv, cluster),
                partial(view_of, cluster),
                server.room,
                self._settings.request_timeout,
                metrics,
            )
            cluster.on_change(lambda _: loop.call_soon_threadsafe(stores.changed))
            self.routes = tuple(self._routes(served))
            server.route(self.routes, forwarding, guard, {STREAM: stores.talk})
            end_watches: list[Callable[[], None]] = [stores.end_streams]
            if rpc is not None:
                from pxrs.server.rpc.calls import Calls
                from pxrs.server.rpc.health import Health
                from pxrs.server.rpc.norikv import SERVICES, NoriKv
                from pxrs.server.rpc.transfers import Transfers

                transfers = Transfers(server.room, self._settings.request_timeout)
                calls = Calls(guard, metrics, transfers)
                norikv = NoriKv(calls, keys, cluster, forwarding)
                health = Health(calls, lambda: not self._trouble, SERVICES)
                cluster.on_change(lambda view: loop.call_soon_threadsafe(norikv.changed, view))
                norikv.changed(cluster.view)
                await rpc.start([*health.handlers(), *norikv.handlers()])
                end_watches += [norikv.end_watches, health.end_watches]
            watching = asyncio.create_task(self._watch_store(px))
            _LOG.info(
                "node %s serves %s on %s%s%s", self.node_id, public(px.url), self._url(endpoint),
                f", gRPC on {rpc.endpoint}" if rpc is not None else "",
                ", to clients with a token" if guard.asks else "",
                extra={"node": self.node_id, "listen": str(endpoint)},
            )  # fmt: skip
            if started is not None:
                started(endpoint)
            await self._stop.wait()
            _LOG.info("stopping: waiting polls are answered, requests finish")
            watching.cancel()
            messages.end_waits()
            for end in end_watches:
                end()
            await asyncio.gather(server.stop(), *([] if rpc is None else [rpc.stop()]))
            await stores.close()
            await leases.close()
            await groups.close()
            await px._threads.call(keys.close)
            await px._threads.call(cluster.close)
            with suppress(PxrsError):  # it ends by itself
                await px._threads.call(context.session.close)
            await forwarding.close()
            await messages.close()
        if cluster.is_displaced:
            raise ConfigError(
                f"another node took the name {self.node_id!r}, so this one has stopped; "
                "give each node a --node-id of its own"
            )
        _LOG.info("stopped")

    def _bind_grpc(self) -> GrpcServer | None:
        """Take the port of gRPC, if it is to be served."""
        if not self._settings.grpc_listen:
            return None
        try:
            from pxrs.server.rpc.server import GrpcServer
        except ImportError:
            raise MissingExtra("pxrs serve --grpc-listen", "broker") from None
        server = GrpcServer(self._settings)
        server.bind()
        return server

    def _routes(self, served: list[Route]) -> list[Route]:
        routes = [*self._health_routes(), *served]

        @cache
        def document() -> bytes:
            return msgspec.json.encode(openapi(routes))

        async def describe(call: Call) -> Answer:
            # Made when it is first asked for: it takes longer than all else at a node's start.
            return Answer(document())

        about = Route(
            method="GET", path="/openapi.json", handler=describe, open=True,
            summary="This document",
        )  # fmt: skip
        return [*routes, about]

    def _url(self, endpoint: Endpoint) -> str:
        return f"{self._scheme}://{endpoint}"

    @property
    def _scheme(self) -> str:
        return "https" if self._settings.tls_cert else "http"

    # Health

    def _health_routes(self) -> list[Route]:
        return [
            Route(
                method="GET", path="/health/live", handler=self._live, open=True,
                summary="Whether the process answers", answer=Alive,
            ),
            Route(
                method="GET", path="/health/ready", handler=self._ready, open=True,
                summary="Whether the node should get requests", answer=Ready,
            ),
        ]  # fmt: skip

    async def _live(self, call: Call) -> Alive:
        return Alive(True, __version__)

    async def _ready(self, call: Call) -> Answer:
        reason = self._trouble
        return Answer(Ready(not reason, self.node_id, reason), 503 if reason else 200)

    @property
    def _trouble(self) -> str:
        """Why the node should get no requests; empty if it should."""
        return "the node is stopping" if self._stop.is_set() else self._store_trouble

    async def _watch_store(self, px: aio.Pxrs) -> None:
        while True:
            self.messages.replace_broken()
            try:
                async with asyncio.timeout(_CHECK_STORE):
                    await px.topics.list()
                    if self._settings.auth == "auto" and not self.guard.asks:
                        await self.guard.ask_if_there_are_tokens()
                        if self.guard.asks:
                            _LOG.info("the store has tokens now: clients need one from here on")
                self._store_trouble = trouble = ""
            except TimeoutError:
                trouble = f"the store did not answer for {_CHECK_STORE:g} s"
                self._note_outage(trouble, None)
            except PxrsError as error:
                # One error may be over at once; clients leave when it is not.
                trouble = self._store_trouble
                self._note_outage("the store does not answer, or not as it should", error)
            except Exception:  # noqa: BLE001 - logged, and tried again
                # A bug of ours. Without these looks the node would be ready for ever, or never.
                trouble = self._store_trouble
                _LOG.exception("a look at the store failed")
            self.remote.note_store(trouble)
            with suppress(TimeoutError):
                async with asyncio.timeout(
                    _CHECK_STORE if not self._store_trouble else _CHECK_SOON
                ):
                    await self._stop.wait()

    def _note_outage(self, trouble: str, error: PxrsError | None) -> None:
        """Logs the store's error and does not serve it: `/health/ready` needs no token."""
        if not self._store_trouble:
            self._metrics.count(names.STORE_OUTAGES)
            _LOG.warning("%s: %s", trouble, "" if error is None else error)
        self._store_trouble = trouble


def run_node(settings: ServeSettings, started: Callable[[Endpoint], None] | None = None) -> None:
    """Serve in this thread until SIGTERM or SIGINT."""
    try:
        import aiohttp  # noqa: F401
        import uvloop
    except ImportError:
        raise MissingExtra("pxrs serve", "broker") from None

    def ready(endpoint: Endpoint) -> None:
        # Objects that exist now stay for good: a full collection need not walk through them.
        gc.collect()
        gc.freeze()
        if started is not None:
            started(endpoint)

    async def main() -> None:
        node = Node(fit_open_files(settings))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, node.stop)
        await node.serve(ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


class TextLines(logging.Formatter):
    """Text, without secrets: tracebacks quote drivers."""

    def format(self, record: logging.LogRecord) -> str:
        return hidden(super().format(record))


class JsonLines(logging.Formatter):
    """One JSON object per line, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": hidden(record.getMessage()),
        }
        if record.exc_info:
            line["error"] = hidden(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(settings: ServeSettings) -> None:
    """Send the logs of pxrs to stderr, in the format that was asked for."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("pxrs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
