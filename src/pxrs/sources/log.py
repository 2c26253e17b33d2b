"""The store's log with virtual topics beside the real ones: one `LogStore` for all readers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from time import monotonic
from typing import Any, NoReturn
from weakref import WeakSet

from pxrs.clock import Clock
from pxrs.core.lag import length
from pxrs.core.records import Ranges
from pxrs.errors import InvalidRequest, PxrsError, TopicNotFound
from pxrs.sources.virtual import VirtualLog
from pxrs.stores.api import (
    Atomic,
    CoordStore,
    FetchesMany,
    LogStore,
    QueueStore,
    Stores,
    TellsSizes,
    Watch,
)
from pxrs.topics import PREPARED, Topics, is_virtual
from pxrs.types import Append, Appended, Bounds, Counted, Fetched, LogPartition

# How long a watch on both real and virtual topics looks at one of them.
_SLICE = 0.05
# Seconds between two looks at the record of a virtual topic that is not prepared.
_REFRESH_EVERY = 10.0


class LogWithSources:
    """See `LogStore`. `open_log` opens the log of the virtual topic of this id.

    `refresh` is called now and then for one that is read: its topic may have been prepared since.
    """

    def __init__(
        self,
        log: LogStore,
        open_log: Callable[[str], VirtualLog],
        refresh: Callable[[VirtualLog], None] | None = None,
    ) -> None:
        self._log = log
        self._open = open_log
        self._refresh = refresh
        # When each is refreshed next, in seconds of the monotonic clock.
        self._refresh_at: dict[str, float] = {}
        self._opened: dict[str, VirtualLog] = {}
        # How many calls read each log now, and the logs that are closed once none does.
        self._reads: Counter[VirtualLog] = Counter()
        self._leaving: list[VirtualLog] = []
        self._watches: WeakSet[_FollowingWatch] = WeakSet()
        self._lock = threading.Lock()

    def virtual(self, topic_id: str) -> VirtualLog:
        """The log of a virtual topic; raises `TopicNotFound` if it was detached."""
        found = self._opened.get(topic_id)
        if found is None:
            with self._lock:
                found = self._opened.get(topic_id)
                if found is None:
                    found = self._opened[topic_id] = self._open(topic_id)
        return found

    @contextmanager
    def reading(self, topic_id: str) -> Iterator[VirtualLog]:
        """The same, and its source is not closed meanwhile, unless the store is."""
        while True:
            log = self.virtual(topic_id)
            with self._lock:
                # It may have been replaced between these two lines.
                if self._opened.get(topic_id) is log:
                    self._reads[log] += 1
                    break
        try:
            yield log
        finally:
            with self._lock:
                self._reads[log] -= 1
                if not self._reads[log]:
                    del self._reads[log]
            self._close_unread()

    def use(self, topic_id: str, log: VirtualLog) -> None:
        """Read the virtual topic from this log from now on.

        Reads at hand finish on the source before, and watches move to the new one.
        """
        with self._lock:
            before = self._opened.get(topic_id)
            self._opened[topic_id] = log
            if before is not None:
                self._leaving.append(before)
            watches = [watch for watch in self._watches if watch.topic_id == topic_id]
        for watch in watches:
            watch.source_has_changed()
        self._close_unread()

    def _close_unread(self) -> None:
        """Close the sources of logs that were left, unless something else reads them.

        Whoever attaches may give the same object again, also under another name.
        """
        if not self._leaving:
            return
        with self._lock:
            unread = [log for log in self._leaving if log not in self._reads]
            self._leaving = [log for log in self._leaving if log in self._reads]
            used = {id(log.source) for log in (*self._opened.values(), *self._leaving)}
        for log in unread:
            if id(log.source) not in used:
                # Nobody needs it any more, whatever its last words are.
                with suppress(Exception):
                    log.close()

    def final(self, where: LogPartition) -> int | None:
        """The offset below which no message can appear any more; None if it is not known yet."""
        if is_virtual(where.topic_id):
            with self.reading(where.topic_id) as log:
                return log.final(where)
        # Offsets of real topics are given when messages are appended.
        return self._log.bounds(where.topic_id)[where.partition].end

    def incarnation(self, where: LogPartition, since: int | None = None) -> int:
        """See `NoticesAnother`."""
        if is_virtual(where.topic_id):
            return self.virtual(where.topic_id).incarnation(where, since)
        return 0

    # Reading

    @contextmanager
    def _fresh(self, topic_id: str) -> Iterator[VirtualLog]:
        """See `reading`; the log is as its topic is now or was a moment ago."""
        with self.reading(topic_id) as found:
            if self._refresh is not None and monotonic() >= self._refresh_at.get(topic_id, 0.0):
                self._refresh_at[topic_id] = monotonic() + _REFRESH_EVERY
                with suppress(PxrsError):
                    self._refresh(found)
            yield found

    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        if is_virtual(where.topic_id):
            with self._fresh(where.topic_id) as log:
                return log.fetch(where, offset, max_bytes)
        return self._log.fetch(where, offset, max_bytes)

    def fetch_many(
        self, places: Sequence[tuple[LogPartition, int]], max_bytes: int
    ) -> Generator[Fetched | PxrsError]:
        first = places[0][0].topic_id if places else ""
        if all(where.topic_id == first for where, _ in places) and is_virtual(first):
            with self._fresh(first) as log:
                yield from log.fetch_many(places, max_bytes)
        elif isinstance(self._log, FetchesMany) and not any(
            is_virtual(where.topic_id) for where, _ in places
        ):
            yield from self._log.fetch_many(places, max_bytes)
        else:
            for where, offset in places:
                try:
                    yield self.fetch(where, offset, max_bytes)
                except PxrsError as error:
                    yield error

    def bounds(self, topic_id: str) -> dict[int, Bounds]:
        if is_virtual(topic_id):
            with self.reading(topic_id) as log:
                return log.bounds()
        return self._log.bounds(topic_id)

    def count(self, topic_id: str, ranges: Mapping[int, Ranges]) -> dict[int, Counted]:
        """See `CountsMessages`."""
        if is_virtual(topic_id):
            with self.reading(topic_id) as log:
                return log.count(ranges)
        return {number: Counted(length(each), exact=True) for number, each in ranges.items()}

    def size(self, where: LogPartition) -> int:
        """0 for virtual topics: the rows are not the store's."""
        return 0 if is_virtual(where.topic_id) else self._log.size(where)

    def sizes(self, topic_id: str) -> dict[int, int]:
        if not is_virtual(topic_id) and isinstance(self._log, TellsSizes):
            return self._log.sizes(topic_id)
        return {
            number: self.size(LogPartition(topic_id, number)) for number in self.bounds(topic_id)
        }

    def batch_at(self, where: LogPartition, timestamp: int) -> int | None:
        if is_virtual(where.topic_id):
            with self.reading(where.topic_id) as log:
                return log.offset_at(where, timestamp)
        return self._log.batch_at(where, timestamp)

    def watch(self, *where: LogPartition) -> Watch:
        virtual = {each.topic_id for each in where if is_virtual(each.topic_id)}
        real = [each for each in where if each.topic_id not in virtual]
        if not virtual:
            return self._log.watch(*real)
        watches: list[Watch] = [self._following(topic_id) for topic_id in sorted(virtual)]
        if real:
            watches.append(self._log.watch(*real))
        return watches[0] if len(watches) == 1 else _AnyOf(watches)

    def _following(self, topic_id: str) -> _FollowingWatch:
        watch = _FollowingWatch(topic_id, self._watch_source)
        with self._lock:
            # Before it is opened: from then on it is told when the source is replaced.
            self._watches.add(watch)
        watch.open()
        return watch

    def _watch_source(self, topic_id: str) -> Watch:
        with self.reading(topic_id) as log:
            return log.watch()

    # Writing

    def create(self, topic_id: str, partitions: int) -> None:
        if not is_virtual(topic_id):
            self._log.create(topic_id, partitions)

    def drop(self, topic_id: str) -> None:
        """Close a virtual topic's source; its rows stay."""
        if not is_virtual(topic_id):
            self._log.drop(topic_id)
            return
        with self._lock:
            gone = self._opened.pop(topic_id, None)
            if gone is not None:
                self._leaving.append(gone)
        self._close_unread()

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        if any(is_virtual(append.where.topic_id) for append in appends):
            _refuse()
        return self._log.append(appends)

    def trim(self, where: LogPartition, before: int) -> int:
        if is_virtual(where.topic_id):
            _refuse()
        return self._log.trim(where, before)

    def expire(
        self, where: LogPartition, before_timestamp: int | None, max_bytes: int | None
    ) -> int:
        if is_virtual(where.topic_id):
            _refuse()
        return self._log.expire(where, before_timestamp, max_bytes)

    def close(self) -> None:
        """Close the sources; the store closes its own log."""
        with self._lock:
            opened = [*self._opened.values(), *self._leaving]
            self._opened, self._leaving = {}, []
        for log in opened:
            log.close()


