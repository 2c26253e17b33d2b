"""The founding story: a plain table, one to five consumers, of which some crash.

A program writes to `events` in transactions that overlap and roll back. Members come, are killed
and frozen. The ledger has every row once, and those of a key in order.
"""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

import pxrs
from pxrs.sources import Table
from support.child import Child
from support.inside import say

EVENTS = Table("events", offset="id", key="account", value=["payload"])
KEYS = 40
TTL = 1.0


def consume(url: str) -> None:
    """Write every row into the ledger, in the transaction that commits the checkpoint."""
    with (
        pxrs.connect(url) as px,
        px.consumer(
            "events", group="billing", auto_commit=False, session_ttl=TTL, revoke_timeout=5.0
        ) as consumer,
    ):
        say(consumer.member)
        while True:
            # What fails on a busy machine, or is fenced, comes again; the ledger tells.
            with suppress(pxrs.PxrsError):
                if messages := consumer.poll(max_records=50, timeout=0.1):
                    rows = ",".join(f"({m.offset}, '{m.key.decode()}')" for m in messages)
                    with consumer.transaction() as tx:
                        tx.execute(f"INSERT INTO ledger (event, account) VALUES {rows}")


def script(engine: str, url: str) -> None:
    """The old consumer: alone, in order of ids, with one checkpoint beside its ledger."""
    db = opened(engine, url)
    say("begins")
    while True:
        [(last,)] = db.execute("SELECT last FROM progress").fetchall()
        found = db.execute(
            f"SELECT id, account FROM events WHERE id > {last} ORDER BY id LIMIT 20"
        ).fetchall()
        if found:
            rows = ",".join(f"({number}, '{account}')" for number, account in found)
            db.execute(f"INSERT INTO ledger (event, account) VALUES {rows}")
            db.execute(f"UPDATE progress SET last = {found[-1][0]}")
        db.commit()


def opened(engine: str, url: str) -> Any:
    if engine == "sqlite":
        return sqlite3.connect(url.removeprefix("sqlite:///"), timeout=60)
    return psycopg.connect(url)


class Events:
    """The table, those who write to it, and the ledger."""

    def __init__(self, engine: str, url: str) -> None:
        self.url = url
        self.engine = engine
        self._committed: list[int] = []
        # Of rows that were rolled back, too.
        self.given: list[int] = []
        self._stop = threading.Event()
        number = "INTEGER PRIMARY KEY AUTOINCREMENT"
        if engine == "postgres":
            number = "bigserial PRIMARY KEY"
        db = self._connect()
        db.execute(f"CREATE TABLE events (id {number}, account text, payload text)")
        db.execute(f"CREATE TABLE ledger (id {number}, event bigint, account text)")
        db.commit()
        db.close()
        # SQLite has one writer.
        self._writers = [
            threading.Thread(target=self._write, args=[seed])
            for seed in range(1 if engine == "sqlite" else 4)
        ]

    def _connect(self) -> Any:
        return opened(self.engine, self.url)

    def run(self, statement: str) -> list[Any]:
        db = self._connect()
        cursor = db.execute(statement)
        found: list[Any] = cursor.fetchall() if cursor.description else []
        db.commit()
        db.close()
        return found

    def start(self, writers: int | None = None) -> None:
        for writer in self._writers[:writers]:
            writer.start()

    def _write(self, seed: int) -> None:
        random, db = Random(seed), self._connect()
        mark = "?" if self.engine == "sqlite" else "%s"
        insert = f"INSERT INTO events (account, payload) VALUES ({mark}, '') RETURNING id"
        while not self._stop.is_set():
            # Keys of its own: the order of a key's rows is that in which they commit.
            keys = [f"{seed}-{random.randrange(KEYS)}" for _ in range(random.randint(1, 5))]
            ids = [db.execute(insert, (key,)).fetchall()[0][0] for key in keys]
            self.given.extend(ids)
            if random.random() < 0.2:
                db.rollback()
            else:
                self._stop.wait(random.choice((0, 0, 0.02)))
                db.commit()
                self._committed.extend(ids)
            # It does not queue up for the writer as pxrs does: without air nobody else gets it.
            self._stop.wait(0.05 if self.engine == "sqlite" else 0.02)
        db.close()

    def stop(self) -> list[int]:
        """The ids of all rows that were written."""
        self._stop.set()
        for writer in self._writers:
            if writer.ident is not None:
                writer.join()
        return self._committed

    def ledger(self) -> list[tuple[int, str]]:
        db = self._connect()
        rows = db.execute("SELECT event, account FROM ledger ORDER BY id").fetchall()
        db.close()
        return [(int(event), account) for event, account in rows]

    def _entered(self) -> int:
        db = self._connect()
        [(count,)] = db.execute("SELECT count(*) FROM ledger").fetchall()
        db.close()
        return int(count)

    def wait_for(self, count: int) -> None:
        """Until so many rows are in the ledger."""
        with pxrs.connect(self.url) as px:
            watch = px.stores.coord.watch("groups/")
            for _ in range(600):
                if self._entered() >= count:
                    break
                watch.wait(0.1)
            else:
                pytest.fail(f"{self._entered()} of {count} rows after a minute")
            watch.close()


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.engine(name)) for name in ("sqlite", "postgres")]
)
def events(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Events]:
    url = f"sqlite:///{tmp_path}/app.db"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
    events = Events(request.param, url)
    yield events
    events.stop()


