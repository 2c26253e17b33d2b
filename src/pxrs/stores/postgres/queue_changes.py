"""Work queues inside the database: what removes, puts, extends and gives back.

Queues are named once, in `names`; items say by their place in it which one they are of. What is
returned for each of the names is the lowest item that shows now and did not before: whoever looks
for items may have passed it.
"""

from __future__ import annotations

from pxrs.stores.postgres.queue_functions import (
    DEAD,
    DELAYED,
    FENCED,
    HELD,
    OPTIONS,
    PLAIN,
    READY,
    STRICT,
    WAITING,
)
from pxrs.stores.queue_rules import REMEMBERED, REMEMBERED_FOR

# The fence. It stands in whatever statement changes the item.
_IS_MINE = f"""i.queue = queues[u.place] AND i.id = u.id AND i.deliveries = u.delivery
    AND i.state = {HELD} AND i.session = in_session AND i.tx = in_tx
    AND (i.deadline IS NULL OR i.deadline > @.pxrs_now_ms())"""

FIND = f"""
CREATE FUNCTION @.pxrs_queue_find(names text[]) RETURNS int8[] {PLAIN} AS $$
BEGIN
    RETURN ARRAY(SELECT k.id FROM unnest(names) WITH ORDINALITY AS u(name, at)
        LEFT JOIN @.pxrs_queues k ON k.name = u.name AND k.dropped IS NULL ORDER BY u.at);
END $$"""

# The lanes of items that may be changed, locked in order.
LOCK_LANES_OF = f"""
CREATE FUNCTION @.pxrs_queue_lock_lanes_of(queues int8[], places int8[], ids int8[])
RETURNS void {PLAIN} AS $$
BEGIN
    PERFORM 1 FROM @.pxrs_queue_items i, unnest(places, ids) AS u(place, id)
        WHERE i.queue = queues[u.place] AND i.id = u.id AND i.lane IS NOT NULL LIMIT 1;
    IF FOUND THEN
        PERFORM 1 FROM (SELECT DISTINCT i.queue, i.lane
                FROM unnest(places, ids) AS u(place, id) JOIN @.pxrs_queue_items i
                ON i.queue = queues[u.place] AND i.id = u.id AND i.lane IS NOT NULL
                ORDER BY i.queue, i.lane OFFSET 0) f
            JOIN @.pxrs_queue_lanes l ON l.queue = f.queue AND l.lane = f.lane
            ORDER BY l.queue, l.lane FOR UPDATE OF l;
    END IF;
END $$"""

# The lanes that are put into, and those that are taken out of, in one order. A lane that is empty
# may be removed by whoever tidies up, just before it is locked: then it is made again.
LOCK_LANES = f"""
CREATE FUNCTION @.pxrs_queue_lock_lanes(
    queues int8[], places int8[], ids int8[], put_queues int8[], put_lanes text[])
RETURNS void {PLAIN} AS $$
DECLARE
    missing bool := true;
BEGIN
    WHILE missing LOOP
        INSERT INTO @.pxrs_queue_lanes
            SELECT DISTINCT u.queue, u.lane FROM unnest(put_queues, put_lanes) AS u(queue, lane)
            WHERE u.lane IS NOT NULL ORDER BY 1, 2 ON CONFLICT DO NOTHING;
        PERFORM 1 FROM (
                SELECT i.queue, i.lane FROM unnest(places, ids) AS u(place, id)
                JOIN @.pxrs_queue_items i
                ON i.queue = queues[u.place] AND i.id = u.id AND i.lane IS NOT NULL
                UNION
                SELECT u.queue, u.lane FROM unnest(put_queues, put_lanes) AS u(queue, lane)
                WHERE u.lane IS NOT NULL ORDER BY 1, 2 OFFSET 0) f
            JOIN @.pxrs_queue_lanes l ON l.queue = f.queue AND l.lane = f.lane
            ORDER BY l.queue, l.lane FOR UPDATE OF l;
        SELECT count(*) > 0 INTO missing FROM unnest(put_queues, put_lanes) AS u(queue, lane)
            WHERE u.lane IS NOT NULL AND NOT EXISTS (SELECT 1 FROM @.pxrs_queue_lanes l
                WHERE l.queue = u.queue AND l.lane = u.lane);
    END LOOP;
END $$"""

