"""A lab over a real engine that coordinates; messages are kept elsewhere."""

from __future__ import annotations

from pxrs.stores.api import Session, Stores
from pxrs.stores.open import open_stores
from pxrs.testing.conformance import await_end


class CoordLab:
    """A place of its own in a shared engine; every handle has connections of its own.

    `ttl`: the shortest session that the engine counts well.
    """

    patience = 20.0

    def __init__(self, url: str, ttl: float) -> None:
        self._url = url
        self.ttl = ttl
        self._opened: list[Stores] = []

    def open(self) -> Stores:
        stores = open_stores("memory://", coord=self._url)
        self._opened.append(stores)
        return stores

    def let_expire(self, session: Session) -> None:
        await_end(self.open(), session, self.patience)

    def close(self) -> None:
        for stores in self._opened:
            stores.close()
