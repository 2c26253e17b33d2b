"""Folders and ports."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

HOST = "127.0.0.1"
_PREFIX = "pxrs-engines-"
_root: tuple[Path, int] | None = None


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; somebody may take one before it is bound."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def new_folder(name: str) -> Path:
    """An empty folder that is gone when this process is."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_own_root()))


def _own_root() -> Path:
    """This process's folder, locked: the next process removes those that nobody locks."""
    global _root
    if _root is None:
        _sweep()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        path.chmod(0o755)
        lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        _root = path, lock
        atexit.register(shutil.rmtree, path, ignore_errors=True)
    return _root[0]


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / "lock", os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)
