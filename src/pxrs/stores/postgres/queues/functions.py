"""Constants of the functions in `sql/queues_*.sql`: `{NAME}` there is one of these."""

from __future__ import annotations

from pxrs.core.queue import DIED_HOLDING, REMEMBERED_FOR, USED_UP  # noqa: F401 - named there
from pxrs.stores.postgres.functions import OLD_SNAPSHOT, SEES_OLD, SESSION_LOST

FENCED = "PX004"
STRICT = "PX005"
GIVEN_UP = "PX006"
READY, DELAYED, HELD, WAITING, DEAD = range(5)

# A plan that was made for an empty queue must do for a long one: only ever by index. Where items
# are looked up by their numbers, the planner must have no choice: one at a time, by LATERAL with
# OFFSET 0, and changed by the row's place (ctid). A join, or `id = ANY`, may read the whole queue.
OPTIONS = """LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s'
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
    SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
    SET enable_material = off"""
PLAIN = "LANGUAGE plpgsql"
# Another take may have locked the items and then leave some of them: look again this soon.
BUSY = 0.02

# The session has to live until the commit. Inlined in every function that needs it: a call costs
# more.
REQUIRED = f"""PERFORM 1 FROM @.pxrs_sessions s
        WHERE s.id = in_session AND s.deadline > clock_timestamp() FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING MESSAGE = in_session,
            ERRCODE = CASE WHEN {SEES_OLD} THEN '{OLD_SNAPSHOT}' ELSE '{SESSION_LOST}' END;
    END IF"""

# How many pages this transaction has read of the indexes that a search goes through.
PAGES_READ = """pg_stat_get_xact_blocks_fetched('@.pxrs_queue_ready'::regclass)
        + pg_stat_get_xact_blocks_fetched('@.pxrs_queue_delayed'::regclass)"""
HOLD = f"""state = {HELD}, deliveries = i.deliveries + 1, session = in_session, tx = in_tx,
            most = in_most, deadline = now_ms + lock_ms, taken_ms = now_ms"""
HELD_AS = """i.id, i.deliveries, i.body, i.key, i.rank, i.put_ms, i.error,
            coalesce(i.base = i.id, true), NULL::float8, NULL::float8, NULL::bool"""

# The fence. Every statement that changes the item contains it. It finds an item by its number: by
# the index of what a transaction holds, each of its items would be compared with all the others.
IS_MINE = f"""i.queue = queues[coalesce(u.place, 1)] AND i.id = u.id
    AND i.deliveries = u.delivery AND i.state + 0 = {HELD}
    AND i.session = in_session AND i.tx = in_tx
    AND (i.deadline IS NULL OR i.deadline > @.pxrs_now_ms())"""
# All items that the transaction holds.
HELD_IN = f"""@.pxrs_queue_items i WHERE i.session = in_session AND i.tx = in_tx
        AND i.queue + 0 = queues[1] AND i.state = {HELD}
        AND (i.deadline IS NULL OR i.deadline > @.pxrs_now_ms())"""

# Reads about one queue, or each of several: its id, whether it is strictly fifo, whether it has
# lanes at all. A queue that has an item in a lane has the lane's row, committed with the item or
# before.
KNOW = """IF cardinality(names) = 1 THEN
        SELECT ARRAY[k.id], ARRAY[k.fifo],
            k.fifo OR EXISTS (SELECT 1 FROM @.pxrs_queue_lanes l WHERE l.queue = k.id)
            INTO queues, are_fifo, laned FROM @.pxrs_queues k
            WHERE k.name = names[1] AND k.dropped IS NULL;
        queues := coalesce(queues, ARRAY[NULL::int8]);
    ELSE
        SELECT array_agg(k.id ORDER BY u.at), array_agg(coalesce(k.fifo, false) ORDER BY u.at),
        bool_or(k.fifo OR EXISTS (SELECT 1 FROM @.pxrs_queue_lanes l WHERE l.queue = k.id))
        INTO queues, are_fifo, laned
        FROM unnest(names) WITH ORDINALITY AS u(name, at)
        LEFT JOIN @.pxrs_queues k ON k.name = u.name AND k.dropped IS NULL;
    END IF"""

COLUMNS = "queue, id, state, rank, visible, deliveries, suspect, put_ms, error, body"
