"""The statements of coordination and sessions. The tests render all of them for Oracle, too.

The time is the database's, when the statement began.
"""

from __future__ import annotations

# In milliseconds since 1970.
NOW_MS = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000)"

_TTL_FROM_NOW = "(UTC_TIMESTAMP(6) + INTERVAL ROUND(1000000 * ttl) MICROSECOND)"
ALIVE = "deadline > UTC_TIMESTAMP(6)"
# The deadline is over, or further ahead than it can be, unless the server's clock was set back. See
# `pxrs.stores.observer`.
_SUSPECT = f"(deadline <= UTC_TIMESTAMP(6) OR deadline > {_TTL_FROM_NOW})"


def latest(statement: str, *, locking: bool) -> str:
    """A plain read, or one that sees the latest state in a transaction with an old snapshot."""
    return f"{statement} LOCK IN SHARE MODE" if locking else statement


# Reading. A session is over when its row is gone: readers do not judge by the clock.
_RECORDS = """SELECT name, body, version, session_id FROM pxrs_coord
    LEFT JOIN pxrs_sessions ON id = session_id WHERE (session_id IS NULL OR id IS NOT NULL)"""
GET = f"{_RECORDS} AND name = %(key)s"
_PAGE = "name <= %(last)s ORDER BY name LIMIT %(limit)s"
LIST_FROM = f"{_RECORDS} AND name >= %(first)s AND {_PAGE}"
LIST_AFTER = f"{_RECORDS} AND name > %(first)s AND {_PAGE}"
LOOK = f"""SELECT revision, removals, (SELECT COUNT(*) FROM pxrs_sessions WHERE {_SUSPECT})
    FROM pxrs_meta"""
NOW = f"SELECT {NOW_MS} FROM DUAL"
CHANGED = "SELECT name FROM pxrs_coord WHERE version > %(since)s"

# Committing, in the order in which rows are locked: sessions, records, the revision.
FOUND_SESSIONS = "SELECT id FROM pxrs_sessions WHERE id IN %(ids)s"
LOCK_SESSIONS = f"{FOUND_SESSIONS} ORDER BY id FOR UPDATE"
# The rows are locked already; a locking read sees their latest state, whatever the snapshot.
LIVING_SESSIONS = f"{FOUND_SESSIONS} AND {ALIVE} LOCK IN SHARE MODE"
NAMED = "SELECT name FROM pxrs_coord WHERE name IN %(keys)s"
LOCK_RECORDS = """SELECT name, body, version, session_id FROM pxrs_coord WHERE name IN %(keys)s
    ORDER BY name FOR UPDATE"""
RAISE_REVISION = "UPDATE pxrs_meta SET revision = revision + %(step)s"
RAISE_BOTH = f"{RAISE_REVISION}, removals = removals + 1"
REVISION = "SELECT revision FROM pxrs_meta"
INSERT = """INSERT INTO pxrs_coord (name, body, version, session_id)
    VALUES (%(name)s, %(body)s, %(version)s, %(session_id)s)"""
UPDATE = """UPDATE pxrs_coord SET body = %(body)s, version = %(version)s,
    session_id = %(session_id)s WHERE name = %(name)s"""
DELETE = "DELETE FROM pxrs_coord WHERE name IN %(keys)s"

# Sessions
OPEN = """INSERT INTO pxrs_sessions (id, ttl, deadline, holder) VALUES (%(id)s, %(ttl)s,
    (UTC_TIMESTAMP(6) + INTERVAL ROUND(1000000 * %(ttl)s) MICROSECOND), %(holder)s)"""
LOCK_SESSION = "SELECT id FROM pxrs_sessions WHERE id = %(id)s FOR UPDATE"
RENEW = f"UPDATE pxrs_sessions SET deadline = {_TTL_FROM_NOW} WHERE id = %(id)s AND {ALIVE}"
# The `holder` of a lent session is the handle that has adopted it last.
ADOPT = f"""UPDATE pxrs_sessions SET deadline = {_TTL_FROM_NOW}, holder = %(holder)s
    WHERE id = %(id)s AND {ALIVE}"""
RENEW_LENT = f"{RENEW} AND holder = %(holder)s"
TTL = "SELECT ttl FROM pxrs_sessions WHERE id = %(id)s"
LOCK_HELD = "SELECT id FROM pxrs_sessions WHERE id = %(id)s AND holder = %(holder)s FOR UPDATE"
SUSPECTS = f"""SELECT id, ttl, deadline, CASE WHEN {ALIVE} THEN 0 ELSE 1 END FROM pxrs_sessions
    WHERE {_SUSPECT} ORDER BY id"""
LOCK_SUSPECTS = f"{FOUND_SESSIONS} AND {_SUSPECT} ORDER BY id FOR UPDATE"
END = "DELETE FROM pxrs_sessions WHERE id IN %(ids)s"
DELETE_BOUND = "DELETE FROM pxrs_coord WHERE session_id IN %(ids)s"
