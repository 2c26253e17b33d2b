"""Every statement that is sent, built once. The tests compile all of them for Oracle, too.

No statement locks rows and limits them at once: Oracle refuses that.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BindParameter,
    ClauseElement,
    Table,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from pxrs.stores.mysql.schema import META, RECORDS, SESSIONS, later, utc_now

_alive = SESSIONS.c.deadline > utc_now()
# Further ahead than it can be, unless the server's clock was set back. See `pxrs.stores.observer`.
_suspect = or_(~_alive, SESSIONS.c.deadline > later(SESSIONS.c.ttl))
_joined = RECORDS.outerjoin(SESSIONS, RECORDS.c.session_id == SESSIONS.c.id)
_columns = (RECORDS.c.name, RECORDS.c.body, RECORDS.c.version, RECORDS.c.session_id)
# A session is over when its row is gone: who reads does not judge by the clock.
_living = (
    select(*_columns)
    .select_from(_joined)
    .where(or_(RECORDS.c.session_id.is_(None), SESSIONS.c.id.is_not(None)))
    .order_by(RECORDS.c.name)
)
_keys: BindParameter[str] = bindparam("keys", expanding=True)
_ids: BindParameter[str] = bindparam("ids", expanding=True)

# Reading
GET = _living.where(RECORDS.c.name == bindparam("key"))
_upto = RECORDS.c.name <= bindparam("last")
LIST_FROM = _living.where(and_(RECORDS.c.name >= bindparam("first"), _upto))
LIST_AFTER = _living.where(and_(RECORDS.c.name > bindparam("first"), _upto))
LOOK = select(
    META.c.revision,
    META.c.removals,
    select(func.count()).select_from(SESSIONS).where(_suspect).scalar_subquery(),
)
CHANGED = select(RECORDS.c.name).where(RECORDS.c.version > bindparam("since"))

# Committing, in the order in which rows are locked: sessions, records, the revision.
LOCK_SESSIONS = (
    select(SESSIONS.c.id).where(SESSIONS.c.id.in_(_ids)).order_by(SESSIONS.c.id).with_for_update()
)
FOUND_SESSIONS = select(SESSIONS.c.id).where(SESSIONS.c.id.in_(_ids))
# They are locked already; a locking read sees their latest state, whatever the snapshot.
LIVING_SESSIONS = (
    select(SESSIONS.c.id).where(and_(SESSIONS.c.id.in_(_ids), _alive)).with_for_update(read=True)
)
LOCK_RECORDS = (
    select(*_columns).where(RECORDS.c.name.in_(_keys)).order_by(RECORDS.c.name).with_for_update()
)
_raised = META.c.revision + bindparam("step")
RAISE_REVISION = update(META).values(revision=_raised)
RAISE_BOTH = update(META).values(revision=_raised, removals=META.c.removals + 1)
REVISION = select(META.c.revision)
INSERT = insert(RECORDS)
UPDATE = (
    update(RECORDS)
    .where(RECORDS.c.name == bindparam("key"))
    .values(
        body=bindparam("new_body"),
        version=bindparam("new_version"),
        session_id=bindparam("new_session"),
    )
)
DELETE = delete(RECORDS).where(RECORDS.c.name.in_(_keys))

# Sessions
OPEN = insert(SESSIONS).values(
    id=bindparam("new_id"),
    ttl=bindparam("seconds"),
    deadline=later(bindparam("length", type_=SESSIONS.c.ttl.type)),
    holder=bindparam("new_holder"),
)
LOCK_SESSION = select(SESSIONS.c.id).where(SESSIONS.c.id == bindparam("one")).with_for_update()
RENEW = (
    update(SESSIONS)
    .where(and_(SESSIONS.c.id == bindparam("one"), _alive))
    .values(deadline=later(SESSIONS.c.ttl))
)
SUSPECTS = (
    select(
        SESSIONS.c.id,
        SESSIONS.c.ttl,
        SESSIONS.c.deadline,
        case((_alive, 0), else_=1).label("is_late"),
    )
    .where(_suspect)
    .order_by(SESSIONS.c.id)
)
LOCK_SUSPECTS = (
    select(SESSIONS.c.id)
    .where(and_(SESSIONS.c.id.in_(_ids), _suspect))
    .order_by(SESSIONS.c.id)
    .with_for_update()
)
END = delete(SESSIONS).where(SESSIONS.c.id.in_(_ids))
DELETE_BOUND = delete(RECORDS).where(RECORDS.c.session_id.in_(_ids))

# The schema's own row
FIRST_META = insert(META).values(id=1, revision=0, removals=0)
SCHEMA_VERSION = select(META.c.schema_version)
SET_SCHEMA = update(META).values(schema_version=bindparam("new_version"))


def named_statements(names: dict[str, Any]) -> dict[str, ClauseElement]:
    """The statements among a module's names, to be compiled for every dialect."""
    return {
        name: value
        for name, value in names.items()
        if name.isupper() and isinstance(value, ClauseElement) and not isinstance(value, Table)
    }


ALL = named_statements(dict(globals()))
