"""PostgreSQL is restarted and its connections are cut under load; a client is cut off from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

import engines
import pxrs
from pxrs.core.records import Claim, decode
from support.child import PATIENCE, Child
from support.engine_fixtures import NewEngine
from support.inside import say
from support.postgres import query
from support.proxy import Proxy

pytestmark = [pytest.mark.engine("postgres"), pytest.mark.thorough]

TOPIC, GROUP, PARTITIONS, TTL = "orders", "ledger", 4, 2.0


def consume(url: str) -> None:
    """Write every message into the ledger, in the transaction that commits the checkpoint."""
    while True:
        try:
            _consume(url)
        except pxrs.StoreError:
            # As any service would: the engine is away, start again.
            continue


def _consume(url: str) -> None:
    with (
        pxrs.connect(url) as px,
        px.consumer(TOPIC, GROUP, auto_commit=False, session_ttl=TTL) as consumer,
    ):
        say("joined")
        while True:
            messages = consumer.poll(max_records=50, timeout=0.1)
            if not messages:
                continue
            rows = ",".join(f"({m.partition}, {m.offset}, {int(m.value)})" for m in messages)
            try:
                with consumer.transaction() as tx:
                    tx.execute(f"INSERT INTO ledger VALUES {rows}")
            except (pxrs.Fenced, pxrs.PxrsError, psycopg.Error):
                continue


class World:
    """An engine of its own, messages that keep coming, and two consumers."""

    def __init__(self, engine: engines.Engine) -> None:
        self.engine = engine
        self.px = pxrs.connect(engine.url)
        self.px.topics.create(TOPIC, partitions=PARTITIONS)
        query(engine.url, "CREATE TABLE ledger (part int, place bigint, number bigint)")
        self.acknowledged: list[int] = []
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._load = threading.Thread(target=self._send)
        self._load.start()
        self.children = [Child(consume, engine.url) for _ in range(2)]
        for child in self.children:
            assert child.read() == "joined"

    def _send(self) -> None:
        try:
            with self.px.producer() as producer:
                number = 0
                while not self._stop.wait(0.002):
                    numbers = range(number, number + 20)
                    number += 20
                    producer.send_many(TOPIC, [(f"k{n % 40}", str(n)) for n in numbers]).result()
                    self.acknowledged += numbers
        except BaseException as error:  # noqa: BLE001 - looked at in the end
            self._failure = error

    def await_progress(self, messages: int = 400) -> None:
        """Until so many more messages were handled."""
        wanted = self.handled() + messages
        watch = self.px.stores.coord.watch(f"claims/{GROUP}/")
        while self.handled() < wanted:
            assert watch.wait(PATIENCE), "the group came to a halt"
        watch.close()

    def handled(self) -> int:
        while True:
            try:
                records = self.px.stores.coord.list(f"claims/{GROUP}/")
            except pxrs.StoreError:
                continue
            return sum(decode(record, Claim).checkpoint or 0 for record in records)

    def finish(self) -> None:
        """End the load and wait until everything is handled; then look at the ledger."""
        self._stop.set()
        self._load.join(PATIENCE)
        assert self._failure is None
        ends = self.px.stores.log.bounds(self.px.topics.list()[0].id)
        total = sum(end for _, end in ends.values())
        watch = self.px.stores.coord.watch(f"claims/{GROUP}/")
        while self.handled() < total:
            assert watch.wait(PATIENCE), "the group came to a halt"
        watch.close()
        rows = query(self.engine.url, "SELECT part, place, number FROM ledger")
        places = {(part, place) for part, place, _ in rows}
        assert len(rows) == len(places) == total, "a message was handled twice, or not at all"
        assert {number for *_, number in rows} == set(self.acknowledged)
        assert total == len(self.acknowledged), "a message was appended twice"

    def close(self) -> None:
        self._stop.set()
        for child in self.children:
            child.kill()
        self._load.join(PATIENCE)
        self.px.close()


@pytest.fixture
def world(new_engine: NewEngine) -> Iterator[World]:
    world = World(new_engine("postgres", durable=True))
    yield world
    world.close()


def test_restarts_under_load(world: World) -> None:
    """Stopped in order and started again; killed -9 and recovered."""
    world.await_progress()
    world.engine.restart()
    world.await_progress()
    world.engine.kill()
    world.engine.start()
    world.await_progress()
    world.finish()


def test_connections_cut_under_load(world: World) -> None:
    for _ in range(4):
        world.await_progress()
        query(
            world.engine.url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'pxrs' AND pid <> pg_backend_pid()",
        )
    world.await_progress()
    world.finish()


@pytest.mark.parametrize("broken", ["silent", "hung up"])
def test_who_is_cut_off_stops_before_its_lease_can_be_taken(postgres_url: str, broken: str) -> None:
    server, _, database = postgres_url.rpartition("/")
    with (
        Proxy(int(server.rpartition(":")[2])) as proxy,
        pxrs.connect(postgres_url) as near,
        pxrs.connect(f"postgresql://postgres@{proxy.address}/{database}") as far,
    ):
        near.topics.create(TOPIC, partitions=2)
        with (
            far.consumer(TOPIC, GROUP, session_ttl=TTL) as away,
            near.consumer(TOPIC, GROUP, session_ttl=TTL) as stays,
        ):
            watch = near.stores.coord.watch(f"claims/{GROUP}/", f"members/{GROUP}/")
            while not (len(away.assignment) == len(stays.assignment) == 1):
                watch.wait(0.1)
            proxy.cut()
            if broken == "hung up":
                proxy.reset()
            while True:
                # In this order: what is taken now, somebody had to stop working on before.
                taken = len(stays.assignment) == 2
                assert not (taken and away._steps.alive)
                if taken:
                    break
                watch.wait(0.05)
            watch.close()
            proxy.heal()
            if broken == "silent":
                proxy.reset()
