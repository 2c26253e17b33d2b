"""Queues and their items, under the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from pxrs.clock import Clock
from pxrs.errors import ConfigError, CopyRefused, OutcomeUnknown
from pxrs.stores.api import ItemRestorer, QueueStore, Stores
from pxrs.types import ItemState, StoredItem

_PAGE = 200
_PIECE_BYTES = 4 * 2**20
_CLOCKS_DIFFER_MS = 60_000
_STATES = tuple(ItemState)

OnItems = Callable[[int], None]


def queues_of(stores: Stores) -> QueueStore | None:
    """The queues, None where a store has none."""
    try:
        return stores.queues
    except ConfigError:
        return None


def count_items(queues: QueueStore | None) -> int:
    """How many items there are, dead ones too."""
    if queues is None:
        return 0
    stats = [queues.stats(queue.name) for queue in queues.all()]
    return sum(each.depth + each.dead for each in stats)


def held_items(queues: QueueStore | None) -> list[str]:
    """Items in somebody's hands, as queue/number. Those whose holder is gone are freed."""
    if queues is None:
        return []
    queues.reap()
    return [
        f"{queue.name}/{item.id}"
        for queue in queues.all()
        for item in queues.peek(queue.name, (ItemState.HELD,), limit=10)
    ]


def require_restorer(source: QueueStore | None, target: QueueStore | None) -> None:
    """Find out before anything is copied whether the target can take the source's items."""
    if source is None or not source.all():
        return
    if target is None:
        raise CopyRefused(
            "the source has queues, and the target has no place for them: they are kept where "
            "coordination is; name a database for that, or delete the queues"
        )
    if not isinstance(target, ItemRestorer):
        raise CopyRefused("the source has queues, and the target can't take over their items yet")


def copy_queues(
    source: QueueStore | None, target: QueueStore | None, on_items: OnItems, clock: Clock
) -> None:
    """Make the target's queues those of the source."""
    if target is None:
        return
    wanted = {queue.name: queue for queue in source.all()} if source is not None else {}
    for queue in target.all():
        if queue.name not in wanted or queue.fifo != wanted[queue.name].fifo:
            target.delete(queue.name)
    for name, queue in wanted.items():
        assert source is not None
        target.create(name, fifo=queue.fifo)
        _copy_items(source, target, name, on_items, clock)


def _copy_items(
    source: QueueStore, target: QueueStore, queue: str, on_items: OnItems, clock: Clock
) -> None:
    if not isinstance(target, ItemRestorer):
        raise CopyRefused("the target can't take over the items of queues yet")
    stale: list[int] = []
    fresh: list[StoredItem] = []
    size = 0

    def flush() -> None:
        nonlocal size
        if stale:
            target.drop(queue, stale)
        if fresh:
            _restore(target, queue, fresh)
            on_items(len(fresh))
        stale.clear()
        fresh.clear()
        size = 0

    most = min(_PAGE, target.limits.items)
    for wanted, have in _pairs(source, target, queue):
        if have is not None and (wanted is None or not _equal(wanted, have, clock)):
            stale.append(have.id)
            have = None
        if wanted is not None and have is None:
            fresh.append(wanted)
            size += len(wanted.body)
        if len(fresh) >= most or len(stale) >= most or size >= _PIECE_BYTES:
            flush()
    flush()


def _restore(target: ItemRestorer, queue: str, items: list[StoredItem]) -> None:
    while True:
        try:
            target.restore(queue, items)
            return
        except OutcomeUnknown:
            # By number: what was added is left alone the next time.
            continue


class _Pair(NamedTuple):
    wanted: StoredItem | None
    have: StoredItem | None


def _pairs(source: QueueStore, target: QueueStore, queue: str) -> Iterator[_Pair]:
    """The items of both by number, side by side."""
    left, right = _all(source, queue), _all(target, queue)
    wanted, have = next(left, None), next(right, None)
    while wanted is not None or have is not None:
        if have is None or (wanted is not None and wanted.id < have.id):
            yield _Pair(wanted, None)
            wanted = next(left, None)
        elif wanted is None or have.id < wanted.id:
            yield _Pair(None, have)
            have = next(right, None)
        else:
            yield _Pair(wanted, have)
            wanted, have = next(left, None), next(right, None)


def _all(queues: QueueStore, queue: str) -> Iterator[StoredItem]:
    page = queues.peek(queue, _STATES, limit=_PAGE)
    while page:
        yield from page
        page = queues.peek(queue, _STATES, after=page[-1].id, limit=_PAGE)


def _essence(item: StoredItem) -> StoredItem:
    """What has to be equal. Where a live item stands depends on the time and on who holds it."""
    state = item.state if item.state is ItemState.DEAD else ItemState.READY
    return msgspec.structs.replace(item, state=state, visible_ms=None, holder=None)


def _equal(left: StoredItem, right: StoredItem, clock: Clock) -> bool:
    return _essence(left) == _essence(right) and _show_together(left, right, clock)


def _show_together(left: StoredItem, right: StoredItem, clock: Clock) -> bool:
    """One that is due in one store may be a moment away in the other: clocks differ."""
    times = {left.visible_ms, right.visible_ms}
    return len(times) == 1 or (
        None in times and max(filter(None, times)) <= clock.wall_ms() + _CLOCKS_DIFFER_MS
    )


def item_differences(
    source: QueueStore | None, target: QueueStore | None, clock: Clock
) -> list[str]:
    """What is not equal, in words."""
    wanted = {queue.name: queue.fifo for queue in source.all()} if source is not None else {}
    have = {queue.name: queue.fifo for queue in target.all()} if target is not None else {}
    found = [
        f"queue {name!r} is not the same"
        for name in sorted(wanted.keys() | have.keys())
        if wanted.get(name) != have.get(name)
    ]
    if source is None or target is None:
        return found
    for name in sorted(wanted.keys() & have.keys()):
        for left, right in _pairs(source, target, name):
            item = left or right
            assert item is not None
            if left is None or right is None or not _equal(left, right, clock):
                found.append(f"item {item.id} of queue {name!r} differs")
    return found
