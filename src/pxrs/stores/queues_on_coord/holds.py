"""What this process holds: so that a commit need not read first, and for how long it lasts."""

from __future__ import annotations

import threading
from contextlib import suppress

from pxrs.errors import PxrsError, SessionLost
from pxrs.stores.api import CoordStore, Session
from pxrs.stores.queues_on_coord.layout import Entry, Layout, entry_of
from pxrs.types import Held, Holder

_HOLDERS_KNOWN = 10_000
_SPARE_SESSIONS = 8


class Holds:
    """Items in this process's hands, as they were handed out. The store's checks decide."""

    def __init__(self, coord: CoordStore) -> None:
        self._coord = coord
        self._lock = threading.Lock()
        self._held: dict[Holder, dict[tuple[str, int], Entry]] = {}

    def add(self, holder: Holder, queue: str, entry: Entry) -> None:
        with self._lock:
            mine = self._held.pop(holder, {})
            mine[queue, entry.standing.number] = entry
            self._held[holder] = mine
            if len(self._held) > _HOLDERS_KNOWN:
                del self._held[next(iter(self._held))]

    def find(self, holder: Holder, held: Held, *, fresh: bool = False) -> Entry | None:
        """How this very delivery stands; None if this holder does not have it."""
        with self._lock:
            entry = self._held.get(holder, {}).get((held.queue, held.id))
        if fresh or entry is None:
            found = self._coord.get(Layout(held.queue).meta(held.id))
            entry = None if found is None else entry_of(found)
        if entry is None or entry.standing.holder != holder:
            return None
        return entry if entry.deliveries == held.delivery else None

    def forget(self, holder: Holder, held: Held) -> None:
        with self._lock:
            mine = self._held.get(holder, {})
            entry = mine.get((held.queue, held.id))
            if entry is not None and entry.deliveries <= held.delivery:
                del mine[held.queue, held.id]
                if not mine:
                    del self._held[holder]

    def lanes(self, holder: Holder, queue: str) -> dict[str, list[Entry]]:
        """What the holder has of each lane of the queue."""
        found: dict[str, list[Entry]] = {}
        with self._lock:
            for (name, _), entry in self._held.get(holder, {}).items():
                if name == queue and entry.standing.lane is not None:
                    found.setdefault(entry.standing.lane, []).append(entry)
        return found

    def ending_with(self, session: str) -> bool:
        """Whether the time of any hold is counted by this session."""
        with self._lock:
            return any(
                entry.standing.until == session
                for mine in self._held.values()
                for entry in mine.values()
            )


class Deadlines:
    """Sessions that count the time of holds which have an end.

    Two machines' clocks are never compared: the engine ends the session, and with it the lock.
    One that counts for nothing any more is used again: opening one is dear on ZooKeeper.
    """

    def __init__(self, coord: CoordStore, holds: Holds) -> None:
        self._coord = coord
        self._holds = holds
        self._lock = threading.Lock()
        self._used: dict[str, Session] = {}
        self._spare: list[Session] = []

    def open(self, seconds: float) -> Session:
        """A session that ends so long from now."""
        while True:
            with self._lock:
                fitting = [each for each in self._spare if each.ttl == seconds]
                if fitting:
                    self._spare.remove(fitting[0])
            if not fitting:
                session = self._coord.session(seconds)
                break
            session = fitting[0]
            try:
                session.renew()
                break
            except SessionLost:
                continue
        with self._lock:
            self._used[session.id] = session
        return session

    def release(self, *sessions: str | None) -> None:
        """Put those aside by which nothing is counted any more."""
        over: list[Session] = []
        for name in set(sessions):
            if name is None or self._holds.ending_with(name):
                continue
            with self._lock:
                session = self._used.pop(name, None)
                if session is not None:
                    self._spare.append(session)
                if len(self._spare) > _SPARE_SESSIONS:
                    over.append(self._spare.pop(0))
        for session in over:
            with suppress(PxrsError):
                session.close()

    def abandon(self, session: str) -> None:
        """Let it end by itself."""
        with self._lock:
            self._used.pop(session, None)

    def close(self) -> None:
        with self._lock:
            every = [*self._used.values(), *self._spare]
            self._used.clear()
            self._spare.clear()
        for session in every:
            with suppress(PxrsError):
                session.close()
