"""A log that fails when told to: before the append is done, or after."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pxrs.errors import PxrsError
from pxrs.stores.api import LogStore, Stores
from pxrs.testing.forwarding import Forwarding
from pxrs.types import Append, Appended, Fetched, LogPartition

Hook = Callable[[Sequence[Append]], None]


def _nothing(_: Sequence[Append]) -> None:
    pass


class FaultyLog(Forwarding, seam=LogStore):
    """A `LogStore` around another. `before` and `after` are called around each append.

    What `before` raises is an append that was not done, what `after` raises is one that was
    done without its caller knowing. A hook that blocks makes the log slow. `appending` stands
    between them and may answer each batch by itself.
    """

    def __init__(self, inner: LogStore) -> None:
        super().__init__(inner)
        self.heal()
        self.expiring: Callable[[], None] = lambda: None
        self.fetching: Callable[[], None] = lambda: None
        self.appends: list[list[Append]] = []
        self.fetches = 0

    def heal(self) -> None:
        """No more faults."""
        self.before: Hook = _nothing
        self.after: Hook = _nothing
        self.appending: Callable[[Sequence[Append]], list[Appended | PxrsError]]
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
        fetched: Fetched = self._inner.fetch(where, offset, max_bytes)
        return fetched

    def expire(
        self, where: LogPartition, before_timestamp: int | None, max_bytes: int | None
    ) -> int:
        self.expiring()
        start: int = self._inner.expire(where, before_timestamp, max_bytes)
        return start


class FaultyStores(Forwarding, seam=Stores):
    """`Stores` whose log is a `FaultyLog`."""

    def __init__(self, inner: Stores) -> None:
        super().__init__(inner)
        self.log = FaultyLog(inner.log)


def times(number: int, error: BaseException) -> Callable[..., None]:
    """Raise the error so many times, then never again."""
    left = [error] * number

    def hook(*_: object) -> None:
        if left:
            raise left.pop()

    return hook
