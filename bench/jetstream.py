"""JetStream: pxrs against nats-py, on one server started for it, at the same durability.

Both acknowledge what the server has taken into memory and written, not synced: its default.
`PARTS` are called from `bench engines`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

import engines
import nats
import pxrs
from bench import ours
from bench.harness import Check, Contestant, Options, Sample, Say, Section, compare
from bench.workload import PAIRS, PARTITIONS, TOPIC, passes, rounded
from pxrs.codec.batches import encode
from pxrs.config import nats_settings, parse_url
from pxrs.stores.api import LogStore
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.types import Append, LogPartition

PEER = "nats-py"
GROUP = "bench"
_PUBLISH = f"{PEER} publish_async"
SINGLE = 500
ROUND_TRIPS = 300
_PATIENCE = 30.0
_FETCH = 500
_POLL = 5_000
APPENDERS = 16


def producing(options: Options, say: Say) -> Section:
    """Messages per second, all acknowledged at the end."""
    messages, few = rounded(options.messages), _few(options)
    with engines.build("nats") as engine:
        engine.start()
        contestants = [
            publishing(engine.url, few),
            Contestant("pxrs send", lambda _: _send(engine.url, messages)),
            Contestant("pxrs send_many", lambda _: _send_many(engine.url, messages)),
        ]
        result = compare("JetStream producing", contestants, options.rounds, options, say)
    ratio = result.ratio("pxrs send", _PUBLISH)
    return Section(
        [result], [Check("JetStream: send ÷ nats-py publish", ratio, 10, "", "at least")]
    )


def publishing(url: str, messages: int) -> Contestant:
    """The peer's own client, as fast as it goes."""
    return Contestant(_PUBLISH, lambda _: asyncio.run(_publish(url, messages)))


def single(options: Options, say: Say) -> Section:
    """One message at a time, each acknowledged before the next."""
    with engines.build("nats") as engine:
        engine.start()
        publish = f"{PEER} publish, awaited"
        contestants = [
            Contestant(publish, lambda _: asyncio.run(_publish_singly(engine.url))),
            Contestant("pxrs send().result()", lambda _: _send_singly(engine.url)),
        ]
        result = compare("JetStream single", contestants, options.rounds, options, say)
    return Section([result])


def consuming(options: Options, say: Say) -> Section:
    """Messages per second out of a stream, acknowledged or committed."""
    messages, few = rounded(options.messages), _few(options)
    with engines.build("nats") as engine:
        engine.start()
        with _opened(engine.url) as px:
            say("JetStream consuming: filling the streams")
            ours.fill(px, messages)
            asyncio.run(_publish(engine.url, few, keep=True))
            pull = f"{PEER} pull and ack"
            contestants = [
                Contestant(pull, lambda _: asyncio.run(_pull(engine.url, few))),
                Contestant("pxrs reader.read", lambda _: ours.read(px, messages)),
                Contestant("pxrs consumer.poll, commit", lambda _: _consume(px, messages)),
            ]
            result = compare("JetStream consuming", contestants, options.rounds, options, say)
    ratio = result.ratio("pxrs consumer.poll, commit", pull)
    return Section(
        [result], [Check("JetStream: group consume ÷ nats-py pull", ratio, 10, "", "at least")]
    )


def round_trips(options: Options, say: Say) -> Section:
    """Small batches to one partition and to eight in one append: they travel side by side."""
    with engines.build("nats") as engine:
        engine.start()
        with _opened(engine.url) as px:
            topic_id = px.topics.create(TOPIC, partitions=PARTITIONS).id
            log = px.stores.log
            contestants = [
                Contestant(f"append to {count}", partial(_append, log, topic_id, count))
                for count in (1, PARTITIONS)
            ]
            result = compare("JetStream appends", contestants, options.rounds, options, say)
    cost = result.cost(contestants[1].name, contestants[0].name)
    return Section([result], [Check("JetStream: append to 8 partitions ÷ to 1, cost", cost, 4, "")])


def sharing(options: Options, say: Say) -> Section:
    """Appends to one partition by one handle, and by sixteen without a pause: they take turns."""
    seconds = 1.0 if options.quick else 5.0
    with engines.build("nats") as engine:
        engine.start()
        say("JetStream: one handle appends")
        ((alone, _),) = _append_together(engine.url, 1, seconds)
        say(f"JetStream: {APPENDERS} handles append")
        results = _append_together(engine.url, APPENDERS, seconds)
    counts = [count for count, _ in results]
    longest = 1000 * max(wait for _, wait in results)
    name = f"JetStream: {APPENDERS} handles, one partition"
    return Section(
        checks=[
            Check(f"{name}: appends ÷ those of one", sum(counts) / alone, 0.5, "", "at least"),
            Check(f"{name}: largest share ÷ smallest", max(counts) / max(1, min(counts)), 3, ""),
            Check(f"{name}: longest wait", longest, 2000, "ms"),
        ],
        notes=[f"one: {alone:,} appends in {seconds:g} s; {APPENDERS}: {sum(counts):,}"],
    )


