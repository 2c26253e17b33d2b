"""Event loops in tests: bounded, and with stores that tell what they are doing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pxrs import aio
from pxrs.aio.threads import Threads
from pxrs.app import Pxrs
from pxrs.errors import PxrsError
from pxrs.stores.api import Watch
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Append, Appended, LogPartition

T = TypeVar("T")

PATIENCE = 30.0


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but not for ever."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


async def elsewhere(wait: Callable[..., object], *args: object) -> None:
    """Wait for a thread's event without holding up the loop."""
    assert await asyncio.to_thread(wait, *args, timeout=PATIENCE)


class Store:
    """A SQLite store whose appends can be counted and held up, and whose waits can be seen."""

    def __init__(self, folder: Path) -> None:
        self.stores = SqliteStores(str(folder / "store.db"))
        self.appends = 0
        self.append_began = threading.Semaphore(0)
        self.may_append = threading.Event()
        self.may_append.set()
        self.wait_began = threading.Semaphore(0)
        self.watches: set[SeenWatch] = set()
        self._append = self.stores.log.append
        self._watch = self.stores.log.watch
        setattr(self.stores.log, "append", self._held_append)  # noqa: B010
        setattr(self.stores.log, "watch", self._seen_watch)  # noqa: B010

    def open(self) -> aio.Pxrs:
        return aio.Pxrs(Pxrs(self.stores), Threads())

    def _held_append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        self.appends += 1
        self.append_began.release()
        assert self.may_append.wait(PATIENCE)
        return self._append(appends)

    def _seen_watch(self, *where: LogPartition) -> Watch:
        watch = SeenWatch(self._watch(*where), self)
        self.watches.add(watch)
        return watch


class SeenWatch:
    """A watch that tells the store when somebody begins to wait, and when it is closed."""

    def __init__(self, watch: Watch, store: Store) -> None:
        self._watch = watch
        self._store = store

    def wait(self, timeout: float | None = None) -> bool:
        self._store.wait_began.release()
        return self._watch.wait(timeout)

    def wake(self) -> None:
        self._watch.wake()

    def close(self) -> None:
        self._watch.close()
        self._store.watches.discard(self)


def waiting_threads() -> list[threading.Thread]:
    """The threads in which asyncio's blocking waits are."""
    return [thread for thread in threading.enumerate() if thread.name == "pxrs-aio-wait"]