# Which items are duplicates, by their place among those that are put. In the order of the keys:
# two who put the same ones wait for each other in turn.
SEEN = f"""
CREATE FUNCTION @.pxrs_queue_seen_before(put_queues int8[], seen text[], windows int8[])
RETURNS int8[] {PLAIN} AS $$
DECLARE
    now_ms int8 := @.pxrs_now_ms();
    each record;
    last_queue int8;
    last_seen text;
    again int8[] := '{{}}';
BEGIN
    FOR each IN SELECT * FROM unnest(put_queues, seen, windows) WITH ORDINALITY
            AS u(queue, seen, lasts, at) WHERE u.seen <> ''
            ORDER BY u.queue, u.seen COLLATE "C", u.at LOOP
        IF each.queue = last_queue AND each.seen = last_seen THEN
            again := again || each.at;
            CONTINUE;
        END IF;
        last_queue := each.queue;
        last_seen := each.seen;
        INSERT INTO @.pxrs_queue_seen AS s VALUES (each.queue, each.seen, now_ms + each.lasts)
            ON CONFLICT (queue, key) DO UPDATE SET until = excluded.until WHERE s.until <= now_ms;
        IF NOT FOUND THEN
            again := again || each.at;
        END IF;
    END LOOP;
    RETURN again;
END $$"""

