"""Copies records of the coordination store, and queues with their items.

Records are topics, groups, claims and history. Those that are bound to a session belong to a
member that is connected, and are not copied. Claims come as they are, with epoch, checkpoint and
finished ranges: their owners are not in the target, so the member that joins there takes over with
the next epoch, and epochs only rise. Queue items keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from pxrs.clock import Clock
from pxrs.core.records import Claim, decode
from pxrs.errors import ConfigError, CopyRefused, InvalidRequest, OutcomeUnknown
from pxrs.stores.api import CoordStore, ItemRestorer, QueueStore, Stores, lots
from pxrs.stores.identity import FOLDER as IDENTITY_FOLDER
from pxrs.types import (
    Check,
    Committed,
    Delete,
    ItemState,
    Put,
    StoredItem,
    Versioned,
    Write,
)

TOPICS = "topics/"
CLAIMS = "claims/"
GROUPS = "group/"
MEMBERS = "members/"
COPY_FOLDER = "copy/"
# Where queues are kept as records, their items are copied as items: engines keep them differently.
# A copy is another store, with an identity of its own.
_NOT_COPIED = (COPY_FOLDER, IDENTITY_FOLDER, "queues/", "queue-")
_RECORDS_PER_PAGE = 1000
_COMMIT_BYTES = 256 * 2**10
_ITEMS_PER_PAGE = 200
_RESTORE_BYTES = 4 * 2**20
_CLOCKS_DIFFER_MS = 60_000
_STATES = tuple(ItemState)

Change = tuple[Check, Write]
OnCopied = Callable[[int], None]


# Records


def lasting(coord: CoordStore) -> dict[str, Versioned]:
    """Every record that a copy takes: those that are bound to no session, but for `_NOT_COPIED`."""
    found: dict[str, Versioned] = {}
    page = coord.list("", limit=_RECORDS_PER_PAGE)
    while page:
        for record in page:
            if record.session is None and not record.key.startswith(_NOT_COPIED):
                found[record.key] = record
        page = coord.list("", after=page[-1].key, limit=_RECORDS_PER_PAGE)
    return found


def members(coord: CoordStore) -> list[str]:
    """The members that are connected, as group/name."""
    return [record.key.removeprefix(MEMBERS) for record in coord.list(MEMBERS)]


def refuse_too_large(source: CoordStore, target: CoordStore) -> None:
    """Raises `CopyRefused` before anything is copied if the target can't hold a record."""
    most = target.limits.value_bytes
    for record in lasting(source).values():
        if len(record.value) > most:
            raise CopyRefused(
                f"record {record.key!r} has {len(record.value)} bytes; the limit of the target "
                f"is {most}"
            )


def copy_records(source: CoordStore, target: CoordStore, on_copied: OnCopied) -> None:
    """Makes the target's records equal to the source's.

    Each write is conditional, so a round that conflicts or whose outcome is unknown is simply
    done again: what was applied is no change any more.
    """
    while not _commit_all(target, missing_writes(source, target), on_copied):
        pass


def _commit_all(target: CoordStore, changes: list[Change], on_copied: OnCopied) -> bool:
    for some in _in_commits(changes, target):
        try:
            outcome = target.commit([check for check, _ in some], [write for _, write in some])
        except OutcomeUnknown:
            return False
        if not isinstance(outcome, Committed):
            return False
        on_copied(len(some))
    return True


def missing_writes(source: CoordStore, target: CoordStore) -> list[Change]:
    """Lists the writes that are missing. Topics come last: one that shows up is whole."""
    wanted, have = lasting(source), lasting(target)
    changes: list[Change] = [
        (Check(key, record.version), Delete(key))
        for key, record in have.items()
        if key not in wanted
    ]
    for key in sorted(wanted, key=lambda key: (key.startswith(TOPICS), key)):
        found, value = have.get(key), wanted[key].value
        if found is None:
            changes.append((Check(key, 0), Put(key, value)))
        elif found.value != value:
            if key.startswith(CLAIMS) and _epoch(found) > _epoch(wanted[key]):
                raise CopyRefused(
                    f"{key} has a higher epoch in the target: a consumer has claimed it there"
                )
            changes.append((Check(key, found.version), Put(key, value)))
    return changes


def _epoch(record: Versioned) -> int:
    return decode(record, Claim).epoch


def _in_commits(changes: list[Change], target: CoordStore) -> Iterator[list[Change]]:
    """Yields pieces that one commit can carry."""
    most = target.limits.operations // 2
    if most < 1:
        raise InvalidRequest("the target can't check and write in one commit")

    def weigh(change: Change) -> tuple[int, int]:
        return 1, len(change[1].value) if isinstance(change[1], Put) else 0

    return lots(changes, weigh, (most, _COMMIT_BYTES))


def differences(wanted: Mapping[str, Versioned], have: Mapping[str, Versioned]) -> Iterator[str]:
    """Describes the records that are not equal."""
    for key in sorted(wanted.keys() | have.keys()):
        if key not in have:
            yield f"record {key!r} is missing"
        elif key not in wanted:
            yield f"record {key!r} is not in the source"
        elif have[key].value != wanted[key].value:
            yield f"record {key!r} differs"


# Queues


def queues_of(stores: Stores) -> QueueStore | None:
    """The queues, or None where a store has none."""
    try:
        return stores.queues
    except ConfigError:
        return None


