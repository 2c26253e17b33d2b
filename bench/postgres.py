"""PostgreSQL in `bench engines`: against a bare psycopg loop, and beside an old transaction."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count, islice
from statistics import median
from time import perf_counter
from typing import Any

import psycopg
from xxhash import xxh64_intdigest

import engines
import pxrs
from bench import ours
from bench.bare import BATCH_BYTES, GROUP_BYTES
from bench.harness import Check, Contestant, Options, Sample, Say, Section, compare
from bench.members import await_share
from bench.ours import Px
from bench.workload import PAIRS, PARTITIONS, TOPIC, ends, passes, rounded
from pxrs.codec.batches import _load, new_builder, set_base_offset

BARE = "bare codec + psycopg"
FETCH_BYTES = 4 * 2**20

# Stored as pxrs stores it, so that both write the same pages.
_SCHEMA = """
CREATE TABLE bare (
    part int8 NOT NULL, base int8 NOT NULL, next int8 NOT NULL,
    max_ts int8 NOT NULL, size int4 NOT NULL, data bytea NOT NULL, PRIMARY KEY (part, base));
ALTER TABLE bare ALTER COLUMN data SET STORAGE EXTERNAL"""
_INSERT = "INSERT INTO bare VALUES (%b, %b, %b, %b, %b, %b)"
_SELECT = """SELECT data FROM bare WHERE part = %b AND base >= %b AND base < (
    SELECT coalesce(max(base) + 1, 0) FROM (SELECT base, sum(size) OVER (ORDER BY base) AS total
        FROM bare WHERE part = %b AND base >= %b LIMIT 64) q WHERE total <= %b)
    ORDER BY base"""

_numbers = count(1)


@contextmanager
def server() -> Iterator[str]:
    """A PostgreSQL of its own, with fsync."""
    with engines.start("postgres", durable=True, settings={"max_wal_size": "4GB"}) as engine:
        yield engine.url


@contextmanager
def database(url: str) -> Iterator[str]:
    """A new database, gone with the block."""
    name = f"bench_{secrets.token_hex(4)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield f"{url.rpartition('/')[0]}/{name}"
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
            connection.execute("CHECKPOINT")


@contextmanager
def opened(url: str) -> Iterator[Px]:
    """The topic in a store."""
    with pxrs.connect(url) as px:
        px.topics.create(TOPIC, partitions=PARTITIONS)
        yield px


def producing(options: Options, say: Say) -> Section:
    """Messages per second into the log, everything durable at the end."""
    messages = rounded(options.messages)
    with server() as url:
        contestants = [
            Contestant(BARE, lambda _: _bare_append(url, messages), "the limit"),
            Contestant("pxrs send", lambda _: _send(url, messages)),
            Contestant("pxrs send_many", lambda _: _send_many(url, messages)),
        ]
        result = compare("PostgreSQL: producing", contestants, options.rounds, options, say)
    return Section(
        [result],
        [
            Check(f"{each.name} ÷ bare", result.ratio(each.name, BARE), 0.4, "", "at least")
            for each in contestants[1:]
        ],
    )


def consuming(options: Options, say: Say) -> Section:
    """Messages per second through a group, against a loop that selects and decodes."""
    messages = rounded(options.messages)
    with server() as url, database(url) as place, opened(place) as px:
        say("PostgreSQL: filling the logs")
        ours.fill(px, messages)
        with closing(_connect(place)) as bare:
            _bare_fill(bare, messages)
            contestants = [
                Contestant(BARE, lambda _: _bare_read(bare, messages), "the limit"),
                Contestant("for message in consumer", lambda _: _loop(px, messages)),
                Contestant("consumer.poll()", lambda _: _poll(px, messages), "500 each"),
            ]
            result = compare("PostgreSQL: consuming", contestants, options.rounds, options, say)
    return Section(
        [result],
        [
            Check(f"{each.name} ÷ bare", result.ratio(each.name, BARE), 0.5, "", "at least")
            for each in contestants[1:]
        ],
    )


def committing(options: Options, say: Say) -> Section:
    """Checkpoint commits while another session holds a transaction open that saw the beginning.

    It keeps every dead row version from being removed.
    """
    commits = 2_000 if options.quick else 40_000
    with server() as url, database(url) as place, opened(place) as px:
        ours.fill(px, len(PAIRS) * (1 + 8 * commits // len(PAIRS)))
        with _joined(px) as consumer:
            say("PostgreSQL: committing with nobody else there")
            alone = _commit_latency(consumer, 1_000)
            with psycopg.connect(place) as other:
                other.execute("CREATE TABLE held ()")
                other.execute("SELECT count(*) FROM pxrs.pxrs_coord")
                say(f"PostgreSQL: {commits:,} commits beside an open transaction")
                started = perf_counter()
                _commit_latency(consumer, commits - 1_000)
                beside = _commit_latency(consumer, 1_000)
                held = perf_counter() - started
                other.rollback()
    note = (
        f"a commit takes {1e3 * alone:.2f} ms; after {commits:,} commits in {held:.0f} s "
        f"beside an open transaction {1e3 * beside:.2f} ms"
    )
    return Section(
        checks=[Check("commit beside an open transaction ÷ alone", beside / alone, 2.0, "")],
        notes=[note],
        figures={"alone_ms": 1e3 * alone, "beside_ms": 1e3 * beside, "held_s": held},
    )


def _bare_append(url: str, messages: int) -> Sample:
    with database(url) as place, closing(_connect(place)) as db:
        started = perf_counter()
        _bare_fill(db, messages)
        seconds = perf_counter() - started
        stored = dict(db.execute("SELECT part, max(next) FROM bare GROUP BY part").fetchall())
        if [stored[partition] for partition in range(PARTITIONS)] != ends(messages):
            raise RuntimeError("the bare loop did not store what it was given")
    return Sample(messages, seconds)


def _connect(place: str) -> psycopg.Connection[Any]:
    db = psycopg.connect(place, autocommit=True)
    db.execute(_SCHEMA)
    return db


def _bare_fill(db: psycopg.Connection[Any], messages: int) -> None:
    """Encode all messages and insert their batches, one transaction per group."""
    now = time.time_ns() // 1_000_000
    builders = [new_builder(BATCH_BYTES) for _ in range(PARTITIONS)]
    counts, bases = [0] * PARTITIONS, [0] * PARTITIONS
    rows: list[tuple[int, int, int, int, int, bytearray]] = []

    def finish(part: int) -> None:
        data = builders[part].build()
        set_base_offset(data, bases[part])
        end = bases[part] + counts[part]
        rows.append((part, bases[part], end, now, len(data), data))
        bases[part], counts[part] = end, 0
        builders[part] = new_builder(BATCH_BYTES)

    def store() -> None:
        with db.transaction(), db.cursor() as cursor:
            cursor.executemany(_INSERT, rows)
        rows.clear()

    digest = xxh64_intdigest
    for _ in range(passes(messages)):
        for key, value in PAIRS:
            part = digest(key) % PARTITIONS
            if builders[part].append(counts[part], now, key, value, []) is None:
                finish(part)
                builders[part].append(0, now, key, value, [])
                if sum(row[4] for row in rows) >= GROUP_BYTES:
                    store()
            counts[part] += 1
    for part in range(PARTITIONS):
        finish(part)
    store()


def _bare_read(db: psycopg.Connection[Any], messages: int) -> Sample:
    """Read every partition, checksums checked, and touch each key, value and offset."""
    open_batch = _load().reader
    seen = []
    started = perf_counter()
    with db.cursor(binary=True) as cursor:
        for part, end in enumerate(ends(messages)):
            offset = -1
            while offset + 1 < end:
                following = offset + 1
                cursor.execute(_SELECT, (part, following, part, following, FETCH_BYTES))
                for (data,) in cursor.fetchall():
                    batch = open_batch(data)
                    if not batch.validate_crc():
                        raise RuntimeError("the checksum is wrong")
                    for record in batch:
                        _key, _value, offset = record.key, record.value, record.offset
            seen.append(offset + 1)
    seconds = perf_counter() - started
    if seen != ends(messages):
        raise RuntimeError("the bare loop did not read what was stored")
    return Sample(messages, seconds)


def _send(url: str, messages: int) -> Sample:
    with database(url) as place, opened(place) as px:
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
    with database(url) as place, opened(place) as px:
        seconds = ours.fill(px, messages)
        ours.verify(px, messages)
    return Sample(messages, seconds)


def _joined(px: Px) -> pxrs.Consumer:
    consumer: pxrs.Consumer = px.consumer(TOPIC, group=f"g{next(_numbers)}")
    await_share(consumer, PARTITIONS)
    return consumer


def _loop(px: Px, messages: int) -> Sample:
    with _joined(px) as consumer:
        started = perf_counter()
        for message in islice(consumer, messages):
            _key, _value, _offset = message.key, message.value, message.offset
        consumer.commit()
        return Sample(messages, perf_counter() - started)


def _poll(px: Px, messages: int) -> Sample:
    left = messages
    with _joined(px) as consumer:
        started = perf_counter()
        while left > 0:
            for message in consumer.poll(500, timeout=10.0):
                _key, _value, _offset = message.key, message.value, message.offset
                left -= 1
        consumer.commit()
        return Sample(messages, perf_counter() - started)


def _commit_latency(consumer: pxrs.Consumer, commits: int) -> float:
    """Median seconds that a commit of one partition's checkpoint takes."""
    took = []
    for _ in range(commits):
        consumer.poll(1, timeout=10.0)
        started = perf_counter()
        consumer.commit()
        took.append(perf_counter() - started)
    return median(took)


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    "postgres-producing": producing,
    "postgres-consuming": consuming,
    "postgres-committing": committing,
}
