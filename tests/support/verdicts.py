"""Units of work under attack: what each was told has to be what the store holds in the end.

Threads put items, half of them together with a row of a table of the caller's. Each unit was told
that it was committed, that it was not, or that nobody knows. The first two are promises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import pxrs
from pxrs.errors import OutcomeUnknown, PxrsError
from pxrs.queues.item import decode_body
from pxrs.types import ItemState
from support.child import PATIENCE

TABLE = "CREATE TABLE units (name VARCHAR(40) PRIMARY KEY)"
QUEUE = "out"


class Attacked:
    """Threads at work, and what they were told."""

    def __init__(self, px: pxrs.Pxrs, threads: int = 8) -> None:
        self.px = px
        self.committed: set[str] = set()
        self.refused: dict[str, str] = {}
        self.unknown: set[str] = set()
        self._failures: list[BaseException] = []
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _work(self, thread: int) -> None:
        try:
            for number in count():
                if self._stop.is_set():
                    return
                self._unit(f"{thread}-{number}", with_row=number % 2 == 0)
        except BaseException as error:
            self._failures.append(error)
            raise

    def _unit(self, name: str, *, with_row: bool) -> None:
        try:
            if with_row:
                with self.px.transaction() as tx:
                    tx.execute(f"INSERT INTO units VALUES ('{name}')")
                    tx.put(QUEUE, name)
            else:
                self.px.put(QUEUE, name)
        except OutcomeUnknown:
            self.unknown.add(name)
        except PxrsError as error:
            self.refused[name] = str(error)
        else:
            with self._changed:
                self.committed.add(name)
                self._changed.notify_all()

    def await_progress(self, units: int = 50) -> None:
        """Until so many more units were committed."""
        with self._changed:
            wanted = len(self.committed) + units
            assert self._changed.wait_for(lambda: len(self.committed) >= wanted, PATIENCE)

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive()
        assert self._failures == []

    def judge(self, rows_in: Callable[[], set[str]]) -> None:
        """Compare what was told with what is there."""
        items, rows = self._items(), rows_in()
        lost = self.committed - items
        assert not lost, f"{len(lost)} of {len(self.committed)} were committed and are not there"
        there = {name: said for name, said in self.refused.items() if name in items}
        assert not there, f"{len(there)} of {len(self.refused)} were refused and are there: {there}"
        assert rows == {name for name in items if int(name.partition("-")[2]) % 2 == 0}

    def _items(self) -> set[str]:
        found: set[str] = set()
        after = 0
        while page := self.px.stores.queues.peek(QUEUE, tuple(ItemState), after=after, limit=5000):
            names = [decode_body(item.body)[0] for item in page]
            assert found.isdisjoint(names)
            assert len(set(names)) == len(names), "an item is there twice"
            found.update(names)
            after = page[-1].id
        return found
