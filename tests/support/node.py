"""Nodes of `pxrs serve`, in this process or in one of their own, and a plain HTTP client."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import os
import resource
import signal
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

import uvloop

from pxrs import Pxrs
from pxrs.server.node import Node
from pxrs.server.remote.stores import StoreService
from pxrs.server.rest.guard import Guard
from pxrs.server.rest.http import HttpServer
from pxrs.server.settings import Endpoint, ServeSettings
from support.child import PATIENCE, forker

# How long a client that polls lets the node work before it asks again.
_LOOK = 0.01
# How long it polls: longer than any request of it waits, and than any member may be silent.
_LOOKS = 2 * PATIENCE


def looks(patience: float = _LOOKS) -> Iterator[None]:
    """Polls of a client, with a moment between two: who asks without end works most.

    Fails when that what it polls for has not come within its patience.
    """
    ends = monotonic() + patience
    while monotonic() < ends:
        yield
        threading.Event().wait(_LOOK)
    raise AssertionError(f"what was polled for has not come within {patience:g} s")


def free_port() -> int:
    """A port that nobody listens on now. Another may have it a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Reply(NamedTuple):
    """An answer; `json` is its body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection to a node, with nothing but the standard library."""

    def __init__(
        self, endpoint: Endpoint, timeout: float = PATIENCE, tls: ssl.SSLContext | None = None
    ) -> None:
        self._connection = (
            http.client.HTTPConnection(*endpoint, timeout=timeout)
            if tls is None
            else http.client.HTTPSConnection(*endpoint, timeout=timeout, context=tls)
        )

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        self.send(method, path, body, headers)
        return self.receive()

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        """Sends a request, and does not wait for its answer."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        self._connection.request(method, path, data, headers or {})

    def receive(self) -> Reply:
        """The answer to what was sent."""
        answer = self._connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, found, answer.read())

    def get(self, path: str) -> Reply:
        return self("GET", path)

    def post(self, path: str, body: Any) -> Reply:
        return self("POST", path, body)

    def close(self) -> None:
        self._connection.close()


class LocalNode:
    """A node on an event loop in a thread of this process."""

    def __init__(self, store: str, *, notice: float = 0.05, **settings: Any) -> None:
        self.settings = ServeSettings(store=store, listen="127.0.0.1:0", **settings)
        self._notice = notice
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LocalNode:
        self._thread.start()
        assert self._started.wait(PATIENCE)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.join()

    def stop(self) -> None:
        # A test may have stopped it before: its loop is closed once it has ended.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._node.stop)

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def client(self) -> Client:
        return Client(self.endpoint)

    @property
    def address(self) -> str:
        """Where it serves HTTP, and `pxrs://`."""
        return str(self.endpoint)

    @property
    def rpc(self) -> str:
        """Where it serves gRPC."""
        assert self._node.rpc is not None
        return str(self._node.rpc.endpoint)

    @property
    def px(self) -> Pxrs:
        """The store that the node serves, for embedded members beside the remote ones."""
        return self._node.px

    def wait_for_polls(self, count: int) -> None:
        """Return when so many fetches wait for messages."""
        self.wait_until(lambda: self._node.messages.waiting >= count)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when it holds; it is asked on the node's event loop."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(PATIENCE)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Let the node's event loop do nothing meanwhile."""
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait(PATIENCE)

        self._loop.call_soon_threadsafe(hold)
        assert held.wait(PATIENCE)
        try:
            yield
        finally:
            go_on.set()

    @property
    def server(self) -> HttpServer:
        return self._node.server

    @property
    def remote(self) -> StoreService:
        """What serves `pxrs://` clients."""
        return self._node.remote

    @property
    def guard(self) -> Guard:
        return self._node.guard

    @property
    def polls(self) -> int:
        """How many fetches wait for messages."""
        return self._node.messages.waiting

    @property
    def tasks(self) -> int:
        """How many tasks the node's event loop has."""
        return len(asyncio.all_tasks(self._loop))

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised by who joins
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._node = Node(self.settings, self._notice)

        def started(endpoint: Endpoint) -> None:
            self.endpoint = endpoint
            self._started.set()

        await self._node.serve(started)


