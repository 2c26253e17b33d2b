"""Remembers items held by this process, ends holds in time, and frees items without a holder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from pxrs.core.queue import DIED_HOLDING
from pxrs.errors import Fenced, PxrsError, SessionLost
from pxrs.stores.api import CoordStore, Session
from pxrs.stores.queues_on_coord.drafts import Context
from pxrs.stores.queues_on_coord.layout import Entry, Layout, entry_of
from pxrs.types import Committed, Held, Holder

_HOLDERS_KNOWN = 10_000
_SPARE_SESSIONS = 8
# How often a process that takes from a queue looks for items to free, if the queue is never empty.
_REAP_EVERY = 1.0
# An engine may end a session a little late. The end itself wakes watches, too.
_OVERDUE = 0.25


class Holds:
    """Items that this process holds, as they were handed out: a commit need not read them first.

    They may be out of date: the store's checks in the commit decide.
    """

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
        """Find the entry of this very delivery; None if this holder does not have it."""
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

    def by_key_order(self, holder: Holder, queue: str) -> dict[str, list[Entry]]:
        """Items of the holder in each key order of the queue."""
        found: dict[str, list[Entry]] = {}
        with self._lock:
            for (name, _), entry in self._held.get(holder, {}).items():
                if name == queue and entry.standing.key_order is not None:
                    found.setdefault(entry.standing.key_order, []).append(entry)
        return found

    def ending_with(self, session: str) -> bool:
        """Whether this session ends any hold."""
        with self._lock:
            return any(
                entry.standing.until == session
                for mine in self._held.values()
                for entry in mine.values()
            )


class Deadlines:
    """Sessions that end holds with a deadline.

    Two machines' clocks are never compared: the engine ends the session, and with it the lock.
    A session that no hold needs any more is used again: opening one is expensive on ZooKeeper.
    """

    def __init__(self, coord: CoordStore, holds: Holds) -> None:
        self._coord = coord
        self._holds = holds
        self._lock = threading.Lock()
        self._used: dict[str, Session] = {}
        self._spare: list[Session] = []

    @contextmanager
    def counting(self, seconds: float) -> Iterator[Session]:
        """A session that ends `seconds` from now, for holds that the block makes.

        If no hold depends on it after the block, it is kept for later.
        """
        session = self._spare_one(seconds) or self._coord.session(seconds)
        with self._lock:
            self._used[session.id] = session
        try:
            yield session
        except (SessionLost, Fenced):
            raise
        except BaseException:
            # A hold may depend on it: it must end on time, so it is not kept to be renewed.
            with self._lock:
                self._used.pop(session.id, None)
            raise
        finally:
            self.release(session.id)

    def _spare_one(self, seconds: float) -> Session | None:
        """A spare session of this length that is still alive, renewed."""
        while True:
            with self._lock:
                session = next((each for each in self._spare if each.ttl == seconds), None)
                if session is None:
                    return None
                self._spare.remove(session)
            with suppress(SessionLost):
                session.renew()
                return session

    def release(self, *sessions: str | None) -> None:
        """Keep those of the sessions for later on which no hold depends any more."""
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

    def close(self) -> None:
        with self._lock:
            every = [*self._used.values(), *self._spare]
            self._used.clear()
            self._spare.clear()
        for session in every:
            with suppress(PxrsError):
                session.close()


class Reaped(NamedTuple):
    """The number of freed items, and in how many seconds holds with a deadline end."""

    freed: int
    waits: list[float]


class Reaper:
    """Frees items whose lock is gone but whose hold record is not. Any process does it.

    It compares no times: the engine removes the lock.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last: dict[str, float] = {}

    def now_and_then(self, at: Layout) -> None:
        now = self._context.clock.monotonic()
        if now - self._last.get(at.queue, now - _REAP_EVERY) >= _REAP_EVERY:
            self.reap(at)

    def reap(self, at: Layout) -> Reaped:
        """Free items of a queue whose lock is gone.

        Reads held items first, then locks: an item that was given back in between has moved, and
        the commit that would free it is refused.
        """
        coord = self._context.coord
        self._last[at.queue] = self._context.clock.monotonic()
        held = [entry_of(record) for record in coord.list(at.metas)]
        if not held:
            return Reaped(0, [])
        locks = {record.key for record in coord.list(at.locks)}
        now_ms = self._context.clock.wall_ms()
        freed, waits = 0, []
        for entry in held:
            if not _is_locked(at, entry, locks):
                freed += self._free(at, entry)
            elif entry.standing.until_ms is not None:
                left = (entry.standing.until_ms - now_ms) / 1000
                waits.append(left if left > 0 else _OVERDUE)
        return Reaped(freed, waits)

    def _free(self, at: Layout, entry: Entry) -> bool:
        """Free one item; returns false if another process, or its holder, was faster."""
        standing = entry.standing
        draft = self._context.draft()
        if standing.most is not None and standing.deliveries >= standing.most:
            if not draft.bury(at, entry, DIED_HOLDING):
                return False
        else:
            draft.give_back(at, entry, draft.now_ms, suspect=True, error=DIED_HOLDING)
        return isinstance(draft.commit(), Committed)


def _is_locked(at: Layout, entry: Entry, locks: set[str]) -> bool:
    number = entry.standing.number
    if at.lock(number) not in locks:
        return False
    return entry.standing.until is None or at.until(number) in locks
