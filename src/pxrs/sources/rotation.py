"""A log file and those it was rotated to, in the order of their writing, each with a number.

A file is rotated by renaming: `app.log` becomes `app.log.1` or `app.log-20260131`, and a new
`app.log` is made. Its name changes, so files are known by device and inode; these are used again
once a file was deleted, so the first bytes count, too. An index beside the log numbers files by
this, for all processes of the host. It is only ever appended to, under a lock, and a number is on
disk before any process uses it: what a crash leaves half written is cut off.

A rotated file may still be written to, by a program that has it open. It is finished once no
process has, which Linux shows to the file's owner: a read lease is granted only then.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import signal
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from pxrs.errors import ConfigError, SourceChanged, StoreBusy, StoreDamaged, StoreError

# Numbers and dates, as programs that rotate append them. Compressed files can't be read.
_ROTATED = re.compile(r"[.-](?P<suffix>\d[\d_.:T-]*)")
_HEAD = 256
# How often a folder is listed until two lists are the same: it changes while files are renamed.
_LISTS = 100


class _Numbered(msgspec.Struct, frozen=True):
    """A line of the index: the file of this number. A later line of the same number replaces it."""

    number: int
    device: int
    inode: int
    # A digest of its first bytes, and how many.
    head: str
    head_size: int


class LogFile(NamedTuple):
    """A file that is there now."""

    number: int
    path: str
    device: int
    inode: int
    size: int
    is_last: bool


class _Found(NamedTuple):
    path: str
    device: int
    inode: int
    size: int
    modified: int


class Renamed(Exception):  # noqa: N818 - to list the folder again is enough
    """A file has another name than a moment ago."""


class RotatedFiles:
    """The files of one log. For one thread at a time."""

    def __init__(self, path: str, index: str) -> None:
        self.path = path
        self.index = index
        self._numbered: dict[int, _Numbered] = {}
        self._finished: set[int] = set()

    def look(self) -> list[LogFile]:
        """All files with something in them, by number."""
        for _ in range(_LISTS):
            found = self._list()
            with suppress(Renamed):
                files = self._match(found) if self._numbered else None
                if files is None:
                    with self._locked() as handle:
                        files = self._number(found, handle)
                if files is not None:
                    return files
        raise StoreBusy(f"the files of {self.path} change all the time; try again")

    @property
    def first_unused(self) -> int:
        """The number of the next file; those below that are not there were deleted."""
        return max(self._numbered, default=-1) + 1

    # The files that exist

    def _list(self) -> list[_Found]:
        """The files that have something in them, and the current one as the last.

        While files are renamed a list may lack one, which would be taken for deleted: the folder is
        listed until it stays the same.
        """
        before: list[_Found] | None = None
        for _ in range(_LISTS):
            found = self._list_once()
            names = [each[:3] for each in found]
            if before is not None and names == [each[:3] for each in before]:
                return found
            before = found
        raise StoreBusy(f"the files of {self.path} are renamed all the time; try again")

    def _list_once(self) -> list[_Found]:
        folder, name = os.path.split(self.path)
        rotated: list[tuple[str, _Found]] = []
        current: list[_Found] = []
        try:
            names = os.listdir(folder)
        except OSError as error:
            raise StoreError(f"{folder} can't be listed: {error.strerror}") from error
        for each in names:
            match = _ROTATED.fullmatch(each, len(name)) if each.startswith(name) else None
            if each != name and match is None:
                continue
            found = _found(os.path.join(folder, each))
            if found is None:
                continue
            if match is None:
                current = [found]
            elif found.size:
                rotated.append((match["suffix"], found))
        # One that is renamed while we list may be seen under both names.
        unique = {(found.device, found.inode): found for found in current}
        for found in reversed(_by_age(rotated)):
            unique.setdefault((found.device, found.inode), found)
        return list(reversed(unique.values()))

    def _match(self, found: Sequence[_Found]) -> list[LogFile] | None:
        """The files by number; None if the index has to be read, or written."""
        by_inode = {(each.device, each.inode): each for each in self._numbered.values()}
        last = self.first_unused - 1
        files = []
        for each in found:
            known = by_inode.get((each.device, each.inode))
            is_newest = each.path == self.path and known is not None and known.number == last
            if not each.size and not is_newest:
                continue
            if known is None:
                return None
            same = _same_head(each, known)
            if not same and is_newest:
                raise SourceChanged(
                    f"{self.path} was truncated or written anew in place (copytruncate): lines may "
                    "be gone, and offsets would repeat. Rotate it by renaming. To go on with what "
                    f"is in it, rename it: mv {self.path} {self.path}.1"
                )
            if not same or (known.head_size < _HEAD and known.head_size < each.size):
                return None
            files.append(LogFile(known.number, *each[:4], is_last=False))
        files.sort()
        return [*files[:-1], files[-1]._replace(is_last=True)] if files else []

    def is_finished(self, file: LogFile, settle: float | None, now_ms: int) -> bool:
        """Whether nothing can be written to it any more.

        Where the system does not show who has it open: if nothing was written for `settle` seconds.
        """
        if file.is_last or file.number in self._finished:
            return not file.is_last
        with suppress(Renamed), opened(file.path, file.device, file.inode) as handle:
            is_open = is_open_for_writing(handle)
            if is_open is None:
                changed = os.fstat(handle).st_mtime * 1000
                is_open = settle is None or now_ms - changed < settle * 1000
            if not is_open:
                self._finished.add(file.number)
        return file.number in self._finished

    # The index

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The index, made if need be, locked against other processes."""
        handle = self._open_index()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        except OSError as error:
            raise StoreError(f"{self.index} can't be used: {error.strerror}") from error
        finally:
            os.close(handle)

    def _open_index(self) -> int:
        """Opens only a file of a trusted user: not a stranger's, and not what a link points to."""
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        for extra in (0, os.O_CREAT | os.O_EXCL, 0):
            try:
                handle = os.open(self.index, flags | extra, 0o644)
            except (FileNotFoundError, FileExistsError):
                continue
            except OSError as error:
                raise ConfigError(
                    f"{self.index}, where the files of {self.path} are numbered, can't be opened: "
                    f"{error.strerror}; name another place with index="
                ) from error
            status = os.fstat(handle)
            is_ours = status.st_uid in self._trusted() and status.st_nlink <= 1
            if not stat.S_ISREG(status.st_mode) or not is_ours:
                os.close(handle)
                raise ConfigError(
                    f"{self.index} is not a file of this user's or of the log's owner, or has "
                    "another name, too; name another place with index="
                )
            if extra:
                _sync_folder(self.index)
            return handle
        raise ConfigError(f"{self.index} can't be made; name another place with index=")

    def _trusted(self) -> set[int]:
        owners = {0, os.geteuid()}
        with suppress(OSError):
            owners.add(os.stat(self.path).st_uid)
        return owners

    def _number(self, found: Sequence[_Found], handle: int) -> list[LogFile] | None:
        """Give numbers to files that have none, and write down more of their first bytes."""
        self._read_index(handle)
        by_inode = {(each.device, each.inode): each for each in self._numbered.values()}
        lines = []
        for each in found:
            known = by_inode.get((each.device, each.inode))
            if not each.size:
                continue
            if known is not None and not _same_head(each, known):
                if each.path == self.path and known.number == self.first_unused - 1:
                    continue  # `_match` raises the error.
                known = None
            if known is None or known.head_size < min(_HEAD, each.size):
                head = _head(each)
                number = self.first_unused if known is None else known.number
                new = _Numbered(number, each.device, each.inode, _digest(head), len(head))
                self._numbered[number] = new
                lines.append(msgspec.json.encode(new) + b"\n")
        if lines:
            _write_whole(handle, b"".join(lines))
        return self._match(found)

    def _read_index(self, handle: int) -> None:
        data = b""
        while more := os.pread(handle, 2**20, len(data)):
            data += more
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(handle, whole)
        try:
            lines = [
                msgspec.json.decode(line, type=_Numbered) for line in data[:whole].splitlines()
            ]
        except msgspec.MsgspecError as error:
            raise StoreDamaged(
                f"{self.index} is not an index of log files ({error}); move it away, and attach "
                "the log under another name: offsets begin anew"
            ) from error
        # An inode may be used again: a later file has it.
        self._numbered = {line.number: line for line in lines}


