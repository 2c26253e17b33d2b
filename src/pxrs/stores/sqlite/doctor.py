"""Examines an SQLite file and the machine it is on."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator

from pxrs.stores.findings import Finding, note, ok, problem, warning
from pxrs.stores.sqlite import schema
from pxrs.stores.sqlite.beside import readers_only
from pxrs.stores.sqlite.database import WAL_LIMIT, Database

# A checkpoint that races with a commit can damage the file up to this version.
_MENDED_SQLITE = (3, 51, 3)
_LEVELS = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "glusterfs")
_LITTLE_SPACE = 2**30
_INSTANCES = "/proc/sys/fs/inotify/max_user_instances"


def findings(database: Database, *, durability: str) -> list[Finding]:
    """Return everything that can be found out without writing."""
    with database.reading() as connection:
        version = schema.found_version(connection)
        journal = connection.execute("PRAGMA journal_mode").fetchone()[0]
        synchronous = connection.execute("PRAGMA synchronous").fetchone()[0]
    return [
        _library(),
        ok("schema", f"version {version}"),
        _durability(journal, synchronous, durability),
        _file_system(database.path),
        _access(database.path),
        _space(database.path),
        _log_size(database.path),
        _inotify(),
    ]


def _library() -> Finding:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < _MENDED_SQLITE:
        return note(
            "version",
            f"SQLite {version}: 3.7.0 to 3.51.2 can damage a file when a checkpoint races with a "
            "commit. pxrs keeps the two apart; another program that writes to this file does not",
            "write to this file through pxrs only, or use SQLite 3.51.3 or newer everywhere",
        )
    return ok("version", f"SQLite {version}")


def _durability(journal: str, synchronous: int, durability: str) -> Finding:
    if journal != "wal":
        return problem(
            "durability",
            f"the journal is {journal!r}, pxrs needs a write-ahead log",
            "no other program may change journal_mode; start the processes again",
        )
    if durability == "relaxed":
        return warning(
            "durability",
            "durability=relaxed: a power cut may take the last commits, acknowledged or not; a "
            "crash of a process does not",
            "leave ?durability=relaxed out of the URL where that matters",
        )
    level = _LEVELS.get(synchronous, str(synchronous))
    return ok("durability", f"every commit is synced (write-ahead log, synchronous={level})")


def _file_system(path: str) -> Finding:
    kind = _kind_of_mount(path)
    if kind in _NETWORK:
        return problem(
            "file system",
            f"the file lies on {kind}: locks and shared memory do not cross a network",
            "put the file on a local disk, or use PostgreSQL",
        )
    return ok("file system", kind or "unknown")


def _kind_of_mount(path: str) -> str:
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                _, place, found, *_ = line.split(" ")
                inside = os.path.commonpath([place, os.path.realpath(path)]) == place
                if inside and len(place) >= len(best):
                    best, kind = place, found
    except (OSError, ValueError):
        return ""
    return kind


def _access(path: str) -> Finding:
    """A file in a folder that only its owner can enter is safe, whatever the file's mode."""
    if all(os.stat(folder).st_mode & 0o011 for folder in _folders_above(path)):
        for file in (path, f"{path}-shm"):
            try:
                bits = readers_only(file)
            except FileNotFoundError:
                continue
            if bits:
                who = f"{'g' if bits & 0o040 else ''}{'o' if bits & 0o004 else ''}"
                return warning(
                    "access",
                    f"{file} can be read by users who may not write it (mode "
                    f"{os.stat(file).st_mode & 0o777:o}): each of them can stop all writers",
                    f"chmod {who}-r {path} {path}-wal {path}-shm, or let them write it, too",
                )
    return ok("access", "only users who may write the file can read it")


def _folders_above(path: str) -> Iterator[str]:
    while path != (path := os.path.dirname(path)):
        yield path


def _space(path: str) -> Finding:
    free = shutil.disk_usage(os.path.dirname(path) or ".").free
    says = f"{free / 2**30:.1f} GiB free"
    if free < _LITTLE_SPACE:
        return warning("space", says, "make room: a full disk refuses every send")
    return ok("space", says)


def _log_size(path: str) -> Finding:
    try:
        size = os.path.getsize(path + "-wal")
    except OSError:
        size = 0
    says = f"the write-ahead log has {size / 2**20:.1f} MiB"
    if size > 4 * WAL_LIMIT:
        return warning(
            "long transactions",
            f"{says}: a process reads in one long transaction and keeps it from starting anew",
            "find the process that holds a cursor or transaction open on this file",
        )
    return ok("long transactions", says)


def _inotify() -> Finding:
    try:
        with open(_INSTANCES, encoding="ascii") as file:
            most = int(file.read())
    except (OSError, ValueError):
        return note("wake-ups", "there is no inotify here: a thread looks every 4 ms instead")
    used = _inotify_used()
    if used >= most:
        return warning(
            "wake-ups",
            f"all {most} inotify instances of this user are taken: a thread looks instead, which "
            "costs some CPU",
            "raise fs.inotify.max_user_instances with sysctl",
        )
    return ok("wake-ups", f"inotify, {used} of {most} instances of this user in use")


def _inotify_used() -> int:
    """Instances of this user, as far as /proc shows them."""
    used = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = f"/proc/{pid}/fd"
        try:
            if os.stat(folder).st_uid != os.getuid():
                continue
            for name in os.listdir(folder):
                used += os.readlink(f"{folder}/{name}") == "anon_inode:inotify"
        except OSError:
            continue
    return used
