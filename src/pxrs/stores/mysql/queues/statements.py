"""What the queues send: every statement, built once.

Rows are locked in one order: sessions, queues, items, each sorted. Taking waits for nobody: it
skips what is locked. MySQL computes an update's columns one after the other, so none is read here
after it was set.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BindParameter,
    Select,
    Table,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    tuple_,
    update,
)

from pxrs.core.queue import DIED_HOLDING, USED_UP
from pxrs.stores.mysql.queues.tables import ITEMS, QUEUES, SEEN
from pxrs.stores.mysql.schema import SESSIONS, KeyedDelete, KeyedUpdate, now_ms, utc_now
from pxrs.stores.mysql.statements import named_statements
from pxrs.stores.rows import DEAD, DELAYED, HELD, READY, WAITING

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


def hinted(statement: Select[Any], index: str, table: Table = ITEMS) -> Select[Any]:
    """With one index only: a plan for a short queue locks all of a long one."""
    for dialect in ("mysql", "mariadb"):
        statement = statement.with_hint(table, f"FORCE INDEX ({index})", dialect)
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
LOOK_TO_REMOVE = (
    select(
        _now,
        _named,
        select(func.count())
        .where(_of_named, _i.item_id.in_(_ids), _i.lane.is_not(None))
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
    KeyedUpdate(ITEMS)
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
    KeyedUpdate(ITEMS)
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
SHOW = KeyedUpdate(ITEMS).where(_these, _i.state == WAITING).values(state=_shown)
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
MINE = hinted(select(_i.due_ms).where(_mine).with_for_update(), "PRIMARY")
EXTEND = KeyedUpdate(ITEMS).where(_mine).values(due_ms=bindparam("until"))
REMOVE = KeyedDelete(ITEMS).where(_mine)
_back_at = bindparam("delay", type_=_i.due_ms.type) + _now
_given_back: dict[str, Any] = {
    "session_id": null(),
    "tx": null(),
    "error_text": func.coalesce(bindparam("error", type_=_i.error_text.type), _i.error_text),
}
GIVE_BACK = (
    KeyedUpdate(ITEMS)
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
GIVE_UP = KeyedUpdate(ITEMS).where(_mine).values(state=DEAD, dead_ms=_now, **_given_back)

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
    KeyedUpdate(ITEMS)
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

ALL = named_statements(dict(globals()))
