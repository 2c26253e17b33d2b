"""Nodes of `pxrs serve`, in this process or in one of their own, and a plain HTTP client."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, NamedTuple

import uvloop

from pxrs import Pxrs
from pxrs.server.node import Node
from pxrs.server.settings import Endpoint, ServeSettings
from support.child import PATIENCE


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

    def __init__(self, endpoint: Endpoint) -> None:
        self._connection = http.client.HTTPConnection(*endpoint, timeout=PATIENCE)

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        self._connection.request(method, path, data, headers or {})
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
        self._loop.call_soon_threadsafe(self._node.stop)

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def client(self) -> Client:
        return Client(self.endpoint)

    @property
    def px(self) -> Pxrs:
        """The store that the node serves, for embedded members beside the remote ones."""
        return self._node.px

    def wait_for_polls(self, count: int) -> None:
        """Return when so many fetches wait for messages."""

        async def wait() -> None:
            while self._node.messages.waiting < count:
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(PATIENCE)

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


class NodeProcess:
    """`pxrs serve` as a real process."""

    def __init__(self, store: str, *arguments: str, listen: str = "127.0.0.1:0") -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pxrs_command",
                "serve",
                "--store",
                store,
                "--listen",
                listen,
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise AssertionError(f"it did not start: {self.process.communicate()[1]}")
        host, _, port = line.removeprefix("http://").rpartition(":")
        self.endpoint = Endpoint(host, int(port))

    def client(self) -> Client:
        return Client(self.endpoint)

    def terminate(self) -> str:
        """SIGTERM, and what it has logged when it has ended."""
        self.process.send_signal(signal.SIGTERM)
        _, logged = self.process.communicate(timeout=PATIENCE)
        return logged

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
