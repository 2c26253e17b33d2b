"""A handler that runs SQL in its transaction keeps its item for as long as it lives."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

import pxrs
from pxrs import Backoff, Item, Pxrs, UnitOfWork
from pxrs.stores.api import QueueStore
from pxrs.types import Held, Holder
from support.child import PATIENCE

ENGINES = [pytest.param(name, marks=pytest.mark.engine(name)) for name in ("postgres", "mariadb")]
DEADLINE = 2.0
# Three extensions are made per deadline: it has passed then, were it not for them.
OFTEN = 4


@pytest.fixture(params=ENGINES)
def server(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return f"{found}?ssl_disabled=true" if request.param == "mariadb" else found


@pytest.fixture
def px(server: str) -> Iterator[Pxrs]:
    with pxrs.connect(server) as px:
        yield px


class Extensions:
    """Counts how often each item was extended, once that was done."""

    def __init__(self, queues: QueueStore) -> None:
        self._extend = queues.extend
        self._changed = threading.Condition()
        self._counts: Counter[int] = Counter()
        queues.extend = self  # type: ignore[method-assign]

    def __call__(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        self._extend(holder, held, lock_for)
        with self._changed:
            self._counts.update(each.id for each in held)
            self._changed.notify_all()

    def wait(self, item: int, number: int) -> bool:
        """Wait until the item was extended so many times more."""
        with self._changed:
            wanted = self._counts[item] + number
            return self._changed.wait_for(lambda: self._counts[item] >= wanted, PATIENCE)


def await_done(px: Pxrs, queue: str, number: int) -> None:
    watch = px.stores.queues.watch(queue)
    while px.queues.describe(queue).done + px.queues.describe(queue).dead < number:
        watch.wait(0.1)
    watch.close()


def test_its_item_is_extended(px: Pxrs) -> None:
    """Another worker waits for the item all the while, and would get it after its deadline."""
    extensions = Extensions(px.stores.queues)
    handled: list[tuple[str, bool]] = []

    def handle(item: Item, tx: UnitOfWork) -> None:
        tx.execute("SELECT 1")
        handled.append((item.value, extensions.wait(item.id, OFTEN)))

    px.put("in", "item")
    with px.listen("in", handle, workers=2, deadline=DEADLINE, retry=Backoff(attempts=1)):
        await_done(px, "in", 1)
    assert handled == [("item", True)]
    assert px.queues.describe("in").done == 1


def test_items_are_extended_though_every_worker_runs_sql(px: Pxrs) -> None:
    """As many transactions as there are connections for them leave one for what keeps them."""
    workers = 8 if "postgres" in px.stores.url else 15
    extensions = Extensions(px.stores.queues)
    all_begun = threading.Barrier(workers)
    handled: list[bool] = []

    def handle(item: Item, tx: UnitOfWork) -> None:
        tx.execute("SELECT 1")
        all_begun.wait(PATIENCE)
        handled.append(extensions.wait(item.id, OFTEN))

    for number in range(workers):
        px.put("in", str(number))
    with px.listen("in", handle, workers=workers, deadline=DEADLINE, retry=Backoff(attempts=1)):
        await_done(px, "in", workers)
    assert handled == [True] * workers
    assert px.queues.describe("in").done == workers
