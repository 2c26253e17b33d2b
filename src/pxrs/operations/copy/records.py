"""Records of the coordination store: topics, groups, claims, history; keys, once there are any.

Records that are bound to a session belong to somebody who is connected, and stay behind. Claims
come as they are, with epoch, checkpoint and finished runs: their owners are not there, so whoever
joins takes over with the next epoch, and epochs only rise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from pxrs.core.records import Claim, decode
from pxrs.errors import CopyRefused, InvalidRequest, OutcomeUnknown
from pxrs.operations.copy.state import FOLDER
from pxrs.stores.api import CoordStore
from pxrs.types import Check, Committed, Delete, Put, Versioned, Write

TOPICS = "topics/"
CLAIMS = "claims/"
GROUPS = "group/"
MEMBERS = "members/"
_NOT_HERE = (FOLDER, "queues/", "queue-")
_PAGE = 1000
_COMMIT_BYTES = 256 * 2**10

Change = tuple[Check, Write]


def lasting(coord: CoordStore) -> dict[str, Versioned]:
    """Every record that is bound to no session, but those of copies and those of queues.

    Where queues are kept as records, their items are copied as items: another engine keeps them
    in another way.
    """
    return {
        record.key: record
        for record in _all(coord)
        if record.session is None and not record.key.startswith(_NOT_HERE)
    }


def _all(coord: CoordStore) -> Iterator[Versioned]:
    page = coord.list("", limit=_PAGE)
    while page:
        yield from page
        page = coord.list("", after=page[-1].key, limit=_PAGE)


def members(coord: CoordStore) -> list[str]:
    """Who is connected, as group/name."""
    return [record.key.removeprefix(MEMBERS) for record in coord.list(MEMBERS)]


def refuse_too_large(source: CoordStore, target: CoordStore) -> None:
    """Find out before anything is copied."""
    most = target.limits.value_bytes
    for record in lasting(source).values():
        if len(record.value) > most:
            raise CopyRefused(
                f"the record {record.key!r} has {len(record.value)} bytes; the target takes {most}"
            )


def copy_records(source: CoordStore, target: CoordStore, on_records: Callable[[int], None]) -> None:
    """Make the target's records those of the source. Topics come last: all of them is there then.

    Each write is conditional, so a round whose outcome is unknown is simply done again: what was
    applied is no change any more.
    """
    while not _commit_all(target, _changes(source, target), on_records):
        pass


def _commit_all(
    target: CoordStore, changes: list[Change], on_records: Callable[[int], None]
) -> bool:
    for some in _in_commits(changes, target):
        try:
            outcome = target.commit([check for check, _ in some], [write for _, write in some])
        except OutcomeUnknown:
            return False
        if not isinstance(outcome, Committed):
            return False
        on_records(len(some))
    return True


def _changes(source: CoordStore, target: CoordStore) -> list[Change]:
    wanted, have = lasting(source), lasting(target)
    gone: list[Change] = [
        (Check(key, record.version), Delete(key))
        for key, record in have.items()
        if key not in wanted
    ]
    put: list[Change] = []
    for key in sorted(wanted, key=lambda key: (key.startswith(TOPICS), key)):
        found = have.get(key)
        if found is None:
            put.append((Check(key, 0), Put(key, wanted[key].value)))
        elif found.value != wanted[key].value:
            _refuse_newer_claim(wanted[key], found)
            put.append((Check(key, found.version), Put(key, wanted[key].value)))
    return gone + put


def _refuse_newer_claim(wanted: Versioned, found: Versioned) -> None:
    if wanted.key.startswith(CLAIMS) and decode(found, Claim).epoch > decode(wanted, Claim).epoch:
        raise CopyRefused(
            f"{wanted.key} has a higher epoch in the target: somebody consumes there already"
        )


def _in_commits(changes: list[Change], target: CoordStore) -> Iterator[list[Change]]:
    """Pieces that one commit can carry."""
    most = max(1, target.limits.operations // 2)
    if target.limits.operations < 2:
        raise InvalidRequest("the target can't check and write in one commit")
    piece: list[Change] = []
    size = 0
    for change in changes:
        weight = len(change[1].value) if isinstance(change[1], Put) else 0
        if piece and (len(piece) == most or size + weight > _COMMIT_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(change)
        size += weight
    if piece:
        yield piece


def record_differences(source: CoordStore, target: CoordStore) -> list[str]:
    """What is not equal, in words."""
    wanted, have = lasting(source), lasting(target)
    return list(
        chain(
            (f"record {key!r} is missing" for key in wanted if key not in have),
            (f"record {key!r} is not in the source" for key in have if key not in wanted),
            (
                f"record {key!r} differs"
                for key in wanted
                if key in have and have[key].value != wanted[key].value
            ),
        )
    )