# `forget_after`: where the session's commits were cut off the last time; -1 if it is not the turn.
APPLY = f"""
CREATE FUNCTION @.pxrs_queue_apply(in_session text, in_tx text, names text[],
    places int8[], ids int8[], counts int8[],
    put_places int8[], keys text[], lanes text[], ranks int8[], delays int8[],
    seen text[], windows int8[], bodies bytea[],
    puts int8[], dones int8[], forget_after int8)
RETURNS TABLE (r_numbers int8[], r_lowest int8[], r_cut int8) {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    now_ms int8;
    queues int8[];
    refused text;
    are_strict bool[];
    put_queues int8[];
    lost int8;
    each record;
    again int8[];
    at int8;
BEGIN
    PERFORM pg_advisory_xact_lock(@.pxrs_queue_holder(in_session, in_tx));
    IF cardinality(ids) > 0 THEN
        PERFORM @.pxrs_queue_require(in_session);
    END IF;
    queues := @.pxrs_queue_find(names);
    r_lowest := array_fill(NULL::int8, ARRAY[cardinality(names)]);
    r_numbers := '{{}}';

    IF cardinality(put_places) > 0 THEN
        IF array_position(queues, NULL) IS NOT NULL THEN
            INSERT INTO @.pxrs_queues (name, fifo, created)
                SELECT DISTINCT names[u.place], false, @.pxrs_now_ms()
                FROM unnest(put_places) AS u(place) WHERE queues[u.place] IS NULL ORDER BY 1
                ON CONFLICT (name) WHERE dropped IS NULL DO NOTHING;
            queues := @.pxrs_queue_find(names);
        END IF;
        are_strict := ARRAY(SELECT coalesce(k.fifo, false)
            FROM unnest(queues) WITH ORDINALITY AS u(id, at)
            LEFT JOIN @.pxrs_queues k ON k.id = u.id ORDER BY u.at);
        IF true = ANY (are_strict) THEN
            SELECT names[u.place] INTO refused
                FROM unnest(put_places, ranks, delays) AS u(place, rank, delay)
                WHERE are_strict[u.place] AND (u.rank <> 0 OR u.delay > 0) LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION USING ERRCODE = '{STRICT}', MESSAGE = refused;
            END IF;
            lanes := ARRAY(SELECT CASE WHEN are_strict[u.place] THEN '' ELSE u.lane END
                FROM unnest(put_places, lanes) WITH ORDINALITY AS u(place, lane, at)
                ORDER BY u.at);
        END IF;
        put_queues := ARRAY(SELECT queues[u.place] FROM unnest(put_places) WITH ORDINALITY
            AS u(place, at) ORDER BY u.at);
    END IF;
    IF cardinality(array_remove(lanes, NULL)) > 0 THEN
        PERFORM @.pxrs_queue_lock_lanes(queues, places, ids, put_queues, lanes);
    ELSIF cardinality(ids) > 0 THEN
        PERFORM @.pxrs_queue_lock_lanes_of(queues, places, ids);
    END IF;

    IF cardinality(ids) > 0 THEN
        lost := cardinality(ids);
        FOR each IN WITH gone AS (
                DELETE FROM @.pxrs_queue_items i
                USING unnest(places, ids, counts) AS u(place, id, delivery)
                WHERE {_IS_MINE} RETURNING u.place, i.queue, i.lane, i.base)
            SELECT g.place, g.queue, count(*) AS number, array_agg(g.lane) AS lanes,
                array_agg(g.base) AS bases FROM gone g GROUP BY g.place, g.queue LOOP
            lost := lost - each.number;
            IF array_remove(each.lanes, NULL) <> '{{}}' THEN
                r_lowest[each.place] :=
                    @.pxrs_queue_settle_all(each.queue, each.lanes, each.bases);
            END IF;
        END LOOP;
        IF lost > 0 THEN
            RAISE EXCEPTION USING ERRCODE = '{FENCED}', MESSAGE = lost || ' of '
                || cardinality(ids);
        END IF;
    END IF;

    IF cardinality(put_places) > 0 THEN
        IF array_position(seen, NULL) IS NULL AND array_to_string(seen, '') <> '' THEN
            again := @.pxrs_queue_seen_before(put_queues, seen, windows);
        END IF;
        now_ms := @.pxrs_now_ms();
        -- Lanes are locked by now: what is put into one later gets a higher number.
        SELECT array_agg(f.number) INTO r_numbers FROM (
            SELECT nextval('@.pxrs_queue_numbers') AS number FROM unnest(put_places)) f;
        IF again IS NOT NULL THEN
            FOREACH at IN ARRAY again LOOP
                r_numbers[at] := NULL;
                puts[put_places[at]] := puts[put_places[at]] - 1;
            END LOOP;
        END IF;
        INSERT INTO @.pxrs_queue_items (queue, id, state, rank, lane, key, visible, deliveries,
                suspect, put_ms, error, body)
            SELECT u.queue, u.number,
                CASE WHEN u.lane IS NOT NULL THEN {WAITING}
                    WHEN u.delay > 0 THEN {DELAYED} ELSE {READY} END,
                u.rank, u.lane, u.key, now_ms + u.delay, 0, false, now_ms, '', u.body
            FROM unnest(put_queues, r_numbers, ranks, lanes, keys, delays, bodies)
                AS u(queue, number, rank, lane, key, delay, body)
            WHERE u.number IS NOT NULL;
        FOR each IN SELECT u.place, u.queue, array_agg(u.lane) AS lanes
                FROM unnest(put_places, put_queues, lanes) AS u(place, queue, lane)
                WHERE u.lane IS NOT NULL GROUP BY u.place, u.queue LOOP
            PERFORM @.pxrs_queue_settle_all(each.queue, each.lanes, NULL);
        END LOOP;
    END IF;

    INSERT INTO @.pxrs_queue_commits (session, tx, at, queues, puts, dones)
        VALUES (in_session, in_tx, clock_timestamp(), queues, puts, dones);
    IF forget_after >= 0 THEN
        r_cut := @.pxrs_queue_forget(in_session, forget_after);
    END IF;
    RETURN NEXT;
END $$"""

# A commit's record says how many items it put and removed, too. What is forgotten is added up.
FOLD = f"""
CREATE FUNCTION @.pxrs_queue_fold(all_queues int8[], all_puts int8[], all_dones int8[])
RETURNS void {PLAIN} AS $$
BEGIN
    INSERT INTO @.pxrs_queue_counts (queue, put, done)
        SELECT u.queue, sum(u.put), sum(u.done)
        FROM unnest(all_queues, all_puts, all_dones) AS u(queue, put, done)
        WHERE EXISTS (SELECT 1 FROM @.pxrs_queues k WHERE k.id = u.queue)
        GROUP BY u.queue HAVING sum(u.put) > 0 OR sum(u.done) > 0;
END $$"""

