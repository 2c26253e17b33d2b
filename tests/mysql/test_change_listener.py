"""Wake-ups: nothing that the looking thread meets makes it deaf, and nobody waits after a fork."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from pxrs.errors import StoreBusy
from pxrs.stores.mysql.change_listener import ChangeListener
from pxrs.stores.mysql.queues.taking import Sight, Take
from pxrs.stores.rows import READY
from pxrs.testing.conformance.queue_tools import Worker
from pxrs.testing.conformance.tools import LONG, put
from support.child import PATIENCE, exit_code
from support.sql import SqlPlace

pytestmark = pytest.mark.engine("mariadb")


def test_no_trouble_makes_anybody_deaf(place: SqlPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections of the process were in use for long, which is no error of the driver's."""
    here, there = place.open(), place.open()
    failed = threading.Event()

    def no_room(self: ChangeListener) -> Any:
        failed.set()
        raise StoreBusy("all connections of this process are in use")

    watch, items = here.coord.watch("k"), here.queues.watch("q")
    monkeypatch.setattr(ChangeListener, "_look_at_queues", no_room)
    assert failed.wait(PATIENCE)
    monkeypatch.undo()
    # Whoever waits looks once: anything may have happened.
    assert watch.wait(PATIENCE)
    assert items.wait(PATIENCE)
    put(there.coord, "k")
    Worker(there).put(b"1")
    assert watch.wait(PATIENCE)
    assert items.wait(PATIENCE)


def test_a_forked_child_neither_waits_nor_hangs(place: SqlPlace) -> None:
    stores = place.open()
    watch = stores.queues.watch("q")
    with stores.coord.changes._lock:
        pid = os.fork()
        if pid == 0:
            # The first may be from before.
            woken = watch.wait(None) and watch.wait(None) and watch.wait(None)
            os._exit(7 if woken else 1)
    assert exit_code(pid) == 7


def test_what_fell_due_and_is_locked_by_another_take_is_asked_for_again(
    place: SqlPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was delayed when this take looked, then somebody showed it, then somebody locked it."""
    stores = place.open()
    worker = Worker(stores)
    (number,) = worker.put(b"1", delay=LONG)
    place.query("UPDATE pxrs_queue_items SET due_ms = 1")
    look = Take._look
    with place.engine.connect() as other:

        def overtaken(*arguments: Any) -> Sight:
            sight = look(*arguments)
            place.query(f"UPDATE pxrs_queue_items SET state = {READY}")
            other.exec_driver_sql(
                f"SELECT 1 FROM pxrs_queue_items WHERE item_id = {number} FOR UPDATE"
            )
            return sight

        monkeypatch.setattr(Take, "_look", overtaken)
        assert worker.due() is not None
        other.rollback()
    monkeypatch.undo()
    assert worker.take_one().body == b"1"
