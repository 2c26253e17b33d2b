"""A session's file under threads, odd names and a machine that runs out of things."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pxrs.errors import InsideTransaction, SessionLost, StoreFull, StoreUnavailable
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.clock import VirtualClock
from pxrs.types import Put, Versioned
from support.child import Child
from support.files import open_files
from support.inside import say, wait_for_parent

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[SqliteStores]:
    stores = SqliteStores(str(tmp_path / "s.db"), busy_timeout=20.0)
    yield stores
    stores.close()


def test_closing_while_another_thread_renews_never_writes_to_a_strangers_file(
    stores: SqliteStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking and writing, the number of the closed file may have become another's."""
    session = stores.coord.session(3600.0)
    about_to_write, closer = threading.Event(), threading.Thread(target=session.close)
    victim = tmp_path / "victim"
    pwrite = os.pwrite

    def slow_pwrite(fd: int, data: bytes, offset: int) -> int:
        if not about_to_write.is_set():
            about_to_write.set()
            closer.start()
            # Either the closing waits for this write, or it is over and its number is free.
            closer.join(0.2)
            victim.write_bytes(b"SQLite format 3\0")
            opened.append(os.open(victim, os.O_RDWR))
        return pwrite(fd, data, offset)

    opened: list[int] = []
    monkeypatch.setattr(os, "pwrite", slow_pwrite)
    session.renew()
    monkeypatch.undo()
    closer.join()
    os.close(opened[0])
    assert victim.read_bytes() == b"SQLite format 3\0"


def test_two_threads_that_renew_never_believe_more_than_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later renewal writes first and believes last: the file would hold the earlier one."""
    clock = VirtualClock()
    stores = SqliteStores(str(tmp_path / "s.db"), clock=clock)
    session = stores.coord.session(10.0)
    stamps: list[float] = []
    wrote, believed = threading.Event(), threading.Event()
    second = threading.Thread(target=session.renew)
    pwrite = os.pwrite

    def overtaken(fd: int, data: bytes, offset: int) -> int:
        if threading.current_thread() is not second:
            clock.advance(2.0)
            second.start()
            wrote.wait(0.2)
        stamps.append(struct.unpack("=d", data)[0])
        pwrite(fd, data, offset)
        if threading.current_thread() is second:
            wrote.set()
            believed.wait(0.2)
        return len(data)

    monkeypatch.setattr(os, "pwrite", overtaken)
    session.renew()
    believed.set()
    second.join()
    monkeypatch.undo()
    assert clock.monotonic() + session.remaining() <= stamps[-1]
    stores.close()


@pytest.mark.parametrize("name", ["../control", "../../s.db", "", ".", "no such"])
def test_a_name_that_is_no_sessions_touches_no_file(
    stores: SqliteStores, tmp_path: Path, name: str
) -> None:
    with pytest.raises(SessionLost):
        stores.coord.commit((), (Put("k", b"", name),))
    assert (tmp_path / "s.db").exists()
    assert (tmp_path / "s.db-pxrs" / "control").exists()


def test_an_observer_that_can_open_no_file_says_so(
    stores: SqliteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = stores.coord.session(3600.0)
    stores.coord.commit((), (Put("k", b"", session.id),))

    def no_more(*args: object, **_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", no_more)
    with pytest.raises(StoreUnavailable, match="Too many open files"):
        stores.coord.get("k")
    with pytest.raises(StoreUnavailable, match="Too many open files"):
        stores.coord.session(1.0)
    monkeypatch.undo()
    assert stores.coord.get("k") is not None


def test_a_session_on_a_full_disk_leaves_nothing(
    stores: SqliteStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    stores.coord.list("")
    before = len(open_files(tmp_path))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreFull):
        stores.coord.session(1.0)
    monkeypatch.undo()
    assert os.listdir(tmp_path / "s.db-pxrs" / "sessions") == []
    assert len(open_files(tmp_path)) == before


def test_a_session_dropped_without_closing_gives_its_file_back(tmp_path: Path) -> None:
    before = len(open_files(tmp_path))
    stores = SqliteStores(str(tmp_path / "s.db"))
    for _ in range(20):
        stores.coord.session(3600.0)
    stores.close()
    assert os.listdir(tmp_path / "s.db-pxrs" / "sessions") == []
    assert len(open_files(tmp_path)) <= before + 1


def hold_the_writer(path: str) -> None:
    stores = SqliteStores(path)
    with stores.atomic():
        say("inside")
        wait_for_parent()


@pytest.mark.long
def test_sessions_come_and_go_while_somebody_else_holds_the_writer(
    stores: SqliteStores, tmp_path: Path
) -> None:
    """With 20 s to wait for the writer: who waited for it would be seen here."""
    dead = stores.coord.session(3600.0)
    leaving = stores.coord.session(3600.0)
    stores.coord.commit((), (Put("a", b"", dead.id), Put("b", b"", leaving.id)))
    with Child(hold_the_writer, str(tmp_path / "s.db")) as child:
        child.read()
        os.unlink(tmp_path / "s.db-pxrs" / "sessions" / dead.id)
        done = threading.Event()

        def come_and_go() -> None:
            stores.coord.session(3600.0)
            leaving.close()
            done.set()

        thread = threading.Thread(target=come_and_go)
        thread.start()
        in_time = done.wait(30.0)
        child.tell()
        thread.join()
        assert in_time
    assert stores.coord.list("") == []


def test_a_session_can_be_opened_and_closed_inside_a_transaction(stores: SqliteStores) -> None:
    session = stores.coord.session(3600.0)
    stores.coord.commit((), (Put("a", b"", session.id),))
    with stores.atomic():
        session.close()
        stores.coord.session(3600.0)
        with pytest.raises(InsideTransaction):
            stores.coord.commit((), (Put("a", b""),))
    assert stores.coord.get("a") is None


def test_a_session_closed_after_its_store_is_over(stores: SqliteStores, tmp_path: Path) -> None:
    other = SqliteStores(str(tmp_path / "s.db"))
    session = other.coord.session(3600.0)
    other.close()
    session.close()
    assert session.remaining() == 0
    with pytest.raises(SessionLost):
        session.renew()


def test_a_record_that_changed_hands_is_never_absent(
    stores: SqliteStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader saw the row of the old session and judged it after the new one had replaced it."""
    old, new = stores.coord.session(3600.0), stores.coord.session(3600.0)
    stores.coord.commit((), (Put("k", b"old", old.id),))
    other = SqliteStores(str(tmp_path / "s.db"))
    alive = other.coord._sessions.alive
    judged: list[str] = []

    def judge_late(name: str) -> bool:
        if not judged:
            stores.coord.commit((), (Put("k", b"new", new.id),))
            old.close()
        judged.append(name)
        return alive(name)

    reads: list[Callable[[], Versioned | None]] = [
        lambda: other.coord.get("k"),
        lambda: next(iter(other.coord.list("k")), None),
    ]
    for read in reads:
        monkeypatch.setattr(other.coord._sessions, "alive", judge_late)
        record = read()
        assert record is not None
        assert record.value == b"new"
        monkeypatch.undo()
        judged.clear()
        old = stores.coord.session(3600.0)
        stores.coord.commit((), (Put("k", b"old", old.id),))
    other.close()


