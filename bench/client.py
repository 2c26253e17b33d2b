"""`bench client`: `pxrs://` through one node over SQLite, against the same embedded."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
import grpc.aio

import pxrs
from bench import ours
from bench.harness import Check, Contestant, Options, Sample, Say, Section, compare
from bench.ours import Px
from bench.workload import PAIRS, PARTITIONS, TOPIC, passes, rounded
from pxrs.client.router import Router
from pxrs.client.topology import NodeAddress, NodesView, Topology
from pxrs.clock import SYSTEM_CLOCK
from pxrs.core.kv import shard_of
from pxrs.core.routing import SLOTS

_THREADS = 16
# Of each thread.
_KEYS = 30
_ECHO = "/bench.Echo/Call"


@contextmanager
def remote(folder: Path) -> Iterator[Px]:
    """A client of a node in a process of its own."""
    command = [sys.executable, "-m", "pxrs_command", "serve", "--listen", "127.0.0.1:0"]
    command += ["--store", ours.url(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        where = process.stdout.readline().decode().strip().removeprefix("http://")
        try:
            with pxrs.connect(f"pxrs://{where}") as px:
                yield px
        finally:
            process.terminate()


@contextmanager
def embedded(folder: Path) -> Iterator[Px]:
    with pxrs.connect(ours.url(folder)) as px:
        yield px


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


Place = Callable[[Path], Any]
Work = Callable[[Px], Sample]


def _both(title: str, work: Work, options: Options, say: Say, target: float) -> Section:
    """The same work embedded and through a node."""

    def contestant(name: str, place: Place) -> Contestant:
        def run(folder: Path) -> Sample:
            with place(folder) as px:
                return work(px)

        return Contestant(name, run)

    contestants = [contestant("embedded", embedded), contestant("pxrs://", remote)]
    result = compare(title, contestants, options.rounds, options, say)
    ratio = result.ratio("pxrs://", "embedded")
    return Section([result], [Check(f"{title}: pxrs:// ÷ embedded", ratio, target, "", "at least")])


def sending(options: Options, say: Say) -> Section:
    """`send`, one call per message, until all are durable."""
    messages = rounded(options.messages // 5)

    def send(px: Px) -> Sample:
        px.topics.create(TOPIC, partitions=PARTITIONS)
        with px.producer() as producer:
            began = perf_counter()
            for _ in range(passes(messages)):
                for key, value in PAIRS:
                    producer.send(TOPIC, value, key=key)
            producer.flush()
            return Sample(messages, perf_counter() - began)

    return _both("send", send, options, say, 0.5)


def consuming(options: Options, say: Say) -> Section:
    """One member of a group polls everything."""
    messages = rounded(options.messages // 5)

    def consume(px: Px) -> Sample:
        px.topics.create(TOPIC, partitions=PARTITIONS)
        ours.fill(px, messages)
        with px.consumer(TOPIC, group="bench", start="earliest") as consumer:
            began, seen = perf_counter(), 0
            while seen < messages:
                seen += len(consumer.poll(max_records=5000, timeout=10))
            consumer.commit()
            return Sample(messages, perf_counter() - began)

    return _both("consume in a group", consume, options, say, 0.5)


def _in_threads(work: Callable[[int], None], count: int) -> Sample:
    """Work of 16 threads. One that fails ends the measurement: its calls were not made."""
    with ThreadPoolExecutor(_THREADS) as pool:
        began = perf_counter()
        for each in [pool.submit(work, name) for name in range(_THREADS)]:
            each.result()
        return Sample(count * _THREADS, perf_counter() - began)


def puts(options: Options, say: Say) -> Section:
    """Durable puts of keys from 16 threads."""
    count = 30 if options.quick else 150

    def put(px: Px) -> Sample:
        def work(name: int) -> None:
            for number in range(count):
                px.kv.put(f"{name}-{number}", b"x" * 100)

        return _in_threads(work, count)

    return _both("put of keys, 16 threads", put, options, say, 0.5)


def _unit(px: Px) -> None:
    """A unit of work that takes an item and puts another."""
    with px.transaction() as tx:
        item = tx.take("in", timeout=5)
        tx.put("out", item.value)


def work(options: Options, say: Say) -> Section:
    """Units of work, one after the other: each waits for its own two calls."""
    count = 50 if options.quick else 300

    def do(px: Px) -> Sample:
        px.put_many("in", ["x" * 100] * count)
        began = perf_counter()
        for _ in range(count):
            _unit(px)
        return Sample(count, perf_counter() - began)

    return _both("take and put", do, options, say, 0.5)


def work_together(options: Options, say: Say) -> Section:
    """Units of work of 16 threads."""
    count = 10 if options.quick else 60

    def do(px: Px) -> Sample:
        px.put_many("in", ["x" * 100] * (count * _THREADS))

        def units(_: int) -> None:
            for _number in range(count):
                _unit(px)

        return _in_threads(units, count)

    return _both("take and put, 16 threads", do, options, say, 0.5)


def gets(options: Options, say: Say) -> Section:
    """Gets of different keys from 16 threads, beside a bare gRPC server that does nothing."""
    count = 60 if options.quick else 300

    def get(folder: Path) -> Sample:
        with remote(folder) as px:
            for name in range(_THREADS):
                for number in range(_KEYS):
                    px.kv.put(f"{name}-{number}", b"x" * 100)

            def work(name: int) -> None:
                for number in range(count):
                    if px.kv.get(f"{name}-{number % _KEYS}") is None:
                        raise AssertionError("a key is missing")

            return _in_threads(work, count)

    def echo(_: Path) -> Sample:
        with _echoing() as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(_ECHO)

            def work(_: int) -> None:
                for _number in range(count):
                    call(b"x" * 100)

            return _in_threads(work, count)

    contestants = [Contestant("get over pxrs://", get), Contestant("bare unary echo", echo)]
    result = compare("get, 16 threads", contestants, options.rounds, options, say)
    ratio = result.ratio("get over pxrs://", "bare unary echo")
    return Section([result], [Check("get ÷ bare unary echo", ratio, 2.0, "", "at least")])


@contextmanager
def _echoing() -> Iterator[int]:
    """A gRPC server of asyncio that answers what it gets, in a process of its own."""
    port = _free_port()
    command = [sys.executable, "-m", "bench.client", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield port
        finally:
            process.terminate()


async def _echo(port: int) -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    service = grpc.method_handlers_generic_handler("bench.Echo", {"Call": handler})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.wait_for_termination()


def routing(options: Options, say: Say) -> Section:
    """The node of a key, in a view of three nodes: of keys not asked for before, and again."""
    topology = Topology()
    nodes = tuple(NodeAddress(name, f"{name}:6080") for name in "abc")
    slots = tuple(nodes[slot % len(nodes)].name for slot in range(SLOTS))
    topology.update(NodesView(1, nodes, slots))
    router = Router(topology, SYSTEM_CLOCK)
    keys = [b"route:%d" % number for number in range(5000)]

    def timed(title: str, find: Callable[[bytes], object], most: float) -> Check:
        began = perf_counter()
        for key in keys:
            find(key)
        return Check(title, 1e6 * (perf_counter() - began) / len(keys), most, "µs")

    return Section(
        checks=[
            timed("the node of a new key", router.node_for, 30.0),
            timed("the node of a key asked for before", router.node_for, 10.0),
            timed("the shard of a key asked for before", shard_of, 1.0),
        ]
    )


PARTS = {
    "sending": sending,
    "consuming": consuming,
    "puts": puts,
    "gets": gets,
    "work": work,
    "work together": work_together,
    "routing": routing,
}

if __name__ == "__main__":
    asyncio.run(_echo(int(sys.argv[1])))
