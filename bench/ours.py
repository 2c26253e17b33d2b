"""pxrs as a user writes it, timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import pxrs
from bench.bare import WARM_UP
from bench.harness import Sample
from bench.workload import PAIRS, PARTITIONS, TOPIC, ends, passes

READ_AT_ONCE = 5_000

Px = Any  # what `pxrs.connect` returns


def url(folder: Path) -> str:
    return f"sqlite:///{(folder / 'app.db').resolve()}"


@contextmanager
def opened(folder: Path) -> Iterator[Px]:
    """A new database with the topic in it."""
    with pxrs.connect(url(folder)) as px:
        px.topics.create(TOPIC, partitions=PARTITIONS)
        yield px


def send(folder: Path, messages: int) -> Sample:
    """`send`, one call per message, until all are durable."""
    with opened(folder) as px:
        with px.producer() as producer:
            started = perf_counter()
            for _ in range(passes(messages)):
                for key, value in PAIRS:
                    producer.send(TOPIC, value, key=key)
            producer.flush()
            seconds = perf_counter() - started
        verify(px, messages)
    return Sample(messages, seconds)


def send_many(folder: Path, messages: int) -> Sample:
    """`send_many`, 10,000 messages per call, until all are durable."""
    with opened(folder) as px:
        seconds = fill(px, messages)
        verify(px, messages)
    return Sample(messages, seconds)


def fill(px: Px, messages: int) -> float:
    """Put all messages into the log; the seconds it took."""
    with px.producer() as producer:
        started = perf_counter()
        for _ in range(passes(messages)):
            producer.send_many(TOPIC, PAIRS)
        producer.flush()
        return perf_counter() - started


def single(folder: Path, count: int) -> Sample:
    """`send().result()`: each message durable before the next one is sent."""
    with opened(folder) as px, px.producer() as producer:
        started = 0.0
        for index in range(-WARM_UP, count):
            if index == 0:
                started = perf_counter()
            key, value = PAIRS[index]
            producer.send(TOPIC, value, key=key).result()
        return Sample(count, perf_counter() - started)


def read(px: Px, messages: int) -> Sample:
    """Read every partition and touch each key, value and offset."""
    wanted = ends(messages)
    started = perf_counter()
    for partition, end in enumerate(wanted):
        read_range(px, partition, 0, end)
    return Sample(messages, perf_counter() - started)


def read_range(px: Px, partition: int, start: int, end: int) -> None:
    """Read the offsets from `start` up to `end` of a partition."""
    reader = px.reader(TOPIC)
    following = start
    while following < end:
        batch = reader.read(partition=partition, offset=following, max_records=READ_AT_ONCE)
        offset = following - 1
        for message in batch:
            _key, _value, offset = message.key, message.value, message.offset
        if offset < following:
            raise RuntimeError(f"partition {partition} ends at {following}, not at {end}")
        following = offset + 1


def verify(px: Px, messages: int) -> None:
    """Every partition ends where it should: nothing is missing, nothing was written twice."""
    reader = px.reader(TOPIC)
    for partition, end in enumerate(ends(messages)):
        last = reader.read(partition=partition, offset=end - 1, max_records=2)
        if [message.offset for message in last] != [end - 1]:
            raise RuntimeError(f"partition {partition} does not end at {end}")
