"""What has to hold when the clock of a database's server is set back by an hour."""

from __future__ import annotations

from collections.abc import Callable

from pxrs.stores.api import Stores
from pxrs.testing.conformance.queue_tools import Worker, bodies, states_of
from pxrs.types import ItemState, NewItem

HOUR = 3600
LOCK = 10.0


def check_items(open_stores: Callable[[], Stores], set_clock: Callable[[int], None]) -> None:
    """`set_clock` sets it back by so many seconds. Nothing is lost; what waits for a time waits on.

    Deadlines are so long that none passes before the clock is set, however busy the machine is.
    """
    stores = open_stores()
    worker, hung, dies = Worker(stores), Worker(stores), Worker(stores)
    worker.put(b"held", b"of a hung one", b"of a dead one")
    held = worker.take_one(lock_for=LOCK)
    hung.take_one(lock_for=LOCK)
    dies.take_one(lock_for=LOCK)
    worker.apply(put=[NewItem(queue="q", body=b"delayed", delay=LOCK)])
    set_clock(HOUR)
    # Who lives goes on, and what is new can be had at once.
    worker.queues.extend(worker.holder, [held.held], LOCK)
    worker.apply(held, put=[NewItem(queue="q", body=b"new")])
    new = worker.take_one()
    assert new.body == b"new"
    worker.apply(new)
    assert states_of(stores) == {
        b"of a hung one": ItemState.HELD,
        b"of a dead one": ItemState.HELD,
        b"delayed": ItemState.DELAYED,
    }
    due = worker.due()
    assert due is not None
    assert HOUR - 60 < due <= HOUR + LOCK
    # A death frees what was held, whatever the clock shows.
    dies.session.close()
    assert worker.take_one().body == b"of a dead one"
    set_clock(-int(2 * LOCK))
    stores.queues.reap()
    assert sorted(bodies(worker.drain())) == [b"delayed", b"of a hung one"]
