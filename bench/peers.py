"""Other ways to put messages somewhere, as their own manuals have it.

The queues on SQLite commit every message by itself and have no way to put several, so they
get fewer messages. All run at `synchronous=FULL`, as pxrs does, whatever their default is.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from bench.harness import Contestant, Sample
from bench.workload import PAIRS, TOPIC, passes

DELIVERY_TIMEOUT = 60.0


def kafka(folder: Path, messages: int) -> Sample:
    """confluent-kafka's `produce` with a delivery callback per message; nothing goes to disk."""
    from confluent_kafka import KafkaError, Message, Producer

    delivered = 0

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        nonlocal delivered
        if error is None:
            delivered += 1

    # The mock is a broker inside librdkafka; it makes topics with four partitions.
    producer = Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "127.0.0.1", "log_level": 0}
    )
    producer.list_topics(TOPIC, timeout=DELIVERY_TIMEOUT)
    produce, poll = producer.produce, producer.poll
    started = perf_counter()
    for _ in range(passes(messages)):
        for index, (key, value) in enumerate(PAIRS):
            try:
                produce(TOPIC, value, key, on_delivery=on_delivery)
            except BufferError:
                poll(DELIVERY_TIMEOUT)
                produce(TOPIC, value, key, on_delivery=on_delivery)
            # Serving callbacks now and then is faster than after every message (600 : 510).
            if index % 256 == 0:
                poll(0)
    producer.flush(DELIVERY_TIMEOUT)
    seconds = perf_counter() - started
    if delivered != messages:
        raise RuntimeError(f"{delivered} of {messages} messages were delivered")
    return Sample(messages, seconds)


def persist_queue(folder: Path, messages: int) -> Sample:
    """persist-queue's `SQLiteQueue`: WAL, and FULL because SQLite's default is."""
    from persistqueue import SQLiteQueue

    queue = SQLiteQueue(str(folder), auto_commit=True)
    require_full(queue._putter)
    put = queue.put
    started = perf_counter()
    for _, value in PAIRS[:messages]:
        put(value)
    seconds = perf_counter() - started
    stored: int = queue.size
    queue.close()
    return _sample(stored, messages, seconds)


def litequeue(folder: Path, messages: int) -> Sample:
    """litequeue's `LiteQueue`: WAL; its own NORMAL is set to FULL. It takes text only."""
    from litequeue import LiteQueue

    queue = LiteQueue(folder / "queue.db")
    queue.conn.execute("PRAGMA synchronous=FULL")
    require_full(queue.conn)
    values = [value.decode() for _, value in PAIRS[:messages]]
    put = queue.put
    started = perf_counter()
    for value in values:
        put(value)
    seconds = perf_counter() - started
    stored: int = queue.qsize()
    queue.close()
    return _sample(stored, messages, seconds)


def huey(folder: Path, messages: int) -> Sample:
    """huey's SQLite storage, `enqueue` only: no task, no pickling. WAL, `fsync=True` is FULL."""
    from huey.storage import SqliteStorage

    storage = SqliteStorage(filename=str(folder / "huey.db"), fsync=True)
    require_full(storage.conn)
    enqueue = storage.enqueue
    started = perf_counter()
    for _, value in PAIRS[:messages]:
        enqueue(value)
    seconds = perf_counter() - started
    stored: int = storage.queue_size()
    storage.close()
    return _sample(stored, messages, seconds)


def contestants(messages: int, few: int) -> list[Contestant]:
    """All peers; the queues put only `few` messages."""
    return [
        Contestant(
            "confluent-kafka produce",
            lambda folder: kafka(folder, messages),
            "librdkafka's mock broker, no disk, delivery callbacks",
        ),
        Contestant(
            "persist-queue put", lambda folder: persist_queue(folder, few), f"FULL, {few:,} puts"
        ),
        Contestant("litequeue put", lambda folder: litequeue(folder, few), f"FULL, {few:,} puts"),
        Contestant("huey enqueue", lambda folder: huey(folder, few), f"FULL, {few:,} puts"),
    ]


def require_full(connection: Any) -> None:
    """Raise unless every commit is synced."""
    (level,) = connection.execute("PRAGMA synchronous").fetchone()
    if level != 2:
        raise RuntimeError(f"synchronous is {level}, not FULL (2)")


def _sample(stored: int, messages: int, seconds: float) -> Sample:
    if stored != messages:
        raise RuntimeError(f"{stored} of {messages} messages are in the queue")
    return Sample(messages, seconds)
