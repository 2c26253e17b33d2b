"""Items set aside for a process that will ask for them: one sync per take and commit, not two.

An item has to be counted durably before it is handed out, and its removal has to be durable when
`commit` returns. A worker in a loop would pay for two syncs. So the commit that removes items also
counts the next ones and sets them aside for its session. Handing them out then touches no
database: they are held already, under a mark instead of a transaction's name, and from there on
the mark counts as one of that transaction's names.

What is set aside is as good as held for everybody else, so it must not stay so:

- Any call of this process but a take of them gives them back first. They are given back, too, when
  no take has come for a while and when the store is closed.
- If the process is killed, its `Handouts` say what it had handed out. The rest gets its count
  back. Where that can't be known the count stays: k remains an upper bound.

Only items without a lane are set aside, and only for who takes again at once after its commits.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import sqlite3
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pxrs.errors import PxrsError, StoreUnavailable
from pxrs.loop import Loop
from pxrs.stores.rows import DELAYED, HELD, READY
from pxrs.stores.sqlite.beside import make_folder_beside, open_beside, open_found
from pxrs.stores.sqlite.posix import (
    boot_id,
    closing_on_failure,
    try_lock,
)
from pxrs.stores.sqlite.queues.rows import number_of
from pxrs.types import Held, Holder

# How soon after a commit the next take has to come, and how long it may then let others wait.
_SOON = 0.05
PATIENCE = 0.2
_LONG = 3600.0
# More would be much to keep in memory for a take that may not come.
MOST = 1000
_PREFIX = "ahead:"
_NEXT = f"""SELECT rank, id, deliveries + 1, key, put_ms, error, body, taken_ms, suspect, lane
    FROM pxrs_queue_items WHERE queue = ? AND state = {READY} ORDER BY rank, id LIMIT ?"""


class Habits:
    """Which queues this process takes from in a loop, how many at a time and how often at most."""

    def __init__(self) -> None:
        self._committed: dict[str, float] = {}
        self._looping: dict[str, tuple[int, int | None]] = {}

    def took(self, queue: str, count: int, most: int | None, now: float) -> None:
        """It took from the queue, soon after a commit or not."""
        if count <= MOST and now - self._committed.get(queue, -1.0) < _SOON:
            self._looping[queue] = (count, most)
        else:
            self._looping.pop(queue, None)

    def committed(self, queue: str, now: float) -> None:
        self._committed[queue] = now

    def expected(self, queue: str) -> tuple[int, int | None] | None:
        """Guesses what the next take will ask for, if one is likely to come at once."""
        return self._looping.get(queue)


class Aside(NamedTuple):
    """Items that one commit has set aside, all under one mark."""

    name: str
    queue: int
    session: str
    mark: str
    number: int
    asked: int
    most: int | None
    # (rank, id, deliveries, key, put_ms, error, body, taken_ms before, suspect, lane)
    rows: list[tuple[Any, ...]]
    # The queue's change counters by then, and when a delayed item shows.
    rung: tuple[int, ...]
    due_ms: int | None
    until: float


class Lent(NamedTuple):
    """The items set aside that a transaction got: its marks, and those it still has."""

    marks: tuple[str, ...]
    items: set[tuple[str, int]]


_NOTHING = Lent((), set())


class Ahead:
    """The items set aside for this process, and which were handed out. Thread-safe."""

    def __init__(
        self,
        folder: str,
        database: str,
        clock: Callable[[], float],
        give_back: Callable[[Sequence[Aside]], None],
        *,
        enabled: bool,
    ) -> None:
        self.enabled = enabled and CAN_TELL
        self.habits = Habits()
        self.verdicts = Verdicts(folder)
        self._where = (folder, database)
        self._clock = clock
        self._give_back = give_back
        self._lock = threading.Lock()
        self._handouts: Handouts | None = None
        self._last = 0
        # Everything that is set aside, or may be; and of that, by queue, what can be handed out.
        self._all: dict[str, Aside] = {}
        self._waiting: dict[str, deque[Aside]] = {}
        self._lent: dict[Holder, Lent] = {}
        self._awake = False
        self._closed = False
        self._giving_back = Loop("pxrs-ahead", self.give_back_in_time)

    def __bool__(self) -> bool:
        return bool(self._all)

    # Setting aside

    def next_mark(self) -> tuple[str, int]:
        """A mark for what is set aside next, and its number."""
        with self._lock:
            if self._handouts is None:
                self._handouts = Handouts(*self._where)
            self._last += 1
            return f"{_PREFIX}{self._handouts.name}:{self._last:x}", self._last

    def note(self, aside: Aside) -> None:
        """It will be set aside if a commit succeeds, so it has to be given back one day."""
        self._all[aside.mark] = aside
        # Not only when it is offered: the commit may be interrupted before that.
        if not self._awake:
            self._wake_up()

    def offer(self, aside: Aside) -> None:
        """Offer the items to takes: the commit has succeeded."""
        with self._lock:
            if aside.mark in self._all:
                self._waiting.setdefault(aside.name, deque()).append(aside)

    # Handing out

    def find(self, queue: str, session: str, count: int, most: int | None) -> Aside | None:
        """Returns items set aside for just this question, not handed out yet."""
        with self._lock:
            waiting = self._waiting.get(queue)
            if not waiting:
                return None
            aside = waiting[0]
            if (aside.session, aside.asked, aside.most) != (session, count, most):
                return None
            if len(aside.rows) < count:
                # There may be more by now.
                return None
            waiting.popleft()
            return aside

    def lend(self, aside: Aside, holder: Holder) -> bool:
        """Give it to a transaction, for good; false if it was given back meanwhile."""
        with self._lock:
            if self._handouts is None or self._all.pop(aside.mark, None) is None:
                return False
            self._handouts.note(aside.number)
            before = self._lent.get(holder, _NOTHING)
            items = {(aside.name, number_of(row[1])) for row in aside.rows}
            self._lent[holder] = Lent((*before.marks, aside.mark), before.items | items)
            return True

    def names(self, holder: Holder) -> tuple[str, ...]:
        """Returns the names a transaction's items may be held under: its own, and marks."""
        return (holder.transaction, *self._lent.get(holder, _NOTHING).marks)

    def holder_of(self, session: str, mark: str) -> Holder:
        """The transaction that something was lent to, if it was by this process."""
        for holder, lent in list(self._lent.items()):
            if mark in lent.marks:
                return holder
        return Holder(session, mark)

    def done_with(self, holder: Holder, held: Iterable[Held]) -> None:
        """The transaction does not hold these any more."""
        lent = self._lent.get(holder)
        if lent is not None:
            lent.items.difference_update([(each.queue, each.id) for each in held])
            if not lent.items:
                self._lent.pop(holder, None)

    # Giving back

    def withdraw(self, queue: str | None = None, now: float | None = None) -> list[Aside]:
        """Withdraw items set aside: of one queue, or those that have waited till now.

        The caller gives it back, or else calls `note` again.
        """
        with self._lock:
            found = [
                aside
                for aside in self._all.values()
                if (queue is None or aside.name == queue) and (now is None or aside.until <= now)
            ]
            for aside in found:
                del self._all[aside.mark]
                waiting = self._waiting.get(aside.name)
                if waiting is not None and aside in waiting:
                    waiting.remove(aside)
            return found

    def _wake_up(self) -> None:
        with self._lock:
            if not self._closed:
                self._giving_back.start()
            self._awake = True
        self._giving_back.wake()

    def give_back_in_time(self) -> float | None:
        """Give back what has waited too long; the seconds until the next time, None at the end."""
        if self._closed:
            return None
        # Whatever goes wrong, it is tried again: else they would stay aside for ever.
        with suppress(Exception):
            self.give_back(now=self._clock())
        if not self._all:
            self._awake = False
        # `note` adds to these before it looks whether this is awake: one of the two sees the other.
        return PATIENCE / 2 if self._all else _LONG

    def give_back(self, queue: str | None = None, now: float | None = None) -> None:
        """Have everything, or what is meant, put where others can take it."""
        found = self.withdraw(queue, now)
        if not found:
            return
        try:
            self._give_back(found)
        except BaseException as error:
            for aside in found:
                self.note(aside)
            if not isinstance(error, PxrsError):
                raise

    def close(self) -> None:
        """Give everything back and forget it."""
        self._closed = True
        self._giving_back.wake()
        self._giving_back.join()
        self.give_back()
        with self._lock:
            handouts, self._handouts = self._handouts, None
        # What could not be given back is judged by those who find it, so the counter stays.
        if handouts is not None:
            if self._all:
                handouts.abandon()
            else:
                handouts.close()

    def abandon(self) -> None:
        """In a forked child: all of it is the parent's."""
        self._all.clear()
        self._waiting.clear()
        self._lent.clear()
        if self._handouts is not None:
            self._handouts.abandon()
        self._handouts = None
        self.enabled = False


