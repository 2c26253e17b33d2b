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

TTL = 0.4


@pytest.fixture
def px(tmp_path: Path) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(f"sqlite:///{tmp_path}/shop.db?busy_timeout=0.05") as px:
        px.create_topic("orders", partitions=2)
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
        sessions = [consumer._membership.session for consumer in (a, b)]
        locking = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
        locking.execute("BEGIN IMMEDIATE")
        # Not to wait for something: that the time passes is what is tested.
        threading.Event().wait(4 * TTL)
        for consumer, session in zip((a, b), sessions, strict=True):
            assert session is not None
            assert consumer._membership.session is session
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
