"""A crash of the server, with `synchronous_commit=off` for everybody who does not ask for more."""

from __future__ import annotations

from contextlib import closing

import pytest

import pxrs
from engines import Engine
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.tools import put
from pxrs.types import Check, Conflict, Put
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("postgres")

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
        px.create_topic("orders", partitions=1)
        with px.producer() as producer:
            sent = producer.send("orders", "message").result()
        px.create_queue("strict", fifo=True)
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
