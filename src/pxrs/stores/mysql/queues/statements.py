"""The statements of queues.

Rows are locked in one order: sessions, queues, items, each sorted. A take waits for no other
transaction: it skips rows that are locked. MySQL computes an update's columns one after the other,
so no column is read here after it was set.

FORCE INDEX: a plan for a short queue would lock all of a long one. For a short table MariaDB
prefers to scan all of it, and waits for rows that others have locked; a statement that names rows
by their key must read those, and lock no others.
"""

from __future__ import annotations

from pxrs.core.queue import DIED_HOLDING, USED_UP
from pxrs.stores.mysql.statements import ALIVE, NOW_MS
from pxrs.stores.rows import DEAD, DELAYED, HELD, READY, WAITING

_UPDATE = "UPDATE pxrs_queue_items FORCE INDEX (PRIMARY) SET"
_DELETE = "DELETE pxrs_queue_items FROM pxrs_queue_items FORCE INDEX (PRIMARY)"
_THESE = "queue_id = %(queue)s AND item_id IN %(ids)s"
_HOLDER = "session_id = %(session)s AND tx = %(tx)s"
# The fence. Every statement that changes the item contains it. Each take raises `deliveries`.
_SAME_DELIVERY = f"{_THESE} AND (item_id, deliveries) IN %(pairs)s AND state = {HELD}"
_MINE = f"{_SAME_DELIVERY} AND {_HOLDER} AND due_ms > {NOW_MS}"

# Sessions
_OF_LIVING = f"FROM pxrs_sessions WHERE id = %(session)s AND {ALIVE} LOCK IN SHARE MODE"
REQUIRE = f"SELECT {NOW_MS} {_OF_LIVING}"
NOW = f"SELECT {NOW_MS} FROM DUAL"

# Taking. The first statement locks only the session's row, and none of the others that it reads.
_NAMED = "(SELECT id FROM pxrs_queues WHERE name = %(name)s)"
_OF_NAMED = f"FROM pxrs_queue_items WHERE queue_id = {_NAMED}"
LOOK = f"""SELECT {NOW_MS}, {_NAMED},
    (SELECT MIN(grade) {_OF_NAMED} AND state = {READY}),
    (SELECT MIN(due_ms) {_OF_NAMED} AND state = {DELAYED}),
    (SELECT MIN(due_ms) {_OF_NAMED} AND state = {HELD}),
    (SELECT COUNT(*) {_OF_NAMED} AND state = {HELD} AND {_HOLDER} AND lane IS NOT NULL)
    {_OF_LIVING}"""
LOOK_TO_REMOVE = f"""SELECT {NOW_MS}, {_NAMED},
    (SELECT COUNT(*) {_OF_NAMED} AND item_id IN %(ids)s AND lane IS NOT NULL)
    {_OF_LIVING}"""
