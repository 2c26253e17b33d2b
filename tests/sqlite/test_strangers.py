"""Files that somebody else has put beside the database: refused, and never changed."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from click.testing import CliRunner

import pxrs
from pxrs.cli.main import cli
from pxrs.errors import StoreBusy, StoreError
from pxrs.sources import Table
from pxrs.stores.findings import Level
from pxrs.stores.sqlite import beside, doctor
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Committed, Put
from support.child import Child
from support.inside import say, wait_for_parent

pytestmark = [
    pytest.mark.engine("sqlite"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]
NOBODY = 65534
COMPANIONS = ("control", "bell", "queue.lock", "writer.lock")


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder of another user, with a database of theirs in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        os.chown(folder, NOBODY, NOBODY)
        stores = SqliteStores(str(folder / "app.db"))
        stores.close()
        shutil.rmtree(folder / "app.db-pxrs")
        os.chown(folder / "app.db", NOBODY, NOBODY)
        yield folder


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of root that nobody else may read."""
    file = tmp_path / "secret"
    file.write_bytes(b"root's own")
    file.chmod(0o600)
    return file


def untouched(file: Path) -> bool:
    found = file.stat()
    mode = stat.S_IMODE(found.st_mode)
    return (found.st_uid, mode, file.read_bytes()) == (0, 0o600, b"root's own")


@pytest.mark.parametrize("name", COMPANIONS)
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_a_link_to_a_file_of_root_is_refused(
    theirs: Path, secret: Path, name: str, plant: Callable[[Path, Path], None]
) -> None:
    (theirs / "app.db-pxrs").mkdir()
    source = secret
    if plant is os.link:
        # A hard link needs the same file system.
        source = theirs / "secret"
        shutil.copy2(secret, source)
        source.chmod(0o600)
    plant(source, theirs / "app.db-pxrs" / name)
    with pytest.raises(StoreError, match=rf"{name} .*(link|links).*remove"):
        SqliteStores(str(theirs / "app.db"))
    assert untouched(source)


@pytest.mark.parametrize("command", ["copy to", "copy from", "demo"])
def test_no_command_follows_a_link(
    theirs: Path, secret: Path, tmp_path: Path, command: str
) -> None:
    mine, planted = f"sqlite:///{tmp_path}/mine.db", f"sqlite:///{theirs}/app.db"
    SqliteStores(f"{tmp_path}/mine.db").close()
    (theirs / "app.db-pxrs").mkdir()
    (theirs / "app.db-pxrs" / "bell").symlink_to(secret)
    arguments = {
        "copy to": ["store", "copy", mine, planted],
        "copy from": ["store", "copy", planted, mine],
        "demo": ["demo", "--plain", "--engine", planted],
    }[command]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert "bell must be a regular file" in result.stderr
    assert untouched(secret)


@pytest.mark.parametrize("name", COMPANIONS)
def test_what_is_no_file_is_refused(theirs: Path, name: str) -> None:
    (theirs / "app.db-pxrs").mkdir()
    os.mkfifo(theirs / "app.db-pxrs" / name)
    with pytest.raises(StoreError, match=rf"{name} must be a regular file"):
        SqliteStores(str(theirs / "app.db"))