def _refuse() -> NoReturn:
    raise InvalidRequest(
        "a virtual topic is a view of its source: it can be read, not written; write to the source"
    )


class StoresWithSources:
    """See `Stores`: the store's own, except for the log."""

    def __init__(self, stores: Stores, log: LogWithSources) -> None:
        self._stores = stores
        self.log = log

    @property
    def url(self) -> str:
        return self._stores.url

    @property
    def coord(self) -> CoordStore:
        return self._stores.coord

    @property
    def queues(self) -> QueueStore:
        return self._stores.queues

    def atomic(self, connection: Any = None) -> AbstractContextManager[Atomic]:
        return self._stores.atomic(connection)

    def close(self) -> None:
        self.log.close()
        self._stores.close()


def with_sources(stores: Stores, clock: Clock) -> StoresWithSources:
    """The stores, with a log that has the rows of virtual topics, too."""
    topics = Topics(stores.coord, stores.log, clock)

    def open_log(topic_id: str) -> VirtualLog:
        # Imported here: programs without virtual topics need not load it.
        from pxrs.sources.descriptions import open_source

        for topic in topics.list():
            if topic.id == topic_id and topic.source is not None:
                return VirtualLog(topic, open_source(topic, stores.url))
        raise TopicNotFound(topic_id)

    def refresh(log: VirtualLog) -> None:
        if log.is_prepared:
            return
        from pxrs.sources.descriptions import use_prepared

        topic = topics.find(log.topic.name)
        if topic.id == log.topic.id and PREPARED in (topic.source or {}):
            use_prepared(topic, log.source)
            log.topic = topic

    return StoresWithSources(stores, LogWithSources(stores.log, open_log, refresh))


