"""Load on an HTTP server: prepared requests on keep-alive connections, and nothing that costs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import uvloop

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Load:
    """What came of a run."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def request(method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
    """A request as it goes over the wire."""
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: {kind}\r\n\r\n".encode() + body


def run(host: str, port: int, requests: Sequence[bytes], connections: int, total: int) -> Load:
    """Send `total` requests, one at a time on each connection; all have to succeed."""
    share = total // connections
    numbers = iter([range(first, total, connections)[:share] for first in range(connections)])
    return _timed(
        host,
        port,
        connections,
        lambda load, streams: _ask(load, *streams, requests, next(numbers)),
    )


@contextmanager
def in_background(
    host: str, port: int, requests: Sequence[bytes], connections: int, every: float
) -> Iterator[None]:
    """Send all requests once every so many seconds, spread out, until the block ends.

    At most `connections` at a time; all have to succeed. The first round is over when the block
    begins.
    """
    stop, warm = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def send(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mine: Sequence[bytes]
    ) -> None:
        load = Load()
        pause = every / max(1, len(mine))
        due = perf_counter()
        while not stop.is_set():
            for asked in mine:
                await _answer(load, reader, writer, asked)
                due += pause
                await asyncio.sleep(max(0.0, due - perf_counter()) if warm.is_set() else 0)
                if stop.is_set():
                    return
            warm.set()

    async def main() -> None:
        ready = [await _connect(host, port) for _ in range(connections)]
        shares = [requests[at::connections] for at in range(connections)]
        await asyncio.gather(
            *(send(*streams, mine) for streams, mine in zip(ready, shares, strict=True))
        )
        for _, writer in ready:
            writer.close()

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as error:
            failed.append(error)
            warm.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        warm.wait()
        yield
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


@contextmanager
def unanswered(host: str, port: int, requests: Sequence[bytes]) -> Iterator[None]:
    """Requests that wait for an answer while the block runs, each on a connection of its own."""
    with ExitStack() as open_sockets:
        for asked in requests:
            connection = open_sockets.enter_context(socket.create_connection((host, port)))
            connection.sendall(asked)
        yield


def follow(
    host: str, port: int, logs: Sequence[tuple[str, int]], query: str, connections: int
) -> Load:
    """Fetch logs from 0 to their ends, each where the answer before says to go on."""
    left = list(logs)
    return _timed(
        host, port, connections, lambda load, streams: _follow(load, *streams, left, query)
    )


def _timed(
    host: str,
    port: int,
    connections: int,
    work: Callable[[Load, Streams], Coroutine[Any, Any, None]],
) -> Load:
    """Do the work of every connection at once; connecting does not count."""

    async def main() -> Load:
        load = Load()
        ready = [await _connect(host, port) for _ in range(connections)]
        started = perf_counter()
        await asyncio.gather(*(work(load, streams) for streams in ready))
        load.seconds = perf_counter() - started
        for _, writer in ready:
            writer.close()
        return load

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def _connect(host: str, port: int) -> Streams:
    return await asyncio.open_connection(host, port, limit=2**24)


async def _follow(
    load: Load,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    left: list[tuple[str, int]],
    query: str,
) -> None:
    while left:
        path, end = left.pop()
        offset = 0
        while offset < end:
            asked = request("GET", f"{path}?offset={offset}&{query}")
            head, body = await _answer(load, reader, writer, asked)
            offset = _number(head, b"x-pxrs-next:") or _number(body, b'"next":')


def _number(data: bytes, name: bytes) -> int:
    """The number behind the last `name`; 0 if it is not there."""
    at = data.rfind(name)
    digits = data[at + len(name) : at + len(name) + 20].strip() if at >= 0 else b"0"
    return int(digits.split(b",")[0].split(b"\r")[0].strip())


async def _ask(
    load: Load,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    requests: Sequence[bytes],
    numbers: range,
) -> None:
    for number in numbers:
        await _answer(load, reader, writer, requests[number % len(requests)])


async def _answer(
    load: Load, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytes
) -> tuple[bytes, bytes]:
    began = perf_counter()
    writer.write(asked)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = head.index(b"content-length:") + 15
    body = await reader.readexactly(int(head[at : head.index(b"\r\n", at)]))
    if not head.startswith(b"http/1.1 20"):
        raise RuntimeError(f"the server answered {head[9:12].decode()} {body[:300]!r}")
    load.latencies.append(perf_counter() - began)
    return head, body
