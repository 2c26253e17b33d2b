"""A log that fails when told to: before the append is done, or after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pxrs.errors import PxrsError
from pxrs.stores.api import Atomic, CoordStore, LogStore, QueueStore, Stores, Watch
from pxrs.types import Append, Appended, Bounds, Fetched, LogPartition

Hook = Callable[[Sequence[Append]], None]


def _nothing(_: Sequence[Append]) -> None:
    pass


class FaultyLog:
    """A `LogStore` around another. `before` and `after` are called around each append.

    What `before` raises is an append that was not done, what `after` raises is one that was
    done without its caller knowing. A hook that blocks makes the log slow. `appending` stands
    between them and may answer each batch by itself.
    """

    def __init__(self, inner: LogStore) -> None:
        self._inner = inner
        self.appending = inner.append
        self.before: Hook = _nothing
        self.after: Hook = _nothing
        self.expiring: Callable[[], None] = lambda: None
        self.fetching: Callable[[], None] = lambda: None
        self.appends: list[list[Append]] = []
        self.fetches = 0

    def heal(self) -> None:
        """No more faults."""
        self.before = self.after = _nothing
        self.appending = self._inner.append

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        self.appends.append(list(appends))
        self.before(appends)
        results = self.appending(appends)
        self.after(appends)
        return results

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        self.fetches += 1
        self.fetching()
        return self._inner.fetch(where, offset, max_bytes)

    def expire(
        self, where: LogPartition, before_timestamp: int | None, max_bytes: int | None
    ) -> int:
        self.expiring()
        return self._inner.expire(where, before_timestamp, max_bytes)

    def create(self, topic_id: str, partitions: int) -> None:
        self._inner.create(topic_id, partitions)

    def drop(self, topic_id: str) -> None:
        self._inner.drop(topic_id)

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        return self._inner.bounds(topic_id)

    def size(self, where: LogPartition) -> int:
        return self._inner.size(where)

    def batch_at(self, where: LogPartition, timestamp: int) -> int | None:
        return self._inner.batch_at(where, timestamp)

    def trim(self, where: LogPartition, before: int) -> int:
        return self._inner.trim(where, before)

    def watch(self, *where: LogPartition) -> Watch:
        return self._inner.watch(*where)

    def close(self) -> None:
        self._inner.close()


class FaultyStores:
    """`Stores` whose log is a `FaultyLog`."""

    def __init__(self, inner: Stores) -> None:
        self._inner = inner
        self.log = FaultyLog(inner.log)

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def coord(self) -> CoordStore:
        return self._inner.coord

    @property
    def queues(self) -> QueueStore:
        return self._inner.queues

    def atomic(self, connection: Any = None) -> AbstractContextManager[Atomic]:
        return self._inner.atomic(connection)

    def close(self) -> None:
        self._inner.close()


def times(number: int, error: BaseException) -> Callable[..., None]:
    """Raise the error so many times, then never again."""
    left = [error] * number

    def hook(*_: object) -> None:
        if left:
            raise left.pop()

    return hook
