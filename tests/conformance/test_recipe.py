"""Queues by the recipe pass the suite on every coordination store they can be kept in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pxrs.stores.api import Session, Stores
from pxrs.stores.composite import CompositeStores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.stores.open import open_stores
from pxrs.stores.queues_on_coord.queues import RecipeQueues
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance import Lab, MemoryLab, Rule, await_end, queue_checks, restore_checks
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


@pytest.fixture(
    params=[
        "memory",
        pytest.param("etcd", marks=pytest.mark.engine("etcd")),
        pytest.param("zookeeper", marks=pytest.mark.engine("zookeeper")),
    ]
)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab: Lab
    if request.param == "memory":
        lab = MemoryLab(over_memory, patience=30.0)
    else:
        lab = EngineLab(place_in(request.param))
    yield lab
    lab.close()


@pytest.mark.parametrize(
    "check", queue_checks() + restore_checks(), ids=lambda check: check.__name__
)
def test_conforms(check: Rule, lab: Lab) -> None:
    check(lab)
