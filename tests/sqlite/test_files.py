"""Files that can't be used: a typed error that says what to do, and nothing half written."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic

import pytest

import pxrs
from pxrs.codec.batches import encode
from pxrs.errors import (
    ConfigError,
    OutcomeUnknown,
    PxrsError,
    SchemaMismatch,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Append, Appended, LogPartition, Put
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent

pytestmark = pytest.mark.engine("sqlite")

WHERE = LogPartition("t", 0)
NOBODY = 65534
MB = 2**20


def _append(stores: SqliteStores, size: int = 1) -> None:
    assert isinstance(
        stores.log.append([Append(WHERE, encode([(None, bytes(size), [], 0)]))])[0], Appended
    )


def _make(path: Path, batches: int = 3) -> None:
    stores = SqliteStores(str(path))
    stores.log.create("t", 1)
    for _ in range(batches):
        _append(stores, 10_000)
    stores.close()


def _check_whole(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="does not exist; create it first"):
        SqliteStores(str(tmp_path / "none" / "s.db"))
    assert os.listdir(tmp_path) == []


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.db").mkdir()
    with pytest.raises(ConfigError, match="is a folder; name a file in it"):
        SqliteStores(str(tmp_path / "s.db"))
    assert os.listdir(tmp_path) == ["s.db"]


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is a letter to my grandmother. " * 1000)


def _half_a_header(path: Path) -> None:
    _make(path)
    os.truncate(path, 60)


@pytest.mark.parametrize("damage", [_garbage, _half_a_header])
def test_a_file_that_is_no_database(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "s.db"
    damage(path)
    before = path.read_bytes()
    beside = set(os.listdir(tmp_path))
    with pytest.raises(StoreDamaged, match="restore it from a backup"):
        SqliteStores(str(path))
    assert path.read_bytes() == before
    # SQLite itself may have looked for a log.
    assert set(os.listdir(tmp_path)) - {"s.db-wal", "s.db-shm"} == beside


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    """It may open; what is missing is an error for who needs it, never an empty log."""
    path = tmp_path / "s.db"
    _make(path, batches=30)
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(StoreDamaged, match="restore it from a backup"):
        stores = SqliteStores(str(path))
        try:
            offset = 0
            while batches := stores.log.fetch(WHERE, offset, MB).batches:
                offset = batches[-1].next
        finally:
            stores.close()


def test_an_empty_file_is_a_new_database(tmp_path: Path) -> None:
    (tmp_path / "s.db").touch()
    _make(tmp_path / "s.db")
    _check_whole(tmp_path / "s.db")


def test_a_file_of_a_newer_pxrs(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE pxrs_meta (name TEXT PRIMARY KEY, value)")
    connection.execute("INSERT INTO pxrs_meta VALUES ('schema', 99)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(SchemaMismatch, match="upgrade pxrs"):
        SqliteStores(str(path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["s.db"]


def test_a_database_whose_text_does_not_sort(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "s.db")
    connection.execute("PRAGMA encoding='UTF-16le'")
    connection.execute("CREATE TABLE mine (id)")
    connection.close()
    with pytest.raises(ConfigError, match="UTF-8"):
        SqliteStores(str(tmp_path / "s.db"))


def test_a_callers_database_that_somebody_reads(tmp_path: Path) -> None:
    """It has another journal, and changing that needs the file for a moment."""
    path = tmp_path / "s.db"
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("CREATE TABLE mine (id)")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM mine").fetchall()
    with pytest.raises(StoreError, match="end its transaction"):
        SqliteStores(str(path), busy_timeout=0.1)
    reader.execute("COMMIT")
    _make(path)
    assert reader.execute("SELECT count(*) FROM mine").fetchone() == (0,)
    reader.close()


def write_all_the_time(path: str) -> None:
    db = sqlite3.connect(path, timeout=60, isolation_level=None)
    db.execute("CREATE TABLE mine (id)")
    for number in range(10**9):
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO mine VALUES (1)")
        if not number:
            say("writes")
        db.execute("COMMIT")


def test_a_callers_database_that_somebody_writes_to_all_the_time(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with Child(write_all_the_time, str(path)) as writer:
        assert writer.read() == "writes"
        stores = SqliteStores(str(path), busy_timeout=60)
        stores.close()
        writer.kill()


def test_a_writer_that_does_not_end_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("CREATE TABLE mine (id)")
        writer.execute("BEGIN IMMEDIATE")
        begun = monotonic()
        with pytest.raises(StoreBusy, match="end its transaction"):
            SqliteStores(str(path), busy_timeout=0.3)
        assert monotonic() - begun >= 0.25


# Without rights. Root has them all, so a child gives its rights up first.


def use_as_nobody(path: str) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        stores = SqliteStores(path)
        try:
            stores.coord.commit((), (Put("k", b""),))
        finally:
            stores.close()
    except PxrsError as error:
        say([type(error).__name__, str(error)])
    else:
        say(["nothing", ""])


def _as_nobody(path: Path) -> tuple[str, str]:
    with Child(use_as_nobody, str(path)) as child:
        name, text = child.read()
    return name, text


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="pxrs-files-"))
    folder.chmod(0o777)
    yield folder
    for each in [folder, *folder.rglob("*")]:
        if each.is_dir():
            each.chmod(0o777)
    shutil.rmtree(folder)


def _set_modes(folder: Path, files: int, folders: int) -> None:
    for each in folder.rglob("*"):
        each.chmod(folders if each.is_dir() else files)


@pytest.mark.long
def test_a_folder_that_can_only_be_read(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    name, text = _as_nobody(open_folder / "s.db")
    assert name == "StoreReadOnly"
    assert "give this user write access" in text
    assert os.listdir(open_folder) == []


@pytest.mark.long
def test_a_file_that_can_only_be_read(open_folder: Path) -> None:
    _make(open_folder / "s.db")
    _set_modes(open_folder, 0o666, 0o777)
    (open_folder / "s.db").chmod(0o444)
    before = (open_folder / "s.db").read_bytes()
    name, text = _as_nobody(open_folder / "s.db")
    assert name == "StoreReadOnly"
    assert "give this user write access" in text
    assert (open_folder / "s.db").read_bytes() == before


@pytest.mark.long
def test_files_beside_the_database_that_can_only_be_read(open_folder: Path) -> None:
    _make(open_folder / "s.db")
    _set_modes(open_folder, 0o444, 0o555)
    (open_folder / "s.db").chmod(0o666)
    name, text = _as_nobody(open_folder / "s.db")
    assert name == "StoreReadOnly"
    assert "s.db-pxrs" in text
    assert "give this user write access" in text


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files for others")
def test_what_root_makes_beside_a_users_database_is_the_users(open_folder: Path) -> None:
    """As SQLite does with its own: else one look as root locks the application out."""
    path = open_folder / "s.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (id)")
    connection.close()
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o660)
    old = os.umask(0o077)
    try:
        stores = SqliteStores(str(path))
        session = stores.coord.session(3600.0)
        stores.coord.commit((), (Put("k", b"", session.id),))
        for each in (open_folder / "s.db-pxrs").rglob("*"):
            info = each.stat()
            assert (info.st_uid, info.st_gid) == (NOBODY, NOBODY), each
            assert stat.S_IMODE(info.st_mode) == (0o770 if each.is_dir() else 0o660), each
        assert _as_nobody(path)[0] == "nothing"
        assert stores.coord.get("k") is not None
        stores.close()
    finally:
        os.umask(old)


# Without space.


def fill_up_to(path: str, most: int) -> None:
    """Append until a file would get larger than allowed; say what came of each."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        stores = SqliteStores(path)
        stores.log.create("t", 1)
        for _ in range(200):
            _append(stores, 100_000)
            say("acknowledged")
    except PxrsError as error:
        say(type(error).__name__)
        say(str(error))
    wait_for_parent()


