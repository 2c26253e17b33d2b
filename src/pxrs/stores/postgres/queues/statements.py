"""A unit of work on queues as the statement that commits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pxrs.core.queue import delay_ms, indexed, is_suspect
from pxrs.stores.postgres.arrays import Byteas
from pxrs.stores.postgres.queues.functions import READY
from pxrs.types import Held, ItemState, NewItem, QueueChange, StoredItem

LONGEST_INDEXED = 501

_APPLY = """SELECT r_numbers, r_lowest FROM @.pxrs_queue_apply(%b::text, %b::text, %b::text,
    {names}, %b::int8[], %b::int8[], %b::int8[], %b::int8[], {bodies}, %b::int8[],
    %b::int8[], %b::text[], %b::text[], %b::text[], %b::int8[], %b::int8[], %b::int8[],
    %b::text[])"""
# The server builds an array of one element much faster than the driver.
_NAMES = ("ARRAY[%b::text]", "%b::text[]")
_BODIES = ("ARRAY[%b::bytea]", "%b::bytea[]")

# Most units that only put are like this: items without a key, priority or delay for one queue,
# which exists and is not fifo. For these the function would be half of the server's work. Returns
# NULL if there is no such queue, or the unit was given up: then nothing was done.
_TO = "@.pxrs_queues k WHERE k.name = %b::text AND k.dropped IS NULL AND NOT k.fifo"
_NOTED = f"""INSERT INTO @.pxrs_queue_commits (session, tx, at, queues, puts, dones)
        SELECT %b::text, %b::text, clock_timestamp(), ARRAY[k.id], ARRAY[%b::int8], ARRAY[0::int8]
        FROM {_TO} ON CONFLICT (session, tx) DO NOTHING RETURNING queues[1] AS id"""
_COUNTED = f"""INSERT INTO @.pxrs_queue_counts (queue, put, done)
        SELECT k.id, %b::int8, 0 FROM {_TO} RETURNING queue AS id"""
_PLAIN_PUT = f"""
    WITH noted AS ({{noted}}),
    new AS (INSERT INTO @.pxrs_queue_items (queue, id, state, rank, visible, deliveries, suspect,
            put_ms, error, body)
        SELECT q.id, nextval('@.pxrs_queue_numbers'), {READY}, 0, q.now_ms, 0, false, q.now_ms,
            '', {{bodies}}
        FROM (SELECT n.id, @.pxrs_now_ms() AS now_ms FROM noted n OFFSET 0) q RETURNING id)
    SELECT array_agg(id) FROM new"""
_PLAIN_PUTS = {
    (is_named, is_alone): _PLAIN_PUT.format(
        noted=_NOTED if is_named else _COUNTED,
        bodies="%b::bytea" if is_alone else "unnest(%b::bytea[])",
    )
    for is_named in (False, True)
    for is_alone in (False, True)
}


def application(change: QueueChange) -> tuple[str, tuple[object, ...]]:
    """The statement for any unit, and its parameters."""
    names = names_of(change)
    removed, added = sorted(change.remove), change.put
    several = len(names) > 1
    place = {name: at for at, name in enumerate(names, 1)}
    bodies = _bodies(added)
    alone = len(bodies) == 1
    statement = _APPLY.format(names=_NAMES[len(names) != 1], bodies=_BODIES[not alone])
    return statement, (
        *change.holder,
        change.unit,
        names[0] if len(names) == 1 else names,
        numbers([place[held.queue] for held in removed]) if several else None,
        numbers([held.id for held in removed]),
        numbers([held.delivery for held in removed]),
        numbers([place[item.queue] for item in added]) if several else None,
        bodies[0] if alone else bodies or None,
        *_details(added),
        *(_tally(names, added, removed) if several else (None, None)),
        list(change.forget) or None,
    )


def only_puts_to(change: QueueChange) -> str | None:
    """The one queue that the unit puts plain items into, if it does nothing else."""
    put = change.put
    if not put or change.remove:
        return None
    queue = put[0].queue
    return queue if all(item.queue == queue and _is_plain(item) for item in put) else None


def plain_put(change: QueueChange) -> tuple[str, tuple[object, ...]]:
    """The statement for a unit that only puts plain items into one queue."""
    put = change.put
    alone = len(put) == 1
    bodies = _bodies(put)
    return _PLAIN_PUTS[bool(change.unit), alone], (
        *((change.holder.session, change.unit) if change.unit else ()),
        len(put),
        put[0].queue,
        bodies[0] if alone else bodies,
    )


def _bodies(items: Sequence[NewItem]) -> Byteas:
    return Byteas(item.body for item in items)


def numbers(values: Sequence[int]) -> str | None:
    """An array as text, which is built much faster than the driver builds one; None if empty."""
    return "{" + ",".join(map(str, values)) + "}" if values else None


def _details(items: Sequence[NewItem]) -> tuple[object, ...]:
    """Ranks, delays, keys, lanes, dedupe keys and windows; None for a column that no item has."""
    if all(map(_is_plain, items)):
        return (None,) * 6
    ranked = any(item.priority for item in items)
    delayed = any(item.delay for item in items)
    keyed = any(item.key is not None for item in items)
    deduped = any(item.dedupe is not None for item in items)
    return (
        numbers([-item.priority for item in items]) if ranked else None,
        numbers([delay_ms(item.delay) for item in items]) if delayed else None,
        [item.key for item in items] if keyed else None,
        [item.key and _indexed(item.key) for item in items] if keyed else None,
        [item.dedupe and _indexed(item.dedupe) for item in items] if deduped else None,
        numbers([delay_ms(item.dedupe_window) for item in items]) if deduped else None,
    )


def _is_plain(item: NewItem) -> bool:
    return not (item.priority or item.delay or item.key or item.dedupe)


def _tally(
    names: Sequence[str], added: Sequence[NewItem], removed: Sequence[Held]
) -> tuple[list[int], list[int]]:
    """Counts the items put into each queue, and removed from it."""
    puts = Counter(item.queue for item in added)
    dones = Counter(held.queue for held in removed)
    return [puts[name] for name in names], [dones[name] for name in names]


def names_of(change: QueueChange) -> list[str]:
    held: Iterable[Held | NewItem] = (*change.remove, *change.put)
    return sorted({each.queue for each in held})


def _indexed(key: str) -> str:
    return indexed(key, LONGEST_INDEXED)


RESTORE_ITEMS = """SELECT @.pxrs_queue_restore(%b::text, %b::int8[], %b::int8[], %b::text[],
    %b::text[], %b::int8[], %b::int8[], %b::bool[], %b::int8[], %b::int8[], %b::bool[],
    %b::int8[], %b::text[], %b::bytea[])"""


def as_columns(items: Sequence[StoredItem], longest: int) -> tuple[object, ...]:
    """Returns the parameters of `RESTORE_ITEMS`, without the queue."""
    return (
        [item.id for item in items],
        [-item.priority for item in items],
        [item.key for item in items],
        [None if item.key is None else indexed(item.key, longest) for item in items],
        [item.visible_ms or item.put_ms for item in items],
        [item.deliveries for item in items],
        [is_suspect(item) for item in items],
        [item.put_ms for item in items],
        [item.taken_ms for item in items],
        [item.state is ItemState.DEAD for item in items],
        [item.dead_ms for item in items],
        [item.error for item in items],
        [item.body for item in items],
    )
