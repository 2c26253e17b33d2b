"""A queue in front of the one writer that an SQLite file has.

SQLite's own busy handler lets a writer in a tight loop starve the others. Here every writer
takes lock A, then lock B, then releases A: a process that has just written has to take A again,
behind the one that already waits for B. At most one process waits for B, so it can poll often;
the others have a whole transaction's time to take A.

Both are polled and not waited for: a wait in `flock` can't be ended by a timeout, and a
frozen holder must become a `StoreBusy` that names it.

Only B keeps writers apart; A only keeps their order. A process that has waited long for A goes on
without it, so a process that was frozen in the queue, where it writes nothing, stops no other. A
process that had to do so waits for A much shorter the next time, until it gets it again.
"""

from __future__ import annotations

import os
import time

from pxrs.clock import Clock
from pxrs.stores.sqlite.beside import open_beside
from pxrs.stores.sqlite.change_counters import Control
from pxrs.stores.sqlite.posix import closing_on_failure, try_lock, unlock

_WAIT_FOR_A = 0.0005
_WAIT_FOR_B = 0.00005
_LONGEST_WAIT = 0.002
# The most that counts between two looks: no busy machine keeps a process waiting for so long.
_LONGEST_LOOK = 0.5
_LONGEST_QUEUE = 1.0
# The factor by which the wait for A shrinks each time in vain, and the shortest wait, which is
# still long enough for a queue that moves.
_SHORTER = 0.1
_SHORTEST_QUEUE = 0.02


class Waited:
    """Counts the seconds that this process has waited. Those in which it was stopped hardly count:
    others have written meanwhile, and who holds the writer now may have just begun.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked = clock.monotonic()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Returns how long it has waited by now. To be asked every now and then."""
        now = self._clock.monotonic()
        self._seconds += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        return self._seconds


class WriterLock:
    """The two locks. The caller ensures that one thread of a process uses them at a time."""

    def __init__(self, folder: str, database: str, control: Control, clock: Clock) -> None:
        self.path = os.path.join(folder, "writer.lock")
        with closing_on_failure() as opened:
            self._a = opened(open_beside(os.path.join(folder, "queue.lock"), database))
            self._b = opened(open_beside(self.path, database))
        self._control = control
        self._clock = clock
        self._queue = _LONGEST_QUEUE

    def enter(self, timeout: float) -> bool:
        """Take the writer's turn; returns false if it did not get it in time."""
        waited = Waited(self._clock)
        try:
            in_order = self._poll(self._a, _WAIT_FOR_A, waited, min(timeout, self._queue))
            shorter = max(_SHORTEST_QUEUE, self._queue * _SHORTER)
            self._queue = _LONGEST_QUEUE if in_order else shorter
            if not self._poll(self._b, _WAIT_FOR_B, waited, timeout):
                return False
        finally:
            unlock(self._a)
        self._control.set_holder(os.getpid(), self._clock.monotonic())
        return True

    def leave(self) -> None:
        """Let the next writer in. A second call does no harm."""
        self._control.set_holder(0, 0.0)
        unlock(self._b)

    def give_up(self) -> None:
        """After `enter` was interrupted anywhere: release what it may have taken."""
        unlock(self._b)
        unlock(self._a)

    def describe_holder(self, path: str) -> str:
        """Describe which process a writer has waited for in vain."""
        holder = self._control.holder
        if holder is None:
            return f"many writers queue for {path}; it is over its capacity"
        held = self._clock.monotonic() - holder.since
        return (
            f"the writer of {path} has been held for {held:.1f} s by "
            f"pid {holder.pid}{_command_of(holder.pid)}; if that process hangs, end it"
        )

    def _poll(self, fd: int, pause: float, waited: Waited, most: float) -> bool:
        while not try_lock(fd):
            if waited.seconds() >= most:
                return False
            time.sleep(pause)
            pause = min(pause * 1.1, _LONGEST_WAIT)
        return True

    def close(self) -> None:
        """Close the files. A call of `give_up` that comes later does nothing.

        A thread that waited for its turn while the store was closed makes one. The descriptors'
        numbers may be other files' by then, whose locks it must not release.
        """
        a, self._a = self._a, -1
        b, self._b = self._b, -1
        os.close(a)
        os.close(b)


def _command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return f" ({words[:80]})" if words else ""
