"""A database locked for longer than the members' sessions: nobody expires, nothing moves."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs.core.records import Claim, decode
from support.child import PATIENCE

pytestmark = pytest.mark.engine("sqlite")

# A busy machine keeps a thread from its renewals for a while.
TTL = 1.5


@pytest.fixture
def px(tmp_path: Path) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(f"sqlite:///{tmp_path}/shop.db?busy_timeout=0.05") as px:
        px.topics.create("orders", partitions=2)
        yield px


def claims(px: pxrs.Pxrs) -> list[tuple[str | None, int]]:
    records = px.stores.coord.list("claims/g/")
    return [(claim.owner, claim.epoch) for claim in (decode(each, Claim) for each in records)]


def settled(px: pxrs.Pxrs, consumers: list[pxrs.Consumer]) -> None:
    while px.groups.describe("g").state != "STABLE" or not all(
        consumer.assignment for consumer in consumers
    ):
        for consumer in consumers:
            consumer.poll(1, timeout=0.02)


def member(px: pxrs.Pxrs) -> pxrs.Consumer:
    return px.consumer("orders", "g", auto_commit=False, session_ttl=TTL)


def test_members_survive_and_are_told(px: pxrs.Pxrs, tmp_path: Path) -> None:
    with member(px) as a, member(px) as b:
        settled(px, [a, b])
        with px.producer() as producer:
            for partition in range(2):
                producer.send("orders", "x", partition=partition)
        assert len(a.poll(timeout=PATIENCE)) == len(b.poll(timeout=PATIENCE)) == 1
        before, generation = claims(px), px.groups.describe("g").generation
        sessions = [consumer._steps.membership.session for consumer in (a, b)]
        locking = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
        locking.execute("BEGIN IMMEDIATE")
        # Not to wait for something: that the time passes is what is tested.
        threading.Event().wait(2 * TTL)
        for consumer, session in zip((a, b), sessions, strict=True):
            assert session is not None
            assert consumer._steps.membership.session is session
            assert session.remaining() > 0
        assert len(px.stores.coord.list("members/g/")) == 2
        # Whoever commits is told, and can do it again.
        with pytest.raises(pxrs.StoreBusy):
            a.commit()
        locking.execute("ROLLBACK")
        locking.close()
        a.commit()
        b.commit()
        assert px.groups.describe("g").lag == 0
        assert claims(px) == before
        assert px.groups.describe("g").generation == generation
        assert a.health().ok
        assert b.health().ok


def test_who_holds_the_writer_does_not_wait_for_who_waits_for_it(tmp_path: Path) -> None:
    """The thread beside the caller commits what was handled, and the caller's own has begun."""
    path = tmp_path / "shop.db"
    with pxrs.connect(f"sqlite:///{path}?busy_timeout=600") as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            producer.send_many("orders", [("k", "1"), ("k", "2")])
        mine = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        mine.execute("CREATE TABLE done (number)")
        with px.consumer("orders", "g", auto_commit_interval=0.01) as consumer:
            consumer.poll(1, timeout=PATIENCE)
            mine.execute("BEGIN IMMEDIATE")
            mine.execute("INSERT INTO done VALUES (2)")
            consumer.poll(1, timeout=PATIENCE)
            lock = consumer._steps.owned_claims.lock
            while lock.acquire(blocking=False):
                lock.release()
                threading.Event().wait(0.001)

            def transact() -> None:
                with consumer.transaction(commits=mine):
                    pass

            transacting = threading.Thread(target=transact, daemon=True)
            transacting.start()
            transacting.join(PATIENCE)
            in_time = not transacting.is_alive()
            if not in_time:
                mine.execute("ROLLBACK")
            assert in_time
        assert px.groups.describe("g").lag == 0
        assert mine.execute("SELECT number FROM done").fetchall() == [(2,)]
        mine.close()