@pytest.mark.long
def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    _make(path, batches=0)
    with Child(fill_up_to, str(path), 2 * MB) as child:
        words = []
        while (word := child.read()) == "acknowledged":
            words.append(word)
        assert word in (StoreFull.__name__, StoreUnavailable.__name__, OutcomeUnknown.__name__)
        assert str(path) in child.read()
        _check_kept(path, len(words))
    _check_kept(path, len(words))


def _check_kept(path: Path, acknowledged: int) -> None:
    stores = SqliteStores(str(path))
    end = stores.log.bounds("t")[0].end
    assert acknowledged <= end <= acknowledged + 1
    stores.close()
    _check_whole(path)


@pytest.mark.long
def test_a_disk_too_small_to_begin_with(tmp_path: Path) -> None:
    """A mapped page that has no place on the disk would be a SIGBUS, not an error."""
    with Child(fill_up_to, str(tmp_path / "s.db"), 4096) as child:
        assert child.read() == "StoreFull"
        assert "free space" in child.read()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        (disk / "s.db-pxrs").mkdir()
        with suppress(OSError):
            (disk / "ballast").write_bytes(bytes(2 * MB))
        with Child(fill_up_to, str(disk / "s.db"), MB) as child:
            assert child.read() == "StoreFull"
        (disk / "ballast").unlink()
        with Child(fill_up_to, str(disk / "s.db"), MB) as child:
            words = []
            while (word := child.read()) == "acknowledged":
                words.append(word)
            assert word == "StoreFull"
        assert words
        for name in ("s.db", "s.db-wal"):
            shutil.copy(disk / name, tmp_path / name)
    finally:
        subprocess.run(["umount", disk], check=True)
    _check_kept(tmp_path / "s.db", len(words))


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    stores = SqliteStores(str(tmp_path / "s.db"))
    stores.log.create("t", 1)
    with stores.atomic() as tx:
        pages = tx.connection.execute("PRAGMA page_count").fetchone()[0]
        tx.connection.execute(f"PRAGMA max_page_count={pages + 20}")
    kept = 0
    with pytest.raises(StoreFull, match=r"nothing was written\. Free space and retry"):
        while True:
            _append(stores, 10_000)
            kept += 1
    assert stores.log.bounds("t")[0].end == kept
    with stores.atomic() as tx:
        tx.connection.execute("PRAGMA max_page_count=1000000")
    _append(stores)
    stores.close()
    _check_whole(tmp_path / "s.db")


