"""A queue on etcd or ZooKeeper that is deleted while others put: what was put afterwards stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pxrs.errors import QueueNotFound
from pxrs.stores.api import CoordStore, Stores
from pxrs.stores.open import open_stores
from pxrs.stores.queues_on_coord.layout import Layout
from pxrs.stores.queues_on_coord.queues import RecipeQueues
from pxrs.testing.conformance.queue_tools import Worker, look
from pxrs.types import Delete, NewItem, Queue, QueueChange, Versioned
from support.engine_fixtures import place_in

Q = "mail"


@pytest.fixture(
    params=[
        pytest.param("etcd", marks=pytest.mark.engine("etcd")),
        pytest.param("zookeeper", marks=pytest.mark.engine("zookeeper")),
    ]
)
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    stores = open_stores(place_in(request.param))
    yield stores
    stores.close()


class Overtaken:
    """A `CoordStore` whose user is overtaken once, after a look at a folder."""

    def __init__(self, coord: CoordStore, folder: str, meanwhile: Callable[[], object]) -> None:
        self._coord = coord
        self._folder = folder
        self._meanwhile: Callable[[], object] | None = meanwhile

    def __getattr__(self, name: str) -> object:
        return getattr(self._coord, name)

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        found = self._coord.list(prefix, after, limit)
        if prefix == self._folder and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        return found


def test_a_deletion_spares_what_was_put_after_another_has_finished_it(stores: Stores) -> None:
    worker = Worker(stores)
    worker.put(b"old", queue=Q)

    def finish_and_put() -> None:
        stores.queues.reap()
        worker.put(b"new", queue=Q)

    slow: Any = Overtaken(stores.coord, Layout(Q).folder, finish_and_put)
    deleter = RecipeQueues(slow)
    deleter.delete(Q)
    deleter.close()
    assert [item.body for item in look(stores, Q)] == [b"new"]
    worker.put(b"newer", queue=Q)
    assert [delivery.body for delivery in worker.drain(Q)] == [b"new", b"newer"]


class Killed(Exception):  # noqa: N818 - what happened
    """Ends a deleter where it stands."""


@pytest.mark.parametrize("knows", [True, False], ids=["knew the queue", "did not"])
def test_dedupe_keys_of_a_deleted_queue_do_not_count(stores: Stores, knows: bool) -> None:
    """The deleter is killed when it has marked the queue, so the old records are all there."""

    def put(queues: RecipeQueues, body: bytes) -> int | None:
        item = NewItem(queue=Q, body=body, dedupe="K", dedupe_window=3600)
        (number,) = queues.apply(QueueChange(worker.holder, (), (item,)))
        return number

    def killed() -> None:
        raise Killed

    worker = Worker(stores)
    producer = RecipeQueues(stores.coord)
    assert put(producer if knows else RecipeQueues(stores.coord), b"old") == 1
    assert put(producer if knows else RecipeQueues(stores.coord), b"again") is None
    dying: Any = Overtaken(stores.coord, Layout(Q).folder, killed)
    with pytest.raises(Killed):
        RecipeQueues(dying).delete(Q)
    assert stores.queues.peek(Q) == []
    assert put(producer, b"new") == 1
    assert put(producer, b"again") is None
    assert [item.body for item in look(stores, Q)] == [b"new"]


def test_items_are_restored_though_a_deleted_queue_still_has_such_items(stores: Stores) -> None:
    def killed() -> None:
        raise Killed

    worker = Worker(stores)
    worker.put(b"old", queue=Q)
    items = look(stores, Q)
    dying: Any = Overtaken(stores.coord, Layout(Q).folder, killed)
    restoring: Any = stores.queues
    find = restoring._directory.find

    def find_then_delete(name: str) -> Queue | None:
        found: Queue | None = find(name)
        restoring._directory.find = find
        with pytest.raises(Killed):
            RecipeQueues(dying).delete(Q)
        return found

    restoring._directory.find = find_then_delete
    with pytest.raises(QueueNotFound):
        restoring.restore(Q, items)


def test_a_queue_that_lost_its_tail_goes_on_behind_its_items(stores: Stores) -> None:
    """Stores have such queues from releases whose deletions removed what was put meanwhile."""
    worker = Worker(stores)
    worker.put(b"1", b"2", b"3", queue=Q)
    worker.apply(worker.take_one(Q))
    worker.release(worker.take_one(Q), dead=True)
    stores.coord.commit([], [Delete(Layout(Q).tail)])
    fresh = RecipeQueues(stores.coord)
    assert fresh.stats(Q).ready == 1
    fresh.close()
    worker.put(b"4", queue=Q)
    assert [(item.id, item.body) for item in look(stores, Q)] == [(2, b"2"), (3, b"3"), (4, b"4")]
    assert stores.queues.stats(Q).dead == 1


def test_a_queue_without_anything_but_its_name_takes_items(stores: Stores) -> None:
    stores.queues.create(Q)
    stores.coord.commit([], [Delete(Layout(Q).tail)])
    worker = Worker(stores)
    worker.put(b"1", queue=Q)
    assert worker.take_one(Q).body == b"1"
