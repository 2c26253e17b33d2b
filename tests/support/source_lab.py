"""Labs of sources: the real thing, programs that write to it, and handles that read it."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql

from pxrs.sources import JsonLines, KafkaTopic, RedisStream, Row, Source, Subscription, Table
from pxrs.testing.conformance import NewRow, SourceWriter

EVENTS = Table("events", key="account", value="payload", timestamp="created_ms")


class OpensAndCloses:
    """A `SourceLab` made of two functions; all that they open is closed in reverse order."""

    patience = 20.0

    def __init__(self, open_source: Callable[[], Source], writer: Callable[[], Any]) -> None:
        self._open = open_source
        self._writer = writer
        self.at_end = ExitStack()

    def open(self) -> Source:
        source = self._open()
        self.at_end.callback(source.close)
        return source

    def writer(self) -> SourceWriter:
        writer: Any = self._writer()
        self.at_end.callback(writer.close)
        found: SourceWriter = writer
        return found

    def close(self) -> None:
        self.at_end.close()


def sqlite_lab() -> OpensAndCloses:
    """A table in a SQLite file."""
    folder = Path(tempfile.mkdtemp(prefix="pxrs-source-"))
    path = folder / "app.db"
    db = sqlite3.connect(path)
    db.execute(
        "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT, payload TEXT, "
        "created_ms INTEGER)"
    )
    db.execute("PRAGMA journal_mode = WAL")
    db.close()
    lab = OpensAndCloses(lambda: EVENTS.open(f"sqlite:///{path}"), lambda: SqliteWriter(path))
    lab.at_end.callback(shutil.rmtree, folder)
    return lab


class SqliteWriter:
    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=30, check_same_thread=False)

    def append(self, rows: Sequence[NewRow], stream: int = 0) -> None:
        with self._db:
            self._db.executemany(
                "INSERT INTO events (account, payload, created_ms) VALUES (?, ?, ?)", rows
            )

    def close(self) -> None:
        self._db.close()


def postgres_lab(url: str) -> OpensAndCloses:
    """A table in this database, made anew."""
    with psycopg.connect(url) as db:
        db.execute("DROP TABLE IF EXISTS events")
        db.execute(
            "CREATE TABLE events (id bigserial PRIMARY KEY, account text, payload text, "
            "created_ms bigint)"
        )
    return OpensAndCloses(lambda: EVENTS.open(url), lambda: PostgresWriter(url))


class PostgresWriter:
    """Also `HoldsRows`: a transaction has its ids before it is committed."""

    def __init__(self, url: str) -> None:
        self._db = psycopg.connect(url)

    def append(self, rows: Sequence[NewRow], stream: int = 0) -> None:
        self.hold(rows)
        self._db.commit()

    def hold(self, rows: Sequence[NewRow]) -> PostgresWriter:
        with self._db.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO events (account, payload, created_ms) VALUES (%s, %s, %s)", rows
            )
        return self

    def commit(self) -> None:
        self._db.commit()

    def abandon(self) -> None:
        self._db.rollback()

    def close(self) -> None:
        self._db.close()


def mariadb_lab(url: str) -> OpensAndCloses:
    """A table in this database, made anew."""
    url = f"{url}?ssl_disabled=true"
    writer = MariadbWriter(url)
    writer.run("DROP TABLE IF EXISTS events")
    writer.run(
        "CREATE TABLE events (id bigint AUTO_INCREMENT PRIMARY KEY, account varchar(100), "
        "payload mediumtext, created_ms bigint) CHARACTER SET utf8mb4"
    )
    writer.close()
    return OpensAndCloses(lambda: EVENTS.open(url), lambda: MariadbWriter(url))


class MariadbWriter:
    """Also `HoldsRows`: a transaction has its ids before it is committed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._db = pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=parts.username,
            database=parts.path[1:],
            ssl_disabled=True,
        )

    def run(self, statement: str) -> None:
        with self._db.cursor() as cursor:
            cursor.execute(statement)

    def append(self, rows: Sequence[NewRow], stream: int = 0) -> None:
        self.hold(rows)
        self._db.commit()

    def hold(self, rows: Sequence[NewRow]) -> MariadbWriter:
        with self._db.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO events (account, payload, created_ms) VALUES (%s, %s, %s)", rows
            )
        return self

    def commit(self) -> None:
        self._db.commit()

    def abandon(self) -> None:
        self._db.rollback()

    def close(self) -> None:
        self._db.close()


class Feed:
    """A queue as that of the proposal: it offers `subscribe(checkpoint)` and nothing else."""

    def __init__(self, *, blocks: bool) -> None:
        self._blocks = blocks
        self._changed = threading.Condition()
        self._rows: list[Row] = []
        self._next = 0
        self.subscriptions = 0

    def append(self, rows: Sequence[NewRow], stream: int = 0) -> None:
        with self._changed:
            for row in rows:
                # Offsets have gaps.
                self._next += 3
                found = Row(self._next, row.timestamp or 0, row.key.encode(), row.value.encode())
                self._rows.append(found)
            self._changed.notify_all()

    def end(self) -> int:
        with self._changed:
            return self._rows[-1].offset + 1 if self._rows else 0

    def subscribe(self, checkpoint: int) -> Iterator[Row | None]:
        self.subscriptions += 1
        place = 0
        while True:
            with self._changed:
                if place == len(self._rows):
                    if not self._blocks:
                        return
                    self._changed.wait(0.02)
                    more = self._rows[place:]
                else:
                    more = self._rows[place : place + 50]
                place += len(more)
            yield from (row for row in more if row.offset >= checkpoint)
            if not more:
                yield None

    def close(self) -> None:
        pass


