"""One writer per file: they queue, nobody waits for itself, and who holds it is named."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from pxrs.clock import SYSTEM_CLOCK, SystemClock
from pxrs.codec.batches import encode
from pxrs.errors import InsideTransaction, NotAtomic, StoreBusy
from pxrs.stores.connections import Lent
from pxrs.stores.sqlite.change_counters import Control
from pxrs.stores.sqlite.database import WAL_LIMIT
from pxrs.stores.sqlite.posix import try_lock
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.stores.sqlite.writer_lock import WriterLock
from pxrs.types import Append, Check, LogPartition, Put
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[SqliteStores]:
    stores = SqliteStores(str(tmp_path / "s.db"), busy_timeout=0.2)
    yield stores
    stores.close()


def count_up(path: str, times: int) -> None:
    """Raise a counter by compare-and-set, as often as told."""
    coord = SqliteStores(path).coord
    say("ready")
    wait_for_parent()
    done = 0
    while done < times:
        record = coord.get("counter")
        version, value = (record.version, int(record.value)) if record else (0, 0)
        outcome = coord.commit([Check("counter", version)], [Put("counter", b"%d" % (value + 1))])
        done += type(outcome).__name__ == "Committed"
    say("done")


def hold_the_writer(path: str) -> None:
    """Freeze inside a write transaction."""
    stores = SqliteStores(path)
    with stores.atomic():
        say("inside")
        wait_for_parent()


@pytest.mark.long
def test_processes_that_count_together_lose_nothing(stores: SqliteStores, tmp_path: Path) -> None:
    children = [Child(count_up, str(tmp_path / "s.db"), 100) for _ in range(4)]
    for child in children:
        child.read()
    for child in children:
        child.tell()
    for child in children:
        assert child.read() == "done"
        child.join()
    record = stores.coord.get("counter")
    assert record is not None
    assert record.value == b"400"


@pytest.mark.long
def test_a_busy_store_names_who_holds_it(stores: SqliteStores, tmp_path: Path) -> None:
    with Child(hold_the_writer, str(tmp_path / "s.db")) as child:
        child.read()
        child.signal(signal.SIGSTOP)
        with pytest.raises(StoreBusy, match=f"pid {child.pid} .*python") as caught:
            stores.coord.commit((), (Put("k", b""),))
        assert caught.value.retryable
        child.signal(signal.SIGCONT)
        child.tell()
        child.join()
    stores.coord.commit((), (Put("k", b""),))


def write_once(path: str) -> None:
    stores = SqliteStores(path, busy_timeout=60.0)
    say("ready")
    wait_for_parent()
    stores.coord.commit((), (Put("child", b""),))
    say("done")


def await_flock(path: Path, pid: int) -> None:
    """Wait until the process has the lock. To try it meanwhile would be in the way."""
    deadline = time.monotonic() + PATIENCE
    while (str(pid), str(path.stat().st_ino)) not in _flocks():
        assert time.monotonic() < deadline, f"process {pid} does not get {path.name}"
        threading.Event().wait(0.001)


def _flocks() -> set[tuple[str, str]]:
    """The process and the file's number of each `flock` that is held, as Linux shows them."""
    lines = map(str.split, Path("/proc/locks").read_text().splitlines())
    return {(line[4], line[5].rpartition(":")[2]) for line in lines if line[1] == "FLOCK"}


@pytest.mark.long
def test_a_process_frozen_in_the_queue_stops_nobody(tmp_path: Path) -> None:
    """It has the first of the two locks and waits for the second: it writes nothing."""
    stores = SqliteStores(str(tmp_path / "s.db"), busy_timeout=10.0)
    queue = tmp_path / "s.db-pxrs" / "queue.lock"
    with Child(write_once, str(tmp_path / "s.db")) as child:
        assert child.read() == "ready"
        with stores.atomic() as tx:
            tx.write(Put("first", b""))
            child.tell()
            await_flock(queue, child.pid)
            child.freeze()
        stores.coord.commit((), (Put("second", b""),))
        began = time.monotonic()
        for _ in range(20):
            stores.coord.commit((), (Put("third", b""),))
        # Not a second for each: it is known by now that the queue stands still.
        assert time.monotonic() - began < 10
        child.signal(signal.SIGCONT)
        assert child.read() == "done"
    keys = [record.key for record in stores.coord.list("")]
    assert keys == ["child", "first", "second", "third"]
    stores.close()


@pytest.mark.long
def test_a_killed_holder_frees_the_writer(stores: SqliteStores, tmp_path: Path) -> None:
    with Child(hold_the_writer, str(tmp_path / "s.db")) as child:
        child.read()
        child.kill()
    stores.coord.commit((), (Put("k", b""),))


def test_a_program_that_writes_past_pxrs_is_a_busy_store_too(
    stores: SqliteStores, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="does not write through pxrs"):
        stores.coord.commit((), (Put("k", b""),))
    assert stores.coord.get("k") is None
    other.execute("ROLLBACK")
    other.close()
    stores.coord.commit((), (Put("k", b""),))


def test_a_thread_of_the_same_process_is_a_busy_store_too(stores: SqliteStores) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with stores.atomic():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    with pytest.raises(StoreBusy, match="another thread"):
        stores.coord.commit((), (Put("k", b""),))
    leave.set()
    thread.join()


def test_nobody_waits_for_itself(stores: SqliteStores) -> None:
    with stores.atomic() as tx:
        tx.write(Put("k", b"1"))
        with pytest.raises(InsideTransaction):
            stores.coord.commit((), (Put("k", b"2"),))
    record = stores.coord.get("k")
    assert record is not None
    assert record.value == b"1"


