"""The limit: what the codec and `sqlite3` can do with nothing around them.

These loops know everything beforehand (offsets, partitions, no other writer) and promise
nothing (no acknowledgements, no deduplication, no other process). They are written for speed:
names are local and nothing is called that the bytes on disk don't need.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from time import perf_counter

from xxhash import xxh64_intdigest

from bench.harness import Sample
from bench.workload import PAIRS, PARTITIONS, ends, passes
from pxrs.codec.batches import _load, new_builder, set_base_offset

# What pxrs' producer does by default: a batch per partition, several in one transaction.
BATCH_BYTES = 256 * 1024
GROUP_BYTES = 2 * 1024 * 1024

WARM_UP = 20

_SCHEMA = """
CREATE TABLE batches (
    part INTEGER NOT NULL, base INTEGER NOT NULL, next INTEGER NOT NULL,
    max_ts INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE UNIQUE INDEX batches_by_base ON batches (part, base);
"""
_INSERT = "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)"
_SELECT = "SELECT data FROM batches WHERE part = ? ORDER BY base"


def connect(folder: Path) -> sqlite3.Connection:
    """A database with SQLite's defaults but WAL and `synchronous=FULL`."""
    db = sqlite3.connect(folder / "bare.db", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.executescript(_SCHEMA)
    return db


def append(folder: Path, messages: int) -> Sample:
    """Encode all messages and insert their batches, one transaction per group."""
    db = connect(folder)
    started = perf_counter()
    fill(db, messages)
    seconds = perf_counter() - started
    stored = dict(db.execute("SELECT part, max(next) FROM batches GROUP BY part"))
    db.close()
    if [stored[partition] for partition in range(PARTITIONS)] != ends(messages):
        raise RuntimeError("the bare loop did not store what it was given")
    return Sample(messages, seconds)


def fill(db: sqlite3.Connection, messages: int) -> None:
    digest, partitions = xxh64_intdigest, PARTITIONS
    now = time.time_ns() // 1_000_000
    builders = [new_builder(BATCH_BYTES) for _ in range(PARTITIONS)]
    appends = [builder.append for builder in builders]
    counts = [0] * PARTITIONS
    bases = [0] * PARTITIONS
    rows: list[tuple[int, int, int, int, int, bytearray]] = []
    size = 0
    no_headers: list[tuple[str, bytes | None]] = []
    for _ in range(passes(messages)):
        for key, value in PAIRS:
            part = digest(key) % partitions
            count = counts[part]
            if appends[part](count, now, key, value, no_headers) is not None:
                counts[part] = count + 1
                continue
            base = bases[part]
            bases[part] = end = base + count
            data = builders[part].build()
            set_base_offset(data, base)
            rows.append((part, base, end, now, len(data), data))
            size += len(data)
            builders[part] = builder = new_builder(BATCH_BYTES)
            appends[part] = builder.append
            builder.append(0, now, key, value, no_headers)
            counts[part] = 1
            if size >= GROUP_BYTES:
                db.execute("BEGIN IMMEDIATE")
                db.executemany(_INSERT, rows)
                db.execute("COMMIT")
                rows.clear()
                size = 0
    for part, builder in enumerate(builders):
        base = bases[part]
        data = builder.build()
        set_base_offset(data, base)
        rows.append((part, base, base + counts[part], now, len(data), data))
    db.execute("BEGIN IMMEDIATE")
    db.executemany(_INSERT, rows)
    db.execute("COMMIT")


def single(folder: Path, count: int) -> Sample:
    """Encode one message, insert it and commit; again and again."""
    db = connect(folder)
    started = 0.0
    for index in range(-WARM_UP, count):
        if index == 0:
            started = perf_counter()
        commit_one(db, index + WARM_UP)
    seconds = perf_counter() - started
    db.close()
    return Sample(count, seconds)


def commit_one(db: sqlite3.Connection, base: int) -> None:
    """Encode one message, insert it at an offset nobody has had, and commit."""
    key, value = PAIRS[base]
    now = time.time_ns() // 1_000_000
    builder = new_builder(BATCH_BYTES)
    builder.append(0, now, key, value, [])
    data = builder.build()
    set_base_offset(data, base)
    row = (xxh64_intdigest(key) % PARTITIONS, base, base + 1, now, len(data), data)
    db.execute("BEGIN IMMEDIATE")
    db.execute(_INSERT, row)
    db.execute("COMMIT")


def read(db: sqlite3.Connection, messages: int) -> Sample:
    """Read every partition, checksums checked, and touch each key, value and offset."""
    open_batch = _load().reader
    seen = [0] * PARTITIONS
    started = perf_counter()
    for part in range(PARTITIONS):
        offset = -1
        for (data,) in db.execute(_SELECT, (part,)).fetchall():
            batch = open_batch(data)
            if not batch.validate_crc():
                raise RuntimeError("the checksum is wrong")
            for record in batch:
                _key, _value, offset = record.key, record.value, record.offset
        seen[part] = offset + 1
    seconds = perf_counter() - started
    if seen != ends(messages):
        raise RuntimeError("the bare loop did not read what was stored")
    return Sample(messages, seconds)
