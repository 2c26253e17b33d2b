"""Values that expire in a store without a clock: the node that leads them has the timers.

A value with a ttl has a record of it beside it. The leader begins to count when it has written the
value, or when it comes across the record: after it took the shard over, or because another node has
written it. Once the time is over it deletes the value, if that is still the same.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.core import kv
from pxrs.core.kv import Timer
from pxrs.core.records import decode
from pxrs.errors import PxrsError
from pxrs.stores.api import CoordStore
from pxrs.types import Check, Delete, Version

_LOG = logging.getLogger("pxrs.kv")
# How often the leader looks for timers that others have written.
_LOOK = 10.0
_PAGE = 500
_RETRY = 1.0


class _Due(NamedTuple):
    at: float
    key: bytes
    version: Version


class Timers:
    """Deletes values when their time is over. Thread-safe; `start` it, and `close` it.

    `expire` deletes a value if it still has this version. `leads`: whether this process leads a
    shard, and so has its timers.
    """

    def __init__(
        self,
        coord: CoordStore,
        clock: Clock,
        expire: Callable[[bytes, Version], object],
        leads: Callable[[int], bool],
    ) -> None:
        self._coord = coord
        self._clock = clock
        self._expire = expire
        self._leads = leads
        self._lock = threading.Lock()
        self._heap: list[_Due] = []
        self._known: dict[bytes, Version] = {}
        self._next_look = clock.monotonic()
        self._news = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pxrs-kv-timers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, key: bytes, version: Version, ttl_ms: int) -> None:
        """Note a value that was written and expires."""
        with self._lock:
            if self._known.get(key) == version:
                return
            self._known[key] = version
            due = _Due(self._clock.monotonic() + ttl_ms / 1000, key, version)
            heapq.heappush(self._heap, due)
            is_first = self._heap[0] is due
        if is_first:
            self._news.set()

    def look_again(self) -> None:
        """Look for timers at once: this process leads shards that others have written to."""
        self._next_look = self._clock.monotonic()
        self._news.set()

    def close(self) -> None:
        """Stop; timers that are left are for the next leader."""
        self._closed = True
        self._news.set()
        if self._thread.is_alive():
            self._thread.join()

    def step(self) -> float:
        """Deletes what is due, looks for more if it is time; the seconds until the next step."""
        now = self._clock.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK
            self._look()
        while (due := self._pop(now)) is not None:
            self._end(due)
        with self._lock:
            first = self._heap[0].at if self._heap else now + _LOOK
        return max(0.0, min(first, self._next_look) - self._clock.monotonic())

    def _run(self) -> None:
        while not self._closed:
            try:
                wait = self.step()
            except PxrsError as error:
                _LOG.warning("values that expire could not be looked after: %s", error)
                wait = _RETRY
            except Exception:  # noqa: BLE001 - logged, and tried again
                # A bug of ours. Without this thread no value would expire any more.
                _LOG.exception("a look after values that expire failed")
                wait = _RETRY
            self._news.wait(wait)
            self._news.clear()

    def _look(self) -> None:
        after: str | None = None
        while page := self._coord.list(kv.TIMERS, after, _PAGE):
            for stored in page:
                timer = decode(stored, Timer)
                if self._leads(kv.shard_of(timer.key)):
                    self.add(timer.key, timer.version, timer.ttl_ms)
            after = page[-1].key

    def _pop(self, now: float) -> _Due | None:
        with self._lock:
            if not self._heap or self._heap[0].at > now:
                return None
            return heapq.heappop(self._heap)

    def _end(self, due: _Due) -> None:
        """Deletes the value, if it is still the same, and its timer."""
        if self._leads(kv.shard_of(due.key)):
            try:
                self._expire(due.key, due.version)
                self._remove(due)
            except Exception:
                with self._lock:
                    late = due._replace(at=self._clock.monotonic() + _RETRY)
                    heapq.heappush(self._heap, late)
                raise
        with self._lock:
            if self._known.get(due.key) == due.version:
                del self._known[due.key]

    def _remove(self, due: _Due) -> None:
        stored = self._coord.get(kv.timer_key(due.key))
        if stored is not None and decode(stored, Timer).version == due.version:
            # A timer that was written anew meanwhile stays.
            self._coord.commit([Check(stored.key, stored.version)], [Delete(stored.key)])