def until(px: pxrs.Pxrs, is_so: Callable[[list[int]], bool]) -> None:
    """Until the members have such shares of the partitions, all of which are given out."""
    watch = px.stores.coord.watch("groups/billing")
    for _ in range(600):
        info = px.groups.describe("billing", lag_seconds=False)
        shares = sorted((len(member.owned) for member in info.members), reverse=True)
        if info.state == "STABLE" and is_so(shares):
            break
        watch.wait(0.1)
    else:
        pytest.fail(f"the group is {info.state}, with shares of {shares}")
    watch.close()


def has_all_once_and_in_order(ledger: list[tuple[int, str]], committed: list[int]) -> None:
    assert sorted(event for event, _ in ledger) == sorted(committed)
    by_key = defaultdict(list)
    for event, account in ledger:
        by_key[account].append(event)
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


@pytest.mark.long
def test_one_to_five_consumers_and_a_crash(events: Events) -> None:
    with pxrs.connect(events.url) as px, ExitStack() as processes:
        px.attach("events", EVENTS, partitions=8)
        events.start()
        members: list[Child] = []
        for wanted in ([8], [4, 4], [3, 3, 2], [2, 2, 2, 2], [2, 2, 2, 1, 1]):
            members.append(processes.enter_context(Child(consume, events.url)))
            members[-1].read()
            until(px, wanted.__eq__)
        killed, frozen, *rest = members
        killed.kill()
        frozen.freeze_between_writes(px.stores)
        until(px, [3, 3, 2].__eq__)
        events.wait_for(len(events.ledger()) + 50)
        frozen.signal(signal.SIGCONT)
        until(px, lambda shares: len(shares) == 4)
        committed = events.stop()
        events.wait_for(len(committed))
        for member in [frozen, *rest]:
            member.kill()
        checkpoints = px.groups.describe("billing", lag_seconds=False).partitions
    has_all_once_and_in_order(events.ledger(), committed)
    assert max(part.checkpoint or 0 for part in checkpoints) <= max(events.given) + 1


@pytest.mark.long
def test_from_one_script_to_two_members_and_back_under_load(events: Events) -> None:
    """The runbook of docs/sources.md, while the program that writes goes on."""
    events.run("CREATE TABLE progress (last bigint)")
    events.run("INSERT INTO progress VALUES (0)")
    with pxrs.connect(events.url) as px, ExitStack() as processes:
        # One: the script would skip rows that commit below its checkpoint, as it always has.
        events.start(writers=1)
        old = processes.enter_context(Child(script, events.engine, events.url))
        old.read()
        events.wait_for(50)
        px.attach("events", EVENTS, partitions=8)
        old.kill()
        [(last,)] = events.run("SELECT last FROM progress")
        px.groups.import_checkpoint("billing", "events", int(last))
        members = [processes.enter_context(Child(consume, events.url)) for _ in range(2)]
        for member in members:
            member.read()
        until(px, [4, 4].__eq__)
        events.wait_for(len(events.ledger()) + 100)
        # One falls behind, and the other dies before it can take over: their checkpoints differ.
        members[1].freeze_between_writes(px.stores)
        events.wait_for(len(events.ledger()) + 20)
        for member in members:
            member.kill()
        until_empty(px)
        level(px.url, events)
        entered = len(events.ledger())
        new = processes.enter_context(Child(script, events.engine, events.url))
        new.read()
        events.wait_for(entered + 50)
        committed = events.stop()
        events.wait_for(len(committed))
        new.kill()
    has_all_once_and_in_order(events.ledger(), committed)


def until_empty(px: pxrs.Pxrs) -> None:
    """Until the sessions of members that were killed are over."""
    watch = px.stores.coord.watch("groups/billing")
    for _ in range(600):
        if px.groups.describe("billing", lag_seconds=False).state == "EMPTY":
            break
        watch.wait(0.1)
    else:
        pytest.fail("the group still has members")
    watch.close()


def level(url: str, events: Events) -> None:
    """Handle what lies between the checkpoints, and give the script the highest of them.

    In a process that has read nothing so far, while a transaction has an id and does not end.
    """
    with pxrs.connect(url) as px:
        slow = opened(events.engine, events.url)
        if events.engine == "postgres":
            slow.execute("INSERT INTO events (account, payload) VALUES ('slow', '')")
        parts = px.groups.describe("billing").partitions
        last = max(part.checkpoint or 0 for part in parts) - 1
        db = opened(events.engine, events.url)
        while (px.sources.describe("events").final or 0) <= last:
            slow.rollback()
        slow.close()
        reader = px.reader("events")
        for part in parts:
            offset = part.checkpoint or 0
            while offset <= last and (rows := reader.read(part.partition, offset)):
                for row in rows:
                    if row.offset <= last:
                        db.execute(
                            "INSERT INTO ledger (event, account) "
                            f"VALUES ({row.offset}, '{row.key.decode()}')"
                        )
                offset = rows[-1].offset + 1
        db.execute(f"UPDATE progress SET last = {last}")
        db.commit()
        db.close()
