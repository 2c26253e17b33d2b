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
        """The current session, for a member; the member can't end it."""
        with self._lock:
            if self._session is None or self._session.remaining() <= 0:
                former, self._session = self._session, None
                if former is not None:
                    # It is over: close what it still keeps open here.
                    with suppress(PxrsError):
                        former.close()
                self._session = self._coord.session(self._ttl)
                self._renewing.start()
            return _Lent(self._session)

    def close(self) -> None:
        """End the session: members that are left are gone at once."""
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
        """Does nothing: the node renews the session."""

    def remaining(self) -> float:
        return self._session.remaining()

    def close(self) -> None:
        """Does nothing: other members are bound to the session, too."""