def _append_together(url: str, count: int, seconds: float) -> list[tuple[int, float]]:
    """For each handle, how often it has appended, and the longest that an append took."""
    settings = nats_settings(parse_url(f"{url}/b-{secrets.token_hex(4)}"))
    where = LogPartition(TOPIC, 0)
    logs = [JetStreamLog(settings) for _ in range(count)]
    logs[0].create(TOPIC, 1)

    def keep_appending(log: LogStore) -> tuple[int, float]:
        waits: list[float] = []
        began = perf_counter()
        while (now := perf_counter()) < began + seconds:
            (outcome,) = log.append([Append(where, encode([(b"key", b"value", [], 1_000)]))])
            if isinstance(outcome, Exception):
                raise outcome
            waits.append(perf_counter() - now)
        return len(waits), max(waits)

    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(keep_appending, logs))
    finally:
        logs[0].drop(TOPIC)
        for log in logs:
            log.close()


# pxrs


@contextmanager
def _opened(url: str) -> Iterator[ours.Px]:
    """A new topic under a prefix of its own; gone with the block."""
    with pxrs.connect("memory://", log=f"{url}/b-{secrets.token_hex(4)}") as px:
        px.topics.create(TOPIC, partitions=PARTITIONS)
        yield px
        px.topics.delete(TOPIC)


def _send(url: str, messages: int) -> Sample:
    with _opened(url) as px:
        with px.producer() as producer:
            started = perf_counter()
            for _ in range(passes(messages)):
                for key, value in PAIRS:
                    producer.send(TOPIC, value, key=key)
            producer.flush()
            seconds = perf_counter() - started
        ours.verify(px, messages)
    return Sample(messages, seconds)


def _send_many(url: str, messages: int) -> Sample:
    with _opened(url) as px:
        seconds = ours.fill(px, messages)
        ours.verify(px, messages)
    return Sample(messages, seconds)


def _send_singly(url: str) -> Sample:
    with _opened(url) as px, px.producer() as producer:
        producer.send(TOPIC, PAIRS[0][1]).result()
        started = perf_counter()
        for key, value in PAIRS[:SINGLE]:
            producer.send(TOPIC, value, key=key).result()
        return Sample(SINGLE, perf_counter() - started)


def _consume(px: ours.Px, messages: int) -> Sample:
    with px.consumer(TOPIC, f"{GROUP}-{secrets.token_hex(4)}", auto_commit=False) as consumer:
        handled = len(consumer.poll(max_records=1, timeout=_PATIENCE))
        started = perf_counter()
        while handled < messages:
            found = consumer.poll(max_records=_POLL, timeout=_PATIENCE)
            if not found:
                raise RuntimeError(f"{handled} of {messages} messages came")
            for message in found:
                _key, _value, _offset = message.key, message.value, message.offset
            handled += len(found)
            consumer.commit()
        return Sample(messages, perf_counter() - started)


def _append(log: LogStore, topic_id: str, count: int, folder: Path) -> Sample:
    places = [LogPartition(topic_id, number) for number in range(count)]
    started = perf_counter()
    for _ in range(ROUND_TRIPS):
        batch = encode([(b"key", b"value", [], 1_000)])
        log.append([Append(where, batch) for where in places])
    return Sample(ROUND_TRIPS, perf_counter() - started)


# nats-py


def _few(options: Options) -> int:
    """Single messages are some ten times as slow: fewer of them take as long."""
    return 5_000 if options.quick else 30_000


async def _publish(url: str, messages: int, *, keep: bool = False) -> Sample:
    """As its manual has it: publish without waiting, then await what is outstanding."""
    client = await nats.connect(url)
    js = client.jetstream()
    await js.add_stream(name="peer", subjects=["peer.*"])
    started = perf_counter()
    futures = [
        await js.publish_async("peer.0", PAIRS[number % len(PAIRS)][1])
        for number in range(messages)
    ]
    await asyncio.gather(*futures)
    seconds = perf_counter() - started
    if not keep:
        await js.delete_stream("peer")
    await client.close()
    return Sample(messages, seconds)


async def _publish_singly(url: str) -> Sample:
    client = await nats.connect(url)
    js = client.jetstream()
    await js.add_stream(name="peer", subjects=["peer.*"])
    await js.publish("peer.0", PAIRS[0][1])
    started = perf_counter()
    for _, value in PAIRS[:SINGLE]:
        await js.publish("peer.0", value)
    seconds = perf_counter() - started
    await js.delete_stream("peer")
    await client.close()
    return Sample(SINGLE, seconds)


async def _pull(url: str, messages: int) -> Sample:
    client = await nats.connect(url)
    js = client.jetstream()
    durable = f"d-{secrets.token_hex(4)}"
    subscription = await js.pull_subscribe("peer.0", durable)
    handled = 0
    started = perf_counter()
    while handled < messages:
        for message in await subscription.fetch(_FETCH, timeout=_PATIENCE):
            await message.ack()
            handled += 1
    seconds = perf_counter() - started
    await js.delete_consumer("peer", durable)
    await client.close()
    return Sample(messages, seconds)


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    "jetstream producing": producing,
    "jetstream single": single,
    "jetstream consuming": consuming,
    "jetstream appends": round_trips,
    "jetstream sharing": sharing,
}
