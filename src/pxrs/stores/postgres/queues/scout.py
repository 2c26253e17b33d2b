"""Remembers where in a queue the next items are, while an old transaction slows searches down.

While some old transaction runs, PostgreSQL can't remove dead row versions: the front of a queue's
index fills with them, and every search from its start passes them all. The same goes for the
indexes of delayed items and of items with a deadline. A process that has found a search to read
much starts the next ones where the last one ended. Then it may miss items that show below: ones
that were given back, whose commit was late, or of a priority it has not seen. So it still searches
from the start, for a tenth of the time at most, and reports that time as the next one to look. A
queue without that trouble is always searched from its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pxrs.types import Delivery

# A search is slow if it reads this many pages of an index, each with hundreds of entries. Time is
# not the measure: a busy machine is slow, too. A connection that has just been opened reads up to a
# dozen pages only to make its plans.
_MANY_PAGES = 32
_ITEMS_PER_PAGE = 20
# How long no search starts at the front again: so many times as long as such a search takes, within
# bounds. One search may have waited for a busy machine: the shorter of the last two counts.
_REST = 10
_LEAST_REST = 0.1
_LONGEST_REST = 5.0
_MOST_RANKS = 32


class Plan(NamedTuple):
    """Says where to search: above the id in `floors`, by rank; everywhere if it is empty.

    `after`: delayed items and deadlines up to that time, by the server's clock, have been dealt
    with. A thorough search also frees items that are no longer held: these count as dealt with from
    then on.
    """

    ranks: Sequence[int] = ()
    floors: Sequence[int] = ()
    after: int = 0
    is_thorough: bool = False

    @property
    def is_whole(self) -> bool:
        return not self.ranks


class Scout:
    """A process's knowledge of one queue's front."""

    def __init__(self) -> None:
        self._floors: dict[int, int] = {}
        self._next_search = 0.0
        self._seen_to = 0
        # One slow search may be chance, when many items were due. Two in a row are not.
        self._slow = 0
        self._took = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether a search from the start was slow."""
        return self._slow > 0

    def plan(self, now: float) -> Plan:
        """Returns where to search."""
        if now >= self._next_search or not self._floors:
            return Plan(is_thorough=self.is_needed)
        ranks = sorted(self._floors)
        return Plan(ranks, [self._floors[rank] for rank in ranks], self._seen_to)

    def searched(self, now: float, seconds: float, began_ms: int, pages: int, found: int) -> None:
        """Note a search from the start: how long it took, when it began by the server's clock,
        how many pages it read and how many items it found."""
        # A search that was not thorough has not dealt with everything.
        self._seen_to = began_ms if self._slow else 0
        is_slow = pages > _MANY_PAGES + found // _ITEMS_PER_PAGE
        self._slow = self._slow + 1 if is_slow else 0
        usual, self._took = min(seconds, self._took), seconds
        rest = min(max(_LEAST_REST, _REST * usual), _LONGEST_REST)
        self._next_search = now + rest if self._slow > 1 else 0.0
        if not self._slow:
            self._floors.clear()

    def found(self, fronts: Sequence[Delivery]) -> None:
        """Note the first items found; everything before them is gone or held."""
        for item in fronts:
            rank = -item.priority
            self._floors[rank] = max(self._floors.get(rank, 0), item.held.id)
        if len(self._floors) > _MOST_RANKS:
            self._floors.clear()

    def shown(self, lowest: int) -> None:
        """Note that items from this id on can be taken now, and could not before."""
        for rank, floor in self._floors.items():
            self._floors[rank] = min(floor, lowest - 1)

    def rest(self, now: float) -> float:
        """Seconds until the next search from the start."""
        return max(0.0, self._next_search - now)