def subscription_lab(*, blocks: bool, tells_its_end: bool) -> OpensAndCloses:
    """A queue in this process, subscribed to."""
    feed = Feed(blocks=blocks)
    description = Subscription(feed.subscribe, feed.end if tells_its_end else None)
    return OpensAndCloses(lambda: description.open(""), lambda: feed)


class RotatingWriter:
    """Appends lines, and renames the file once it has some. Also `TrimsRows`."""

    def __init__(self, path: Path, lock: threading.Lock, lines_per_file: int = 4) -> None:
        self._path = path
        self._lock = lock
        self._most = lines_per_file

    def append(self, rows: Sequence[NewRow], stream: int = 0) -> None:
        for first in range(0, len(rows), 3):
            lines = [
                json.dumps({"at": row.timestamp, "account": row.key, "payload": row.value})
                for row in rows[first : first + 3]
            ]
            # Not under the lock: another may rename the file while it is open here.
            with self._path.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))
            with self._lock:
                if self._path.exists() and self._path.read_bytes().count(b"\n") >= self._most:
                    self.rotate()

    def rotate(self) -> None:
        for old in sorted(self.rotated(), reverse=True):
            self._path.with_name(f"{self._path.name}.{old}").rename(
                self._path.with_name(f"{self._path.name}.{old + 1}")
            )
        self._path.rename(self._path.with_name(f"{self._path.name}.1"))

    def rotated(self) -> list[int]:
        names = [each.name for each in self._path.parent.iterdir()]
        ends = [name.removeprefix(f"{self._path.name}.") for name in names]
        return [int(end) for end in ends if end.isdigit()]

    def trim(self) -> None:
        self._path.with_name(f"{self._path.name}.{max(self.rotated())}").unlink()

    def close(self) -> None:
        pass


def json_lines_lab() -> OpensAndCloses:
    """A file that is renamed all the time."""
    folder = Path(tempfile.mkdtemp(prefix="pxrs-source-"))
    path, lock = folder / "app.log", threading.Lock()
    path.touch()
    lines = JsonLines(str(path), key="account", value="payload", timestamp="at")
    lab = OpensAndCloses(lambda: lines.open(""), lambda: RotatingWriter(path, lock))
    lab.at_end.callback(shutil.rmtree, folder)
    return lab


class RedisWriter:
    """Adds entries to a stream. Also `TrimsRows`."""

    def __init__(self, url: str, stream: str) -> None:
        import redis

        self._client = redis.Redis.from_url(url)
        self._stream = stream

    def append(self, rows: Sequence[NewRow], stream: int = 0) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for row in rows:
            entry = "*" if row.timestamp is None else f"{row.timestamp}-*"
            pipeline.xadd(self._stream, {"account": row.key, "payload": row.value}, id=entry)
        pipeline.execute()

    def trim(self) -> None:
        length = int(self._client.xlen(self._stream))
        self._client.xtrim(self._stream, maxlen=length - 3, approximate=False)

    def close(self) -> None:
        self._client.close()


def redis_lab(url: str) -> OpensAndCloses:
    """A stream of its own."""
    stream = f"s-{secrets.token_hex(6)}"
    entries = RedisStream(url, stream, key="account", value="payload")
    return OpensAndCloses(lambda: entries.open(""), lambda: RedisWriter(url, stream))


class MockKafka:
    """The mock cluster of librdkafka: a protocol mock, not Kafka. Its topics have 4 partitions."""

    def __init__(self) -> None:
        from confluent_kafka import Producer

        # It lives in a client, and other clients find it at its address.
        self._host = Producer({"test.mock.num.brokers": 1}, logger=_SILENT)
        brokers = self._host.list_topics(timeout=10).brokers.values()
        self.bootstrap = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)

    def writer(self, topic: str) -> KafkaWriter:
        return KafkaWriter(self.bootstrap, topic)

    def close(self) -> None:
        self._host.flush(10)


_SILENT = logging.getLogger("kafka.tests")


class KafkaWriter:
    def __init__(self, bootstrap: str, topic: str, **settings: object) -> None:
        from confluent_kafka import Producer

        settings = {"bootstrap.servers": bootstrap, "linger.ms": 0, **settings}
        self.client = Producer(settings, logger=_SILENT)
        self._topic = topic

    def append(self, rows: Sequence[NewRow], stream: int = 0) -> None:
        for row in rows:
            self.client.produce(
                self._topic,
                value=row.value,
                key=row.key,
                partition=stream,
                timestamp=row.timestamp or 0,
            )
        assert self.client.flush(20) == 0

    def close(self) -> None:
        self.client.flush(10)


def kafka_lab(kafka: MockKafka) -> OpensAndCloses:
    """A topic of its own in a protocol mock."""
    topic = f"t-{secrets.token_hex(6)}"
    make_topic(kafka, topic)
    description = KafkaTopic(kafka.bootstrap, topic)
    return OpensAndCloses(lambda: description.open(""), lambda: kafka.writer(topic))


def make_topic(kafka: MockKafka, topic: str) -> None:
    from confluent_kafka.admin import AdminClient

    # Whoever asks for a topic makes it.
    AdminClient({"bootstrap.servers": kafka.bootstrap}, logger=_SILENT).list_topics(topic, 10)