_CANDIDATE = "item_id, deliveries, suspect, grade, item_key, put_ms, error_text, body, lane"
FRONTS = f"""SELECT {_CANDIDATE} FROM pxrs_queue_items FORCE INDEX (pxrs_items_ready)
    WHERE queue_id = %(queue)s AND state = {READY}
    ORDER BY grade, item_id LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""
_BEHIND = f"WHERE queue_id = %(queue)s AND lane = %(lane)s AND state = {WAITING} ORDER BY item_id"
# Which items are next is read without a lock. Locked by number, of those that another transaction
# has locked it only learns that they are missing.
BEHIND = f"""SELECT item_id FROM pxrs_queue_items FORCE INDEX (pxrs_items_lane)
    {_BEHIND} LIMIT %(limit)s"""
LOCK_BEHIND = f"""SELECT {_CANDIDATE}, due_ms FROM pxrs_queue_items FORCE INDEX (PRIMARY)
    WHERE {_THESE} AND state = {WAITING} ORDER BY item_id FOR UPDATE SKIP LOCKED"""
FIRST_BEHIND = f"SELECT due_ms FROM pxrs_queue_items {_BEHIND} LIMIT 1"
# A locking search would wait for each item of other holders that these are about to remove.
IN_LANES = f"""SELECT item_id FROM pxrs_queue_items FORCE INDEX (pxrs_items_ready)
    WHERE queue_id = %(queue)s AND state = {HELD} AND {_HOLDER} AND lane IS NOT NULL
    ORDER BY item_id"""
LANES_HELD = f"""SELECT lane, due_ms FROM pxrs_queue_items FORCE INDEX (PRIMARY)
    WHERE {_THESE} AND state = {HELD} AND {_HOLDER} ORDER BY item_id FOR UPDATE"""
HOLD = f"""{_UPDATE} state = {HELD}, deliveries = deliveries + 1, session_id = %(session)s,
    tx = %(tx)s, most = %(most)s, due_ms = %(until)s, taken_ms = %(now)s WHERE {_THESE}"""
PROMOTE = f"""UPDATE pxrs_queue_items SET state = {READY}
    WHERE queue_id = %(queue)s AND state = {DELAYED} AND due_ms <= %(now)s"""
BURY = f"""{_UPDATE} state = {DEAD}, dead_ms = %(now)s,
    error_text = COALESCE(error_text, '{USED_UP}') WHERE {_THESE}"""

# Lanes: which states there are in each, and the first item of each state.
LANES = f"""SELECT lane, state, MIN(item_id) FROM pxrs_queue_items FORCE INDEX (pxrs_items_lane)
    WHERE queue_id = %(queue)s AND lane IN %(lanes)s AND state < {DEAD} GROUP BY lane, state"""
LANES_OF = f"SELECT item_id, lane FROM pxrs_queue_items WHERE {_THESE} AND lane IS NOT NULL"
SHOW = f"""{_UPDATE} state = CASE WHEN due_ms > %(now)s THEN {DELAYED} ELSE {READY} END
    WHERE {_THESE} AND state = {WAITING}"""
HIDE = f"""UPDATE pxrs_queue_items SET state = {WAITING}
    WHERE queue_id = %(queue)s AND lane IN %(lanes)s AND state IN ({READY}, {DELAYED})"""

# Holding on, giving back and removing
MINE = f"SELECT due_ms FROM pxrs_queue_items FORCE INDEX (PRIMARY) WHERE {_MINE} FOR UPDATE"
STILL_MINE = f"SELECT item_id FROM pxrs_queue_items FORCE INDEX (PRIMARY) WHERE {_MINE}"
EXTEND = f"{_UPDATE} due_ms = %(until)s WHERE {_MINE}"
REMOVE = f"{_DELETE} WHERE {_MINE}"
_FREED = "session_id = NULL, tx = NULL"
GIVE_BACK = f"""{_UPDATE}
    state = CASE WHEN lane IS NOT NULL THEN {WAITING} WHEN %(delay)s > 0 THEN {DELAYED}
        ELSE {READY} END,
    due_ms = %(delay)s + {NOW_MS}, suspect = 0,
    error_text = COALESCE(%(error)s, error_text), {_FREED} WHERE {_MINE}"""
GIVE_UP = f"""{_UPDATE} state = {DEAD}, dead_ms = {NOW_MS},
    error_text = COALESCE(%(error)s, error_text), {_FREED} WHERE {_MINE}"""

# What dead holders leave behind
_HOLDS = "pxrs_queue_items LEFT JOIN pxrs_sessions ON pxrs_sessions.id = session_id"
_LOST = f"state = {HELD} AND (pxrs_sessions.id IS NULL OR due_ms <= {NOW_MS})"
LOST = f"""SELECT item_id, deliveries, lane, session_id, pxrs_sessions.id FROM {_HOLDS}
    WHERE queue_id = %(queue)s AND {_LOST} ORDER BY item_id"""
LOST_NAMED = f"""SELECT pxrs_queues.id FROM {_HOLDS} JOIN pxrs_queues ON pxrs_queues.id = queue_id
    WHERE name = %(name)s AND {_LOST} LIMIT 1"""
# A hold that was extended since it was looked at is left alone; a session does not come back.
_USED_UP = "most IS NOT NULL AND deliveries >= most"
FREE = f"""{_UPDATE}
    state = CASE WHEN {_USED_UP} THEN {DEAD} WHEN lane IS NULL THEN {READY} ELSE {WAITING} END,
    dead_ms = CASE WHEN {_USED_UP} THEN {NOW_MS} ELSE NULL END,
    due_ms = {NOW_MS}, suspect = 1, error_text = '{DIED_HOLDING}', {_FREED}
    WHERE {_SAME_DELIVERY} AND (due_ms <= {NOW_MS} OR session_id IN %(gone)s)"""
# For every queue: when the next item shows, when the next hold ends, and whether a holder is gone.
_OF_QUEUE = "queue_id = pxrs_queues.id"
DUE = f"""SELECT id, name, {NOW_MS},
    (SELECT MIN(due_ms) FROM pxrs_queue_items WHERE {_OF_QUEUE} AND state = {DELAYED}),
    (SELECT MIN(due_ms) FROM pxrs_queue_items WHERE {_OF_QUEUE} AND state = {HELD}),
    (SELECT COUNT(*) FROM {_HOLDS}
        WHERE {_OF_QUEUE} AND state = {HELD} AND pxrs_sessions.id IS NULL)
    FROM pxrs_queues"""

# Putting
_COLUMNS = """queue_id, item_id, state, grade, lane, item_key, due_ms, deliveries, suspect,
    put_ms, body"""
_VALUES = """%(queue)s, %(item)s, %(state)s, %(grade)s, %(lane)s, %(item_key)s, %(due_ms)s,
    %(deliveries)s, %(suspect)s, %(put_ms)s, %(body)s"""
INSERT = f"INSERT INTO pxrs_queue_items ({_COLUMNS}) VALUES ({_VALUES})"
RESTORE = f"""INSERT INTO pxrs_queue_items ({_COLUMNS}, taken_ms, dead_ms, error_text)
    VALUES ({_VALUES}, %(taken_ms)s, %(dead_ms)s, %(error)s)"""
PRESENT = f"SELECT item_id FROM pxrs_queue_items WHERE {_THESE}"
FORGET_SEEN = f"DELETE FROM pxrs_queue_seen WHERE queue_id = %(queue)s AND until_ms <= {NOW_MS}"
SEEN_BEFORE = """SELECT seen_key FROM pxrs_queue_seen
    WHERE queue_id = %(queue)s AND seen_key IN %(keys)s"""
SEE = """INSERT INTO pxrs_queue_seen (queue_id, seen_key, until_ms)
    VALUES (%(queue)s, %(seen_key)s, %(until)s)"""
DROP_SEEN = "DELETE FROM pxrs_queue_seen WHERE queue_id = %(queue)s"

# Queues
_QUEUE = "name, id, fifo, created_ms"
FIND = f"SELECT {_QUEUE} FROM pxrs_queues WHERE name IN %(names)s"
EVERY = f"SELECT {_QUEUE} FROM pxrs_queues ORDER BY name"
LOCK_QUEUES = f"""SELECT {_QUEUE}, next_item, {NOW_MS}
    FROM pxrs_queues FORCE INDEX (pxrs_queues_name)
    WHERE name IN %(names)s ORDER BY name FOR UPDATE"""
MAKE = f"""INSERT IGNORE INTO pxrs_queues
        (id, name, fifo, created_ms, next_item, changes, put, done)
    VALUES (%(id)s, %(name)s, %(fifo)s, {NOW_MS}, 1, 0, 0, 0)"""
NUMBER = """UPDATE pxrs_queues SET next_item = next_item + %(numbers)s, put = put + %(fresh)s,
    changes = changes + 1 WHERE id = %(queue)s"""
NUMBER_ABOVE = """UPDATE pxrs_queues SET next_item = GREATEST(next_item, %(above)s),
    put = put + %(fresh)s, changes = changes + 1 WHERE id = %(queue)s"""
STIR = "UPDATE pxrs_queues SET changes = changes + 1 WHERE id IN %(ids)s"
COUNT_DONE = "UPDATE pxrs_queues SET done = done + %(more)s WHERE id = %(queue)s"
DROP_QUEUE = "DELETE FROM pxrs_queues WHERE id = %(queue)s"
WATCHED = "SELECT name, id, changes FROM pxrs_queues WHERE name IN %(names)s"

# What was applied, or given up
REMEMBER = """INSERT INTO pxrs_queue_commits (session_id, n, tx, queue_id, done)
    VALUES (%(session)s, %(n)s, %(tx)s, %(queue)s, %(done)s)"""
# Waits for a record that another transaction is about to commit.
BECAME = """SELECT done FROM pxrs_queue_commits WHERE session_id = %(session)s AND tx = %(tx)s
    LOCK IN SHARE MODE"""
# The holder's items. A locking search would wait for all items that others are about to remove. So
# this one reads the items as they are, committed or not, and they are then locked by number.
HELD_BY = f"""SELECT queue_id, item_id FROM pxrs_queue_items FORCE INDEX (pxrs_items_ready)
    WHERE queue_id = {_NAMED} AND state = {HELD} AND {_HOLDER}"""
LOCK_ITEMS = f"""SELECT item_id FROM pxrs_queue_items FORCE INDEX (PRIMARY)
    WHERE {_THESE} FOR UPDATE"""
LOCK_FREE_ITEMS = f"{LOCK_ITEMS} SKIP LOCKED"
_NOTED = "SELECT n, queue_id, done FROM pxrs_queue_commits WHERE session_id = %(session)s"
NOTED = f"{_NOTED} AND tx IN %(units)s"
NOTED_IN = f"{_NOTED} LIMIT 1000"
# Sessions that are over, when that was first seen, and the present time. The end of a session is
# noted beside its units, under a name that no unit has, with the server's time as its number.
_ENDED = "(ended)"
ORPHANED = f"""SELECT session_id, MIN(CASE WHEN tx = '{_ENDED}' THEN n END), {NOW_MS}
    FROM pxrs_queue_commits LEFT JOIN pxrs_sessions ON id = session_id
    WHERE id IS NULL GROUP BY session_id"""
NOTE_ENDED = f"""INSERT INTO pxrs_queue_commits (session_id, n, tx, queue_id, done)
    VALUES (%(session)s, {NOW_MS}, '{_ENDED}', 0, 0)"""
FORGET = "DELETE FROM pxrs_queue_commits WHERE session_id = %(session)s AND n IN %(numbers)s"

# Administration
_ITEM = f"""item_id, state, body, item_key, grade, deliveries, put_ms, taken_ms, due_ms, dead_ms,
    error_text, session_id, tx, {NOW_MS}"""
_COUNT = f"SELECT COUNT(*) FROM pxrs_queue_items WHERE {_OF_QUEUE} AND state ="
_OVERDUE = f"state = {DELAYED} AND due_ms <= {NOW_MS}"
# One statement: between two of them an item could move and be counted twice, or not at all.
STATS = f"""SELECT ({_COUNT} {READY}), ({_COUNT} {DELAYED}), ({_COUNT} {HELD}),
    ({_COUNT} {WAITING}), ({_COUNT} {DEAD}),
    (SELECT COUNT(*) FROM pxrs_queue_items WHERE {_OF_QUEUE} AND {_OVERDUE}),
    (SELECT put_ms FROM pxrs_queue_items WHERE {_OF_QUEUE} AND state < {DEAD}
        ORDER BY item_id LIMIT 1),
    put,
    pxrs_queues.done + (SELECT COALESCE(SUM(c.done), 0) FROM pxrs_queue_commits c
        WHERE c.queue_id = pxrs_queues.id)
    FROM pxrs_queues WHERE name = %(name)s"""
# Which items are in the states. A delayed one whose time has come is ready.
_STANDING = f"state IN %(states)s AND NOT ({_OVERDUE})"
_STANDING_READY = f"(state IN %(states)s OR {_OVERDUE})"


def standing(statement: str, states: list[int]) -> str:
    """The statement for items in the states."""
    return statement.replace("{standing}", _STANDING_READY if READY in states else _STANDING)


PEEK = f"""SELECT {_ITEM} FROM pxrs_queue_items
    WHERE queue_id = {_NAMED} AND item_id > %(after)s AND {{standing}}
    ORDER BY item_id LIMIT %(limit)s"""
# From the end: removing a lane from its front would show each of its items.
LAST = f"""SELECT item_id FROM pxrs_queue_items
    WHERE queue_id = {_NAMED} AND item_id < %(before)s AND {{standing}}
    ORDER BY item_id DESC LIMIT %(limit)s"""
LOCK_STANDING = f"""SELECT item_id, lane FROM pxrs_queue_items FORCE INDEX (PRIMARY)
    WHERE {_THESE} AND {{standing}} ORDER BY item_id FOR UPDATE"""
DISCARD = f"{_DELETE} WHERE {_THESE}"
PIECE = """SELECT item_id FROM pxrs_queue_items WHERE queue_id = %(queue)s
    ORDER BY item_id LIMIT %(limit)s"""
DISCARD_UPTO = "DELETE FROM pxrs_queue_items WHERE queue_id = %(queue)s AND item_id <= %(upto)s"
STRAYS = """SELECT DISTINCT queue_id FROM pxrs_queue_items LEFT JOIN pxrs_queues ON id = queue_id
    WHERE id IS NULL"""
REVIVE = f"""{_UPDATE} item_id = %(new)s,
    state = CASE WHEN lane IS NULL THEN {READY} ELSE {WAITING} END,
    due_ms = %(now)s, put_ms = %(now)s, deliveries = 0, suspect = 0,
    taken_ms = NULL, dead_ms = NULL, most = NULL
    WHERE queue_id = %(queue)s AND item_id = %(old)s AND state = {DEAD}"""
