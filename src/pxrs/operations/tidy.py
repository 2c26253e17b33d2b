"""Finds and removes what killed processes left: topics half made, and logs that no topic names.

A record names a log from before it is made until it is to go (`pxrs.topics`). So logs are listed
first and records read after that: a log which no record names by then was given up by all, and no
record will ever name it. A topic that is not made may be under way: its record is removed if it is
still the same, and the process that is making it begins anew, with another log. No clock is read,
and nothing that a topic needs is removed, even if topics are created and deleted meanwhile.
"""

from __future__ import annotations

import msgspec

from pxrs.errors import TopicNotFound
from pxrs.operations.copy import logs_of_copy
from pxrs.stores.api import KeepsOwners, LogStore, Stores
from pxrs.topics import Recorded, recorded_in, withdraw


class LeftLog(msgspec.Struct, frozen=True):
    """A log that no topic names, by its id, and how many messages it holds."""

    id: str
    messages: int


class Leftovers(msgspec.Struct, frozen=True):
    """Leftovers of a store. Topics that are `unmade` may be under way at this moment."""

    logs: tuple[LeftLog, ...] = ()
    unmade: tuple[Recorded, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.logs or self.unmade)


def find_leftovers(stores: Stores) -> Leftovers:
    """Look for leftovers. Logs of other stores, and of unknown ones, are not listed.

    Logs are looked for only where the log knows the stores that made them.
    """
    coord, log = stores.coord, stores.log
    logs = _own_logs(log) if isinstance(log, KeepsOwners) else set()
    # In this order: a copy is finished when its topics are recorded.
    logs -= logs_of_copy(coord)
    recorded = recorded_in(coord)
    logs -= {found.topic.id for found in recorded}
    return Leftovers(
        tuple(_look_into(log, topic_id) for topic_id in sorted(logs)),
        tuple(found for found in recorded if not found.made),
    )


def _own_logs(log: KeepsOwners) -> set[str]:
    owners = log.held()
    mine = log.owner() if owners else ""
    return {topic_id for topic_id, owner in owners.items() if mine and owner == mine}


def _look_into(log: LogStore, topic_id: str) -> LeftLog:
    try:
        held = log.bounds(topic_id)
    except TopicNotFound:
        # It has gone meanwhile, as its topic's deletion goes on.
        held = {}
    return LeftLog(topic_id, sum(part.end - part.start for part in held.values()))


def remove_leftovers(stores: Stores, found: Leftovers) -> Leftovers:
    """Remove what was found; returns what was removed. A topic that was made meanwhile stays."""
    coord, log = stores.coord, stores.log
    for each in found.logs:
        log.drop(each.id)
    unmade = tuple(each for each in found.unmade if withdraw(coord, log, each))
    return Leftovers(found.logs, unmade)
