"""A queue on etcd or ZooKeeper that is deleted while others put: what was put afterwards stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from queue import SimpleQueue
from typing import Any

import pytest

from pxrs.errors import QueueNotFound
from pxrs.stores.api import CoordStore, Stores
from pxrs.stores.open import open_stores
from pxrs.stores.queues_on_coord.layout import Layout
from pxrs.stores.queues_on_coord.queues import RecipeQueues
from pxrs.testing.conformance.queue_tools import Worker, look, states_of
from pxrs.types import Delete, ItemState, NewItem, Queue, QueueChange, Versioned
from support.child import Child
from support.engine_fixtures import place_in
from support.inside import say, wait_for_parent

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
    """A `CoordStore` whose user is overtaken once, after a look at a folder or a record.

    `looks`: after how many of them.
    """

    def __init__(
        self, coord: CoordStore, where: str, meanwhile: Callable[[], object], looks: int = 1
    ) -> None:
        self._coord = coord
        self._where = where
        self._meanwhile = meanwhile
        self._looks = looks

    def __getattr__(self, name: str) -> object:
        return getattr(self._coord, name)

    def get(self, key: str) -> Versioned | None:
        found = self._coord.get(key)
        self._look(key)
        return found

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        found = self._coord.list(prefix, after, limit)
        self._look(prefix)
        return found

    def _look(self, where: str) -> None:
        if where == self._where:
            self._looks -= 1
            if self._looks == 0:
                self._meanwhile()


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


def test_a_deletion_spares_a_queue_that_was_made_when_it_had_found_nothing_left(
    stores: Stores,
) -> None:
    """Not only its items: without its name they would be there, and nobody could take them."""
    worker = Worker(stores)
    worker.put(b"old", queue=Q)

    def finish_and_put() -> None:
        stores.queues.reap()
        worker.put(b"new", queue=Q)

    # It finds the old item's records, and then twice nothing.
    slow: Any = Overtaken(stores.coord, Layout(Q).folder, finish_and_put, looks=3)
    deleter = RecipeQueues(slow)
    deleter.delete(Q)
    deleter.close()
    assert [item.body for item in look(stores, Q)] == [b"new"]
    worker.put(b"newer", queue=Q)
    assert [delivery.body for delivery in worker.drain(Q)] == [b"new", b"newer"]


def test_a_queue_that_is_made_anew_while_it_is_looked_up_is_taken_for_what_it_is(
    stores: Stores,
) -> None:
    """It was no fifo queue, and is one now: an item without a place in its order would be lost."""
    stores.queues.create(Q)

    def make_anew() -> None:
        stores.queues.delete(Q)
        stores.queues.create(Q, fifo=True)

    for where in (Layout(Q).head, Layout(Q).tail):
        slow: Any = Overtaken(stores.coord, where, make_anew)
        producer = RecipeQueues(slow)
        worker = Worker(stores)
        items = tuple(NewItem(queue=Q, body=body) for body in (b"1", b"2"))
        producer.apply(QueueChange(worker.holder, (), items))
        producer.close()
        assert states_of(stores, Q) == {b"1": ItemState.READY, b"2": ItemState.WAITING}
        stores.queues.delete(Q)
        stores.queues.create(Q)


_ROUNDS, _PRODUCERS, _PER_ROUND, _MOST = 10, 3, 5, 200


def produce(url: str, name: str) -> None:
    """Put items without a pause, until the parent tells that the next round has begun."""
    stores = open_stores(url)
    worker = Worker(stores)
    told: SimpleQueue[None] = SimpleQueue()

    def listen() -> None:
        while True:
            wait_for_parent()
            told.put(None)

    threading.Thread(target=listen, daemon=True).start()
    for current in count():
        for number in range(_MOST):
            body = f"{name}-{current}-{number}"
            worker.put(body.encode(), queue=Q)
            say([current, body])
            if not told.empty():
                break
        told.get()


@pytest.mark.long
def test_what_processes_put_after_a_deletion_stays(stores: Stores) -> None:
    """They also finish the deletion, each at its own pace, while others have begun anew."""
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(produce, stores.url, f"producer-{number}"))
            for number in range(_PRODUCERS)
        ]
        for current in range(1, _ROUNDS + 1):
            for child in children:
                _put_in(child, current - 1)
            stores.queues.delete(Q)
            for child in children:
                child.tell()
            acknowledged = {body for child in children for body in _put_in(child, current)}
            there = {item.body.decode() for item in look(stores, Q)}
            assert acknowledged <= there


def _put_in(child: Child, current: int) -> list[str]:
    """The items of a round that it puts first."""
    found: list[str] = []
    while len(found) < _PER_ROUND:
        told, body = child.read()
        if told == current:
            found.append(body)
    return found


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


def test_a_queue_that_is_deleted_while_it_gets_its_tail_again_can_be_made_again(
    stores: Stores,
) -> None:
    """A tail without a queue would refuse the next one for ever."""
    worker = Worker(stores)
    worker.put(b"old", queue=Q)
    stores.coord.commit([], [Delete(Layout(Q).tail)])
    slow: Any = Overtaken(stores.coord, Layout(Q).items, lambda: stores.queues.delete(Q))
    healing = RecipeQueues(slow)
    assert healing.stats(Q).put == 0
    healing.close()
    assert stores.coord.list(Layout(Q).folder) == []
    worker.put(b"new", queue=Q)
    assert [item.body for item in look(stores, Q)] == [b"new"]


def test_a_queue_without_anything_but_its_name_takes_items(stores: Stores) -> None:
    stores.queues.create(Q)
    stores.coord.commit([], [Delete(Layout(Q).tail)])
    worker = Worker(stores)
    worker.put(b"1", queue=Q)
    assert worker.take_one(Q).body == b"1"