class _FollowingWatch:
    """A watch on the source of a virtual topic: on the new one when that is replaced.

    Whoever replaces it sets `_is_behind` and then wakes the watch before. So the thread that waits
    either sees that before it sleeps, or is woken: it moves in its next `wait`, and that returns
    true, as something may have come in between. A `wake` that still goes to the watch before is
    not lost either, for the same reason.
    """

    def __init__(self, topic_id: str, open_watch: Callable[[str], Watch]) -> None:
        self.topic_id = topic_id
        self._open = open_watch
        # A signal handler may close it in the middle of a move.
        self._lock = threading.RLock()
        self._is_behind = False
        self._closed = False
        self._watch: Watch | None = None

    def open(self) -> None:
        """Watch the source that the topic has now."""
        with self._lock:
            self._is_behind = False
            watch = self._open(self.topic_id)
            before, self._watch = self._watch, watch
            if self._closed:
                watch.close()
        if before is not None:
            before.close()

    def source_has_changed(self) -> None:
        """End the wait at hand; the next one is for the new source."""
        self._is_behind = True
        self.wake()

    def wait(self, timeout: float | None = None) -> bool:
        if self._is_behind and self._move():
            return True
        assert self._watch is not None
        return self._watch.wait(timeout)

    def _move(self) -> bool:
        with self._lock:
            if self._is_behind and not self._closed:
                try:
                    self.open()
                except PxrsError:
                    # Trouble is for those who read; until then the watch before sleeps for us.
                    self._is_behind = True
                    return False
        return True

    def wake(self) -> None:
        watch = self._watch
        if watch is not None:
            watch.wake()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._watch is not None:
                self._watch.close()


class _AnyOf:
    """A watch on several, of which each is looked at in turn."""

    def __init__(self, watches: list[Watch]) -> None:
        self._watches = watches

    def wait(self, timeout: float | None = None) -> bool:
        left = float("inf") if timeout is None else timeout
        while True:
            for watch in self._watches:
                if watch.wait(max(0.0, min(_SLICE, left))):
                    return True
                left -= _SLICE
            if left <= 0:
                return False

    def wake(self) -> None:
        self._watches[0].wake()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