def test_a_link_that_leads_nowhere_yet_makes_no_file(theirs: Path, tmp_path: Path) -> None:
    (theirs / "app.db-pxrs").mkdir()
    (theirs / "app.db-pxrs" / "control").symlink_to(tmp_path / "made")
    with pytest.raises(StoreError, match="symbolic link"):
        SqliteStores(str(theirs / "app.db"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("inside", ["", "sessions"])
def test_a_folder_that_is_a_link_is_refused(theirs: Path, tmp_path: Path, inside: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if inside:
        (theirs / "app.db-pxrs").mkdir()
    (theirs / "app.db-pxrs" / inside).symlink_to(elsewhere)
    with pytest.raises(StoreError, match="must be a folder, and no symbolic link"):
        SqliteStores(str(theirs / "app.db")).coord.session(60.0)
    assert os.listdir(elsewhere) == []
    assert (elsewhere.stat().st_uid, stat.S_IMODE(elsewhere.stat().st_mode)) == (0, 0o700)


@pytest.mark.parametrize("inside", ["", "sessions"])
def test_a_folder_that_becomes_a_link_later_is_refused(
    theirs: Path, tmp_path: Path, inside: str
) -> None:
    """What has the name of a session elsewhere is neither judged nor stamped nor removed."""
    stores = SqliteStores(str(theirs / "app.db"))
    sessions = stores.coord._sessions
    own, lent = stores.coord.session(60.0), stores.coord.lend(60.0)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "sessions").mkdir(parents=True)
    names = ["a" * 24, "lent-" + "a" * 24, "." + "a" * 24, own.id, lent.id]
    for name in names:
        (elsewhere / "sessions" / name).write_bytes(b"root's own, 24 bytes long")
    real = theirs / "app.db-pxrs" / inside
    real.rename(theirs / "moved")
    real.symlink_to(elsewhere / inside if inside else elsewhere)
    calls: list[Callable[[], object]] = [
        sessions.names,
        sessions.sweep_unborn,
        lambda: sessions.alive("a" * 24),
        lambda: sessions.alive("lent-" + "a" * 24),
        lambda: sessions.deadline("a" * 24),
        lambda: stores.coord.session(60.0),
        lambda: stores.coord.adopt("lent-" + "a" * 24),
        own.renew,
        lent.renew,
        lent.close,
        own.close,
    ]
    for call in calls:
        with pytest.raises(StoreError, match="must be a folder, and no symbolic link"):
            call()
    assert sorted(os.listdir(elsewhere / "sessions")) == sorted(names)
    for name in names:
        assert (elsewhere / "sessions" / name).read_bytes() == b"root's own, 24 bytes long"
    real.unlink()
    (theirs / "moved").rename(real)
    stores.close()


def make_pipe(_: Path, name: Path) -> None:
    os.mkfifo(name)


@pytest.mark.parametrize("plant", [os.symlink, os.link, make_pipe])
def test_a_session_that_is_no_file_of_its_own_is_refused(
    theirs: Path, secret: Path, plant: Callable[[Path, Path], None]
) -> None:
    """It is neither stamped, nor believed, nor waited for."""
    stores = SqliteStores(str(theirs / "app.db"))
    # A hard link needs the same file system.
    secret = Path(shutil.copy2(secret, theirs / "secret"))
    for name in ("a" * 24, "lent-" + "a" * 24):
        plant(secret, theirs / "app.db-pxrs" / "sessions" / name)
        calls: list[Callable[[], object]] = [
            partial(stores.coord._sessions.alive, name),
            partial(stores.coord._sessions.deadline, name),
            partial(stores.coord.commit, [], [Put("k", b"", name)]),
        ]
        if name.startswith("lent"):
            calls.append(partial(stores.coord.adopt, name))
        for call in calls:
            with pytest.raises(StoreError, match="must be a regular file"):
                call()
    assert untouched(secret)
    stores.close()


@pytest.mark.parametrize("name", COMPANIONS)
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_a_link_that_is_laid_while_a_file_is_made_is_refused(
    theirs: Path,
    secret: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    plant: Callable[[Path, Path], None],
) -> None:
    """Between the look, which finds nothing, and the making of the file."""
    secret = Path(shutil.copy2(secret, theirs / "secret"))
    look = beside.open_found

    def look_too_early(path: str, *rest: Any) -> int:
        try:
            return look(path, *rest)
        except FileNotFoundError:
            if path.endswith(name):
                plant(secret, Path(path))
            raise

    monkeypatch.setattr(beside, "open_found", look_too_early)
    with pytest.raises(StoreError, match=rf"{name} .*(link|links).*remove"):
        SqliteStores(str(theirs / "app.db"))
    assert untouched(secret)


@pytest.mark.parametrize("name", COMPANIONS)
def test_a_file_that_was_there_keeps_its_owner_and_mode(theirs: Path, name: str) -> None:
    (theirs / "app.db-pxrs").mkdir()
    file = theirs / "app.db-pxrs" / name
    file.touch(mode=0o640)
    stores = SqliteStores(str(theirs / "app.db"))
    stores.close()
    found = file.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o640)


def test_a_folder_that_was_there_keeps_its_owner_and_mode(theirs: Path) -> None:
    (theirs / "app.db-pxrs").mkdir(mode=0o750)
    stores = SqliteStores(str(theirs / "app.db"))
    stores.close()
    found = (theirs / "app.db-pxrs").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o750)


def test_a_database_behind_a_link_of_another_user_is_refused(theirs: Path, tmp_path: Path) -> None:
    (theirs / "mine.db").symlink_to(tmp_path / "made.db")
    os.lchown(theirs / "mine.db", NOBODY, NOBODY)
    with pytest.raises(StoreError, match="symbolic link of another user"):
        SqliteStores(str(theirs / "mine.db"))
    assert os.listdir(tmp_path) == []


