"""The one store session of a node: every member that the node holds is bound to it."""

from __future__ import annotations

import threading
from contextlib import suppress

from pxrs.errors import PxrsError
from pxrs.loop import Loop
from pxrs.stores.api import CoordStore, Session

_RETRY = 0.5


class NodeSession:
    """Opens the session, renews it, and opens another when it was lost. Thread-safe."""

    def __init__(self, coord: CoordStore, ttl: float) -> None:
        self._coord = coord
        self._ttl = ttl
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._closed = False
        self._renewing = Loop("pxrs-node-session", self._renew)

    def lend(self, ttl: float) -> Session:
        """The session as it is now, for a member that must not end it."""
        with self._lock:
            if self._session is None or self._session.remaining() <= 0:
                former, self._session = self._session, None
                if former is not None:
                    # It is over: what it keeps open here is put away.
                    with suppress(PxrsError):
                        former.close()
                self._session = self._coord.session(self._ttl)
                self._renewing.start()
            return _Lent(self._session)

    def close(self) -> None:
        """End it: the members that are left are gone at once."""
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
        self._renewing.wake()
        if session is not None:
            session.close()

    def _renew(self) -> float | None:
        session = self._session
        if self._closed or session is None:
            return None
        try:
            session.renew()
        except PxrsError:
            # Lost, or the store is away: its own deadline decides, and members ask for another.
            return _RETRY
        return self._ttl / 3


class _Lent:
    """The node's session in the hands of one member."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def ttl(self) -> float:
        return self._session.ttl

    def renew(self) -> None:
        """Nothing: the node renews it."""

    def remaining(self) -> float:
        return self._session.remaining()

    def close(self) -> None:
        """Nothing: others are bound to it too."""
