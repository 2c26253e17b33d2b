"""Files and folders beside the database, in a folder that other users may be able to write.

A user who can write there can put links in place of pxrs' files. So every step of the path, from
the database's folder on, is opened relative to a handle of the folder before; no link is followed;
and what is opened must be a regular file with one name. Owner and mode are changed only on files
and folders that the call itself has made.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pxrs.errors import StoreUnavailable
from pxrs.stores.sqlite.posix import closing_on_failure

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without these flags, opening would wait for a pipe, and follow a link.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 100
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
_OF_SQLITE = ("-wal", "-shm", "-journal")


def open_beside(path: str, database: str, flags: int = 0) -> int:
    """Opens a file beside the database, or makes it for the users who may write the database.

    With `O_EXCL` it must not exist yet.
    """
    with folder_of(path, database) as folder:
        name = os.path.basename(path)
        for _ in range(_TRIES):
            if not flags & os.O_EXCL:
                with suppress(FileNotFoundError):
                    return open_found(path, os.O_RDWR, name, folder)
            try:
                return _make_file(name, folder, database)
            except FileExistsError:
                # Another process was faster; open its file, unless it must be a new one.
                if flags & os.O_EXCL:
                    raise
    raise StoreUnavailable(
        f"{path} can't be opened: another process keeps creating and removing it"
    )


def open_found(path: str, flags: int, name: str = "", folder: int | None = None) -> int:
    """Opens an existing file; raises `StoreUnavailable` unless it is a regular file, one name."""
    try:
        fd = os.open(name or path, flags | _FILE, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _strange(path) from None
        raise
    found = os.fstat(fd)
    # A file that was just removed has no name.
    if found.st_nlink > 1 or not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise _strange(path, found)
    return fd


def make_folder_beside(path: str, database: str) -> None:
    """Makes a folder beside the database, for users who may write that, unless it exists."""
    name = os.path.basename(path)
    with folder_of(path, database) as parent:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
            made = True
        except FileExistsError:
            made = False
        folder = _open_folder(path, name, parent)
        try:
            # An empty folder of this user: even if it is not the one made above, it is as good.
            if made and os.fstat(folder).st_uid == os.geteuid() and not os.listdir(folder):
                _share(folder, database, is_folder=True)
        finally:
            os.close(folder)


def make_database(path: str) -> None:
    """Makes an empty file for this user alone, unless the file exists.

    SQLite would let everybody read it, and gives its shared memory the same mode. Being able to
    read that is enough to hold the lock of the writers.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, _NEW, 0o600))


def readers_only(path: str) -> int:
    """The mode bits by which users may read the file who may not write it."""
    mode = os.stat(path).st_mode
    return mode & 0o044 & ~((mode & 0o022) << 1)


def check_links(path: str, real: str) -> None:
    """Refuses links by which another user may have led this one to a file of its own.

    `real` is the file that the database's path leads to.
    """
    if os.path.islink(path):
        laid_by = os.lstat(path).st_uid
        owners = {0, os.geteuid()}
        with suppress(FileNotFoundError):
            owners.add(os.stat(real).st_uid)
        if laid_by not in owners:
            raise StoreUnavailable(
                f"{path} is a symbolic link of another user (uid {laid_by}) to {real}; "
                "name the file itself, or create the link again as this user"
            )
    for ending in _OF_SQLITE:
        with suppress(FileNotFoundError):
            found = os.lstat(real + ending)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise _strange(real + ending, found)


def _make_file(name: str, folder: int, database: str) -> int:
    with closing_on_failure() as opened:
        fd = opened(os.open(name, _NEW, 0o600, dir_fd=folder))
        _share(fd, database, is_folder=False)
    return fd


@contextmanager
def folder_of(path: str, database: str) -> Iterator[int]:
    """The folder that the file is in, opened step by step from the database's own."""
    top = os.path.dirname(database)
    inside = os.path.dirname(path)[len(top) :].strip(os.sep)
    steps = inside.split(os.sep) if inside else []
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, step in enumerate(steps):
            inner = _open_folder(os.path.join(top, *steps[: depth + 1]), step, fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _open_folder(path: str, name: str, parent: int) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise StoreUnavailable(
                f"{path} must be a folder, and no symbolic link; remove it, and find out who "
                "put it there"
            ) from None
        raise


def _share(fd: int, database: str, *, is_folder: bool) -> None:
    """Give the file the database's owner and mode, as SQLite does with its own files.

    Otherwise a single use by root would lock the application out. Users who may only read the
    database get no rights at all: being able to read a file is enough to lock it.
    """
    theirs = os.stat(database)
    writes = theirs.st_mode & 0o222
    mode = writes | (theirs.st_mode & (writes << 1))
    if is_folder:
        mode |= (mode & 0o444) >> 2
    with suppress(PermissionError):
        if os.geteuid() == 0:
            os.fchown(fd, theirs.st_uid, theirs.st_gid)
        os.fchmod(fd, mode)


def _strange(path: str, found: os.stat_result | None = None) -> StoreUnavailable:
    what = "a symbolic link, or no file"
    if found is not None and stat.S_ISREG(found.st_mode):
        what = f"a file with {found.st_nlink} links"
    elif found is not None:
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no file"
    return StoreUnavailable(
        f"{path} must be a regular file with one name, got {what}; remove it, and find out who "
        "put it there"
    )
