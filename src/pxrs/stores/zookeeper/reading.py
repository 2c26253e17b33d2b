"""Reading records: each as of now, and none of a session that is over."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pxrs.stores.zookeeper.known import Knowledge, Known
from pxrs.stores.zookeeper.link import Link, maybe, told, zk
from pxrs.stores.zookeeper.listings import Listing, Listings
from pxrs.stores.zookeeper.names import GUARD, key_of, key_prefix_of
from pxrs.stores.zookeeper.sessions import Sessions
from pxrs.types import Versioned

_AT_ONCE = 500


class Found(NamedTuple):
    """A znode as it is: its record, which is None when its session is over."""

    known: Known
    record: Versioned | None


class Reading:
    """Reads for one handle. Every round begins with a sync: the server has to catch up first."""

    def __init__(self, link: Link, root: str, sessions: Sessions, knowledge: Knowledge) -> None:
        self._link = link
        self._root = root
        self._sessions = sessions
        self._knowledge = knowledge
        self.listings = Listings(link, root)

    def records(self, paths: Sequence[str]) -> dict[str, Found]:
        """The znodes that are there."""
        found: dict[str, Found] = {}
        for first in range(0, len(paths), _AT_ONCE):
            found |= self._some(paths[first : first + _AT_ONCE])
        return found

    def walk(self, folder: str, prefix: str, after: str | None) -> Iterator[str]:
        """Paths of the records below a folder with keys from `prefix`, beyond `after`, by key."""
        parts: list[Iterator[tuple[str, str]]] = []
        folders = [folder]
        sync = True
        while folders:
            listed = self.listings.of(folders, sync=sync)
            sync = False
            below: list[str] = []
            for parent, listing in zip(folders, listed, strict=True):
                parts.append(self._part(parent, listing, prefix, after))
                paths = [f"{parent}/{name}" for name in listing.folders]
                below += [each for each in paths if _meet(key_prefix_of(self._root, each), prefix)]
            folders = below
        return (path for _, path in heapq.merge(*parts))

    def _part(
        self, folder: str, listing: Listing, prefix: str, after: str | None
    ) -> Iterator[tuple[str, str]]:
        """Keys and paths of one folder."""
        common = key_prefix_of(self._root, folder)
        if after is not None and after > common and not after.startswith(common):
            return
        beyond = after[len(common) :] if after is not None and after.startswith(common) else None
        first = prefix[len(common) :] if prefix.startswith(common) else ""
        for leaf in listing.between(first, beyond):
            yield common + leaf, f"{folder}/{listing.name(leaf)}"

    def guards(self, folders: Iterable[str]) -> dict[str, int]:
        """The versions of the folders' guards, where there is one."""
        wanted = list(folders)
        stats = self._ask(lambda client: [client.exists_async(f"{f}/{GUARD}") for f in wanted])
        found = {
            folder: stat.version
            for folder, stat in zip(wanted, stats, strict=True)
            if stat is not None
        }
        for folder, version in found.items():
            self._knowledge.learn_guard(folder, version)
        return found

    def _some(self, paths: Sequence[str]) -> dict[str, Found]:
        """Again until no record was replaced while its session was looked up."""
        while True:
            seen = self._raw(paths)
            named = {known.session for known, _ in seen.values()} - {None}
            alive = self._alive([str(name) for name in named])
            dead = [path for path, (known, _) in seen.items() if known.session in named - alive]
            if not dead:
                break
            again = self._raw(dead)
            if all(again.get(path) == seen[path] for path in dead):
                break
        found = {}
        for path, (known, value) in seen.items():
            ended = known.session is not None and known.session not in alive
            key = key_of(self._root, path)
            record = None if ended else Versioned(key, value, known.version, known.session)
            found[path] = Found(known, record)
            self._knowledge.learn(path, known)
        return found

    def _raw(self, paths: Sequence[str]) -> dict[str, tuple[Known, bytes]]:
        folders = sorted({path.rpartition("/")[0] for path in paths})

        def send(client: Any) -> list[Any]:
            # In this order: a guard that was read first makes what is read after it certain.
            return [
                client.sync_async(self._root),
                *(client.exists_async(f"{folder}/{GUARD}") for folder in folders),
                *(maybe(client.get_async(path)) for path in paths),
            ]

        answers = self._ask(send)[1:]
        guards: dict[str, int] = {}
        for folder, stat in zip(folders, answers, strict=False):
            if stat is not None:
                guards[folder] = stat.version
                self._knowledge.learn_guard(folder, stat.version)
        seen = {}
        for path, answer in zip(paths, answers[len(folders) :], strict=True):
            guard = guards.get(path.rpartition("/")[0])
            if answer is None or guard is None:
                self._knowledge.learn(path, None)
                continue
            data, stat = answer
            session, _, value = data.partition(b"\n")
            known = Known(stat.mzxid, stat.version, guard, session.decode() or None)
            seen[path] = known, value
        return seen

    def _alive(self, names: Sequence[str]) -> set[str]:
        if not names:
            return set()
        paths = [self._sessions.path(name) for name in names]
        stats = self._ask(lambda client: [client.exists_async(path) for path in paths])
        return {name for name, stat in zip(names, stats, strict=True) if stat is not None}

    def _ask(self, send: Any) -> Any:
        try:
            return self._link.call(send)
        except zk.KazooException as error:
            raise told(error) from error


def _meet(folder: str, prefix: str) -> bool:
    """Whether keys in the folder can start with the prefix."""
    return folder.startswith(prefix) or prefix.startswith(folder)