# Names and places.


def test_every_name_of_a_file_leads_to_the_same_locks(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "s.db").symlink_to(tmp_path / "link" / "s.db")
    first = SqliteStores(str(tmp_path / "real" / "s.db"))
    session = first.coord.session(3600.0)
    first.coord.commit((), (Put("k", b"", session.id),))
    second = SqliteStores(str(tmp_path / "s.db"))
    assert second.database.folder == first.database.folder
    assert second.coord.get("k") is not None
    first.close()
    second.close()


def test_a_store_stays_where_it_is_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    stores = SqliteStores("s.db")
    monkeypatch.chdir(tmp_path / "elsewhere")
    session = stores.coord.session(3600.0)
    stores.coord.commit((), (Put("k", b"", session.id),))
    assert stores.coord.get("k") is not None
    stores.close()
    assert os.listdir(tmp_path / "elsewhere") == []


def _remove_file(path: Path) -> None:
    for name in ("", "-wal", "-shm"):
        os.unlink(f"{path}{name}")


def _replace_file(path: Path) -> None:
    _remove_file(path)
    _make(path)


def _remove_folder(path: Path) -> None:
    path.with_name("s.db-pxrs").rename(path.with_name("gone"))


def _remove_lock(path: Path) -> None:
    (path.with_name("s.db-pxrs") / "writer.lock").unlink()


@pytest.mark.parametrize("move", [_remove_file, _replace_file, _remove_folder, _remove_lock])
def test_nothing_is_acknowledged_into_a_file_that_was_taken_away(
    tmp_path: Path, move: Callable[[Path], None]
) -> None:
    path = tmp_path / "s.db"
    stores = SqliteStores(str(path))
    stores.log.create("t", 1)
    move(path)
    assert stores.database._whereabouts is not None
    stores.database._whereabouts.look_now()
    with pytest.raises(StoreError, match="removed or replaced"):
        _append(stores)
    with pytest.raises(StoreError, match="removed or replaced"):
        _append(stores)
    stores.close()


@pytest.mark.parametrize("removed", ["s.db-pxrs", "s.db-pxrs/sessions"])
def test_a_member_that_only_waits_is_told_that_the_folder_was_removed(
    tmp_path: Path, removed: str
) -> None:
    """Its session has gone with the folder, and a new one would be seen by nobody."""
    with pxrs.connect(f"sqlite:///{tmp_path}/s.db") as px:
        px.topics.create("t", 1)
        with px.consumer("t", "g", session_ttl=1.0) as consumer:
            consumer.poll(timeout=0.0)
            shutil.rmtree(tmp_path / removed)
            with pytest.raises(StoreError, match="start the process again") as raised:
                consumer.poll(timeout=PATIENCE)
            assert not raised.value.retryable
            assert consumer.health().state == "failed"


@pytest.mark.long
def test_processes_that_open_and_close_a_new_file_at_once(tmp_path: Path) -> None:
    children = [Child(come_and_go, str(tmp_path / "s.db"), number) for number in range(4)]
    for child in children:
        assert child.rest() == ["done"]
        child.join()
    stores = SqliteStores(str(tmp_path / "s.db"))
    assert len(stores.coord.list("k/")) == 4 * 15
    stores.close()
    _check_whole(tmp_path / "s.db")


def come_and_go(path: str, number: int) -> None:
    for time in range(15):
        stores = SqliteStores(path)
        stores.coord.commit((), (Put(f"k/{number}-{time}", b""),))
        stores.close()
    say("done")