# Forgets all but a session's latest commits; up to which.
FORGET = f"""
CREATE FUNCTION @.pxrs_queue_forget(in_session text, after int8) RETURNS int8 {PLAIN} AS $$
#variable_conflict use_column
DECLARE
    cut int8;
    queues int8[];
    puts int8[];
    dones int8[];
BEGIN
    SELECT c.n INTO cut FROM @.pxrs_queue_commits c WHERE c.session = in_session AND c.n > after
        ORDER BY c.n DESC OFFSET {REMEMBERED} LIMIT 1;
    IF cut IS NULL THEN
        RETURN after;
    END IF;
    WITH gone AS (DELETE FROM @.pxrs_queue_commits c
        WHERE c.session = in_session AND c.n > after AND c.n <= cut RETURNING c.*)
    SELECT array_agg(u.queue), array_agg(u.put), array_agg(u.done) INTO queues, puts, dones
        FROM gone g, unnest(g.queues, g.puts, g.dones) AS u(queue, put, done);
    PERFORM @.pxrs_queue_fold(queues, puts, dones);
    RETURN cut;
END $$"""

EXTEND = f"""
CREATE FUNCTION @.pxrs_queue_extend(in_session text, in_tx text, names text[],
    places int8[], ids int8[], counts int8[], lock_ms int8)
RETURNS SETOF text {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    queues int8[] := @.pxrs_queue_find(names);
    until int8 := @.pxrs_now_ms() + lock_ms;
    mine int8;
    sooner text[];
BEGIN
    PERFORM @.pxrs_queue_require(in_session);
    SELECT count(*), array_agg(DISTINCT names[f.place])
            FILTER (WHERE f.deadline IS NULL OR f.deadline > until) INTO mine, sooner FROM (
        SELECT u.place, i.deadline FROM unnest(places, ids, counts)
            AS u(place, id, delivery) JOIN @.pxrs_queue_items i ON {_IS_MINE}
            FOR UPDATE OF i) f;
    IF mine < cardinality(ids) THEN
        RAISE EXCEPTION USING ERRCODE = '{FENCED}', MESSAGE = (cardinality(ids) - mine)
            || ' of ' || cardinality(ids);
    END IF;
    UPDATE @.pxrs_queue_items i SET deadline = until
        FROM unnest(places, ids, counts) AS u(place, id, delivery) WHERE {_IS_MINE};
    RETURN QUERY SELECT unnest(sooner);
END $$"""

RELEASE = f"""
CREATE FUNCTION @.pxrs_queue_release(in_session text, in_tx text, names text[],
    places int8[], ids int8[], counts int8[], delays int8[], errors text[], deads bool[])
RETURNS int8[] {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    queues int8[] := @.pxrs_queue_find(names);
    now_ms int8;
    lowest int8[] := array_fill(NULL::int8, ARRAY[cardinality(names)]);
    each record;
BEGIN
    PERFORM 1 FROM @.pxrs_sessions s
        WHERE s.id = in_session AND s.deadline > clock_timestamp() FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN lowest;
    END IF;
    PERFORM @.pxrs_queue_lock_lanes_of(queues, places, ids);
    now_ms := @.pxrs_now_ms();
    FOR each IN WITH back AS (
            UPDATE @.pxrs_queue_items i SET
                state = CASE WHEN u.dead THEN {DEAD} WHEN i.lane IS NOT NULL THEN {WAITING}
                    WHEN u.delay > 0 THEN {DELAYED} ELSE {READY} END,
                dead_ms = CASE WHEN u.dead THEN now_ms END,
                visible = now_ms + u.delay, suspect = i.suspect AND u.dead,
                error = CASE u.error WHEN '' THEN i.error ELSE u.error END,
                session = NULL, tx = NULL, deadline = NULL
            FROM unnest(places, ids, counts, delays, errors, deads)
                AS u(place, id, delivery, delay, error, dead)
            WHERE {_IS_MINE} RETURNING u.place, i.queue, i.id, i.lane, i.base)
        SELECT b.place, b.queue, min(b.id) FILTER (WHERE b.lane IS NULL) AS lowest,
            array_agg(b.lane) AS lanes, array_agg(b.base) AS bases
            FROM back b GROUP BY b.place, b.queue LOOP
        lowest[each.place] := least(coalesce(each.lowest, 9223372036854775807),
            @.pxrs_queue_settle_all(each.queue, each.lanes, each.bases));
    END LOOP;
    RETURN lowest;
END $$"""

