"""Watches: one znode for each prefix.

A commit also writes every folder above the records it changes, so one watch on one znode, the
deepest folder that holds a prefix, covers everything under it. ZooKeeper's watches fire once:
the listener sets them again, then wakes the waiting callers. What happens in between is seen by the
read that follows. kazoo's callbacks only put into a queue.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Any

from pxrs.errors import PxrsError
from pxrs.stores.wakeups import LocalWatch
from pxrs.stores.zookeeper.link import Link

_EVERYTHING = "*"


class Watches:
    """The watches of one handle and the thread that listens for them."""

    def __init__(self, link: Link, sessions: str) -> None:
        self._link = link
        # The end of a session removes records: it wakes every watch.
        self._sessions = sessions
        self._lock = threading.RLock()
        self._watches: dict[LocalWatch, frozenset[str]] = {}
        self._armed: set[str] = set()
        self._rung: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        link.client.add_listener(self._state_changed)

    def watch(self, folders: frozenset[str]) -> LocalWatch:
        """A watch that is set on the server when this returns."""
        watch = LocalWatch(self._lock, lambda: None, self._forget)
        wanted = folders | {self._sessions}
        with self._lock:
            self._watches[watch] = wanted
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._listen, name="pxrs-zookeeper-watch", daemon=True
                )
                self._thread.start()
        try:
            for folder in wanted:
                self._arm(folder)
        except BaseException:
            watch.close()
            raise
        return watch

    def close(self) -> None:
        """Close every watch and end the thread."""
        with self._lock:
            self._closed = True
            for watch in list(self._watches):
                watch.close()
            thread = self._thread
        self._link.client.remove_listener(self._state_changed)
        self._rung.put(None)
        if thread is not None:
            # It may wait for an answer.
            thread.join(self._link.farewell.left())

    def _arm(self, folder: str) -> None:
        """Set the watch on the server, if it is not set."""
        with self._lock:
            if folder in self._armed:
                return
        if folder == self._sessions:
            self._link.call(
                lambda client: client.get_children_async(folder, lambda _: self._rung.put(folder))
            )
        else:
            # Also on a folder that does not exist yet: the watch fires when it is created.
            self._link.call(
                lambda client: client.exists_async(folder, lambda _: self._rung.put(folder))
            )
        with self._lock:
            self._armed.add(folder)

    def _listen(self) -> None:
        while (folder := self._rung.get()) is not None:
            with self._lock:
                if self._closed:
                    return
                self._armed -= self._armed if folder == _EVERYTHING else {folder}
                waiting = {each for folders in self._watches.values() for each in folders}
                again = waiting if folder == _EVERYTHING else waiting & {folder}
            try:
                for each in again:
                    self._arm(each)
            except PxrsError as error:
                if error.retryable:
                    # The connection is lost; when it is back, all watches are set again.
                    continue
                # Waiting callers must get this error; they do when they read.
            self._wake(folder)

    def _wake(self, folder: str) -> None:
        with self._lock:
            for watch, folders in self._watches.items():
                if folder == _EVERYTHING or folder in folders:
                    watch.wake()

    def _state_changed(self, state: Any) -> None:
        # kazoo dropped its watches when the connection broke.
        if state == "CONNECTED":
            self._rung.put(_EVERYTHING)

    def _forget(self, watch: LocalWatch) -> None:
        with suppress(KeyError):
            del self._watches[watch]
