"""Sessions: an ephemeral znode on a connection of its own.

A record names its session and counts only as long as the session's znode exists; a commit that
writes with the session checks that. So all records of a session vanish at once, any handle can
write with it, and several sessions can have a part in one commit; with ephemeral records none of
this would work.

kazoo keeps the connection's ZooKeeper session alive by itself; that shows that the process
lives, not that its owner renews. So a thread of this handle ends a session that is not renewed in
time, and the server ends it when this process can't. And a single server may be wrong about which
sessions live: a session exists if a majority agrees that it does.
"""

from __future__ import annotations

import math
import secrets
import threading
from typing import Any

from pxrs.clock import Clock
from pxrs.config import ServerSettings
from pxrs.errors import Closed, SessionLost
from pxrs.stores.api import validate_ttl
from pxrs.stores.zookeeper.failures import zk
from pxrs.stores.zookeeper.link import Farewell, Link, agreed


class ZooKeeperSession:
    """A `Session`. `remaining` counts from when the last request that was answered was sent."""

    def __init__(self, link: Link, clock: Clock, path: str, ttl: float, sent: float) -> None:
        self._link = link
        self._clock = clock
        self.id = path.rpartition("/")[2]
        self.ttl = ttl
        self._path = path
        self._renewed = sent
        self._heard = sent
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def renew(self) -> None:
        if self.over:
            raise self._lost()
        sent = 0.0

        def look(client: Any) -> Any:
            nonlocal sent
            sent = self._clock.monotonic()
            return agreed(client, self._path)

        try:
            self._link.call(look, expected=(zk.NoNodeError,))
        except zk.NoNodeError:
            self.abandon()
            raise self._lost() from None
        except Closed:
            # Its time was up while the servers said nothing.
            raise self._lost() from None
        self._renewed = max(self._renewed, sent)
        self._heard = max(self._heard, sent)

    def remaining(self) -> float:
        if self.over:
            return 0.0
        return max(0.0, self._end() - self._clock.monotonic())

    def close(self) -> None:
        """End it; the server removes the znode before it answers.

        If it does not answer in time, this goes on in the background.
        """
        if not self.over:
            self._over.set()
            self._link.stop()

    def abandon(self) -> None:
        """Count it as over, and close its connection in the background."""
        if not self.over:
            self._over.set()
            threading.Thread(target=self._link.stop, daemon=True).start()

    def tend(self) -> float:
        """End it if it was not renewed in time; returns the seconds until the next such check."""
        now = self._clock.monotonic()
        if now >= self._renewed + self.ttl:
            self.abandon()
            return math.inf
        left = self._renewed + self.ttl - now
        if self.ttl <= self._link.negotiated:
            return left
        agreed(self._link.client, self._path).then(lambda: self._hear(now))
        return min(left, self._link.negotiated / 4)

    def _hear(self, sent: float) -> None:
        """Note that the servers have answered a request that was sent at `sent`."""
        self._heard = max(self._heard, sent)

    def _end(self) -> float:
        """When it ends: by its TTL, or because the server got no request for its own timeout."""
        return min(self._renewed + self.ttl, self._heard + self._link.negotiated)

    def _lost(self) -> SessionLost:
        return SessionLost(f"session {self.id} is over; open a new one")


class Sessions:
    """The sessions of one handle, and the thread that ends those that are not renewed."""

    def __init__(
        self, settings: ServerSettings, clock: Clock, folder: str, farewell: Farewell
    ) -> None:
        self._settings = settings
        self._farewell = farewell
        self._clock = clock
        self._folder = folder
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._held: set[ZooKeeperSession] = set()
        # Not a `Loop`: that ends with its object. If a handle was dropped without being closed,
        # kazoo keeps its sessions alive, and those have to end, too.
        self._thread: threading.Thread | None = None
        self._closed = False

    def path(self, session_id: str) -> str:
        """The znode that exists as long as the session."""
        if not session_id.isalnum():
            raise SessionLost(f"there is no session {session_id!r}")
        return f"{self._folder}/{session_id}"

    def open(self, ttl: float) -> ZooKeeperSession:
        """Open a session with a connection of its own."""
        validate_ttl(ttl)
        link = Link(self._settings, self._clock, ttl if ttl < 3600 else 3600, self._farewell)
        path = f"{self._folder}/{secrets.token_hex(10)}"
        try:
            sent = link.make(path, ephemeral=True)
        except BaseException:
            link.stop()
            raise
        session = ZooKeeperSession(link, self._clock, path, ttl, sent)
        self._keep(session)
        return session

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            self._closed = True
            held = list(self._held)
            thread = self._thread
        self._changed.set()
        for session in held:
            session.close()
        if thread is not None:
            thread.join()

    def _keep(self, session: ZooKeeperSession) -> None:
        with self._lock:
            self._held.add(session)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._tend, name="pxrs-zookeeper-sessions", daemon=True
                )
                self._thread.start()
        self._changed.set()

    def _tend(self) -> None:
        while not self._closed:
            self._changed.clear()
            with self._lock:
                self._held = {session for session in self._held if not session.over}
                held = list(self._held)
            soonest = min((session.tend() for session in held), default=math.inf)
            self._changed.wait(None if soonest == math.inf else max(0.001, soonest))
