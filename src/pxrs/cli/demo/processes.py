"""The demo's processes: the producer, the consumers and nodes, and `Cast`, which starts them.

They read orders from stdin, one per line, and report in JSON lines on stdout. They end when their
stdin does, and with their parent, so none outlives it, however it died: not even a frozen one.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec

from pxrs.app import connect
from pxrs.cli.demo.judge import KEYS, Entry, open_ledger
from pxrs.config import URL_VARIABLE, default_url
from pxrs.errors import MissingExtra, PxrsError

# Short, so that the demo need not wait long for a frozen consumer.
SESSION_TTL = 2.0
_ROUNDS_PER_SECOND = 50
# The most messages that a consumer commits at once.
_BATCH = 250
_LOOK = 0.05
_PATIENCE = 60.0
_PR_SET_PDEATHSIG = 1

Role = Literal["produce", "consume", "serve"]
# The last report of a process; None when it has ended.
Report = tuple[str, dict[str, Any] | None]


class DemoFailed(PxrsError):  # noqa: N818 - named like the errors it stands among
    """Something that the demo waits for did not happen, or one of its processes died."""


class Cast:
    """Starts processes and reads their reports. Leaving the block ends them all."""

    def __init__(self, url: str, arguments: Mapping[Role, tuple[str, ...]]) -> None:
        # Not an argument: the URL may hold a password, and every user can see arguments.
        self._environment = {**os.environ, URL_VARIABLE: url}
        self._arguments = arguments
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def start(self, who: str, role: Role, *more: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, role, *self._arguments[role], *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the parent; a child ends when its stdin does.
            process_group=0,
            env=self._environment,
        )
        thread = threading.Thread(target=self._hear, args=(who, process), daemon=True)
        self._processes[who] = process
        self._threads.append(thread)
        thread.start()

    def _hear(self, who: str, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            self._reports.put((who, msgspec.json.decode(line)))
        self._reports.put((who, None))

    def reports(self, timeout: float = 0.0) -> list[Report]:
        """The reports since the last call; waits up to `timeout` for the first."""
        found: list[Report] = []
        with suppress(queue.Empty):
            found.append(self._reports.get(timeout > 0, timeout))
            while True:
                found.append(self._reports.get_nowait())
        return found

    def order(self, who: str, order: str) -> None:
        stdin = self._processes[who].stdin
        assert stdin is not None
        with suppress(BrokenPipeError):
            stdin.write(f"{order}\n".encode())
            stdin.flush()

    def send_signal(self, who: str, number: signal.Signals) -> None:
        self._processes[who].send_signal(number)

    def failure(self, who: str) -> DemoFailed:
        """The error for a process that ended by itself, with the last line it printed."""
        process = self._processes[who]
        assert process.stderr is not None
        errors = process.stderr.read().decode(errors="replace").strip().splitlines()
        last = errors[-1] if errors else "it printed nothing"
        return DemoFailed(f"{who} ended with code {process.wait()}: {last}")

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        for thread in self._threads:
            thread.join()
        for process in self._processes.values():
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()


class Nodes:
    """Nodes that serve the store at this URL. Leaving the block ends them."""

    def __init__(self, url: str, count: int) -> None:
        self._cast = Cast(url, {"serve": ()})
        self._ports = {f"node-{number}": _free_port() for number in range(1, count + 1)}

    @property
    def url(self) -> str:
        """The store through these nodes."""
        return "pxrs://" + ",".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def kill_first(self) -> None:
        """Kills the node that all clients use."""
        self._cast.send_signal(next(iter(self._ports)), signal.SIGKILL)

    def __enter__(self) -> Nodes:
        try:
            for name, port in self._ports.items():
                self._cast.start(name, "serve", name, str(port))
            serving: set[str] = set()
            while len(serving) < len(self._ports):
                reports = self._cast.reports(_PATIENCE)
                if not reports:
                    raise DemoFailed(f"no node serves within {_PATIENCE:g} s")
                for name, words in reports:
                    if words is None:
                        raise self._cast.failure(name)
                    serving.add(name)
        except BaseException:
            self._cast.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cast.__exit__()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# What runs in the processes


def _report(**words: Any) -> None:
    # One write per report: a kill can't leave half a line.
    os.write(sys.stdout.fileno(), msgspec.json.encode(words) + b"\n")


class _Orders:
    """The parent's orders, as they come."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="pxrs-demo-parent", daemon=True).start()

    def _listen(self) -> None:
        # Not by `sys.stdin`: a thread that waits in it makes the end of its process a crash.
        left = b""
        while some := os.read(0, 4096):
            *lines, left = (left + some).split(b"\n")
            for line in lines:
                self._orders.put(line.decode().strip())
        os._exit(1)

    def next(self, timeout: float | None) -> str | None:
        """The next order, or None if there is none in time; without a timeout it waits."""
        try:
            return self._orders.get(timeout is None or timeout > 0, timeout)
        except queue.Empty:
            return None


def _produce(topic: str, round_size: str) -> None:
    """Sends at a steady pace; `burst N` sends N messages at once, `stop` ends it."""
    orders = _Orders()
    with connect(default_url()) as px, px.producer() as producer:
        sent = 0
        due = time.monotonic()
        while (order := orders.next(due - time.monotonic())) != "stop":
            due = max(due + 1 / _ROUNDS_PER_SECOND, time.monotonic())
            count = int(order.removeprefix("burst ")) if order else int(round_size)
            pairs = [(b"account-%02d" % (n % KEYS), b"%d" % n) for n in range(sent, sent + count)]
            producer.send_many(topic, pairs).result()
            sent += count
            _report(acked=sent)
    _report(done=True)


def _consume(topic: str, group: str, address: str) -> None:
    """Enters every message into the ledger.

    On `hold` it waits for the next order with a batch in hand; on `leave` it ends.
    """
    orders = _Orders()
    with connect(default_url()) as px:
        ledger = open_ledger(px, address)
        turn = 0
        order: str | None = None
        with px.consumer(topic, group, auto_commit=False, session_ttl=SESSION_TTL) as consumer:
            _report(member=consumer.member)
            while (order := orders.next(0) or order) != "leave":
                messages = consumer.poll(max_records=_BATCH, timeout=_LOOK)
                if not messages:
                    continue
                if order == "hold":
                    # Here, and not inside a transaction: that would stop the whole file.
                    upto = {str(message.partition): message.offset + 1 for message in messages}
                    _report(holding=len(messages), upto=upto)
                    orders.next(None)
                entries = [
                    Entry(m.partition, m.offset, int(m.value), m.fence.epoch, turn + n)
                    for n, m in enumerate(messages)
                ]
                turn += len(entries)
                entered = ledger.enter(consumer, entries)
                if order == "hold":
                    _report(refused=not entered)
                    order = None
            # All processes of a host share one clock: the parent measures from here.
            _report(leaving=time.monotonic())
    _report(done=True)


def _serve(name: str, port: str) -> None:
    """Serves the store to the others, until it is killed."""
    try:
        from pxrs.server.node import run_node
    except ImportError as error:
        raise MissingExtra("pxrs demo --nodes", "broker,remote") from error
    from pxrs.server.settings import load_settings

    _Orders()
    settings = load_settings(
        {
            "store": default_url(),
            "listen": f"127.0.0.1:{port}",
            "node_id": name,
            "auth": "off",
        },
        None,
        {},
    )
    run_node(settings, lambda _: _report(serving=name))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    role, *arguments = sys.argv[1:]
    if role == "produce":
        _produce(*arguments)
    elif role == "consume":
        _consume(*arguments)
    else:
        _serve(*arguments)
