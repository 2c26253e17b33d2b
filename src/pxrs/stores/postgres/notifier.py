"""Notifies other processes of changes: NOTIFY after the commit, on another connection.

Inside the transaction, NOTIFY would take a lock on the whole database at the commit. So a separate
thread sends, at most every few milliseconds, and for at most a tenth of the time: beside a thread
that commits all the time, it would otherwise cost as much as the commits. Changes that were
committed meanwhile are sent together. No commit waits for a notification, and it may be lost: see
`change_listener.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from zlib import crc32

from pxrs.loop import Loop
from pxrs.stores.postgres.database import Database
from pxrs.types import LogPartition

# Seconds between two notifications; and how many times as long as the last one took to send.
_PAUSE, _LONGEST_PAUSE = 0.004, 0.01
_REST = 10
_LONG = 3600.0
_LONGEST = 7900
_MOST = 8
EVERYTHING = "*"
# Not synced: a crash loses only hints.
_NOTIFY = """SELECT pg_notify(%s, word) FROM unnest(%s::text[]) word,
    set_config('synchronous_commit', 'off', true)"""


def channel_of(schema: str) -> str:
    """The channel of a schema's changes: a short name, however long the schema's is."""
    return f"pxrs_{crc32(schema.encode()):08x}"


def place_of(where: LogPartition) -> str:
    """The name of a partition in a word of kind `PARTITION`."""
    return f"{where.partition}/{where.topic_id}"


def payloads(words: Iterable[str]) -> list[str]:
    """Pack the words into as few texts as possible; `EVERYTHING` if they do not fit."""
    out, size = [""], 0
    for word in words:
        length = len(word.encode()) + 1
        if "\n" in word or length > _LONGEST or len(out) > _MOST:
            return [EVERYTHING]
        if size + length > _LONGEST:
            out.append("")
            size = 0
        out[-1] = f"{out[-1]}\n{word}" if out[-1] else word
        size += length
    return out


class Notifier:
    """Sends notifications of this process. Thread-safe; its thread starts at the first `ring`."""

    def __init__(self, database: Database, channel: str) -> None:
        self._database = database
        self._channel = channel
        self._lock = threading.Lock()
        self._words: set[str] = set()
        self._closing = threading.Event()
        self._sending = Loop("pxrs-notifier", self.send)
        database.origin.on_fork(self._abandon)

    def ring(self, words: Iterable[str]) -> None:
        """Notify other processes that these have changed."""
        with self._lock:
            if self._closing.is_set():
                return
            self._words.update(words)
            self._sending.start()
        self._sending.wake()

    def close(self) -> None:
        """Send what is not sent yet, and stop."""
        with self._lock:
            self._closing.set()
        self._sending.wake()
        self._sending.join(self._database.busy_timeout)

    def send(self) -> float | None:
        """Send what has changed; returns the seconds until the next time, None at the end."""
        with self._lock:
            words, self._words = self._words, set()
            if not words:
                return None if self._closing.is_set() else _LONG
        began = time.monotonic()
        # Only a hint: a waiting process polls by itself before long.
        with suppress(Exception):
            self._database.write(_NOTIFY, (self._channel, payloads(words)))
            took = time.monotonic() - began
            # The pause is here, because a `ring` must not wake this thread during it.
            self._closing.wait(min(max(_PAUSE, _REST * took), _LONGEST_PAUSE))
        return 0.0

    def _abandon(self) -> None:
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._closing.set()
