"""The age of a file: time counted only by clocks that run forward.

A wall clock may leap by days and come back; what was forgotten meanwhile would be gone. So the file
keeps an age. Processes that write add to it the time that has passed, by the host's monotonic
clock, since the last of them did so. That clock is the same for all processes and starts again with
the host: then nothing is added. So the age is never more than the time that has passed, except with
a wrong clock, or with the clock of another host to which the file was moved: with those one reading
adds a day at most.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

DAY_MS = 24 * 3600 * 1000
_NOTE_EVERY_MS = 60_000


class Age(NamedTuple):
    """The age, and the reading of the monotonic clock when it was noted. Both in ms."""

    ms: int
    read: int | None

    def at(self, now: int) -> Age:
        """The age when the clock shows `now`."""
        passed = 0 if self.read is None else min(max(0, now - self.read), DAY_MS)
        return Age(self.ms + passed, now)

    def is_due(self, now: int) -> bool:
        """Whether the age at that time should be noted: a commit more or less does not matter."""
        return self.read is None or not 0 <= now - self.read < _NOTE_EVERY_MS


def read_age(connection: sqlite3.Connection) -> Age:
    """The age as it was noted last."""
    return Age(*connection.execute("SELECT ms, read FROM pxrs_age").fetchone())


def note(connection: sqlite3.Connection, age: Age) -> None:
    """Store the age for the processes that write later."""
    connection.execute("UPDATE pxrs_age SET ms = ?, read = ?", age)
