"""The ids of items that are put: when they are known, and to whom."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs import InvalidRequest, Pxrs, PxrsError, aio
from pxrs.stores.memory.stores import MemoryStores
from pxrs.stores.open import open_stores
from pxrs.stores.queues_on_coord.queues import RecipeQueues
from pxrs.testing.faults import NOTHING, Rates
from support.loops import run
from support.queueplace import Place


@pytest.fixture
def place(url: str) -> Iterator[Place]:
    with contextlib.closing(Place(open_stores(url))) as place:
        yield place


def ids_in(px: Pxrs, queue: str) -> list[int]:
    return [item.id for item in px.queues.peek(queue)]


def check_ids(px: Pxrs) -> None:
    """As `put`, `put_many` and both of a transaction's tell them."""
    found = [px.put("q", "1"), *px.put_many("q", ["2", "3"], key="k")]
    with px.transaction() as tx:
        items = [tx.put("q", "4"), *tx.put_many("q", ["5", "6"]), tx.put("p", "elsewhere")]
    *here, there = [item.id for item in items]
    assert found + here == ids_in(px, "q")
    assert [there] == ids_in(px, "p")
    assert [px.put("q", "7", dedupe="d") is None for _ in range(2)] == [False, True]
    assert px.put_many("q", []) == []


def test_put_tells_the_id_on_every_engine(engine_url: str) -> None:
    with pxrs.connect(engine_url) as px:
        check_ids(px)


@pytest.mark.engine("mariadb")
def test_put_tells_the_id_on_mariadb(mariadb_url: str) -> None:
    with pxrs.connect("memory://", coord=mariadb_url) as px:
        check_ids(px)


@pytest.mark.engine("memory")
def test_put_tells_the_id_on_the_recipe() -> None:
    stores = MemoryStores()
    stores.queues = RecipeQueues(stores.coord)  # type: ignore[assignment]
    with Pxrs(stores) as px:
        check_ids(px)


def test_a_duplicate_has_none_and_is_known_as_one(px: Pxrs) -> None:
    with px.transaction() as tx:
        items = [tx.put("q", "1", dedupe="d"), tx.put("q", "2", dedupe="d"), tx.put("q", "3")]
    first, second = ids_in(px, "q")
    assert [item.id for item in items] == [first, None, second]


def test_there_is_no_id_before_the_commit_and_after_a_rollback(px: Pxrs) -> None:
    tx = px.begin()
    item = tx.put("q", "1")
    with pytest.raises(InvalidRequest, match="has not committed"):
        item.id  # noqa: B018
    tx.rollback()
    with pytest.raises(InvalidRequest, match="has not committed"):
        item.id  # noqa: B018


def test_the_handle_does_not_keep_the_transaction_alive(px: Pxrs) -> None:
    """One that is dropped gives back what it took, whoever still looks at what it put."""
    px.put("q", "1")
    tx = px.begin()
    assert tx.take("q", 5.0) is not None
    item = tx.put("p", "2")
    del tx
    with px.transaction() as other:
        assert other.take("q", 5.0) is not None
    with pytest.raises(InvalidRequest):
        item.id  # noqa: B018


@pytest.mark.parametrize("sends", [False, True], ids=["queues alone", "with a message"])
def test_a_lost_answer_loses_the_id_but_tells_no_wrong_one(place: Place, sends: bool) -> None:
    place.other.topics.create("t", partitions=1)
    told: dict[str, int | None] = {}
    for number in range(20):
        place.faults.rates = Rates(unknown_applied=0.5)
        tx = place.px.begin()
        item = tx.put("q", f"{number}")
        if sends:
            tx.send("t", "beside it")
        with contextlib.suppress(PxrsError):
            tx.commit()
        place.faults.rates = NOTHING
        if not tx.is_open:
            told[f"{number}"] = item.id
        else:
            tx.rollback()
    place.faults.heal()
    found = {item.value: item.id for item in place.other.queues.peek("q", limit=100)}
    assert found.keys() == told.keys()
    known = {value: number for value, number in told.items() if number is not None}
    assert known
    assert known.items() <= found.items()


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("commits", [True, False])
def test_a_joined_unit_knows_before_the_caller_commits(tmp_path: Path, commits: bool) -> None:
    path = tmp_path / "app.db"
    with (
        pxrs.connect(f"sqlite:///{path}") as px,
        contextlib.closing(sqlite3.connect(path)) as mine,
    ):
        px.put("q", "before")
        mine.execute("BEGIN IMMEDIATE")
        ids = [px.put("q", "1", connection=mine), *px.put_many("q", ["2"], connection=mine)]
        mine.commit() if commits else mine.rollback()
        assert ids_in(px, "q")[1:] == (ids if commits else [])


def test_a_consumers_transaction_tells_ids(px: Pxrs) -> None:
    px.topics.create("t", partitions=1)
    with px.producer() as producer:
        producer.send("t", "1").result()
    with px.consumer("t", group="g", start="earliest") as consumer:
        assert consumer.poll(1, timeout=5.0)
        with consumer.transaction() as tx:
            item = tx.put("q", "1")
    assert [item.id] == ids_in(px, "q")


def test_asyncio(url: str) -> None:
    async def main() -> None:
        async with aio.connect(url) as px:
            found = [await px.put("q", "1"), *await px.put_many("q", ["2", "3"])]
            async with px.transaction() as tx:
                items = [await tx.put("q", "4"), *await tx.put_many("q", ["5"])]
            found += [item.id for item in items]
            assert found == [item.id for item in await px.queues.peek("q")]

    run(main())


def test_unknown_options_are_refused(px: Pxrs) -> None:
    with pytest.raises(TypeError, match="Did you mean 'priority'"):
        px.put("q", "1", prority=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'dedupe'"):
        px.put_many("q", ["1"], dedupe="d")  # type: ignore[call-overload]
