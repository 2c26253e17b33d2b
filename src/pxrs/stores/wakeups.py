"""Watches inside one process, under the lock of the store they belong to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Generic, TypeVar

from pxrs.clock import SYSTEM_CLOCK

T = TypeVar("T")

# Engines that are notified of changes in other processes name what changes by one word: its kind,
# and its key, name or place.
KEY, PARTITION, QUEUE = KINDS = "kpq"


class Wanted:
    """The words that a watch waits for. For records it matches every key that begins with one."""

    __slots__ = ("_beginnings", "words")

    def __init__(self, kind: str, names: Iterable[str]) -> None:
        self.words = frozenset(kind + name for name in names)
        self._beginnings = tuple(self.words) if kind == KEY else ()

    def __call__(self, word: str) -> bool:
        return word in self.words or word.startswith(self._beginnings)


def named(wants: Iterable[object]) -> set[str]:
    """Everything that these watches wait for."""
    return {word for want in wants if isinstance(want, Wanted) for word in want.words}


class Wakeups(Generic[T]):
    """The watches of one store and what each of them waits for.

    `settle` is called with the lock held before a watch goes to sleep: it does what has fallen
    due and returns in how many seconds something falls due again, or None.
    """

    def __init__(
        self, lock: threading.RLock, settle: Callable[[], float | None] = lambda: None
    ) -> None:
        self._lock = lock
        self._settle = settle
        self._watches: dict[LocalWatch, Callable[[T], bool]] = {}

    def watch(self, wants: Callable[[T], bool]) -> LocalWatch:
        """A watch that wakes on a change of whatever `wants` is true for."""
        watch = LocalWatch(self._lock, self._settle, self._forget)
        with self._lock:
            self._watches[watch] = wants
        return watch

    def ring(self, changed: Collection[T]) -> None:
        """Wake the watches that wait for one of the things that changed."""
        with self._lock:
            for watch, wants in self._watches.items():
                if any(map(wants, changed)):
                    watch.wake()

    def wanted(self) -> list[Callable[[T], bool]]:
        """The subjects of all open watches."""
        with self._lock:
            return list(self._watches.values())

    def wake(self, whose: Callable[[Callable[[T], bool]], bool]) -> None:
        """Wake the watches, chosen by what they wait for, that may have missed something."""
        with self._lock:
            for watch, wants in self._watches.items():
                if whose(wants):
                    watch.wake()

    def reconsider(self) -> None:
        """Let waiting threads call `settle` again, to learn how long they may sleep."""
        with self._lock:
            for watch in self._watches:
                watch.reconsider()

    def close(self) -> None:
        """Close every watch."""
        with self._lock:
            for watch in list(self._watches):
                watch.close()

    def abandon(self, lock: threading.RLock) -> None:
        """In a forked child: drop all watches, and the lock, which may never be released."""
        for watch in self._watches:
            watch.abandon(lock)
        self._lock = lock
        self._watches = {}

    def _forget(self, watch: LocalWatch) -> None:
        with self._lock:
            self._watches.pop(watch, None)


class LocalWatch:
    """A `Watch` on a store in this process.

    The timeout of `wait` is real time, whatever clock the store goes by: it bounds how long a
    thread is blocked.
    """

    def __init__(
        self,
        lock: threading.RLock,
        settle: Callable[[], float | None],
        forget: Callable[[LocalWatch], None],
    ) -> None:
        self._changed = threading.Condition(lock)
        self._settle = settle
        self._forget = forget
        # How often the watch was woken, and how many of these wake-ups a wait has answered.
        self._wakes = self._answered = 0
        self._closed = False
        self._on_wake: Callable[[], None] | None = None

    def on_wake(self, call: Callable[[], None]) -> None:
        """See `pxrs.stores.api.CallsBack`."""
        self._on_wake = call

    def wait(self, timeout: float | None = None) -> bool:
        now = SYSTEM_CLOCK.monotonic
        deadline = float("inf") if timeout is None else now() + timeout
        with self._changed:
            # Each thread compares its own count: several may wait, and all of them are woken.
            answered = self._answered
            while True:
                due = self._settle()
                if self._wakes != answered or self._closed:
                    self._answered = self._wakes
                    return True
                left = deadline - now()
                if left <= 0:
                    return False
                limit = min(left, float("inf") if due is None else due)
                self._changed.wait(None if limit > threading.TIMEOUT_MAX else limit)

    def wake(self) -> None:
        """Wake the waiting threads: something that the watch waits for has changed."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()
        if self._on_wake is not None:
            self._on_wake()

    def reconsider(self) -> None:
        """Let waiting threads call `settle` again: something may fall due earlier than before."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self._closed = True
        self._forget(self)
        self.reconsider()
        if self._on_wake is not None:
            self._on_wake()

    def abandon(self, lock: threading.RLock) -> None:
        """In a forked child: stop waiting for anything."""
        self._changed = threading.Condition(lock)
        self._closed = True