def _orders(queues: QueueStore | None) -> dict[str, bool]:
    """The names of all queues, and whether each is strictly fifo."""
    return {queue.name: queue.fifo for queue in queues.all()} if queues is not None else {}


def count_items(queues: QueueStore | None) -> int:
    """Returns the number of items, including dead ones."""
    if queues is None:
        return 0
    stats = [queues.stats(queue.name) for queue in queues.all()]
    return sum(each.depth + each.dead for each in stats)


def held_items(queues: QueueStore | None) -> list[str]:
    """Some items that workers hold, as queue/number. Items of workers that are gone are freed."""
    if queues is None:
        return []
    queues.reap()
    return [
        f"{queue.name}/{item.id}"
        for queue in queues.all()
        for item in queues.peek(queue.name, (ItemState.HELD,), limit=10)
    ]


def refuse_items(source: QueueStore | None, target: QueueStore | None) -> None:
    """Raises `CopyRefused` before anything is copied if the target can't hold the queues."""
    if not _orders(source):
        return
    if target is None:
        raise CopyRefused(
            "the source has queues, and the target has no place for them: they are kept where "
            "coordination is; name a database for that, or delete the queues"
        )
    _restorer(target)


def _restorer(target: QueueStore) -> ItemRestorer:
    if not isinstance(target, ItemRestorer):
        raise CopyRefused("the source has queues, and the target can't take over their items yet")
    return target


def copy_queues(
    source: QueueStore | None, target: QueueStore | None, on_copied: OnCopied, clock: Clock
) -> None:
    """Makes the target's queues equal to the source's."""
    if target is None:
        return
    wanted = _orders(source)
    for name, fifo in _orders(target).items():
        if wanted.get(name) != fifo:
            target.delete(name)
    for name, fifo in wanted.items():
        assert source is not None
        target.create(name, fifo=fifo)
        _copy_items(source, target, name, on_copied, clock)


def _copy_items(
    source: QueueStore, target: QueueStore, queue: str, on_copied: OnCopied, clock: Clock
) -> None:
    restorer = _restorer(target)

    def weigh(pair: tuple[StoredItem | None, StoredItem | None]) -> tuple[int, int]:
        return 1, 0 if pair[0] is None else len(pair[0].body)

    room = (min(_ITEMS_PER_PAGE, target.limits.items), _RESTORE_BYTES)
    for some in lots(_unequal(source, target, queue, clock), weigh, room):
        stale = [have.id for _, have in some if have is not None]
        fresh = [wanted for wanted, _ in some if wanted is not None]
        if stale:
            target.drop(queue, stale)
        if fresh:
            _restore(restorer, queue, fresh)
            on_copied(len(fresh))


def _restore(target: ItemRestorer, queue: str, items: list[StoredItem]) -> None:
    while True:
        try:
            target.restore(queue, items)
            return
        except OutcomeUnknown:
            # Items go by number: the next time, those that were added are skipped.
            continue


def item_differences(
    source: QueueStore | None, target: QueueStore | None, clock: Clock
) -> Iterator[str]:
    """Describes the queues and items that are not equal."""
    wanted, have = _orders(source), _orders(target)
    for name in sorted(wanted.keys() | have.keys()):
        if wanted.get(name) != have.get(name):
            yield f"queue {name!r} is not the same"
    if source is None or target is None:
        return
    for name in sorted(wanted.keys() & have.keys()):
        for left, right in _unequal(source, target, name, clock):
            item = left or right
            assert item is not None
            yield f"item {item.id} of queue {name!r} differs"


def _unequal(
    source: QueueStore, target: QueueStore, queue: str, clock: Clock
) -> Iterator[tuple[StoredItem | None, StoredItem | None]]:
    """Yields the items that are only in one store, or not the same in both, by number."""
    left, right = _items(source, queue), _items(target, queue)
    wanted, have = next(left, None), next(right, None)
    while wanted is not None or have is not None:
        if have is None or (wanted is not None and wanted.id < have.id):
            yield wanted, None
            wanted = next(left, None)
        elif wanted is None or have.id < wanted.id:
            yield None, have
            have = next(right, None)
        else:
            if not _equal(wanted, have, clock):
                yield wanted, have
            wanted, have = next(left, None), next(right, None)


def _items(queues: QueueStore, queue: str) -> Iterator[StoredItem]:
    page = queues.peek(queue, _STATES, limit=_ITEMS_PER_PAGE)
    while page:
        yield from page
        page = queues.peek(queue, _STATES, after=page[-1].id, limit=_ITEMS_PER_PAGE)


def _equal(left: StoredItem, right: StoredItem, clock: Clock) -> bool:
    """Whether two items are the same.

    An item due in one store may be a moment away in the other, because clocks differ.
    """
    times = {left.visible_ms, right.visible_ms}
    return _essence(left) == _essence(right) and (
        len(times) == 1
        or (None in times and max(filter(None, times)) <= clock.wall_ms() + _CLOCKS_DIFFER_MS)
    )


def _essence(item: StoredItem) -> StoredItem:
    """The item without what may differ: a live item's state depends on time and holder."""
    state = item.state if item.state is ItemState.DEAD else ItemState.READY
    return msgspec.structs.replace(item, state=state, visible_ms=None, holder=None)
