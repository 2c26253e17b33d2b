"""A process that has little time for its own threads still finds out that others are dead."""

from __future__ import annotations

import threading

import pytest

import pxrs
from pxrs import Item, Pxrs, UnitOfWork
from pxrs.stores.open import open_stores
from support.busy import busy
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent

ENGINES = [pytest.param(name, marks=pytest.mark.engine(name)) for name in ("postgres", "mariadb")]
TTL = 2.0


@pytest.fixture(params=ENGINES)
def server(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return f"{found}?ssl_disabled=true" if request.param == "mariadb" else found


def hold_an_item(url: str) -> None:
    """Take an item and keep it until killed."""
    with Pxrs(open_stores(url), session_ttl=TTL) as px, px.begin() as tx:
        item = tx.take("in")
        say(item and item.value)
        wait_for_parent()


def test_a_busy_process_gets_what_a_killed_worker_held(server: str) -> None:
    handled, done = [], threading.Event()

    def handle(item: Item, tx: UnitOfWork) -> None:
        handled.append(item.value)
        done.set()

    with pxrs.connect(server) as px, Child(hold_an_item, server) as child:
        px.put("in", "item")
        assert child.read() == "item"
        with busy(1.2, rest=0.3), px.listen("in", handle, workers=2):
            child.kill()
            assert done.wait(2 * PATIENCE)
    # Its own session may have been lost, too: then it has the item again.
    assert set(handled) == {"item"}
