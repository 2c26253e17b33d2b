"""Sessions on one host: who died is noticed at once, who froze when the TTL is over."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pxrs.errors import Closed, SessionLost
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.clock import VirtualClock
from pxrs.types import Put
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent

pytestmark = pytest.mark.engine("sqlite")

LONG = 3600.0


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[SqliteStores]:
    stores = SqliteStores(str(tmp_path / "s.db"))
    yield stores
    stores.close()


def hold_session(path: str, ttl: float) -> None:
    """Open a session, write a record with it and keep it, renewing never."""
    coord = SqliteStores(path).coord
    session = coord.session(ttl)
    coord.commit((), (Put("members/child", b"", session.id),))
    say(session.id)
    wait_for_parent()
    try:
        session.renew()
    except SessionLost as error:
        say(str(error))


def _wait_until_gone(stores: SqliteStores, key: str) -> None:
    watch = stores.coord.watch("members/")
    while stores.coord.get(key) is not None:
        assert watch.wait(PATIENCE)
    watch.close()


@pytest.mark.parametrize("use_inotify", [True, False], ids=["inotify", "polling"])
def test_a_killed_process_is_noticed_long_before_its_ttl(tmp_path: Path, use_inotify: bool) -> None:
    stores = SqliteStores(str(tmp_path / "s.db"), use_inotify=use_inotify)
    with Child(hold_session, str(tmp_path / "s.db"), LONG) as child:
        child.read()
        assert stores.coord.get("members/child") is not None
        watch = stores.coord.watch("members/")
        child.kill()
        assert watch.wait(PATIENCE)
        assert stores.coord.get("members/child") is None
    stores.close()


@pytest.mark.long
def test_a_frozen_process_loses_its_session_and_is_told(
    stores: SqliteStores, tmp_path: Path
) -> None:
    with Child(hold_session, str(tmp_path / "s.db"), 0.5) as child:
        child.read()
        child.signal(signal.SIGSTOP)
        _wait_until_gone(stores, "members/child")
        child.signal(signal.SIGCONT)
        child.tell()
        assert "expired" in child.read()


def test_a_long_transaction_of_somebody_else_expires_nobody(
    stores: SqliteStores, tmp_path: Path
) -> None:
    session = stores.coord.session(0.3)
    stores.coord.commit((), (Put("members/me", b"", session.id),))
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    watch = stores.coord.watch("never/")
    for _ in range(6):
        watch.wait(0.1)
        session.renew()
    assert stores.coord.get("members/me") is not None
    other.execute("ROLLBACK")
    other.close()


def test_a_renewal_that_comes_too_late_ends_the_session(tmp_path: Path) -> None:
    clock = VirtualClock()
    stores = SqliteStores(str(tmp_path / "s.db"), clock=clock)
    session = stores.coord.session(10.0)
    clock.advance(9.9)
    session.renew()
    assert session.remaining() == pytest.approx(10.0)
    clock.advance(10.0)
    assert session.remaining() == 0
    with pytest.raises(SessionLost):
        session.renew()
    stores.close()


def test_a_holder_frozen_between_its_check_and_its_stamp_has_not_renewed(tmp_path: Path) -> None:
    """The stamp is written after the deadline: an observer may already have judged."""
    clock = _ClockThatJumps()
    stores = SqliteStores(str(tmp_path / "s.db"), clock=clock)
    session = stores.coord.session(10.0)
    stores.coord.commit((), (Put("members/me", b"", session.id),))
    clock.jump_after_next_look = 11.0
    with pytest.raises(SessionLost):
        session.renew()
    assert stores.coord.get("members/me") is None
    stores.close()


class _ClockThatJumps(VirtualClock):
    """Jumps ahead right after it was looked at, as when the process is frozen there."""

    jump_after_next_look = 0.0

    def monotonic(self) -> float:
        now = super().monotonic()
        jump, self.jump_after_next_look = self.jump_after_next_look, 0.0
        if jump:
            self.advance(jump)
        return now


def test_a_verdict_is_final_also_for_a_holder_that_sees_it_late(tmp_path: Path) -> None:
    slow, fast = VirtualClock(), VirtualClock()
    holder = SqliteStores(str(tmp_path / "s.db"), clock=slow)
    observer = SqliteStores(str(tmp_path / "s.db"), clock=fast)
    session = holder.coord.session(10.0)
    holder.coord.commit((), (Put("members/me", b"", session.id),))
    fast.advance(10.0)
    assert observer.coord.get("members/me") is None
    assert holder.coord.get("members/me") is None
    with pytest.raises(SessionLost):
        session.renew()
    with pytest.raises(SessionLost):
        holder.coord.commit((), (Put("members/me", b"", session.id),))
    for stores in (holder, observer):
        stores.close()


def test_a_forked_child_neither_keeps_nor_ends_its_parents_session(stores: SqliteStores) -> None:
    session = stores.coord.session(LONG)
    stores.coord.commit((), (Put("members/me", b"", session.id),))
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go_read, 1)
        try:
            stores.coord.get("members/me")
        except Closed:
            os._exit(7)
        os._exit(1)
    assert stores.coord.get("members/me") is not None
    session.close()
    assert stores.coord.get("members/me") is None
    os.write(go_write, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.long
def test_rows_of_ended_sessions_are_swept(stores: SqliteStores, tmp_path: Path) -> None:
    with Child(hold_session, str(tmp_path / "s.db"), LONG) as child:
        child.read()
        child.kill()
    stores.coord.session(LONG)
    with closing(sqlite3.connect(tmp_path / "s.db")) as mine:
        assert mine.execute("SELECT count(*) FROM pxrs_coord").fetchone() == (0,)


def test_sessions_can_be_renewed_while_another_thread_commits(stores: SqliteStores) -> None:
    session = stores.coord.session(LONG)
    stop = threading.Event()

    def commit() -> None:
        while not stop.is_set():
            stores.coord.commit((), (Put("k", b""),))

    thread = threading.Thread(target=commit)
    thread.start()
    for _ in range(200):
        session.renew()
    stop.set()
    thread.join()
