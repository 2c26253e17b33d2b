"""Wake-ups: none is lost, and nothing that the listening thread meets makes it deaf."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pxrs.errors import Closed
from pxrs.stores.sqlite import change_listener as listener_module
from pxrs.stores.sqlite import posix
from pxrs.stores.sqlite.change_counters import Control
from pxrs.stores.sqlite.change_listener import SlotWatch
from pxrs.stores.sqlite.sessions import SessionFiles
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Put
from support.child import PATIENCE, Child, exit_code
from support.inside import say, wait_for_parent

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[SqliteStores]:
    stores = SqliteStores(str(tmp_path / "s.db"))
    yield stores
    stores.close()


def hold_session(path: str) -> None:
    coord = SqliteStores(path).coord
    session = coord.session(3600.0)
    coord.commit((), (Put("members/child", b"", session.id),))
    say(session.id)
    wait_for_parent()


def _put(stores: SqliteStores, key: str) -> None:
    stores.coord.commit((), (Put(key, b""),))


def test_a_change_at_the_very_end_of_a_wait_is_not_lost(
    stores: SqliteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the waiting has timed out and before the watch has noted what it saw."""
    watch = stores.coord.watch("k")
    look = Control.counters
    looks: list[int] = []

    def look_slowly(self: Control, slots: Any) -> tuple[int, ...]:
        if threading.current_thread() is threading.main_thread():
            looks.append(1)
            if len(looks) == at:
                monkeypatch.undo()
                _put(stores, "k")
        return look(self, slots)

    for at in (1, 2, 3, 4):
        looks.clear()
        monkeypatch.setattr(Control, "counters", look_slowly)
        told = watch.wait(0.0)
        monkeypatch.undo()
        if len(looks) < at:
            break
        assert told or watch.wait(0.0), f"lost at look {at}"
        while watch.wait(0.0):
            pass
    assert at > 1
    watch.close()


