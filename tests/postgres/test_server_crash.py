"""A crash of the server, with `synchronous_commit=off` for everybody who does not ask for more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest

import pxrs
from engines import Engine
from pxrs.errors import TransactionConflict
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.tools import put
from pxrs.types import Check, Conflict, Outcome, Put
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.postgres import query

pytestmark = [pytest.mark.engine("postgres"), pytest.mark.thorough]

# Commits stay in the server's memory for so long, unless somebody waits for the disk.
_FORGETFUL = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
_ON_PURPOSE = "?options=-csynchronous_commit%3Doff"
# More than the server's sequence is written down for at a time.
_MANY = 100


@pytest.fixture
def server(new_engine: NewEngine) -> Engine:
    return new_engine("postgres", settings=_FORGETFUL)


def crash(server: Engine) -> None:
    server.kill()
    server.restart()


def test_what_pxrs_acknowledged_is_there(server: Engine) -> None:
    with pxrs.connect(server.url) as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            sent = producer.send("orders", "message").result()
        px.queues.create("strict", fifo=True)
        px.put("strict", "item")
        with px.begin() as tx:
            assert tx.take("strict") is not None
            crash(server)
    with pxrs.connect(server.url) as px:
        (message,) = px.reader("orders").read(partition=0, offset=sent.offset)
        assert message.value == b"message"
        (item,) = px.stores.queues.peek("strict")
        # Handed out once, though nobody could write down what became of it.
        assert item.deliveries == 1
        found = px.stores.queues.find("strict")
        assert found is not None
        assert found.fifo


def test_a_version_is_not_given_twice_though_commits_are_lost(server: Engine) -> None:
    """An owner that was frozen remembers a version; that of its successor must be another."""
    with closing(PostgresStores(server.url + _ON_PURPOSE)) as frozen:
        put(frozen.coord, "k", b"old")
        remembered = [put(frozen.coord, "k", b"mine") for _ in range(_MANY)]
        crash(server)
        with closing(PostgresStores(server.url + _ON_PURPOSE)) as successor:
            given = [put(successor.coord, "k", b"yours") for _ in range(2 * _MANY)]
        assert set(given).isdisjoint(remembered)
        for version in remembered[:: _MANY // 10]:
            outcome = frozen.coord.commit((Check("k", version),), (Put("k", b"stale"),))
            assert isinstance(outcome, Conflict)


def test_a_commit_that_a_crash_has_undone_is_known_to_be(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the session is over with its connection, and ended before anybody has asked."""
    with pxrs.connect(server.url) as px, ThreadPoolExecutor(1) as pool:
        px.put("q", "first")
        session, outcome = px._context().hold_session.session(), px.stores.queues.outcome

        def ask_late(name: str, unit: str) -> Outcome:
            session.close()
            return outcome(name, unit)

        monkeypatch.setattr(px.stores.queues, "outcome", ask_late)
        tx = px.begin()
        tx.put("q", "in doubt")
        with closing(psycopg.connect(server.url)) as other:
            other.execute("LOCK TABLE pxrs.pxrs_queue_commits IN ACCESS EXCLUSIVE MODE")
            commit = pool.submit(tx.commit)
            while not query(server.url, "SELECT 1 FROM pg_locks WHERE NOT granted"):
                assert not commit.done()
            server.kill()
            server.restart()
        with pytest.raises(TransactionConflict, match="not committed"):
            commit.result(PATIENCE)
        assert px.queues.describe("q").put == 1
