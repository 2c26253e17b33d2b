"""`bench serve`: a node over SQLite against embedded use, and against itself without a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple
from urllib.request import urlopen

import engines
from bench import http_load, jetstream, ours, valkey
from bench.harness import Check, Contestant, Options, Sample, Say, Section, compare, scratch
from bench.processes import cpu_share
from bench.workload import PAIRS, PARTITIONS, TOPIC, ends, rounded
from pxrs.codec.batches import encode
from pxrs.metrics import WAITING
from pxrs.types import Header

_BATCH = 100
_RAW = 500
_MESSAGES = f"/v1/topics/{TOPIC}/messages"


class Node(NamedTuple):
    """A node in a process of its own."""

    port: int
    pid: int


@contextmanager
def node(folder: Path, *, store: bool = True, **settings: str) -> Iterator[Node]:
    """A node in a process of its own. Without a store it answers as if it had one."""
    command = [sys.executable, "-m", "pxrs_command", "serve", "--listen", "127.0.0.1:0"]
    command += ["--store", ours.url(folder)]
    if not store:
        command = [sys.executable, "-m", "bench.no_store"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **settings}
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode().strip()
        try:
            yield Node(int(line.rpartition(":")[2]), process.pid)
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
    with node(folder, store=store) as (port, _):
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
        with node(Path(name)) as (port, _):
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


def idle(options: Options, say: Say) -> Section:
    """What 500 fetches that wait for messages cost a node."""
    count, seconds = (100, 2.0) if options.quick else (500, 10.0)
    say(f"{count} idle polls, {seconds:g} s")
    with scratch(options) as name, node(Path(name)) as (port, pid):
        _made(port)
        polls = [
            http_load.request(
                "GET", f"/v1/topics/{TOPIC}/partitions/{number % PARTITIONS}/messages"
                f"?offset=0&wait={2 * seconds:g}",
            )
            for number in range(count)
        ]  # fmt: skip
        with http_load.unanswered("127.0.0.1", port, polls):
            _await_waiting(port, count)
            share = 100 * cpu_share(pid, seconds)
    return Section(checks=[Check(f"{count} idle polls, share of a core", share, 1.0, "%")])


def _await_waiting(port: int, count: int) -> None:
    """Until so many fetches wait."""
    while True:
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        if f"{WAITING.name} {float(count)}" in text:
            return


def heartbeats(options: Options, say: Say) -> Section:
    """What 2,000 members in 200 groups cost a node that hears of each every three seconds."""
    groups, each, seconds = (20, 10, 3.0) if options.quick else (200, 10, 12.0)
    say(f"{groups * each} members join {groups} groups")
    # While others join, nobody beats yet: a session of ten seconds could be over by then.
    with scratch(options) as name, node(Path(name), PXRS_SERVE_SESSION_TIMEOUT="60") as (port, pid):
        _made(port)
        joins, beats, found = [], [], []
        for group in (f"G_{TOPIC}_{number}" for number in range(groups)):
            asked = {"topic": TOPIC, "appId": group.rpartition("_")[2]}
            found.append(_post("/api/v1/metadata/consumer-groups/find-or-create", asked))
            for number in range(each):
                who = f"m{number}"
                joins.append(
                    _post("/api/v1/consumer-group/join", {"groupId": group, "consumerId": who})
                )
                beat = {"groupId": group, "memberId": f"{who}~{group}"}
                beats.append(_post("/api/v1/consumer-group/heartbeat", beat))
        http_load.run("127.0.0.1", port, found, 1, len(found))
        joined = http_load.run("127.0.0.1", port, joins, 50, len(joins))
        with http_load.in_background("127.0.0.1", port, beats, 50, every=3.0):
            _await_calm(pid, say)
            say(f"heartbeats for {seconds:g} s")
            share = 100 * cpu_share(pid, seconds)
    return Section(
        checks=[
            Check(f"heartbeats of {groups * each:,} members, share of a core", share, 25.0, "%")
        ],
        notes=[f"the joins took {joined.seconds:.1f} s, p99 {joined.percentile(0.99):.1f} s"],
    )


def _await_calm(pid: int, say: Say) -> None:
    """Until the rebalances that the joins began are over."""
    before = 100.0
    while (share := 100 * cpu_share(pid, 3.0)) < 0.9 * before:
        say(f"settling: {share:.0f} % of a core")
        before = share


def peers(options: Options, say: Say) -> Section:
    """Messages per second into a node, beside servers of others through their own clients."""
    messages = rounded(options.messages // 5)
    with engines.build("valkey") as valkey_server, engines.build("nats") as nats_server:
        valkey_server.start()
        nats_server.start()
        contestants = [
            Contestant(
                "JSON × 100, 4 connections",
                lambda folder: _produce(
                    folder, _json_requests(_BATCH), _BATCH, 4, messages // _BATCH, store=True
                ),
            ),
            Contestant(
                "raw × 500, 4 connections",
                lambda folder: _produce(
                    folder, _raw_requests(), _RAW, 4, messages // _RAW, store=True
                ),
            ),
            valkey.adding(valkey_server.url, messages),
            jetstream.publishing(nats_server.url, messages),
        ]
        result = compare("producing, beside peers", contestants, options.rounds, options, say)
    return Section([result])


def _post(path: str, body: object) -> bytes:
    return http_load.request("POST", path, json.dumps(body).encode())


def low_load(options: Options, say: Say) -> Section:
    """What a node adds to a durable append when there is nothing else to do."""
    count = 50 if options.quick else 300
    one = _json_requests(1)
    added = []
    with (
        scratch(options) as name,
        ours.opened(Path(name)) as px,
        node(Path(name)) as (port, _),
        px.producer() as producer,
    ):
        for number in range(options.rounds):
            say(f"low load, round {number + 1}")
            times = []
            for key, value in PAIRS[:count]:
                began = perf_counter()
                producer.send(TOPIC, value, key=key).result()
                times.append(perf_counter() - began)
            load = http_load.run("127.0.0.1", port, one, 1, count)
            added.append(1000 * (load.percentile(0.5) - median(times)))
    return Section(
        checks=[Check("added to an append at low load", median(added), 1.0, "ms")],
        figures={"added, ms": added},
    )


PARTS = {
    "producing": producing,
    "single": single,
    "consuming": consuming,
    "idle": idle,
    "heartbeats": heartbeats,
    "low load": low_load,
    "peers": peers,
}
