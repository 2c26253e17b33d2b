"""What the queues send beside taking and changing: making and finding queues, and looking after.

See `statements` for the rules.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Select,
    and_,
    bindparam,
    case,
    delete,
    false,
    func,
    insert,
    null,
    or_,
    select,
    update,
)

from pxrs.stores.mysql.queues.statements import hinted
from pxrs.stores.mysql.queues.tables import COMMITS, ITEMS, QUEUES
from pxrs.stores.mysql.schema import SESSIONS, KeyedDelete, KeyedUpdate, now_ms
from pxrs.stores.mysql.statements import named_statements
from pxrs.stores.rows import DEAD, DELAYED, HELD, READY, WAITING

_i, _q = ITEMS.c, QUEUES.c
_now: Any = now_ms()
_queue: BindParameter[int] = bindparam("queue", type_=_q.id.type)
_in_queue = _i.queue_id == _queue
_ids: BindParameter[int] = bindparam("ids", expanding=True)
_these = and_(_in_queue, _i.item_id.in_(_ids))

# Queues
_named_so = _q.name.in_(bindparam("names", expanding=True))
_queue_columns = (_q.name, _q.id, _q.fifo, _q.created_ms)
FIND = select(*_queue_columns).where(_named_so)
EVERY = select(*_queue_columns).order_by(_q.name)
LOCK_QUEUES = hinted(
    select(*_queue_columns, _q.next_item, _now)
    .where(_named_so)
    .order_by(_q.name)
    .with_for_update(),
    "pxrs_queues_name",
    QUEUES,
)
MAKE = (
    insert(QUEUES)
    .prefix_with("IGNORE", dialect="mysql")
    .prefix_with("IGNORE", dialect="mariadb")
    .values(
        id=bindparam("new_id"),
        name=bindparam("new_name"),
        fifo=bindparam("strict"),
        created_ms=_now,
        next_item=1,
        changes=0,
        put=0,
        done=0,
    )
)
NUMBER = (
    update(QUEUES)
    .where(_q.id == _queue)
    .values(
        next_item=_q.next_item + bindparam("numbers", type_=_q.next_item.type),
        put=_q.put + bindparam("fresh", type_=_q.put.type),
        changes=_q.changes + 1,
    )
)
NUMBER_ABOVE = (
    update(QUEUES)
    .where(_q.id == _queue)
    .values(
        next_item=func.greatest(_q.next_item, bindparam("above", type_=_q.next_item.type)),
        put=_q.put + bindparam("fresh", type_=_q.put.type),
        changes=_q.changes + 1,
    )
)
STIR = update(QUEUES).where(_q.id.in_(_ids)).values(changes=_q.changes + 1)
DROP_QUEUE = delete(QUEUES).where(_q.id == _queue)
WATCHED = select(_q.name, _q.id, _q.changes).where(_named_so)

# What was applied, or given up
REMEMBER = insert(COMMITS)
# A record that somebody is about to commit is waited for.
BECAME = (
    select(COMMITS.c.done)
    .where(COMMITS.c.session_id == bindparam("session"), COMMITS.c.tx == bindparam("unit"))
    .with_for_update(read=True)
)
# What the holder has. Who locks what it looks at waits for all that others are about to remove: so
# it is read as it stands, committed or not, and then locked by its number.
HELD_BY = hinted(
    select(_i.queue_id, _i.item_id).where(
        _i.queue_id == select(_q.id).where(_q.name == bindparam("name")).scalar_subquery(),
        _i.state == HELD,
        _i.session_id == bindparam("session"),
        _i.tx == bindparam("transaction"),
    ),
    "pxrs_items_ready",
)
LOCK_HELD_BY = HELD_BY.with_for_update()
LOCK_ITEMS = hinted(select(_i.item_id).where(_these).with_for_update(), "PRIMARY")
NOTED = select(COMMITS.c.n, COMMITS.c.queue_id, COMMITS.c.done).where(
    COMMITS.c.session_id == bindparam("session"),
    COMMITS.c.tx.in_(bindparam("units", expanding=True)),
)
NOTED_IN = select(COMMITS.c.n, COMMITS.c.queue_id, COMMITS.c.done)
NOTED_IN = NOTED_IN.where(COMMITS.c.session_id == bindparam("session")).limit(1000)
# Sessions that are over, when that was first seen, and what time it is. It is noted beside their
# units, under a name that no unit has, with the server's time as its number.
_ENDED = "(ended)"
ORPHANED = (
    select(
        COMMITS.c.session_id,
        func.min(case((COMMITS.c.tx == _ENDED, COMMITS.c.n))),
        _now,
    )
    .select_from(COMMITS.outerjoin(SESSIONS, SESSIONS.c.id == COMMITS.c.session_id))
    .where(SESSIONS.c.id.is_(None))
    .group_by(COMMITS.c.session_id)
)
NOTE_ENDED = insert(COMMITS).values(
    session_id=bindparam("session"), n=_now, tx=_ENDED, queue_id=0, done=0
)
FORGET = delete(COMMITS).where(
    COMMITS.c.session_id == bindparam("session"),
    COMMITS.c.n.in_(bindparam("numbers", expanding=True)),
)
COUNT_DONE = (
    update(QUEUES)
    .where(_q.id == _queue)
    .values(done=_q.done + bindparam("more", type_=_q.done.type))
)

# Looking after
_stored = (
    _i.item_id,
    _i.state,
    _i.body,
    _i.item_key,
    _i.grade,
    _i.deliveries,
    _i.put_ms,
    _i.taken_ms,
    _i.due_ms,
    _i.dead_ms,
    _i.error_text,
    _i.session_id,
    _i.tx,
    _now,
)


def _counted(*conditions: ColumnElement[bool]) -> Any:
    query = select(func.count()).select_from(ITEMS).where(_i.queue_id == _q.id, *conditions)
    return query.correlate(QUEUES).scalar_subquery()


# One statement: between two of them an item could move and be counted twice, or not at all.
STATS = select(
    *(_counted(_i.state == state) for state in (READY, DELAYED, HELD, WAITING, DEAD)),
    _counted(_i.state == DELAYED, _i.due_ms <= _now),
    select(_i.put_ms)
    .where(_i.queue_id == _q.id, _i.state < DEAD)
    .order_by(_i.item_id)
    .limit(1)
    .correlate(QUEUES)
    .scalar_subquery(),
    _q.put,
    _q.done
    + select(func.coalesce(func.sum(COMMITS.c.done), 0))
    .where(COMMITS.c.queue_id == _q.id)
    .correlate(QUEUES)
    .scalar_subquery(),
).where(_q.name == bindparam("name"))


def standing(states: list[int]) -> ColumnElement[bool]:
    """Which items stand so. A delayed one whose time has come is ready."""
    overdue = and_(_i.state == DELAYED, _i.due_ms <= _now)
    among = _i.state.in_(states) if states else false()
    return or_(among, overdue) if READY in states else and_(among, ~overdue)


def peek(states: list[int], limit: int) -> Select[Any]:
    """Items in the states, oldest first."""
    above = _i.item_id > bindparam("after", type_=_i.item_id.type)
    query = select(*_stored).where(_in_queue, above, standing(states))
    return query.order_by(_i.item_id).limit(limit)


def latest(states: list[int], limit: int) -> Select[Any]:
    """Items in the states from the end: a lane that goes from its front shows each of them."""
    below = _i.item_id < bindparam("before", type_=_i.item_id.type)
    query = select(_i.item_id).where(_in_queue, below, standing(states))
    return query.order_by(_i.item_id.desc()).limit(limit)


def lock_standing(states: list[int]) -> Select[Any]:
    """These items, as far as they stand so, locked."""
    query = select(_i.item_id, _i.lane).where(_these, standing(states))
    return hinted(query.order_by(_i.item_id).with_for_update(), "PRIMARY")


DISCARD = KeyedDelete(ITEMS).where(_these)
PIECE = select(_i.item_id).where(_in_queue).order_by(_i.item_id)
DISCARD_UPTO = delete(ITEMS).where(_in_queue, _i.item_id <= bindparam("upto"))
STRAYS = (
    select(_i.queue_id)
    .distinct()
    .select_from(ITEMS.outerjoin(QUEUES, _q.id == _i.queue_id))
    .where(_q.id.is_(None))
)
REVIVE = (
    KeyedUpdate(ITEMS)
    .where(_in_queue, _i.item_id == bindparam("old"), _i.state == DEAD)
    .values(
        item_id=bindparam("new"),
        state=case((_i.lane.is_(None), READY), else_=WAITING),
        due_ms=bindparam("now"),
        put_ms=bindparam("now"),
        deliveries=0,
        suspect=0,
        taken_ms=null(),
        dead_ms=null(),
        most=null(),
    )
)


ALL = {
    **named_statements(dict(globals())),
    "PEEK": peek([READY, HELD], 10),
    "LATEST": latest([DELAYED], 10),
    "LOCK_STANDING": lock_standing([READY, DEAD]),
}
