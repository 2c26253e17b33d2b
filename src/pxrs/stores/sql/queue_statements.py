"""What the queues send: every statement, built once.

Rows are locked in one order: sessions, queues, items, each sorted. Taking waits for nobody: it
skips what is locked. MySQL computes an update's columns one after the other, so none is read here
after it was set.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BindParameter,
    ClauseElement,
    ColumnElement,
    Select,
    Table,
    and_,
    bindparam,
    case,
    delete,
    false,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    tuple_,
    update,
)

from pxrs.stores.queue_rules import DIED_HOLDING, USED_UP
from pxrs.stores.sql.queue_tables import (
    COMMITS,
    DEAD,
    DELAYED,
    HELD,
    ITEMS,
    QUEUES,
    READY,
    SEEN,
    WAITING,
)
from pxrs.stores.sql.schema import SESSIONS, now_ms, utc_now

_i, _q = ITEMS.c, QUEUES.c
_now: Any = now_ms()
_queue: BindParameter[int] = bindparam("queue", type_=_q.id.type)
_in_queue = _i.queue_id == _queue
_ids: BindParameter[int] = bindparam("ids", expanding=True)
_these = and_(_in_queue, _i.item_id.in_(_ids))
_pairs: BindParameter[Any] = bindparam("pairs", expanding=True)
_holder = and_(_i.session_id == bindparam("session"), _i.tx == bindparam("transaction"))
# The fence. It stands in whatever statement changes the item. Each take raises `deliveries`.
_same_delivery = and_(_these, tuple_(_i.item_id, _i.deliveries).in_(_pairs), _i.state == HELD)
_mine = and_(_same_delivery, _holder, _i.due_ms > _now)


def hinted(statement: Select[Any], index: str) -> Select[Any]:
    """With one index only: a plan for a short queue locks all of a long one."""
    for dialect in ("mysql", "mariadb"):
        statement = statement.with_hint(ITEMS, f"FORCE INDEX ({index})", dialect)
    return statement


# Sessions
_alive = and_(SESSIONS.c.id == bindparam("session"), SESSIONS.c.deadline > utc_now())
REQUIRE = select(_now).select_from(SESSIONS).where(_alive).with_for_update(read=True)

NOW = select(_now)

# Taking. What the first statement reads beside the session is not locked.
_named = select(_q.id).where(_q.name == bindparam("name")).scalar_subquery()
_of_named = _i.queue_id == _named


def _first_due(state: int) -> Any:
    query = select(func.min(_i.due_ms)).where(_of_named, _i.state == state)
    return query.scalar_subquery()


LOOK = (
    select(
        _now,
        _named,
        select(func.min(_i.grade)).where(_of_named, _i.state == READY).scalar_subquery(),
        _first_due(DELAYED),
        _first_due(HELD),
        select(func.count())
        .where(_of_named, _i.state == HELD, _holder, _i.lane.is_not(None))
        .scalar_subquery(),
    )
    .select_from(SESSIONS)
    .where(_alive)
    .with_for_update(read=True)
)
_candidate = (
    _i.item_id,
    _i.deliveries,
    _i.suspect,
    _i.grade,
    _i.item_key,
    _i.put_ms,
    _i.error_text,
    _i.body,
    _i.lane,
)
FRONTS = hinted(
    select(*_candidate)
    .where(_in_queue, _i.state == READY)
    .order_by(_i.grade, _i.item_id)
    .with_for_update(skip_locked=True),
    "pxrs_items_ready",
)
BEHIND = hinted(
    select(*_candidate, _i.due_ms)
    .where(_in_queue, _i.lane == bindparam("lane"), _i.state == WAITING)
    .order_by(_i.item_id)
    .with_for_update(),
    "pxrs_items_lane",
)
LANES_HELD = (
    select(_i.lane, _i.due_ms)
    .where(_in_queue, _i.state == HELD, _holder, _i.lane.is_not(None))
    .order_by(_i.item_id)
    .with_for_update()
)
FIRST_BEHIND = (
    select(_i.due_ms)
    .where(_in_queue, _i.lane == bindparam("lane"), _i.state == WAITING)
    .order_by(_i.item_id)
    .limit(1)
)
HOLD = (
    update(ITEMS)
    .where(_these)
    .values(
        state=HELD,
        deliveries=_i.deliveries + 1,
        session_id=bindparam("new_session"),
        tx=bindparam("new_tx"),
        most=bindparam("new_most"),
        due_ms=bindparam("until"),
        taken_ms=bindparam("now"),
    )
)
PROMOTE = (
    update(ITEMS)
    .where(_in_queue, _i.state == DELAYED, _i.due_ms <= bindparam("now"))
    .values(state=READY)
)
BURY = (
    update(ITEMS)
    .where(_these)
    .values(
        state=DEAD,
        dead_ms=bindparam("now"),
        error_text=func.coalesce(_i.error_text, USED_UP),
    )
)

# Lanes: which states there are in each, and the first item of each state.
LANES = hinted(
    select(_i.lane, _i.state, func.min(_i.item_id))
    .where(_in_queue, _i.lane.in_(bindparam("lanes", expanding=True)), _i.state < DEAD)
    .group_by(_i.lane, _i.state),
    "pxrs_items_lane",
)
_shown = case((_i.due_ms > bindparam("now"), DELAYED), else_=READY)
SHOW = update(ITEMS).where(_these, _i.state == WAITING).values(state=_shown)
HIDE = (
    update(ITEMS)
    .where(
        _in_queue,
        _i.lane.in_(bindparam("lanes", expanding=True)),
        _i.state.in_((READY, DELAYED)),
    )
    .values(state=WAITING)
)

# Holding on, giving back and removing
MINE = select(_i.due_ms).where(_mine).with_for_update()
EXTEND = update(ITEMS).where(_mine).values(due_ms=bindparam("until"))
REMOVE = delete(ITEMS).where(_mine)
_back_at = bindparam("delay", type_=_i.due_ms.type) + _now
_given_back: dict[str, Any] = {
    "session_id": null(),
    "tx": null(),
    "error_text": func.coalesce(bindparam("error", type_=_i.error_text.type), _i.error_text),
}
GIVE_BACK = (
    update(ITEMS)
    .where(_mine)
    .values(
        state=case(
            (_i.lane.is_not(None), WAITING),
            (bindparam("delay", type_=_i.due_ms.type) > 0, DELAYED),
            else_=READY,
        ),
        due_ms=_back_at,
        suspect=0,
        **_given_back,
    )
)
GIVE_UP = update(ITEMS).where(_mine).values(state=DEAD, dead_ms=_now, **_given_back)

# What the dead leave behind
_used_up = and_(_i.most.is_not(None), _i.deliveries >= _i.most)
_holds = ITEMS.outerjoin(SESSIONS, SESSIONS.c.id == _i.session_id)
LOST = (
    select(_i.item_id, _i.deliveries, _i.lane, _i.session_id, SESSIONS.c.id)
    .select_from(_holds)
    .where(_in_queue, _i.state == HELD, or_(SESSIONS.c.id.is_(None), _i.due_ms <= _now))
    .order_by(_i.item_id)
)
LOST_NAMED = (
    select(_q.id)
    .select_from(_holds.join(QUEUES, _q.id == _i.queue_id))
    .where(
        _q.name == bindparam("name"),
        _i.state == HELD,
        or_(SESSIONS.c.id.is_(None), _i.due_ms <= _now),
    )
    .limit(1)
)
# A hold that was extended since it was looked at is left alone; a session does not come back.
FREE = (
    update(ITEMS)
    .where(
        _same_delivery,
        or_(_i.due_ms <= _now, _i.session_id.in_(bindparam("gone", expanding=True))),
    )
    .values(
        state=case((_used_up, DEAD), (_i.lane.is_(None), READY), else_=WAITING),
        dead_ms=case((_used_up, _now), else_=null()),
        due_ms=_now,
        suspect=1,
        error_text=literal(DIED_HOLDING),
        session_id=null(),
        tx=null(),
    )
)
# Every queue: when something shows, and when a hold ends; whether a holder has gone.
DUE = select(
    _q.id,
    _q.name,
    _now,
    select(func.min(_i.due_ms))
    .where(_i.queue_id == _q.id, _i.state == DELAYED)
    .correlate(QUEUES)
    .scalar_subquery(),
    select(func.min(_i.due_ms))
    .where(_i.queue_id == _q.id, _i.state == HELD)
    .correlate(QUEUES)
    .scalar_subquery(),
    select(func.count())
    .select_from(_holds)
    .where(_i.queue_id == _q.id, _i.state == HELD, SESSIONS.c.id.is_(None))
    .correlate(QUEUES)
    .scalar_subquery(),
)

# Queues
_named_so = _q.name.in_(bindparam("names", expanding=True))
_queue_columns = (_q.name, _q.id, _q.fifo, _q.created_ms)
FIND = select(*_queue_columns, _now).where(_named_so)
EVERY = select(*_queue_columns).order_by(_q.name)
LOCK_QUEUES = (
    select(_q.id, _q.next_item, _now).where(_q.id.in_(_ids)).order_by(_q.id).with_for_update()
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

# Putting
LANES_OF = select(_i.item_id, _i.lane).where(_these, _i.lane.is_not(None))
INSERT = insert(ITEMS)
PRESENT = select(_i.item_id).where(_these)
FORGET_SEEN = delete(SEEN).where(SEEN.c.queue_id == _queue, SEEN.c.until_ms <= _now)
SEEN_BEFORE = select(SEEN.c.seen_key).where(
    SEEN.c.queue_id == _queue, SEEN.c.seen_key.in_(bindparam("keys", expanding=True))
)
SEE = insert(SEEN)
DROP_SEEN = delete(SEEN).where(SEEN.c.queue_id == _queue)

# What was applied
REMEMBER = insert(COMMITS)
APPLIED = (
    select(COMMITS.c.n)
    .where(COMMITS.c.session_id == bindparam("session"), COMMITS.c.tx == bindparam("transaction"))
    .with_for_update(read=True)
)


def old_commits(keep: int) -> Select[Any]:
    """A session's commits without the latest ones: some of them."""
    query = select(COMMITS.c.n, COMMITS.c.queue_id, COMMITS.c.done)
    query = query.where(COMMITS.c.session_id == bindparam("session"))
    return query.order_by(COMMITS.c.n.desc()).offset(keep).limit(1000)


ORPHANED = (
    select(COMMITS.c.session_id, func.max(COMMITS.c.n))
    .select_from(COMMITS.outerjoin(SESSIONS, SESSIONS.c.id == COMMITS.c.session_id))
    .where(SESSIONS.c.id.is_(None))
    .group_by(COMMITS.c.session_id)
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
    return query.order_by(_i.item_id).with_for_update()


DISCARD = delete(ITEMS).where(_these)
PIECE = select(_i.item_id).where(_in_queue).order_by(_i.item_id)
DISCARD_UPTO = delete(ITEMS).where(_in_queue, _i.item_id <= bindparam("upto"))
STRAYS = (
    select(_i.queue_id)
    .distinct()
    .select_from(ITEMS.outerjoin(QUEUES, _q.id == _i.queue_id))
    .where(_q.id.is_(None))
)
REVIVE = (
    update(ITEMS)
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
    **{
        name: value
        for name, value in list(globals().items())
        if name.isupper() and isinstance(value, ClauseElement) and not isinstance(value, Table)
    },
    "OLD_COMMITS": old_commits(64),
    "PEEK": peek([READY, HELD], 10),
    "LATEST": latest([DELAYED], 10),
    "LOCK_STANDING": lock_standing([READY, DEAD]),
}
