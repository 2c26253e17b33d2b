"""Ctrl-C, forks and closing in the middle of things: the writer is free afterwards."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pxrs.codec.batches import encode
from pxrs.errors import Closed, ConfigError, PxrsError, StoreError
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Append, LogPartition, Put
from support.child import Child
from support.files import open_files
from support.inside import say

pytestmark = pytest.mark.engine("sqlite")

_WATCHED = tuple(f"stores/sqlite/{name}.py" for name in ("database", "writer_lock", "atomic"))


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[SqliteStores]:
    stores = SqliteStores(str(tmp_path / "s.db"), busy_timeout=0.2)
    yield stores
    stores.close()


class _Interrupter:
    """Raises KeyboardInterrupt at the nth place where Python would deliver a signal.

    That is where a function begins and where a call returns.
    """

    def __init__(self, place: int) -> None:
        self._left = place
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not frame.f_code.co_filename.endswith(_WATCHED) or event not in ("call", "c_return"):
            return
        # The one place that can't be closed: a lock does not say who took it.
        if event == "c_return" and arg.__name__ == "acquire":
            return
        self._left -= 1
        if self._left == 0:
            self.where = f"{event} {arg} in {frame.f_code.co_name}:{frame.f_lineno}"
            sys.setprofile(None)
            raise KeyboardInterrupt


def _commit(stores: SqliteStores) -> None:
    stores.coord.commit((), (Put("k", b""),))


def _transact(stores: SqliteStores) -> None:
    with stores.atomic() as tx:
        tx.write(Put("k", b""))


@pytest.mark.parametrize("write", [_commit, _transact])
def test_an_interrupt_anywhere_leaves_the_writer_free(
    stores: SqliteStores, tmp_path: Path, write: Callable[[SqliteStores], None]
) -> None:
    other = SqliteStores(str(tmp_path / "s.db"), busy_timeout=0.2)
    for place in range(1, 1000):
        interrupter = _Interrupter(place)
        sys.setprofile(interrupter)
        try:
            write(stores)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        try:
            other.coord.commit((), (Put("other", b""),))
            stores.coord.commit((), (Put("mine", b""),))
        except PxrsError as error:
            pytest.fail(f"after an interrupt at {interrupter.where}: {error!r}")
        if not interrupter.where:
            break
    assert place > 20
    other.close()


def test_a_signal_during_a_commit_leaves_the_writer_free(
    stores: SqliteStores,
) -> None:
    """COMMIT waits for the disk: that is where a real Ctrl-C lands."""
    started = threading.Event()
    old = signal.signal(signal.SIGUSR1, _interrupt)

    def interrupt_later() -> None:
        started.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    rest = threading.Thread(target=interrupt_later)
    rest.start()
    stores.log.create("t", 1)
    batch = encode([(None, bytes(2**20), [], 0)])
    with pytest.raises(KeyboardInterrupt):
        while True:
            stores.log.append([Append(LogPartition("t", 0), batch)])
            started.set()
    rest.join()
    signal.signal(signal.SIGUSR1, old)
    stores.coord.commit((), (Put("k", b""),))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_child_forked_inside_a_transaction_can_neither_commit_nor_undo_it(
    stores: SqliteStores, tmp_path: Path
) -> None:
    for fail in (False, True):
        with stores.atomic() as tx:
            tx.write(Put("parent", b""))
            pid = os.fork()
            if pid == 0:
                _leave_in_child(tx, fail)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert [record.key for record in stores.coord.list("")] == ["parent"]
    mine = sqlite3.connect(tmp_path / "s.db")
    assert mine.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    mine.close()


def _leave_in_child(tx: Any, fail: bool) -> None:
    code = 1
    try:
        if fail:
            tx.__exit__(ValueError, ValueError(), None)
            code = 7
        else:
            tx.write(Put("child", b""))
            tx.__exit__(None, None, None)
    except Closed:
        code = 7
    finally:
        os._exit(code)


def test_closing_twice_and_at_once(tmp_path: Path) -> None:
    stores = SqliteStores(str(tmp_path / "s.db"))
    failures: list[BaseException] = []
    barrier = threading.Barrier(8)

    def close() -> None:
        barrier.wait()
        try:
            stores.close()
        except PxrsError as error:
            failures.append(error)

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores.close()
    assert failures == []


@pytest.mark.long
def test_closing_does_not_wait_for_a_frozen_process(tmp_path: Path) -> None:
    stores = SqliteStores(str(tmp_path / "s.db"), busy_timeout=0.2)
    with Child(hold_the_writer, str(tmp_path / "s.db")) as child:
        child.read()
        child.signal(signal.SIGSTOP)
        stores.close()


def hold_the_writer(path: str) -> None:
    with SqliteStores(path).atomic():
        say("inside")
        signal.pause()


def test_a_reader_that_finishes_while_the_store_closes_leaves_nothing_open(
    tmp_path: Path,
) -> None:
    stores = SqliteStores(str(tmp_path / "s.db"))
    with stores.database.reading():
        stores.close()
    assert not (tmp_path / "s.db-wal").exists()
    with pytest.raises(Closed):
        stores.coord.get("k")


def test_a_store_that_fails_to_open_keeps_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    SqliteStores(str(path)).close()
    mine = sqlite3.connect(path, isolation_level=None)
    mine.execute("UPDATE pxrs_meta SET value = 99 WHERE name = 'schema'")
    mine.close()
    before = len(open_files(tmp_path))
    for _ in range(5):
        with pytest.raises(StoreError):
            SqliteStores(str(path))
    assert len(open_files(tmp_path)) == before


@pytest.mark.parametrize("busy_timeout", [-1.0, float("inf"), float("nan"), 1e10])
def test_a_busy_timeout_that_cannot_be_waited(tmp_path: Path, busy_timeout: float) -> None:
    with pytest.raises(ConfigError):
        SqliteStores(str(tmp_path / "s.db"), busy_timeout=busy_timeout)
