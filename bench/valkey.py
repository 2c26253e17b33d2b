"""Valkey streams through redis-py, as a peer: what a team without a log would use.

Pipelines of 100, the default of `appendonly` with a sync every second: less durable than any store
of pxrs' that is beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import engines
from bench.harness import Contestant, Options, Sample, Say, Section, compare
from bench.workload import PAIRS, passes, rounded

STREAM, GROUP, MEMBER = "orders", "bench", "one"
PIPELINE = 100


def streams(options: Options, say: Say) -> Section:
    """Messages per second into a stream, and out of it by a group, each acknowledged."""
    messages = rounded(20_000 if options.quick else 50_000)
    with engines.build("valkey") as engine:
        engine.start()
        contestants = [
            adding(engine.url, messages),
            Contestant("valkey XREADGROUP, XACK", lambda _: _read(engine.url, messages)),
        ]
        result = compare("Valkey streams", contestants, options.rounds, options, say)
    return Section([result])


def adding(url: str, messages: int) -> Contestant:
    """The peer's own client with pipelines."""
    return Contestant("valkey XADD", lambda _: _add(url, messages), "pipelines of 100")


def _connect(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url)


def _add(url: str, messages: int) -> Sample:
    client = _connect(url)
    client.delete(STREAM)
    started = perf_counter()
    _fill(client, messages)
    seconds = perf_counter() - started
    stored = client.xlen(STREAM)
    client.close()
    if stored != messages:
        raise RuntimeError(f"{stored} of {messages} messages are in the stream")
    return Sample(messages, seconds)


def _fill(client: Any, messages: int) -> None:
    for _ in range(passes(messages)):
        for start in range(0, len(PAIRS), PIPELINE):
            pipeline = client.pipeline(transaction=False)
            for key, value in PAIRS[start : start + PIPELINE]:
                pipeline.xadd(STREAM, {b"key": key, b"value": value})
            pipeline.execute()


def _read(url: str, messages: int) -> Sample:
    client = _connect(url)
    client.delete(STREAM)
    _fill(client, messages)
    client.xgroup_create(STREAM, GROUP, id="0")
    seen = 0
    started = perf_counter()
    while seen < messages:
        ((_, entries),) = client.xreadgroup(GROUP, MEMBER, {STREAM: ">"}, count=PIPELINE)
        client.xack(STREAM, GROUP, *(entry for entry, _ in entries))
        seen += len(entries)
    seconds = perf_counter() - started
    client.close()
    return Sample(messages, seconds)


PARTS: dict[str, Callable[[Options, Say], Section]] = {"streams": streams}
