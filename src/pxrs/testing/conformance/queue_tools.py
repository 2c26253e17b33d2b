"""Helpers for the checks of queues."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from pxrs.errors import Fenced, SessionLost
from pxrs.stores.api import Session, Stores, lots
from pxrs.testing.conformance.lab import Lab, Violation
from pxrs.testing.conformance.tools import LONG, raises, require, same
from pxrs.types import (
    Delivery,
    Held,
    Holder,
    ItemState,
    NewItem,
    QueueChange,
    Release,
    StoredItem,
)

Q = "q"
READY, DELAYED, HELD = ItemState.READY, ItemState.DELAYED, ItemState.HELD
WAITING, DEAD = ItemState.WAITING, ItemState.DEAD

# More than any check puts into a queue.
PLENTY = 1_000

_numbers = count(1)


class Worker:
    """A holder of items: one transaction of a session, on one handle."""

    def __init__(self, stores: Stores, session: Session | None = None) -> None:
        self.stores = stores
        self.queues = stores.queues
        self.session = session or stores.coord.session(LONG)
        self.holder = Holder(self.session.id, f"tx-{next(_numbers)}")

    def take(
        self,
        number: int = 1,
        queue: str = Q,
        *,
        most: int | None = None,
        lock_for: float | None = None,
    ) -> list[Delivery]:
        """The deliveries of one `take`."""
        taken = self.queues.take(queue, self.holder, number, most=most, lock_for=lock_for)
        require(len(taken.items) <= number, "more was handed out than asked for")
        return taken.items

    def take_one(
        self, queue: str = Q, *, most: int | None = None, lock_for: float | None = None
    ) -> Delivery:
        """Take one item, which must exist."""
        found = self.take(1, queue, most=most, lock_for=lock_for)
        require(len(found) == 1, f"nothing could be taken from queue {queue!r}")
        return found[0]

    def drain(self, queue: str = Q, *, most: int | None = None) -> list[Delivery]:
        """Take everything that can be taken now, by as many takes as needed."""
        found: list[Delivery] = []
        while some := self.take(PLENTY, queue, most=most):
            found += some
            require(len(found) <= PLENTY, "items are handed out without end")
        return found

    def due(self, queue: str = Q) -> float | None:
        """Return when there may be something, from a `take` that must find nothing."""
        taken = self.queues.take(queue, self.holder, 1)
        same(bodies(taken.items), [], "what could be taken")
        return taken.due

    def apply(
        self, *done: Delivery, put: Iterable[NewItem] = (), remove: Iterable[Held] = ()
    ) -> list[int | None]:
        """Remove what was done, and put, in one change."""
        removed = (*(each.held for each in done), *remove)
        return self.queues.apply(QueueChange(self.holder, removed, tuple(put)))

    def put(
        self,
        *values: bytes,
        queue: str = Q,
        key: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
    ) -> list[int]:
        """Put one item for each of the values, all of which have to be new; returns their ids.

        In one change, or in as many as the store's limits require.
        """
        new = [
            NewItem(queue=queue, body=value, key=key, priority=priority, delay=delay)
            for value in values
        ]
        holder = Holder(self.session.id, f"tx-{next(_numbers)}")
        found = [
            each
            for lot in lots(new, lambda item: (1, len(item.body)), self.queues.limits)
            for each in self.queues.apply(QueueChange(holder, (), tuple(lot)))
            if each is not None
        ]
        same(len(found), len(values), "how many of the new items have an id")
        return found

    def release(
        self, *given: Delivery, delay: float = 0.0, error: str = "", dead: bool = False
    ) -> None:
        """Give items back in one call."""
        self.queues.release(self.holder, [Release(each.held, delay, error, dead) for each in given])

    def extend(self, *held: Delivery, lock_for: float) -> None:
        self.queues.extend(self.holder, [each.held for each in held], lock_for)

    def must_have_lost(self, delivery: Delivery, *also: Delivery) -> None:
        """Require that commit, extension and release change nothing about the items."""
        before = look(self.stores, delivery.held.queue)
        with raises(Fenced, SessionLost):
            self.apply(delivery, *also, put=[NewItem(queue="never", body=b"")])
        with raises(Fenced, SessionLost):
            self.extend(delivery, *also, lock_for=LONG)
        self.release(delivery, error="from a zombie")
        self.release(delivery, dead=True)
        same(self.queues.find("never"), None, "what a refused change made")
        same(look(self.stores, delivery.held.queue), before, "the items after a zombie's calls")


def wait_for_item(lab: Lab, worker: Worker, queue: str = Q) -> Delivery:
    """Take an item; if there is none, wait for the watch, at most until the next is due."""
    watch = worker.queues.watch(queue)
    try:
        while True:
            taken = worker.queues.take(queue, worker.holder, 1)
            if taken.items:
                return taken.items[0]
            woken = watch.wait(lab.patience if taken.due is None else taken.due)
            if not woken and taken.due is None:
                raise Violation("nothing was due, and the waiter for an item was not woken")
    finally:
        watch.close()


def bodies(items: Iterable[Delivery | StoredItem]) -> list[bytes]:
    """The bodies, in order."""
    return [item.body for item in items]


def look(stores: Stores, queue: str = Q) -> list[StoredItem]:
    """Every item of a queue, the dead too, after items of ended holders were freed."""
    stores.queues.reap()
    return stores.queues.peek(queue, tuple(ItemState), limit=PLENTY)


def states_of(stores: Stores, queue: str = Q) -> dict[bytes, ItemState]:
    """Return the state of each item, by its body."""
    return {item.body: item.state for item in look(stores, queue)}


def let_time_pass(lab: Lab, stores: Stores) -> None:
    """Return when one TTL of the lab has passed, by the store's clock."""
    lab.let_expire(stores.coord.session(lab.ttl))


def soon(lab: Lab) -> float:
    """Seconds that have certainly passed after `let_time_pass`."""
    return lab.ttl / 2
