"""Constants of, and calls to, the functions in `sql/coord.sql`, `log.sql` and `sessions.sql`.

`@.` stands for the schema, `{NAME}` for a constant of this module. Each call of a function is one
statement, so one round trip. Every statement inside a plpgsql function sees what was committed
before it began, so what is read after taking a lock is what the lock protects.

Locks are taken in one order everywhere: sessions by id, records by key, partitions by topic and
number. Keys sort by code point here ("C") and in Python alike.
"""

from __future__ import annotations

from pxrs.stores.rows import CHANCE_BITS

# Error codes that the functions raise; `failures.py` translates them.
OVERTAKEN = "PX001"
SESSION_LOST = "PX002"
BOUND = "PX003"
OLD_SNAPSHOT = "PX007"

# Whether the transaction is the caller's, at a level at which it does not see what others have
# committed since it began. A row that it does not find may exist: that is no verdict.
SEES_OLD = "current_setting('transaction_isolation') IN ('repeatable read', 'serializable')"

# What `pxrs_commit` does with a key.
CHECK, PUT, DELETE = 0, 1, 2

# What `pxrs_append` returns for a batch.
APPENDED, DUPLICATE, NO_TOPIC, NO_PARTITION, FENCED, GAP = range(6)

# A crash of the server, or a fail-over, may lose commits, and with them the sequence goes back: it
# would give the same numbers again, and an owner that was frozen would find its successor's record
# at the version that it remembers. So a part of each version is random.
NEXT_VERSION = (
    f"(nextval('@.pxrs_revision') << {CHANCE_BITS}) + floor(random() * {2**CHANCE_BITS})::int8"
)

# Whether the connection that held the session's lock is closed. After a restart of the server that
# can't be known: a restart frees every lock.
IS_UNLOCKED = """CASE WHEN s.lock IS NOT NULL AND s.started = pg_postmaster_start_time()
        THEN pg_try_advisory_xact_lock_shared(s.lock) ELSE false END"""
IS_LATE = "s.deadline <= clock_timestamp()"
# Whether the deadline is further ahead than it can be, unless the server's clock was set back.
IS_AHEAD = "s.deadline > clock_timestamp() + s.ttl * interval '1 second'"

# The start time of the server and, as JSON, the sessions that may be over: id, TTL, deadline,
# whether it has passed, whether the session's connection is closed. See `pxrs.stores.observer`.
SUSPECTS = f"""pg_postmaster_start_time(), (
    SELECT json_agg(json_build_array(o.id, o.ttl, o.deadline, o.late, o.unlocked))::text FROM (
        SELECT s.id, s.ttl, (extract(epoch FROM s.deadline) * 1000000)::int8 AS deadline,
            {IS_LATE} AS late, {IS_UNLOCKED} AS unlocked, {IS_AHEAD} AS ahead
        FROM @.pxrs_sessions s OFFSET 0) o
    WHERE o.late OR o.unlocked OR o.ahead)"""
