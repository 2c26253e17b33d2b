"""Translates SQLite's error codes into errors of pxrs."""

from __future__ import annotations

import errno
import os
import sqlite3

from pxrs.errors import (
    InvalidRequest,
    PxrsError,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TransactionConflict,
)

_BUSY, _LOCKED, _READONLY, _IOERR, _CORRUPT, _FULL, _CANTOPEN, _NOTADB = 5, 6, 8, 10, 11, 13, 14, 26
_PROTOCOL = 15
_BUSY_SNAPSHOT = 517
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)


# A number or text that SQLite has no column for never reaches it: the driver refuses it.
DRIVER_ERRORS = (sqlite3.Error, OverflowError, UnicodeError)


def primary_code(error: Exception) -> int:
    """The error's primary result code, 0 if it has none."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def is_io_error(error: sqlite3.Error) -> bool:
    """Whether the disk failed."""
    return primary_code(error) == _IOERR


def is_old_snapshot(error: Exception) -> bool:
    """Whether the transaction has read data that another one has changed since."""
    return getattr(error, "sqlite_errorcode", 0) == _BUSY_SNAPSHOT


def translate(error: Exception, path: str) -> PxrsError:
    """The typed error for an error of SQLite about the file, or of its driver about a value."""
    if not isinstance(error, sqlite3.Error):
        return InvalidRequest(f"{path} can't hold such a value: {error}")
    if is_old_snapshot(error):
        return TransactionConflict(
            f"the transaction on {path} has read data that others changed since; roll it back and "
            "run it again, from BEGIN IMMEDIATE if this happens often"
        )
    code = primary_code(error)
    if code in (_BUSY, _LOCKED, _PROTOCOL):
        return StoreBusy(
            f"{path} is locked by a program that does not write through pxrs ({error}); "
            "end its transaction, or raise busy_timeout"
        )
    if code == _FULL:
        return StoreFull(f"no space left for {path}; nothing was written. Free space and retry")
    if code == _READONLY:
        return StoreReadOnly(
            f"{path} can't be written ({error}); give this user write access to the file "
            "and its folder"
        )
    if code in (_CORRUPT, _NOTADB):
        return StoreDamaged(
            f"{path} is not a whole SQLite database ({error}); restore it from a backup, or save "
            "what can be saved with: sqlite3 FILE .recover"
        )
    if code == _CANTOPEN and os.path.exists(path) and not os.access(path, os.R_OK):
        return StoreReadOnly(f"{path} can't be read; give this user read and write access to it")
    if code == _CANTOPEN:
        return StoreUnavailable(
            f"{path} can't be opened ({error}); its folder must exist and be writable"
        )
    if code == _IOERR:
        # SQLite tells a full disk apart, but not a quota that is used up, and hides the system's
        # error number. Both may pass: so it is retryable.
        return StoreUnavailable(
            f"the disk failed under {path} ({error}), or its user's quota is used up"
        )
    return StoreError(f"SQLite refused a statement on {path}: {error}")


def translate_os(error: OSError, path: str) -> StoreError:
    """The typed error for a system error about a file of pxrs."""
    if error.errno in _NO_SPACE:
        return StoreFull(f"no space left for {path} ({error.strerror}); free space and retry")
    if error.errno in _NO_RIGHT:
        return StoreReadOnly(
            f"{path} can't be written ({error.strerror}); pxrs needs it for locks and sessions: "
            "give this user write access to the database, its folder and this"
        )
    if error.errno == errno.ENOENT:
        return removed(path)
    return StoreUnavailable(f"{path} can't be used ({error.strerror})")


def removed(path: str) -> StoreError:
    """Builds the error for a file that this process has opened and that others would not find."""
    return StoreError(
        f"{path} was removed or replaced while this process used it; start the process again"
    )