def test_a_database_behind_a_link_of_ones_own_is_opened(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    SqliteStores(str(tmp_path / "link.db")).close()
    assert (tmp_path / "real.db-pxrs").is_dir()


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
def test_a_link_in_place_of_sqlites_own_files_is_refused(
    theirs: Path, secret: Path, ending: str
) -> None:
    (theirs / f"app.db{ending}").symlink_to(secret)
    with pytest.raises(StoreError, match=f"app.db{ending} .*symbolic link"):
        SqliteStores(str(theirs / "app.db"))
    assert untouched(secret)


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
def test_a_link_that_is_laid_while_the_store_is_open_is_refused(
    theirs: Path, secret: Path, ending: str
) -> None:
    """SQLite follows no symbolic link by itself, but opens a file that has another name, too."""
    # A hard link needs the same file system.
    secret = Path(shutil.copy2(secret, theirs / "secret"))
    stores = SqliteStores(str(theirs / "app.db"))
    with stores.database.reading():
        (theirs / f"app.db{ending}").unlink(missing_ok=True)
        os.link(secret, theirs / f"app.db{ending}")
        # The connection of the block is in use: this opens another one.
        with pytest.raises(StoreError, match=f"app.db{ending} must be a regular file"):
            stores.coord.get("k")
    assert untouched(secret)
    (theirs / f"app.db{ending}").unlink()
    stores.close()


def table_of_theirs(folder: Path, mode: str) -> str:
    """A table in a file of another user; its path."""
    path = folder / "table.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA journal_mode={mode}")
        db.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, payload TEXT)")
        db.execute("INSERT INTO events VALUES (1, 'one')")
        db.commit()
    os.chown(path, NOBODY, NOBODY)
    return str(path)


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("way", ["url", "engine"])
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_a_link_beside_a_table_is_refused(
    theirs: Path, secret: Path, ending: str, way: str, plant: Callable[[Path, str], None]
) -> None:
    path = table_of_theirs(theirs, "delete" if ending == "-journal" else "wal")
    if plant is os.link:
        # A hard link needs the same file system. Newer SQLite follows no symbolic one by itself.
        secret = Path(shutil.copy2(secret, theirs / "secret"))
    plant(secret, path + ending)
    if way == "url":
        table = Table("events", value="payload", url=f"sqlite:///{path}")
    else:
        table = Table(
            "events", value="payload", engine=sqlalchemy.create_engine(f"sqlite:///{path}")
        )
    with (
        pxrs.connect("memory://") as px,
        pytest.raises(StoreError, match=f"table.db{ending} must be a regular file"),
    ):
        px.attach("events", table, partitions=1)
    assert untouched(secret)


@pytest.mark.parametrize("wanted", ["read", "execute"])
def test_a_link_that_is_laid_while_a_table_is_read_is_refused(
    theirs: Path, secret: Path, wanted: str
) -> None:
    """A file without a write-ahead log: every transaction looks for its journal."""
    path = table_of_theirs(theirs, "delete")
    table = Table("events", value="payload", url=f"sqlite:///{path}").open("memory://")
    assert [row[0] for row in table.read(0, 0, 10).rows] == [1]
    Path(path + "-journal").symlink_to(secret)
    with pytest.raises(StoreError, match=r"table.db-journal .*symbolic link"):
        if wanted == "read":
            table.bounds(0)
        else:
            table.execute("CREATE INDEX more ON events (payload)")
    table.close()
    assert untouched(secret)


def test_a_table_behind_a_link_of_another_user_is_refused(theirs: Path, tmp_path: Path) -> None:
    (theirs / "mine.db").symlink_to(table_of_theirs(tmp_path, "delete"))
    os.chown(tmp_path / "table.db", 0, 0)
    os.lchown(theirs / "mine.db", NOBODY, NOBODY)
    with pytest.raises(StoreError, match="symbolic link of another user"):
        Table("events", value="payload", url=f"sqlite:///{theirs}/mine.db").open("memory://")


def become_another_user() -> None:
    os.setgroups([])
    os.setgid(1234)
    os.setuid(1234)


def hold_as_a_reader(path: str) -> None:
    """Take the lock of a file as a user who has no right to write it; say what came of it."""
    become_another_user()
    try:
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except PermissionError:
        say("refused")
    else:
        say("held")


@pytest.mark.parametrize("name", COMPANIONS)
def test_who_may_only_read_the_database_cant_hold_its_locks(theirs: Path, name: str) -> None:
    (theirs / "app.db").chmod(0o644)
    stores = SqliteStores(str(theirs / "app.db"))
    with Child(hold_as_a_reader, str(theirs / "app.db-pxrs" / name)) as child:
        said = child.read()
    stores.close()
    assert said == "refused"