# The clock that pxrs reads. Not `time.time`: gRPC's core reads the real one beside it.
_START = """
import time
real = time.time_ns
time.time_ns = lambda: real() + {clock_off}
from pxrs_command import main
main()
"""


class NodeProcess:
    """`pxrs serve` as a real process.

    It is a fork of one that has loaded all that a node needs: to load it takes longer than most
    tests. `clock_off`: how many seconds its wall clock is ahead; such a one is started anew, as the
    clock has to be wrong before anything is loaded. `open_files`: how many it may have. `broken`: a
    function of a test module that breaks it before it starts. `settings` are those that have no
    flag.
    """

    def __init__(
        self,
        store: str,
        *arguments: str,
        listen: str = "127.0.0.1:0",
        clock_off: float = 0.0,
        open_files: int | None = None,
        broken: Callable[[], None] | None = None,
        **settings: object,
    ) -> None:
        words = ["serve", "--store", store, "--listen", listen, *arguments]
        environment = {f"PXRS_SERVE_{name.upper()}": str(each) for name, each in settings.items()}
        # Not a pipe: nobody reads it while the node runs, and a full one would stop it.
        self._logged = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when it has ended
        its_end, end = os.pipe()
        try:
            if clock_off:
                assert broken is None
                assert open_files is None
                target: tuple[Callable[..., None], Any] = run_with_clock, (words, clock_off)
            else:
                name = "" if broken is None else f"{broken.__module__}:{broken.__name__}"
                target = run_node, (words, open_files, name)
            with open(os.devnull) as nothing:
                fds = [nothing.fileno(), end, self._logged.fileno(), end]
                loads = () if clock_off else _LOADED
                self.process = forker().fork(*target, fds, environment, loads)
        finally:
            os.close(end)
        self._printed = open(its_end)  # noqa: SIM115 - closed when it has ended
        line = self._printed.readline().strip()
        if not line:
            raise AssertionError(f"it did not start: {self._ended()}")
        host, _, port = line.removeprefix("http://").rpartition(":")
        self.endpoint = Endpoint(host, int(port))

    def client(self) -> Client:
        return Client(self.endpoint)

    def terminate(self) -> str:
        """SIGTERM, and what it has logged when it has ended."""
        self.process.signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> str:
        """SIGKILL, and what it had logged."""
        self.process.signal(signal.SIGKILL)
        return self._ended()

    def freeze(self) -> None:
        """SIGSTOP, until it stands still: it keeps its connections and does nothing."""
        self.process.freeze()

    def wake(self) -> None:
        self.process.signal(signal.SIGCONT)

    def _ended(self) -> str:
        self.process.wait()
        self._printed.close()
        if self._logged.closed:
            return ""
        self._logged.seek(0)
        with self._logged:
            return self._logged.read()


# What a node needs: the command line, the node, and all that those load when they start.
_LOADED = ("pxrs.cli.main", "pxrs.cli.serve", "pxrs.server.node", "grpc.aio", "uvloop")


def run_node(words: list[str], open_files: int | None, broken: str) -> None:
    """Be a node, in a fork."""
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    if broken:
        module, name = broken.split(":")
        getattr(importlib.import_module(module), name)()
    from pxrs_command import main

    # What these were made for was another file: one that can seek, it may be.
    sys.stdout, sys.stderr = (
        open(fd, "w", buffering=1, closefd=False)  # noqa: SIM115 - open to the end
        for fd in (1, 2)
    )
    sys.argv = ["pxrs", *words]
    main()


def run_with_clock(words: list[str], clock_off: float) -> None:
    """Be a node that is started anew."""
    start = _START.format(clock_off=int(clock_off * 10**9))
    os.execv(sys.executable, [sys.executable, "-c", start, *words])


def wait_for_slots(
    client: Client,
    names: set[str],
    headers: dict[str, str] | None = None,
    patience: float = _LOOKS,
) -> dict[str, object]:
    """The cluster view once exactly these nodes share all slots."""
    for _ in looks(patience):
        view: dict[str, object] = client("GET", "/v1/cluster", None, headers).json
        if set(view["slots"]) == names:  # type: ignore[call-overload]
            break
    return view
