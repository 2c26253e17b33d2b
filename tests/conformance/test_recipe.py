"""Queues by the recipe pass the suite on the coordination stores they can be kept in.

The recipe is the same code on all of them: ZooKeeper runs what depends on the engine, which is
who holds what, who is woken, who wins a race, and names.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.stores.api import Session, Stores
from pxrs.stores.composite import CompositeStores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.stores.open import open_stores
from pxrs.stores.queues_on_coord.queues import RecipeQueues
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance import (
    Lab,
    MemoryLab,
    Rule,
    await_end,
    queue_checks,
    queue_locks,
    queue_wakes,
    queues,
    restore_checks,
)
from pxrs.testing.conformance.lab import checks_of
from support.engine_fixtures import place_in


def over_memory(clock: VirtualClock) -> Stores:
    stores = MemoryStores(clock=clock)
    queues = RecipeQueues(stores.coord, clock)
    return CompositeStores(
        stores.url, stores.coord, stores.log, queues, [stores.close, queues.close]
    )


class EngineLab:
    """A place of its own in a shared engine, which counts sessions in seconds."""

    ttl = 2.0
    patience = 60.0

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened: list[Stores] = []

    def open(self) -> Stores:
        self._opened.append(open_stores(self._url))
        return self._opened[-1]

    def let_expire(self, session: Session) -> None:
        await_end(self.open(), session, self.patience)

    def close(self) -> None:
        for stores in self._opened:
            stores.close()


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab: Lab
    if request.param == "memory":
        lab = MemoryLab(over_memory, patience=30.0)
    else:
        lab = EngineLab(place_in(request.param))
    yield lab
    lab.close()


ALL = queue_checks() + restore_checks()
OF_THE_ENGINE = (
    *checks_of(queue_locks, queue_wakes),
    queues.check_names_are_exact,
)
_MARKS = {
    "memory": [],
    "etcd": [pytest.mark.engine("etcd")],
    "zookeeper": [pytest.mark.engine("zookeeper"), pytest.mark.thorough],
}
_CHECKS = {"memory": ALL, "etcd": ALL, "zookeeper": OF_THE_ENGINE}


@pytest.mark.parametrize(
    ("lab", "check"),
    [
        pytest.param(
            name,
            check,
            marks=_MARKS[name],
            id=f"{name}-{check.__name__}",
        )
        for name, checks in _CHECKS.items()
        for check in checks
    ],
    indirect=["lab"],
)
def test_conforms(check: Rule, lab: Lab) -> None:
    check(lab)