def is_mark(tx: str) -> bool:
    """Whether this is no transaction's name."""
    return tx.startswith(_PREFIX)


def was_handed_out(tx: str, verdicts: Verdicts) -> bool:
    """Whether an item that its session left behind may have been handed out."""
    if not is_mark(tx):
        return True
    owner, _, number = tx.removeprefix(_PREFIX).partition(":")
    try:
        return verdicts.may_be_out(owner, int(number, 16))
    except ValueError:
        return True


def forget_owners(connection: sqlite3.Connection, verdicts: Verdicts) -> None:
    """Remove the counters of processes that are gone and have left nothing behind."""
    for name in verdicts.left_behind():
        row = connection.execute(
            f"SELECT 1 FROM pxrs_queue_items WHERE state = {HELD} AND tx >= ? AND tx < ? LIMIT 1",
            (f"{_PREFIX}{name}:", f"{_PREFIX}{name};"),
        ).fetchone()
        if row is None:
            verdicts.forget(name)


def set_aside(
    connection: sqlite3.Connection,
    queue: int,
    session: str,
    mark: str,
    count: int,
    most: int | None,
    now_ms: int,
) -> list[tuple[Any, ...]]:
    """Count the next items and hold them under the mark, the first ones first."""
    rows = [
        row
        for row in connection.execute(_NEXT, (queue, count)).fetchall()
        if not row[8] and row[9] is None and (most is None or row[2] <= most)
    ]
    if rows:
        marks = ",".join("?" * len(rows))
        connection.execute(
            f"UPDATE pxrs_queue_items SET state = {HELD}, deliveries = deliveries + 1, "
            f"session = ?, tx = ?, most = ?, taken_ms = ? WHERE id IN ({marks})",
            (session, mark, most, now_ms, *[row[1] for row in rows]),
        )
    return rows


