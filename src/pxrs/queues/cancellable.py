"""Transactions for somebody who may walk away: taking without waiting, giving back unseen.

A blocking `take` hands its item to whoever called it. A task on an event loop can be cancelled
while a thread takes for it, and nobody has seen what that thread got. It must neither be removed
by a commit nor stay locked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pxrs.core.retry import Backoff
from pxrs.queues.hold_session import GivenBack
from pxrs.queues.item import Item
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.stores.api import QueueStore
from pxrs.types import Release


class Unseen:
    """What a transaction took and nobody has been given yet. Thread-safe."""

    def __init__(self, work: UnitOfWork) -> None:
        self._work = work
        self._items: dict[tuple[str, int], Item] = {}

    @property
    def queues(self) -> QueueStore:
        """The store that the transaction takes from."""
        return self._work._context.stores.queues

    def take(
        self, queue: str, count: int, retry: Backoff, lock_for: float | None
    ) -> tuple[list[Item], float | None]:
        """What there is now, and in how many seconds there may be more, as far as is known.

        Until they are `seen` the items go back when the transaction ends, however it does.
        """
        with self._work._lock:
            items, due, _ = self._work._look(queue, count, retry, lock_for)
            self._items.update(((item.queue, item.id), item) for item in items)
        return items, due

    def seen(self, items: Sequence[Item]) -> None:
        """They have been handed over. Does not wait."""
        for item in items:
            self._items.pop((item.queue, item.id), None)

    def give_back(self, items: Sequence[Item]) -> None:
        """Release them; the transaction goes on without them.

        Their deliveries stay counted, and no error is noted.
        """
        work = self._work
        with work._lock:
            unwanted = {(item.queue, item.id) for item in items}
            given = [held for held, _ in work._held.taken if (held.queue, held.id) in unwanted]
            # In place: the transaction's finalizer looks at the same list.
            work._held.taken[:] = [each for each in work._held.taken if each.held not in given]
            self.seen(items)
        if not given or not work.is_open:
            return
        unseen = GivenBack(work._held.holder, tuple(Release(held) for held in given))
        hold_session = work._context.hold_session
        # Inside a write transaction of its own this thread can't release: another one will.
        if work._atomic is not None or not hold_session.release(unseen):
            hold_session.give_back(unseen)

    def end(self, how: Callable[[], None]) -> None:
        """End the transaction in this way, without what nobody has seen."""
        with self._work._lock:
            self.give_back(list(self._items.values()))
            how()
