"""The threads that listen and tell, when it goes wrong."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pxrs.errors import StoreUnavailable
from pxrs.stores.postgres import change_listener as listener_module
from pxrs.stores.postgres.database import Database
from pxrs.stores.postgres.looks import Looks
from pxrs.stores.postgres.notifier import channel_of
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.stores.wakeups import KEY, Wanted
from pxrs.types import Put
from support.child import PATIENCE

pytestmark = pytest.mark.engine("postgres")


def test_who_opens_a_watch_while_the_server_is_away_does_not_make_it_knock_without_a_pause(
    stores: PostgresStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: queue.SimpleQueue[bool] = queue.SimpleQueue()

    class Select:
        """Says how each pause between two attempts has ended."""

        def __getattr__(self, name: str) -> Any:
            return getattr(select, name)

        def select(self, *arguments: Any) -> Any:
            ready = select.select(*arguments)
            pauses.put(bool(ready[0]))
            return ready

    def away(self: Database) -> Any:
        raise StoreUnavailable("it is away")

    monkeypatch.setattr(listener_module, "select", Select())
    monkeypatch.setattr(Database, "connect", away)
    watch = stores.coord.watch("k")
    interrupted = [pauses.get(timeout=PATIENCE) for _ in range(3)]
    assert interrupted.count(True) <= 1
    monkeypatch.undo()
    watch.close()


def test_no_error_makes_anybody_mute(
    stores: PostgresStores, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(self: Database, *arguments: object) -> Any:
        failed.set()
        raise ValueError("what nobody thought of")

    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute(f"LISTEN {channel_of('pxrs')}".encode())
        with monkeypatch.context() as trouble:
            trouble.setattr(Database, "write", fail)
            stores._changes.ring(KEY, ["lost"])
            assert failed.wait(PATIENCE)
        stores._changes.ring(KEY, ["k"])
        heard = [each.payload for each in other.notifies(timeout=PATIENCE, stop_after=1)]
    assert heard == ["kk"]


def test_what_is_told_while_the_listener_asks_something_is_heard(
    open_stores: Callable[[], PostgresStores], postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with the answer, and the socket has nothing more to tell."""
    here, there = open_stores(), open_stores()
    looking, told, done = threading.Event(), threading.Event(), threading.Event()
    look = Looks.look

    def slow(self: Looks, read: Any, *arguments: Any) -> Any:
        if looking.is_set():
            # No other look helps.
            assert done.wait(2 * PATIENCE)
        seen = look(self, read, *arguments)
        looking.set()
        assert told.wait(PATIENCE)
        read("SELECT 1", ())
        return seen

    watch = there.coord.watch("k")
    assert watch.wait(PATIENCE)
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute(f"LISTEN {channel_of('pxrs')}".encode())
        monkeypatch.setattr(Looks, "look", slow)
        assert looking.wait(PATIENCE)
        watch.wait(0)
        here.coord.commit((), (Put("k", b""),))
        assert [each.payload for each in other.notifies(timeout=PATIENCE, stop_after=1)] == ["kk"]
    told.set()
    try:
        assert watch.wait(PATIENCE)
    finally:
        done.set()
    watch.close()


def test_a_watch_beside_a_close_writes_into_no_other_file(
    stores: PostgresStores, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files opened after the close get the numbers of the pipe that woke the thread."""
    paths = [tmp_path / f"foreign {number}" for number in range(64)]
    with ExitStack() as opened:

        def closed_meanwhile(kind: str, names: Iterable[str]) -> Wanted:
            stores.close()
            for path in paths:
                opened.enter_context(path.open("wb"))
            return Wanted(kind, names)

        monkeypatch.setattr(listener_module, "Wanted", closed_meanwhile)
        stores.coord.watch("k").close()
    assert {path.read_bytes() for path in paths} == {b""}
