"""Decides up to which id the rows of a table are final, though ids are given before they commit.

A writer takes its id from a counter and commits later, so a row can appear below rows that were
read already: a reader that goes to the highest id it sees has skipped it for ever. This argument
closes the gap: a writer that has an id up to `top` took it before `top` was given, so it was
running then, or had ended. Once all writers that ran after `top` was read have ended, every row up
to `top` that will ever exist can be read; ids that are missing then were rolled back or deleted.

Where no id is missing, no writer has to be waited for: a row whose id follows the last final one is
final by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# How many of these are remembered; beyond, every other one is merged into the one after it.
_MOST_WAITS = 64


class _Wait(NamedTuple):
    """Rows up to `top` are final once these have ended; None while nobody could be seen.

    `since`: when `top` was read.
    """

    top: int
    running: frozenset[str] | None
    since: float

    def seen(self, running: frozenset[str] | None) -> _Wait:
        """Returns what is left to wait for after a look.

        A look that sees nobody proves nobody's end. The first that sees anybody names everyone who
        has to be waited for: whoever has an id up to `top` ran before, and runs still or has ended.
        """
        if running is None:
            return self
        left = running if self.running is None else self.running & running
        return self._replace(running=left)


class Settling:
    """One reader's knowledge of one table. `final`: all rows up to this id are there."""

    __slots__ = ("_waits", "final")

    def __init__(self) -> None:
        self.final = -1
        self._waits: list[_Wait] = []

    @property
    def is_waiting(self) -> bool:
        """Whether ids were given whose rows are not final yet."""
        return bool(self._waits)

    def look(
        self, top: int, running: frozenset[str] | None, now: float, settle: float = 0.0
    ) -> int:
        """Returns up to which id rows that are read from now on are final.

        `top` is the highest id that was given, and `running` are the writers that were seen *after*
        it was read; those of an earlier look that are still running must be among them. None if
        they can't be seen now: then ids are final `settle` seconds after they were read as a `top`.
        """
        waits = [wait.seen(running) for wait in self._waits]
        if top > max(self.final, waits[-1].top if waits else -1):
            waits.append(_Wait(top, running, now))
        done = [
            wait.top
            for wait in waits
            if (running is None or not wait.running) and wait.since + settle <= now
        ]
        self.final = max(self.final, *done) if done else self.final
        waits = [wait for wait in waits if wait.top > self.final]
        if len(waits) > _MOST_WAITS:
            # The last one stays: the others may only become final later for it.
            waits = waits[1::2] if len(waits) % 2 == 0 else waits[::2]
        self._waits = waits
        return self.final

    def follow(self, ids: Iterable[int]) -> int:
        """Returns `final`, raised over ids, in rising order, that follow it without a gap."""
        self.final = following(self.final, ids)
        return self.final


def following(last: int, ids: Iterable[int]) -> int:
    """Returns the last of the ids, in rising order, that follow `last` without a gap."""
    for each in ids:
        if each != last + 1:
            break
        last = each
    return last
