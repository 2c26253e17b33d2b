"""`bench serve`: a node over SQLite against embedded use, and against itself without a store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import http_load, ours
from bench.harness import Check, Contestant, Options, Sample, Say, Section, compare, scratch
from bench.workload import PAIRS, PARTITIONS, TOPIC, ends, rounded
from pxrs.codec.batches import encode
from pxrs.types import Header

_BATCH = 100
_RAW = 500
_MESSAGES = f"/v1/topics/{TOPIC}/messages"


@contextmanager
def node(folder: Path, *, store: bool = True) -> Iterator[int]:
    """A node in a process of its own; its port. Without a store it answers as if it had one."""
    command = [sys.executable, "-m", "pxrs_command", "serve", "--listen", "127.0.0.1:0"]
    command += ["--store", ours.url(folder)]
    if not store:
        command = [sys.executable, "-m", "bench.no_store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode().strip()
        try:
            yield int(line.rpartition(":")[2])
        finally:
            process.terminate()


def _json_requests(size: int) -> list[bytes]:
    texts = [(key.decode(), value.decode("latin-1")) for key, value in PAIRS[:10_000]]
    bodies = [
        json.dumps(
            {"messages": [{"key": key, "value": value} for key, value in texts[at : at + size]]}
        ).encode()
        for at in range(0, min(len(texts), 100 * size), size)
    ]
    return [http_load.request("POST", _MESSAGES, body) for body in bodies]


def _raw_requests() -> list[bytes]:
    no_headers: list[Header] = []
    records = [(key, value, no_headers, 1_700_000_000_000) for key, value in PAIRS[:_RAW]]
    body = bytes(encode(records).data)
    paths = [f"/v1/topics/{TOPIC}/partitions/{number}/batches" for number in range(PARTITIONS)]
    return [http_load.request("POST", path, body, "application/vnd.pxrs.batch") for path in paths]


def _made(port: int) -> None:
    body = json.dumps({"name": TOPIC, "partitions": PARTITIONS}).encode()
    http_load.run("127.0.0.1", port, [http_load.request("POST", "/v1/topics", body)], 1, 1)


def _produce(
    folder: Path, requests: list[bytes], each: int, connections: int, total: int, *, store: bool
) -> Sample:
    with node(folder, store=store) as port:
        if store:
            _made(port)
        http_load.run("127.0.0.1", port, requests, connections, 5 * connections)
        load = http_load.run("127.0.0.1", port, requests, connections, total)
        _LATENCIES.setdefault(f"{each} × {connections}", []).append(load.percentile(0.99))
        return Sample(total * each, load.seconds)


_LATENCIES: dict[str, list[float]] = {}


def producing(options: Options, say: Say) -> Section:
    """Messages per second into a node, everything durable when it is answered."""
    messages = rounded(options.messages // 5)
    hundred, raw = _json_requests(_BATCH), _raw_requests()
    contestants = [
        Contestant("embedded send", lambda folder: ours.send(folder, messages)),
        Contestant(
            "JSON × 100, 4 connections",
            lambda folder: _produce(folder, hundred, _BATCH, 4, messages // _BATCH, store=True),
        ),
        Contestant(
            "raw × 500, 4 connections",
            lambda folder: _produce(folder, raw, _RAW, 4, messages // _RAW, store=True),
        ),
    ]
    result = compare("producing", contestants, options.rounds, options, say)
    json_ratio = result.ratio("JSON × 100, 4 connections", "embedded send")
    raw_ratio = result.ratio("raw × 500, 4 connections", "embedded send")
    p99 = max(max(each) for each in _LATENCIES.values()) * 1000
    return Section(
        [result],
        [
            Check("JSON × 100 ÷ embedded", json_ratio, 0.25, "", "at least"),
            Check("raw batches ÷ embedded", raw_ratio, 0.5, "", "at least"),
            Check("p99 of a produce request", p99, 50.0, "ms"),
        ],
    )


def single(options: Options, say: Say) -> Section:
    """Single durable messages from 64 connections, and the same server without a store."""
    requests = _json_requests(1)
    total = 64 * (20 if options.quick else 100)

    def contestant(name: str, store: bool) -> Contestant:
        return Contestant(
            name, lambda folder: _produce(folder, requests, 1, 64, total, store=store)
        )

    contestants = [contestant("durable", True), contestant("without a store", False)]
    result = compare("single, 64 connections", contestants, options.rounds, options, say)
    ratio = result.ratio("durable", "without a store")
    return Section([result], [Check("durable ÷ without a store", ratio, 0.5, "", "at least")])


def consuming(options: Options, say: Say) -> Section:
    """Messages per second out of a node."""
    messages = rounded(options.messages // 5)
    with scratch(options) as name, ours.opened(Path(name)) as px:
        say("consuming: filling the log")
        ours.fill(px, messages)
        with node(Path(name)) as port:
            contestants = [
                Contestant("embedded read", lambda _: ours.read(px, messages)),
                Contestant("JSON × 500", lambda _: _follow(port, messages, "messages", "max=500")),
                Contestant(
                    "raw, 64 KB", lambda _: _follow(port, messages, "batches", "max_bytes=65536")
                ),
            ]
            result = compare("consuming", contestants, options.rounds, options, say)
    as_json = result.ratio("JSON × 500", "embedded read")
    raw = result.ratio("raw, 64 KB", "embedded read")
    return Section(
        [result],
        [
            Check("JSON ÷ embedded", as_json, 0.25, "", "at least"),
            Check("raw ÷ embedded", raw, 0.5, "", "at least"),
        ],
    )


def _follow(port: int, messages: int, what: str, query: str) -> Sample:
    """Four consumers, each following two partitions to their ends."""
    paths = [f"/v1/topics/{TOPIC}/partitions/{number}/{what}" for number in range(PARTITIONS)]
    wanted = ends(messages)
    load = http_load.follow("127.0.0.1", port, list(zip(paths, wanted, strict=True)), query, 4)
    return Sample(messages, load.seconds)


PARTS = {"producing": producing, "single": single, "consuming": consuming}