# Removes items in these states, lanes in order; how many. One that is due counts as ready.
DISCARD = f"""
CREATE FUNCTION @.pxrs_queue_discard(in_name text, ids int8[], states int8[])
RETURNS int8 {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    queues int8[] := @.pxrs_queue_find(ARRAY[in_name]);
    gone int8;
    lanes text[];
BEGIN
    PERFORM @.pxrs_queue_lock_lanes_of(queues, ARRAY(SELECT 1::int8 FROM unnest(ids)), ids);
    WITH gone AS (
        DELETE FROM @.pxrs_queue_items i USING unnest(ids) AS u(id)
        WHERE i.queue = queues[1] AND i.id = u.id
        AND CASE WHEN i.state = {DELAYED} AND i.visible <= @.pxrs_now_ms() THEN {READY}
            ELSE i.state END = ANY (states) RETURNING i.lane)
    SELECT count(*), array_agg(g.lane) INTO gone, lanes FROM gone g;
    PERFORM @.pxrs_queue_settle_all(queues[1], lanes, NULL);
    RETURN gone;
END $$"""

# Puts dead items at the end, as if they had never been handed out; how many.
REDRIVE = f"""
CREATE FUNCTION @.pxrs_queue_redrive(in_name text, ids int8[]) RETURNS int8 {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    q int8 := (@.pxrs_queue_find(ARRAY[in_name]))[1];
    now_ms int8 := @.pxrs_now_ms();
    number int8;
    in_lane text;
    total int8 := 0;
    dead_lanes text[];
BEGIN
    dead_lanes := ARRAY(SELECT i.lane FROM unnest(ids) AS u(id) JOIN @.pxrs_queue_items i
        ON i.queue = q AND i.id = u.id AND i.state = {DEAD} AND i.lane IS NOT NULL);
    PERFORM @.pxrs_queue_lock_lanes('{{}}', '{{}}', '{{}}',
        ARRAY(SELECT q FROM unnest(dead_lanes)), dead_lanes);
    FOREACH number IN ARRAY ids LOOP
        UPDATE @.pxrs_queue_items i SET id = nextval('@.pxrs_queue_numbers'),
            state = CASE WHEN i.lane IS NULL THEN {READY} ELSE {WAITING} END, visible = now_ms,
            deliveries = 0, suspect = false, put_ms = now_ms, taken_ms = NULL, dead_ms = NULL
            WHERE i.queue = q AND i.id = number AND i.state = {DEAD}
            RETURNING i.lane INTO in_lane;
        IF FOUND THEN
            total := total + 1;
            IF in_lane IS NOT NULL THEN
                PERFORM @.pxrs_queue_settle(q, in_lane, 0);
            END IF;
        END IF;
    END LOOP;
    RETURN total;
END $$"""

# Frees and shows what it can in every queue; those where it did, and when to look again.
SWEEP = f"""
CREATE FUNCTION @.pxrs_queue_sweep(OUT r_freed text[], OUT r_due float8) {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    each record;
BEGIN
    r_freed := '{{}}';
    FOR each IN SELECT k.id, k.name FROM @.pxrs_queues k WHERE k.dropped IS NULL ORDER BY k.id LOOP
        IF @.pxrs_queue_free(each.id, 0) > 0 THEN
            r_freed := r_freed || each.name;
        END IF;
        PERFORM @.pxrs_queue_promote(each.id, 0);
        PERFORM @.pxrs_queue_settle_late(each.id);
        r_due := least(r_due, @.pxrs_queue_due(each.id, 0));
    END LOOP;
END $$"""