@pytest.mark.long
def test_writers_wait_their_turn_and_none_starves(tmp_path: Path) -> None:
    """Nobody's share is measured in time: all have to finish, though all write without pause."""
    children = [Child(count_alone, str(tmp_path / "s.db"), 150) for _ in range(4)]
    for child in children:
        child.read()
    for child in children:
        child.tell()
    for child in children:
        assert child.read() == "done"
        child.join()


def count_alone(path: str, times: int) -> None:
    coord = SqliteStores(path).coord
    key = f"counters/{os.getpid()}"
    say("ready")
    wait_for_parent()
    for number in range(times):
        coord.commit((), (Put(key, b"%d" % number),))
    say("done")


@pytest.mark.long
def test_the_write_ahead_log_stays_short_beside_a_reader(
    stores: SqliteStores, tmp_path: Path
) -> None:
    where = LogPartition("t", 0)
    stores.log.create("t", 1)
    stop = threading.Event()

    def replay() -> None:
        while not stop.is_set():
            offset = 0
            while batches := stores.log.fetch(where, offset, 2**20).batches:
                offset = batches[-1].next

    thread = threading.Thread(target=replay)
    thread.start()
    for _ in range(6 * WAL_LIMIT // 2**20):
        stores.log.append([Append(where, encode([(None, bytes(2**20), [], 0)]))])
    stop.set()
    thread.join()
    # `doctor` warns of one that is longer.
    assert os.path.getsize(tmp_path / "s.db-wal") < 4 * WAL_LIMIT


def test_the_callers_own_statements_commit_with_ours(stores: SqliteStores, tmp_path: Path) -> None:
    with stores.atomic() as tx:
        tx.connection.execute("CREATE TABLE orders (id)")
        tx.connection.execute("INSERT INTO orders VALUES (1)")
        tx.write(Put("k", b""))
    with pytest.raises(ZeroDivisionError), stores.atomic() as tx:
        tx.connection.execute("INSERT INTO orders VALUES (2)")
        tx.write(Put("other", b""))
        _ = 1 / 0
    with stores.database.reading() as connection:
        assert connection.execute("SELECT id FROM orders").fetchall() == [(1,)]
    assert [record.key for record in stores.coord.list("")] == ["k"]


def test_on_the_callers_connection(stores: SqliteStores, tmp_path: Path) -> None:
    mine = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    mine.execute("CREATE TABLE orders (id)")
    with stores.atomic(Lent(mine)) as tx:
        assert tx.connection is mine
        mine.execute("INSERT INTO orders VALUES (1)")
        tx.write(Put("k", b""))
    assert not mine.in_transaction
    assert stores.coord.get("k") is not None
    mine.close()


def test_inside_the_callers_transaction(stores: SqliteStores, tmp_path: Path) -> None:
    mine = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    watch = stores.coord.watch("k")
    mine.execute("BEGIN IMMEDIATE")
    with stores.atomic(mine) as tx:
        tx.write(Put("k", b""))
    assert stores.coord.get("k") is None
    mine.execute("COMMIT")
    assert stores.coord.get("k") is not None
    assert watch.wait(10)
    mine.close()


def test_what_fails_inside_the_callers_transaction_leaves_it_as_it_was(
    stores: SqliteStores, tmp_path: Path
) -> None:
    mine = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    mine.execute("CREATE TABLE orders (id)")
    mine.execute("BEGIN IMMEDIATE")
    mine.execute("INSERT INTO orders VALUES (1)")
    block = stores.atomic(mine)
    with pytest.raises(Exception, match="topic 'none'"), block as tx:
        tx.write(Put("k", b""))
        tx.append(LogPartition("none", 0), encode([(None, b"v", [], 0)]))
    mine.execute("COMMIT")
    assert mine.execute("SELECT id FROM orders").fetchall() == [(1,)]
    assert stores.coord.get("k") is None
    mine.close()


def test_a_connection_to_another_file_is_refused(stores: SqliteStores, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db")
    with pytest.raises(NotAtomic), stores.atomic(other):
        pass
    other.close()


def test_giving_up_after_the_close_releases_no_lock_of_another_file(tmp_path: Path) -> None:
    """A thread that waited for its turn gives up then; the numbers are other files' by now."""
    folder, database = str(tmp_path), str(tmp_path / "s.db")
    Path(database).touch()
    control = Control(folder, database)
    lock = WriterLock(folder, database, control, SystemClock())
    lock.close()
    with ExitStack() as opened:
        paths = [tmp_path / f"foreign {number}" for number in range(64)]
        for path in paths:
            assert try_lock(opened.enter_context(path.open("w")).fileno())
        lock.give_up()
        others = [opened.enter_context(path.open("w")) for path in paths]
        assert not any(try_lock(other.fileno()) for other in others)
    control.close()


class JumpingClock:
    """A clock on which time passes at once, as it does for a process that was stopped."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return SYSTEM_CLOCK.monotonic() + self.ahead

    def wall_ms(self) -> int:
        return SYSTEM_CLOCK.wall_ms()


def test_a_process_that_was_stopped_while_it_waited_waits_on(tmp_path: Path) -> None:
    """It would name the writer of this moment, who has just begun, as one that hangs."""
    database = str(tmp_path / "s.db")
    SqliteStores(database, busy_timeout=20.0).close()
    folder, clock = f"{database}-pxrs", JumpingClock()
    control = Control(folder, database)
    holder = WriterLock(folder, database, control, SystemClock())
    waiting = WriterLock(folder, database, control, clock)
    assert holder.enter(1.0)
    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(waiting.enter, 20.0)
        while clock.looks < 10:
            assert not entered.done()
        clock.ahead = 60.0
        looks = clock.looks
        while clock.looks < looks + 10 and not entered.done():
            pass
        holder.leave()
        assert entered.result()
    waiting.leave()
    holder.close()
    waiting.close()
    control.close()