def is_outranked(connection: sqlite3.Connection, queue: int, rank: int, now_ms: int) -> bool:
    """Whether something more urgent has come, or may have; or the queue is not there any more."""
    items = "FROM pxrs_queue_items WHERE queue = :queue AND state ="
    best, due, is_there = connection.execute(
        f"SELECT (SELECT min(rank) {items} {READY}), (SELECT min(visible) {items} {DELAYED}), "
        "EXISTS (SELECT 1 FROM pxrs_queues WHERE id = :queue)",
        {"queue": queue},
    ).fetchone()
    return not is_there or (best is not None and best < rank) or (due is not None and due <= now_ms)


def put_back(connection: sqlite3.Connection, aside: Aside) -> None:
    """Make items ready again that were not handed out; their deliveries are not counted."""
    connection.executemany(
        f"UPDATE pxrs_queue_items SET state = {READY}, deliveries = deliveries - 1, "
        f"session = NULL, tx = NULL, taken_ms = ? WHERE id = ? AND state = {HELD} "
        "AND session = ? AND tx = ?",
        [(row[7], row[1], aside.session, aside.mark) for row in aside.rows],
    )


# Which items that were set aside have been handed out: a counter that outlives its process. Items
# set aside have numbers, and are handed out by this process alone. It raises the counter, in a
# page of shared memory, before a caller gets them. The kernel keeps the page when the process is
# killed; then its lock on the file is free, the counter stands still for ever, and whatever has a
# higher number was in nobody's hands. Whoever can't tell has to assume that it was: the process
# may be alive, the file gone, the machine restarted.

_PAGE = struct.Struct("=8sQ")
_COUNTER_AT = 8
_COUNTER = struct.Struct("=Q")
_BOOT = boot_id().encode()
_NAME = re.compile("[0-9a-f]{12}")

# Where one start of the machine can't be told from another nothing is set aside.
CAN_TELL = bool(_BOOT)


class Handouts:
    """The counter of this process."""

    def __init__(self, folder: str, database: str) -> None:
        folder = os.path.join(folder, "ahead")
        make_folder_beside(folder, database)
        self.name = secrets.token_hex(6)
        self._path = os.path.join(folder, self.name)
        hidden = os.path.join(folder, f".{self.name}")
        with closing_on_failure() as opened:
            self._fd = opened(open_beside(hidden, database, os.O_EXCL))
            try_lock(self._fd)
            os.posix_fallocate(self._fd, 0, _PAGE.size)
            os.pwrite(self._fd, _PAGE.pack(_BOOT, 0), 0)
            self._map = mmap.mmap(self._fd, _PAGE.size)
            # Named once it is locked: whoever finds the lock free knows that the process is gone.
            os.rename(hidden, self._path)

    def note(self, number: int) -> None:
        """Note that this number is about to be handed out; all below it may have been."""
        if number > _COUNTER.unpack_from(self._map, _COUNTER_AT)[0]:
            _COUNTER.pack_into(self._map, _COUNTER_AT, number)

    def close(self) -> None:
        """Nothing is set aside any more."""
        with suppress(OSError):
            os.unlink(self._path)
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: the counter is the parent's."""
        self._map.close()
        os.close(self._fd)


class Verdicts:
    """Reads what other processes have handed out, to free what they left behind."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, "ahead")

    def may_be_out(self, name: str, number: int) -> bool:
        """Whether the item with this number may have been handed out."""
        if not _NAME.fullmatch(name):
            return True
        try:
            fd = open_found(os.path.join(self._folder, name), os.O_RDONLY)
        except (OSError, StoreUnavailable):
            return True
        try:
            if not try_lock(fd, shared=True):
                return True
            page = os.pread(fd, _PAGE.size, 0)
        except OSError:
            return True
        finally:
            os.close(fd)
        if len(page) < _PAGE.size:
            return True
        boot, counter = _PAGE.unpack(page)
        return bool(boot != _BOOT) or number <= counter

    def left_behind(self) -> list[str]:
        """The names of those who are gone."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return [name for name in names if self._is_free(name)]

    def forget(self, name: str) -> None:
        """Nothing is left of it."""
        with suppress(OSError):
            os.unlink(os.path.join(self._folder, name))

    def _is_free(self, name: str) -> bool:
        try:
            fd = open_found(os.path.join(self._folder, name), os.O_RDONLY)
        except (OSError, StoreUnavailable):
            return False
        try:
            # One that is not named yet may not be locked yet, either.
            return os.fstat(fd).st_size >= _PAGE.size and try_lock(fd, shared=True)
        except OSError:
            return False
        finally:
            os.close(fd)
