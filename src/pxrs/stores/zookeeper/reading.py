"""Reading records: each as of now, and none of a session that is over.

To callers, a version is the id of the transaction that wrote the record (mzxid), which only rises.
A multi can only check a znode's own counter, which starts again when the znode is deleted and
made anew. So each folder has a *guard*, a znode that every delete in the folder writes: the
counter, together with a version that the guard had when the counter was read or before, identifies
one write only. A guard is never removed, or its own counter would start again. Folders are, so
guards are not in them; some folders share one.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pxrs.stores.zookeeper.commits import Operation
from pxrs.stores.zookeeper.link import Link, agreed, maybe
from pxrs.stores.zookeeper.names import (
    GUARD,
    guard_of,
    is_record,
    key_of,
    key_prefix_of,
    leaf_of,
)
from pxrs.stores.zookeeper.sessions import Sessions
from pxrs.types import Versioned

_MOST = 100_000


class Known(NamedTuple):
    """A record as it was seen: `version` for callers, `counter` and `guard` for ZooKeeper."""

    version: int
    counter: int
    guard: int
    session: str | None = None


class Knowledge:
    """Cached records, folders and guards. Bounded: the oldest are dropped, and read again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: OrderedDict[str, Known] = OrderedDict()
        self._guards: OrderedDict[str, int] = OrderedDict()
        self._folders: OrderedDict[str, None] = OrderedDict()

    def record(self, path: str) -> Known | None:
        with self._lock:
            return self._records.get(path)

    def learn(self, path: str, known: Known | None) -> None:
        with self._lock:
            self._records.pop(path, None)
            if known is not None:
                self._records[path] = known
                if len(self._records) > _MOST:
                    self._records.popitem(last=False)

    def guard(self, guard: str) -> int | None:
        """A version that the guard had at some time; None if it is not known."""
        with self._lock:
            return self._guards.get(guard)

    def learn_guard(self, guard: str, version: int) -> None:
        with self._lock:
            self._guards[guard] = max(version, self._guards.pop(guard, 0))
            if len(self._guards) > _MOST:
                self._guards.popitem(last=False)

    def folder(self, folder: str) -> bool:
        """Whether the folder existed when it was last seen. It may have been removed since."""
        with self._lock:
            return folder in self._folders

    def learn_folders(self, folders: Iterable[str]) -> None:
        with self._lock:
            for folder in folders:
                self._folders[folder] = None
            while len(self._folders) > _MOST:
                self._folders.popitem(last=False)

    def forget_folders(self, folders: Iterable[str]) -> None:
        with self._lock:
            for folder in folders:
                self._folders.pop(folder, None)


_AT_ONCE = 500


class Found(NamedTuple):
    """A znode that exists, and its record, which is None when its session is over."""

    known: Known
    record: Versioned | None


