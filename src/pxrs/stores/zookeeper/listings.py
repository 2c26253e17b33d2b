"""Which znodes are in a folder, without asking for all their names every time.

ZooKeeper answers with all children of a znode or with none, and in no order: with 10,000 items in
a queue that is what a `take` would cost. A znode also counts how often its children changed, so a
listing is good as long as the count is. And what this handle itself makes and removes can be
added to the listing, if the count says that nobody else did.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pxrs.stores.zookeeper.commits import Operation
from pxrs.stores.zookeeper.link import Link, maybe, told, zk
from pxrs.stores.zookeeper.names import GUARD, is_record, leaf_of

_MOST_NAMES = 300_000


class Listing(NamedTuple):
    """The children of a folder when its count was this; `made` tells it from one made again.

    `leaves`: the last parts of the records' keys, sorted; `names`: of those which are not
    their names, these.
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
    """Those of one handle. Bounded: what was not used for longest is asked for again."""

    def __init__(self, link: Link, root: str) -> None:
        self._link = link
        self._root = root
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Listing] = OrderedDict()
        self._names = 0

    def of(self, folders: Sequence[str], *, sync: bool) -> list[Listing]:
        """As of now, if the server has caught up: `sync` sees to that."""
        with self._lock:
            known = {folder: self._known[folder] for folder in folders if folder in self._known}

        def look(client: Any) -> list[Any]:
            first = [client.sync_async(self._root)] if sync else []
            return first + [
                client.exists_async(folder) if folder in known else self._children(client, folder)
                for folder in folders
            ]

        found: dict[str, Listing] = {}
        stale: list[str] = []
        for folder, answer in zip(folders, self._ask(look)[1 if sync else 0 :], strict=True):
            if folder not in known or answer is None:
                found[folder] = self._learn(folder, answer)
            elif (answer.czxid, answer.cversion) == known[folder][:2]:
                found[folder] = known[folder]
            else:
                stale.append(folder)
        answers = self._ask(lambda client: [self._children(client, each) for each in stale])
        for folder, answer in zip(stale, answers, strict=True):
            found[folder] = self._learn(folder, answer)
        return [found[folder] for folder in folders]

    def changed(self, operations: Sequence[Operation], results: Sequence[Any]) -> None:
        """A commit of this handle did this. It wrote the folders last: their counts are the new."""
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
                # One that was made only to be taken away again is neither.
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

    def _ask(self, send: Any) -> Any:
        try:
            return self._link.call(send)
        except zk.KazooException as error:
            raise told(error) from error


def _folders(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if name != GUARD and not is_record(name)))


def _with(listing: Listing, changes: int, new: Sequence[str], gone: Sequence[str]) -> Listing:
    """With other records."""
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
    # Two sorted runs, or one that is not: Python sorts both fast.
    leaves += sorted(fresh)
    leaves.sort()
    return listing._replace(changes=changes, leaves=leaves, names=names)


def _size(listing: Listing) -> int:
    return 1 + len(listing.leaves) + len(listing.folders)