# What nobody will ask for: commits of sessions that are over for long, dedupe keys whose time is
# over, lanes without items, queues that were deleted. Nobody waits for it, nor it for anybody.
TIDY = f"""
CREATE FUNCTION @.pxrs_queue_tidy() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s' AS $$
#variable_conflict use_column
DECLARE
    each record;
    queues int8[];
    puts int8[];
    dones int8[];
BEGIN
    WITH gone AS (DELETE FROM @.pxrs_queue_commits d WHERE d.n IN (
        SELECT c.n FROM @.pxrs_queue_commits c
        WHERE coalesce(c.ended, c.at) < clock_timestamp() - {REMEMBERED_FOR} * interval '1 s'
        AND NOT EXISTS (SELECT 1 FROM @.pxrs_sessions s WHERE s.id = c.session)
        FOR UPDATE SKIP LOCKED) RETURNING d.*)
    SELECT array_agg(u.queue), array_agg(u.put), array_agg(u.done) INTO queues, puts, dones
        FROM gone g, unnest(g.queues, g.puts, g.dones) AS u(queue, put, done);
    PERFORM @.pxrs_queue_fold(queues, puts, dones);
    WITH gone AS (DELETE FROM @.pxrs_queue_counts d WHERE d.n IN (
        SELECT c.n FROM @.pxrs_queue_counts c FOR UPDATE SKIP LOCKED) RETURNING d.*)
    SELECT array_agg(g.queue), array_agg(g.put), array_agg(g.done) INTO queues, puts, dones
        FROM gone g;
    PERFORM @.pxrs_queue_fold(queues, puts, dones);
    DELETE FROM @.pxrs_queue_seen d WHERE (d.queue, d.key) IN (
        SELECT s.queue, s.key FROM @.pxrs_queue_seen s WHERE s.until <= @.pxrs_now_ms()
        FOR UPDATE SKIP LOCKED);
    -- Only what is still empty when it is locked.
    FOR each IN SELECT l.queue, l.lane FROM @.pxrs_queue_lanes l WHERE NOT EXISTS (
            SELECT 1 FROM @.pxrs_queue_items i WHERE i.queue = l.queue AND i.lane = l.lane)
            FOR UPDATE OF l SKIP LOCKED LOOP
        DELETE FROM @.pxrs_queue_lanes l WHERE l.queue = each.queue AND l.lane = each.lane
            AND NOT EXISTS (SELECT 1 FROM @.pxrs_queue_items i
                WHERE i.queue = each.queue AND i.lane = each.lane AND i.state < {DEAD});
    END LOOP;
    FOR each IN SELECT k.id, k.dropped FROM @.pxrs_queues k WHERE k.dropped IS NOT NULL
            FOR UPDATE SKIP LOCKED LOOP
        DELETE FROM @.pxrs_queue_items i WHERE i.queue = each.id;
        DELETE FROM @.pxrs_queue_lanes l WHERE l.queue = each.id;
        DELETE FROM @.pxrs_queue_holders h WHERE h.queue = each.id;
        DELETE FROM @.pxrs_queue_seen s WHERE s.queue = each.id;
        DELETE FROM @.pxrs_queue_counts c WHERE c.queue = each.id;
        DELETE FROM @.pxrs_queue_unsettled u WHERE u.queue = each.id;
        -- Somebody's transaction may have found it before it was deleted.
        DELETE FROM @.pxrs_queues k
            WHERE k.id = each.id AND each.dropped < clock_timestamp() - interval '1 day';
    END LOOP;
END $$"""

CHANGING = (
    FIND,
    LOCK_LANES_OF,
    LOCK_LANES,
    SEEN,
    FOLD,
    FORGET,
    APPLY,
    EXTEND,
    RELEASE,
    DISCARD,
    REDRIVE,
    SWEEP,
    TIDY,
)