class Reading:
    """Reads for one handle. With `now`, it reads what a majority has agreed on (`link.agreed`).

    Without `now` it reads what a majority had agreed on at an earlier read of the same session of
    ZooKeeper, or something newer (`Link.in_one_session`).
    """

    def __init__(self, link: Link, root: str, sessions: Sessions) -> None:
        self._link = link
        self._root = root
        self._sessions = sessions
        self.knowledge = Knowledge()
        self.listings = Listings(link, root)

    def records(self, paths: Sequence[str]) -> dict[str, Found]:
        """The znodes that exist now."""
        return self._link.in_one_session(lambda: self.those(paths, now=True))

    def those(self, paths: Sequence[str], *, now: bool = False) -> dict[str, Found]:
        """The znodes that exist. See `Reading` for `now`."""
        found: dict[str, Found] = {}
        for first in range(0, len(paths), _AT_ONCE):
            found |= self._some(paths[first : first + _AT_ONCE], now=now and not first)
        return found

    def walk(self, folder: str, prefix: str, after: str | None) -> Iterator[str]:
        """Paths of the records that exist now below a folder, with keys from `prefix` and beyond
        `after`, sorted by key."""
        parts: list[Iterator[tuple[str, str]]] = []
        folders = [folder]
        now = True
        while folders:
            listed = self.listings.of(folders, now=now)
            now = False
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

    def folders(self, folders: Sequence[str]) -> set[str]:
        """Those of the folders that exist. Learns them, and the versions of the guards."""
        guards = sorted({guard_of(self._root, folder) for folder in folders})
        stats = self._link.call(
            lambda client: [client.exists_async(path) for path in (*folders, *guards)]
        )
        for guard, stat in zip(guards, stats[len(folders) :], strict=True):
            if stat is not None:
                self.knowledge.learn_guard(guard, stat.version)
        there = {folder for folder, stat in zip(folders, stats, strict=False) if stat is not None}
        self.knowledge.learn_folders(there)
        return there

    def _some(self, paths: Sequence[str], *, now: bool) -> dict[str, Found]:
        """Read; repeats until no record was replaced while its session was looked up."""
        while True:
            seen = self._raw(paths, now=now)
            named = {known.session for known, _ in seen.values()} - {None}
            alive = self._alive([str(name) for name in named])
            dead = [path for path, (known, _) in seen.items() if known.session in named - alive]
            if not dead:
                break
            again = self._raw(dead, now=False)
            if all(again.get(path) == seen[path] for path in dead):
                break
        found = {}
        for path, (known, value) in seen.items():
            ended = known.session is not None and known.session not in alive
            key = key_of(self._root, path)
            record = None if ended else Versioned(key, value, known.version, known.session)
            found[path] = Found(known, record)
            self.knowledge.learn(path, known)
        return found

    def _raw(self, paths: Sequence[str], *, now: bool) -> dict[str, tuple[Known, bytes]]:
        guard_by_path = {path: guard_of(self._root, path.rpartition("/")[0]) for path in paths}
        guards = sorted(set(guard_by_path.values()))

        def send(client: Any) -> list[Any]:
            # In this order: the guard must be read before the records whose counters it completes.
            return [
                *([agreed(client, self._root)] if now else []),
                *(client.exists_async(guard) for guard in guards),
                *(maybe(client.get_async(path)) for path in paths),
            ]

        answers = self._link.call(send)[1 if now else 0 :]
        versions: dict[str, int] = {}
        for guard, stat in zip(guards, answers, strict=False):
            if stat is not None:
                versions[guard] = stat.version
                self.knowledge.learn_guard(guard, stat.version)
        seen = {}
        unguarded: set[str] = set()
        for path, answer in zip(paths, answers[len(guards) :], strict=True):
            guard = guard_by_path[path]
            if answer is None:
                self.knowledge.learn(path, None)
            elif guard not in versions:
                unguarded.add(guard)
            else:
                data, stat = answer
                session, _, value = data.partition(b"\n")
                known = Known(stat.mzxid, stat.version, versions[guard], session.decode() or None)
                seen[path] = known, value
        if unguarded:
            # An earlier release has written them; or they were made after the guards were read.
            for guard in unguarded:
                self._link.make(guard.rpartition("/")[0])
                self._link.make(guard)
            return self._raw(paths, now=now)
        return seen

    def _alive(self, names: Sequence[str]) -> set[str]:
        if not names:
            return set()
        paths = [self._sessions.path(name) for name in names]
        stats = self._link.call(lambda client: [client.exists_async(path) for path in paths])
        return {name for name, stat in zip(names, stats, strict=True) if stat is not None}


def _meet(folder: str, prefix: str) -> bool:
    """Whether keys in the folder can start with the prefix."""
    return folder.startswith(prefix) or prefix.startswith(folder)


# Which znodes are in a folder, without asking for all their names every time. ZooKeeper answers
# with all children of a znode or with none, and in no order: with 10,000 items in a queue every
# `take` would have to pay for that. A znode also counts how often its children changed, so a
# listing is valid as long as the count is the same. And children that this handle itself creates
# and deletes can be added to the listing, if the count shows that no other client changed any.

_MOST_NAMES = 300_000


class Listing(NamedTuple):
    """The children of a folder at a count of `changes`; `made` shows if it was made again since.

    `leaves`: the last parts of the records' keys, sorted; `names`: the znode names of those leaves
    that differ from them.
    """

    made: int
    changes: int
    leaves: Sequence[str]
    names: Mapping[str, str]
    folders: Sequence[str]

    def between(self, first: str, after: str | None) -> Iterator[str]:
        """Leaves that start with one text and come after another."""
        begin = bisect_left(self.leaves, first)
        if after is not None:
            begin = max(begin, bisect_right(self.leaves, after))
        for at in range(begin, len(self.leaves)):
            leaf = self.leaves[at]
            if not leaf.startswith(first):
                return
            yield leaf

    def name(self, leaf: str) -> str:
        """The name of a record's znode."""
        return self.names.get(leaf) or f"={leaf}"