def is_open_for_writing(handle: int) -> bool | None:
    """Whether any process has the file open for writing; None where that can't be known.

    The file's owner (and root) can know it, on Linux, on local disks: by whether a read lease is
    granted. If another process opens the file while this one has the lease, this one gets a
    signal: one that is ignored unless a program handles it, as the usual one would end the process.
    """
    try:
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)  # type: ignore[attr-defined,unused-ignore]
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return True if error.errno == errno.EAGAIN else None
    except AttributeError:
        return None
    with suppress(OSError):
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _found(path: str) -> _Found | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return _Found(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _by_age(rotated: list[tuple[str, _Found]]) -> list[_Found]:
    """The oldest first: of counters the highest, of dates the lowest.

    Not by the last write, unless the names say nothing: a program may write to a file for a while
    after it was rotated.
    """
    counters = [suffix.isdigit() and len(suffix) < 6 for suffix, _ in rotated]
    if all(counters):
        rotated = sorted(rotated, key=lambda each: -int(each[0]))
    elif not any(counters):
        rotated = sorted(rotated, key=lambda each: each[0])
    else:
        rotated = sorted(rotated, key=lambda each: each[1].modified)
    return [found for _, found in rotated]


def _head(found: _Found) -> bytes:
    with opened(found.path, found.device, found.inode) as handle:
        return os.pread(handle, min(_HEAD, found.size), 0)


@contextmanager
def opened(path: str, device: int, inode: int) -> Iterator[int]:
    """The file, if it still has this name; closed with the block."""
    handle = open_file(path, device, inode)
    try:
        yield handle
    finally:
        os.close(handle)


def open_file(path: str, device: int, inode: int) -> int:
    """Open the file if it still has this name, else `Renamed`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Renamed from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    status = os.fstat(handle)
    if (status.st_dev, status.st_ino) != (device, inode):
        os.close(handle)
        raise Renamed
    return handle


def _digest(head: bytes) -> str:
    return hashlib.sha256(head).hexdigest()[:32]


def _same_head(found: _Found, known: _Numbered) -> bool:
    head = _head(found)[: known.head_size]
    return len(head) == known.head_size and _digest(head) == known.head


def _write_whole(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]
    os.fsync(handle)


def _sync_folder(path: str) -> None:
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
