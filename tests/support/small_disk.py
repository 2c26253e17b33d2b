"""A small disk to be filled and emptied: a file system in memory, which only root can mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PIECE = bytes(2**18)


class SmallDisk:
    """The mounted folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, but: int = 0) -> None:
        """Leave no more room than so many bytes."""
        with self._ballast.open("wb", buffering=0) as ballast:
            while self._free() > but + len(_PIECE):
                ballast.write(_PIECE)

    def make_room(self) -> None:
        self._ballast.unlink()

    def _free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[SmallDisk]:
    """A disk of so many bytes over this folder, which keeps its owner and mode."""
    was = folder.stat()
    options = f"size={size},mode={was.st_mode & 0o777:o},uid={was.st_uid},gid={was.st_gid}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily: a server that was just killed may still be about to close its files.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
