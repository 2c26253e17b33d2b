"""Makes folders, which the servers remove when they are empty, and guards, which stay.

A folder is a container: a server looks for empty ones every minute and removes them, unless
nothing was ever in them. It does so by a transaction, so a commit finds the folder or does not:
then the folder is made again, and the commit sent again. What is known of the records of a removed
folder stays true: their guards, by which a version is told from a later one, are elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pxrs.errors import StoreUnavailable
from pxrs.stores.zookeeper.failures import came_back_empty, zk
from pxrs.stores.zookeeper.link import Link
from pxrs.stores.zookeeper.names import GUARD, folders_above, guard_of, lasting
from pxrs.stores.zookeeper.reading import Reading


class Folders:
    """The folders of one handle's commits."""

    def __init__(self, link: Link, root: str, reading: Reading) -> None:
        self._link = link
        self._root = root
        self._reading = reading
        self._knowledge = reading.knowledge
        # Folders that this handle has found or made and nobody may remove.
        self._lasting: set[str] = set()

    def open(self) -> None:
        """Make the root."""
        self._link.make_all(f"{self._root}/{GUARD}")
        self._lasting.add(self._root)

    def require(self, folders: Collection[str], deadline: float) -> list[str]:
        """Make sure that the folders exist, as far as is known, and that their guards are known.

        Returns those that this call has made. Raises `StoreDamaged` if another program has removed
        what stays for good.
        """
        unknown = sorted(folder for folder in folders if not self._knowledge.folder(folder))
        if not unknown:
            return []
        # As of before the look: another thread may make now what this one does not find.
        known = frozenset(self._lasting)
        there = self._reading.folders(unknown)
        self._lasting.update(lasting(self._root, folder) for folder in there)
        missing = [folder for folder in unknown if folder not in there]
        unguarded = {
            folder
            for folder in unknown
            if self._knowledge.guard(guard_of(self._root, folder)) is None
        }
        made = [each for folder in missing for each in self._make(folder, known, deadline)]
        for folder in unguarded:
            self._link.make(guard_of(self._root, folder), deadline)
        if missing or unguarded:
            self._reading.folders(unknown)
        return made

    def forget(self, folders: Collection[str]) -> None:
        """Look again, the next time, whether these folders exist."""
        self._knowledge.forget_folders(folders)

    def drop(self, made: Sequence[str]) -> None:
        """Have folders removed that were made for nothing: no server would ever do it.

        Not those that another commit has used by now: ZooKeeper refuses it.
        """
        self.forget(made)
        for folder in sorted(made, reverse=True):
            self._link.client.delete_async(folder)

    def _make(self, folder: str, known: Collection[str], deadline: float) -> list[str]:
        """Make a folder and those above it; returns those that this call has made."""
        self._make_lasting(folder, known, deadline)
        below = folders_above(self._root, f"{folder}/x")[2:]
        made: list[str] = []
        while True:
            try:
                for depth, part in enumerate(below):
                    # What the first one is in stays for good: without it the store is damaged.
                    expected = (zk.NoNodeError,) if depth else ()
                    if self._link.make_container(part, deadline, *expected):
                        made.append(part)
                return made
            except zk.NoNodeError:
                # A server has just removed the folder above, which was empty.
                if self._link.is_late(deadline):
                    raise StoreUnavailable(
                        "ZooKeeper: the folders were removed faster than they were made"
                    ) from None

    def _make_lasting(self, folder: str, known: Collection[str], deadline: float) -> None:
        """Make what stays for good. `known`: what was there before the folder was found missing."""
        top = lasting(self._root, folder)
        if top in known:
            if top == folder:
                raise came_back_empty()
            return
        self._link.make(top, deadline)
        self._link.make(f"{top}/{GUARD}", deadline)
        self._lasting.add(top)