_NOTHING = Listing(0, -1, (), {}, ())


class Listings:
    """The listings of one handle. Bounded: the oldest are dropped, and asked for again."""

    def __init__(self, link: Link, root: str) -> None:
        self._link = link
        self._root = root
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Listing] = OrderedDict()
        self._names = 0

    def of(self, folders: Sequence[str], *, now: bool) -> list[Listing]:
        """The listings of these folders. See `Reading` for `now`."""
        with self._lock:
            known = {folder: self._known[folder] for folder in folders if folder in self._known}

        def look(client: Any) -> list[Any]:
            first = [agreed(client, self._root)] if now else []
            return first + [
                client.exists_async(folder) if folder in known else self._children(client, folder)
                for folder in folders
            ]

        found: dict[str, Listing] = {}
        stale: list[str] = []
        for folder, answer in zip(folders, self._link.call(look)[1 if now else 0 :], strict=True):
            if folder not in known or answer is None:
                found[folder] = self._learn(folder, answer)
            elif (answer.czxid, answer.cversion) == known[folder][:2]:
                found[folder] = known[folder]
            else:
                stale.append(folder)
        answers = self._link.call(lambda client: [self._children(client, each) for each in stale])
        for folder, answer in zip(stale, answers, strict=True):
            found[folder] = self._learn(folder, answer)
        return [found[folder] for folder in folders]

    def changed(self, operations: Sequence[Operation], results: Sequence[Any]) -> None:
        """Learn from a commit of this handle. It wrote the folders last: their counts are new."""
        made: defaultdict[str, list[str]] = defaultdict(list)
        gone: defaultdict[str, list[str]] = defaultdict(list)
        for operation, result in zip(operations, results, strict=True):
            folder, _, name = operation.path.rpartition("/")
            if operation.kind == "create":
                made[folder].append(name)
            elif operation.kind == "delete":
                gone[folder].append(name)
            elif operation.kind == "set_data" and operation.path in made.keys() | gone.keys():
                self._change(operation.path, result, made[operation.path], gone[operation.path])

    def _change(self, folder: str, stat: Any, made: list[str], gone: list[str]) -> None:
        with self._lock:
            before = self._known.get(folder)
            count = len(made) + len(gone)
            if before and (stat.czxid, stat.cversion - count) == before[:2]:
                # A child that was created only to be deleted again is neither new nor old.
                new = [name for name in made if name not in gone]
                old = [name for name in gone if name not in made]
                self._keep(folder, _with(before, stat.cversion, new, old))

    def _children(self, client: Any, folder: str) -> Any:
        return maybe(client.get_children_async(folder, include_data=True))

    def _learn(self, folder: str, answer: Any) -> Listing:
        listing = _NOTHING
        if answer is not None:
            names, stat = answer
            listing = _with(
                _NOTHING._replace(made=stat.czxid, folders=_folders(names)),
                stat.cversion,
                [name for name in names if is_record(name)],
                (),
            )
        with self._lock:
            before = self._known.get(folder)
            if before is None or before[:2] < listing[:2]:
                self._keep(folder, listing)
        return listing

    def _keep(self, folder: str, listing: Listing) -> None:
        before = self._known.pop(folder, _NOTHING)
        self._names += _size(listing) - _size(before)
        self._known[folder] = listing
        while self._names > _MOST_NAMES and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._names -= _size(oldest)


def _folders(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if name != GUARD and not is_record(name)))


def _with(listing: Listing, changes: int, new: Sequence[str], gone: Sequence[str]) -> Listing:
    """The listing after adding and removing records."""
    names = dict(listing.names)
    leaves = list(listing.leaves)
    for name in gone:
        leaf = leaf_of(name)
        names.pop(leaf, None)
        at = bisect_left(leaves, leaf)
        if leaves[at : at + 1] == [leaf]:
            del leaves[at]
    fresh = []
    for name in new:
        leaf = leaf_of(name)
        fresh.append(leaf)
        if name != f"={leaf}":
            names[leaf] = name
    # Python sorts two sorted runs fast.
    leaves += sorted(fresh)
    leaves.sort()
    return listing._replace(changes=changes, leaves=leaves, names=names)


def _size(listing: Listing) -> int:
    return 1 + len(listing.leaves) + len(listing.folders)