def test_two_threads_that_wait_on_one_watch_are_both_woken(stores: SqliteStores) -> None:
    watch = stores.coord.watch("k")
    woken: list[bool] = []
    threads = [
        threading.Thread(target=lambda: woken.append(watch.wait(PATIENCE))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while len(woken) < 2:
        _put(stores, "k")
    for thread in threads:
        thread.join()
    assert woken == [True, True]
    watch.close()


def test_closing_wakes_whoever_waits_for_ever(stores: SqliteStores, tmp_path: Path) -> None:
    other = SqliteStores(str(tmp_path / "s.db"))
    watch = other.coord.watch("k")
    woken: list[bool] = []
    started = threading.Event()

    def wait() -> None:
        started.set()
        woken.append(watch.wait(None))

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    other.close()
    thread.join(PATIENCE)
    assert woken == [True]
    assert watch.wait(None)


def test_a_watch_can_be_waited_on_while_its_store_closes(tmp_path: Path) -> None:
    """The page that the watch looks at is still there."""
    stores = SqliteStores(str(tmp_path / "s.db"))
    watch = stores.coord.watch("k")
    stores.database.control.close = lambda: None  # type: ignore[method-assign]
    stores.close()
    stores.database.control.__class__.close(stores.database.control)
    watch._closed = False
    assert watch.wait(0.0) in (True, False)


def test_nothing_listens_on_a_store_that_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = SqliteStores(str(tmp_path / "s.db"))
    refused: list[Closed] = []

    def watch_late() -> None:
        try:
            stores.coord.watch("k")
        except Closed as error:
            refused.append(error)

    monkeypatch.setattr(stores.coord, "close", watch_late)
    stores.close()
    assert len(refused) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "pxrs-changes"]


def _break_folder(folder: Path) -> None:
    (folder / "sessions").rename(folder / "elsewhere")


def _name_oddly(folder: Path) -> None:
    Path(os.fsdecode(bytes(folder / "sessions") + b"/\xff\xfe")).write_bytes(b"x")


@pytest.mark.parametrize("trouble", [_break_folder, _name_oddly])
def test_trouble_in_the_folder_makes_nobody_deaf(
    stores: SqliteStores, tmp_path: Path, trouble: Callable[[Path], None]
) -> None:
    watch = stores.coord.watch("k")
    trouble(tmp_path / "s.db-pxrs")
    for _ in range(3):
        watch.wait(2 * listener_module.TICK)
    assert [thread for thread in threading.enumerate() if thread.name == "pxrs-changes"]
    other = SqliteStores(str(tmp_path / "s.db"))
    _put(other, "k")
    assert watch.wait(PATIENCE)
    other.close()


def _let_it_be_quiet(watch: SlotWatch) -> None:
    """Until nothing is left that would wake it by itself, as the first looks at the file do."""
    while watch.wait(6 * listener_module.TICK):
        pass


@pytest.mark.long
@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), ValueError("what nobody thought of")]
)
def test_no_error_makes_anybody_deaf(
    stores: SqliteStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    watch = stores.coord.watch("members/")
    failed = threading.Event()

    def no_more(self: SessionFiles, *_: object) -> Any:
        failed.set()
        raise error

    monkeypatch.setattr(SessionFiles, "names", no_more)
    assert failed.wait(PATIENCE)
    monkeypatch.undo()
    with Child(hold_session, str(tmp_path / "s.db")) as child:
        child.read()
        child.kill()
        while stores.coord.list("members/"):
            assert watch.wait(PATIENCE)


@pytest.mark.long
def test_a_death_is_noticed_when_events_were_lost(
    stores: SqliteStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's queue ran over: it says so, once, and has forgotten the rest."""
    drain = posix.drain
    overflow = struct.pack("iIII", -1, 0x4000, 0, 0)
    with Child(hold_session, str(tmp_path / "s.db")) as child:
        child.read()
        watch = stores.coord.watch("members/")
        _let_it_be_quiet(watch)
        monkeypatch.setattr(listener_module, "drain", lambda fd: overflow if drain(fd) else b"")
        child.kill()
        assert watch.wait(30.0)
    assert stores.coord.get("members/child") is None


@pytest.mark.long
def test_a_lock_that_is_released_long_after_the_event_is_noticed(
    stores: SqliteStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of the closing before it drops the lock, and may be held up between."""
    with Child(hold_session, str(tmp_path / "s.db")) as child:
        name = child.read()
        watch = stores.coord.watch("members/")
        _let_it_be_quiet(watch)
        alive = SessionFiles.alive
        left = [2]

        def still_locked(self: SessionFiles, asked: str) -> bool:
            if asked == name and left[0]:
                left[0] -= 1
                return True
            return alive(self, asked)

        monkeypatch.setattr(SessionFiles, "alive", still_locked)
        child.kill()
        assert watch.wait(30.0)
        assert left == [0]


def test_a_forked_child_neither_waits_nor_hangs(stores: SqliteStores) -> None:
    watch = stores.coord.watch("k")
    with stores._changes._lock:
        pid = os.fork()
        if pid == 0:
            woken = watch.wait(None)
            stores.close()
            os._exit(7 if woken else 1)
    assert exit_code(pid) == 7


def test_what_nobody_watches_wakes_no_process(stores: SqliteStores, tmp_path: Path) -> None:
    inotify = posix.open_inotify()
    if inotify is None:
        pytest.skip("no inotify here")
    try:
        posix.add_watch(inotify, str(tmp_path / "s.db-pxrs" / "bell"), posix.IN_MODIFY)
        _put(stores, "watched")
        with closing(SqliteStores(str(tmp_path / "s.db"))) as other:
            watch = other.coord.watch("watched")
            posix.drain(inotify)
            _put(stores, "alone")
            assert not posix.drain(inotify)
            _put(stores, "watched")
            assert posix.drain(inotify)
            assert watch.wait(PATIENCE)
    finally:
        os.close(inotify)