def test_a_lent_session_that_another_process_ended_is_over_at_the_next_look(
    stores: SqliteStores, tmp_path: Path
) -> None:
    """Its file is kept open between looks; nobody may rely on it once its name is gone."""
    lent = stores.coord.lend(3600.0)
    assert stores.coord.is_alive(lent.id)
    before = open_files(tmp_path)
    assert stores.coord.is_alive(lent.id)
    assert open_files(tmp_path) == before
    assert any(lent.id in path for path in before)
    os.unlink(tmp_path / "s.db-pxrs" / "sessions" / lent.id)
    assert not stores.coord.is_alive(lent.id)
    assert not any(lent.id in path for path in open_files(tmp_path))


def test_a_lent_session_expires_though_its_file_is_kept_open(tmp_path: Path) -> None:
    clock = VirtualClock()
    stores = SqliteStores(str(tmp_path / "s.db"), busy_timeout=20.0, clock=clock)
    lent = stores.coord.lend(10.0)
    clock.advance(9.0)
    assert stores.coord.is_alive(lent.id)
    lent.renew()
    clock.advance(9.0)
    assert stores.coord.is_alive(lent.id)
    clock.advance(1.0)
    assert not stores.coord.is_alive(lent.id)
    stores.close()
    assert not [path for path in open_files(tmp_path) if "/sessions/" in path]


def test_few_files_of_lent_sessions_are_kept_open(stores: SqliteStores, tmp_path: Path) -> None:
    lent = [stores.coord.lend(3600.0) for _ in range(150)]
    assert all(stores.coord.is_alive(session.id) for session in lent)
    assert len([path for path in open_files(tmp_path) if "/lent-" in path]) == 100