@pytest.mark.parametrize(
    ("database", "file", "folder"),
    [(0o644, 0o600, 0o700), (0o664, 0o660, 0o770), (0o666, 0o666, 0o777), (0o600, 0o600, 0o700)],
)
def test_only_who_may_write_the_database_may_use_what_is_beside_it(
    theirs: Path, database: int, file: int, folder: int
) -> None:
    (theirs / "app.db").chmod(database)
    stores = SqliteStores(str(theirs / "app.db"))
    session = stores.coord.session(3600.0)
    beside = theirs / "app.db-pxrs"
    modes = {each.is_dir(): stat.S_IMODE(each.stat().st_mode) for each in beside.rglob("*")}
    session.close()
    stores.close()
    assert modes == {True: folder, False: file}
    assert stat.S_IMODE(beside.stat().st_mode) == folder


# Where SQLite's writers lock the `-shm` file to keep apart.
WRITER = 120


def hold_the_writers_as_a_reader(path: str) -> None:
    """Keep SQLite's writers out, as a user who has no right to write; say what came of it."""
    become_another_user()
    try:
        fcntl.lockf(os.open(f"{path}-shm", os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB, 1, WRITER)
    except PermissionError:
        say("refused")
    else:
        say("held")
    wait_for_parent()


def test_a_stranger_cant_stop_the_writers_of_a_new_database(theirs: Path) -> None:
    path = str(theirs / "new.db")
    stores = SqliteStores(path, busy_timeout=0.1)
    with Child(hold_the_writers_as_a_reader, path) as child:
        said = child.read()
        assert isinstance(stores.coord.commit([], [Put("k", b"")]), Committed)
    stores.close()
    assert said == "refused"


def test_a_database_that_was_there_keeps_its_mode(theirs: Path) -> None:
    """And who may read it can keep its writers out: the doctor says so."""
    path = theirs / "shared.db"
    path.touch()
    path.chmod(0o644)
    stores = SqliteStores(str(path), busy_timeout=0.1)
    with Child(hold_the_writers_as_a_reader, str(path)) as child:
        assert child.read() == "held"
        with pytest.raises(StoreBusy):
            stores.coord.commit([], [Put("k", b"")])
    found = {finding.check: finding for finding in stores.findings()}["access"]
    stores.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert (found.level, "shared.db can be read" in found.says) == (Level.WARNING, True)


@pytest.mark.parametrize(
    ("mode", "folder", "mend"),
    [
        (0o644, 0o755, "chmod go-r "),
        (0o664, 0o755, "chmod o-r "),
        (0o640, 0o710, "chmod g-r "),
        (0o644, 0o700, ""),
        (0o660, 0o755, ""),
        (0o600, 0o755, ""),
    ],
)
def test_the_doctor_knows_who_can_stop_the_writers(
    theirs: Path, mode: int, folder: int, mend: str
) -> None:
    path = theirs / "app.db"
    path.chmod(mode)
    theirs.chmod(folder)
    found = doctor._access(str(path))
    assert (found.level is Level.WARNING) == bool(mend)
    assert found.mend.startswith(mend)


def test_the_doctor_knows_a_shared_memory_that_is_older_than_the_mode(theirs: Path) -> None:
    path = theirs / "app.db"
    path.chmod(0o644)
    stores = SqliteStores(str(path))
    path.chmod(0o600)
    found = doctor._access(str(path))
    stores.close()
    assert (found.level, "app.db-shm can be read" in found.says) == (Level.WARNING, True)


def test_a_file_made_beforehand_is_shared_with_its_group(theirs: Path) -> None:
    path = theirs / "team.db"
    path.touch()
    path.chmod(0o660)
    stores = SqliteStores(str(path))
    shared = {file.name: stat.S_IMODE(file.stat().st_mode) for file in theirs.glob("team.db*")}
    stores.close()
    assert shared == {
        "team.db": 0o660,
        "team.db-wal": 0o660,
        "team.db-shm": 0o660,
        "team.db-pxrs": 0o770,
    }


def open_as_another_user(path: str) -> None:
    become_another_user()
    try:
        SqliteStores(path)
    except StoreError as error:
        say([type(error).__name__, str(error)])


def test_who_may_not_even_read_it_is_told_so(theirs: Path) -> None:
    theirs.chmod(0o777)
    SqliteStores(str(theirs / "new.db")).close()
    with Child(open_as_another_user, str(theirs / "new.db")) as child:
        kind, text = child.read()
    assert kind == "StoreReadOnly"
    assert "read and write access" in text
