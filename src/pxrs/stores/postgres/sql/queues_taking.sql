-- Work queues inside the database: taking, changing and giving back, each in one statement.
--
-- A lane is a set of items that stay in order: those of a key, or all of a fifo queue. At its front
-- is one item that is ready or delayed, or those that one transaction holds; all others wait. A
-- transaction that puts into a lane, or changes its front, holds the lane's row until its commit:
-- numbers are assigned under that lock, so they are in the order of the commits, and no transaction
-- relies on a front that another one is about to remove. Such a row is locked and never written.
--
-- Locks are taken in one order: the session, lanes by queue and name, items. `pxrs_queue_take`
-- waits for no other transaction: it skips rows that are locked, lanes too.
--
-- `base` of a held item in a lane: everything of the lane below it is gone. So dead row versions,
-- which some old transaction keeps from being removed, are not searched again.

CREATE FUNCTION @.pxrs_now_ms() RETURNS int8 LANGUAGE sql VOLATILE AS $$
    SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::int8 $$;

-- The lock of one take: a call that asks for its outcome waits for it.
CREATE FUNCTION @.pxrs_queue_unit(in_session text, in_unit text) RETURNS int8
LANGUAGE sql IMMUTABLE AS $$ SELECT hashtextextended(in_session || '/' || in_unit, 5) $$;

CREATE FUNCTION @.pxrs_queue_promote(q int8, after int8) RETURNS void {PLAIN} AS $$
DECLARE
    due tid[];
BEGIN
    due := ARRAY(SELECT i.ctid FROM @.pxrs_queue_items i WHERE i.queue = q AND i.state = {DELAYED}
        AND i.visible > after AND i.visible <= @.pxrs_now_ms() ORDER BY i.visible
        LIMIT 10000 FOR UPDATE SKIP LOCKED);
    IF cardinality(due) > 0 THEN
        UPDATE @.pxrs_queue_items i SET state = {READY}
            WHERE i.ctid = ANY (due) AND i.state + 0 = {DELAYED};
    END IF;
END $$;

-- Frees items without a holder; returns how many. A session that is over has no row.
CREATE FUNCTION @.pxrs_queue_free(q int8, after int8) RETURNS int8 {PLAIN} AS $$
DECLARE
    now_ms int8 := @.pxrs_now_ms();
    lost text[];
    ids int8[];
    rows tid[];
    lanes text[];
    locked text[];
    bases int8[];
    freed int8;
BEGIN
    lost := ARRAY(SELECT h.session FROM @.pxrs_queue_holders h WHERE h.queue = q
        AND NOT EXISTS (SELECT 1 FROM @.pxrs_sessions s WHERE s.id = h.session));
    SELECT array_agg(f.id), array_agg(DISTINCT f.lane) INTO ids, lanes FROM (
        SELECT i.id, i.lane FROM unnest(lost) AS u(session) JOIN @.pxrs_queue_items i
            ON i.session = u.session AND i.queue = q AND i.state = {HELD}
        UNION
        SELECT i.id, i.lane FROM @.pxrs_queue_items i WHERE i.queue = q AND i.state = {HELD}
            AND i.deadline IS NOT NULL AND i.deadline > after AND i.deadline <= now_ms) f;
    IF ids IS NULL THEN
        DELETE FROM @.pxrs_queue_holders h WHERE h.queue = q AND h.session = ANY (lost);
        RETURN 0;
    END IF;
    locked := ARRAY(SELECT l.lane FROM @.pxrs_queue_lanes l WHERE l.queue = q
        AND l.lane = ANY (lanes) ORDER BY l.lane FOR UPDATE SKIP LOCKED);
    rows := ARRAY(SELECT i.place FROM unnest(ids) AS u(id), LATERAL (
        SELECT t.ctid AS place FROM @.pxrs_queue_items t
        WHERE t.queue = q AND t.id = u.id AND t.state + 0 = {HELD}
        AND (t.lane IS NULL OR t.lane = ANY (locked))
        AND (t.session = ANY (lost) OR t.deadline <= now_ms) OFFSET 0 FOR UPDATE SKIP LOCKED) i);
    WITH gone AS (
        UPDATE @.pxrs_queue_items i SET
            state = CASE WHEN i.deliveries >= i.most THEN {DEAD}
                WHEN i.lane IS NULL THEN {READY} ELSE {WAITING} END,
            dead_ms = CASE WHEN i.deliveries >= i.most THEN now_ms END,
            visible = now_ms, error = '{DIED_HOLDING}', suspect = true,
            session = NULL, tx = NULL, deadline = NULL
        WHERE i.ctid = ANY (rows) RETURNING i.lane, i.base)
    SELECT count(*), array_agg(g.lane), array_agg(g.base) INTO freed, lanes, bases FROM gone g;
    PERFORM @.pxrs_queue_settle_all(q, lanes, bases);
    RETURN freed;
END $$;

-- In how many seconds there may be an item to take that can't be taken now.
CREATE FUNCTION @.pxrs_queue_due(q int8, after int8) RETURNS float8 {PLAIN} AS $$
DECLARE
    shows int8;
    ends int8;
    soonest int8;
BEGIN
    SELECT i.visible INTO shows FROM @.pxrs_queue_items i WHERE i.queue = q
        AND i.state = {DELAYED} AND i.visible > after ORDER BY i.visible LIMIT 1;
    SELECT i.deadline INTO ends FROM @.pxrs_queue_items i WHERE i.queue = q AND i.state = {HELD}
        AND i.deadline IS NOT NULL AND i.deadline > after ORDER BY i.deadline LIMIT 1;
    soonest := least(shows, ends) - @.pxrs_now_ms();
    RETURN CASE WHEN soonest > 0 THEN soonest ELSE soonest * 0 END / 1000.0;
END $$;

-- When the next item shows in a lane in which the holder may take more.
CREATE FUNCTION @.pxrs_queue_due_behind(q int8, in_session text, in_tx text)
RETURNS float8 {PLAIN} AS $$
DECLARE
    soonest int8;
    shows int8;
    each record;
BEGIN
    FOR each IN SELECT i.lane, min(i.base) AS base FROM @.pxrs_queue_items i
            WHERE i.session = in_session AND i.tx = in_tx AND i.queue = q AND i.state = {HELD}
            AND i.lane IS NOT NULL GROUP BY i.lane LOOP
        SELECT i.visible INTO shows FROM @.pxrs_queue_items i WHERE i.queue = q
            AND i.lane = each.lane AND i.state = {WAITING} AND i.id >= each.base
            ORDER BY i.id LIMIT 1;
        soonest := least(soonest, shows);
    END LOOP;
    soonest := soonest - @.pxrs_now_ms();
    RETURN CASE WHEN soonest > 0 THEN soonest ELSE soonest * 0 END / 1000.0;
END $$;

-- Which of the fronts to hand out, and which items behind them: the rules of
-- `pxrs.core.queue.pick`. An item that has had all its deliveries becomes dead, and the caller
-- looks again.
CREATE FUNCTION @.pxrs_queue_pick(q int8, fronts int8[], in_session text, in_tx text, n int8,
    in_most int8, suspects bool, OUT chosen tid[], OUT bases int8[], OUT buried bool,
    OUT refused bool) {PLAIN} AS $$
DECLARE
    now_ms int8 := @.pxrs_now_ms();
    wanted int8[] := fronts;
    from_base int8[] := fronts;
    each record;
    behind record;
    start int8;
BEGIN
    chosen := '{}';
    bases := '{}';
    buried := false;
    refused := false;
    FOR each IN
        SELECT f.lane, f.id AS front FROM (SELECT i.lane, i.id, u.at
            FROM unnest(fronts) WITH ORDINALITY AS u(id, at), LATERAL (
                SELECT t.id, t.lane FROM @.pxrs_queue_items t
                WHERE t.queue = q AND t.id = u.id OFFSET 0) i
            WHERE i.lane IS NOT NULL ORDER BY u.at) f
        UNION ALL
        SELECT h.lane, NULL FROM (SELECT DISTINCT i.lane FROM @.pxrs_queue_items i
            WHERE i.session = in_session AND i.tx = in_tx AND i.queue = q AND i.state = {HELD}
            AND i.lane IS NOT NULL ORDER BY i.lane) h
    LOOP
        EXIT WHEN cardinality(wanted) >= n;
        PERFORM 1 FROM @.pxrs_queue_lanes l WHERE l.queue = q AND l.lane = each.lane
            FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        start := each.front;
        IF start IS NULL THEN
            -- Only while it is late with none of them.
            SELECT min(i.base) INTO start FROM @.pxrs_queue_items i
                WHERE i.session = in_session AND i.tx = in_tx AND i.queue = q
                AND i.state = {HELD} AND i.lane = each.lane
                HAVING coalesce(min(i.deadline), now_ms + 1) > now_ms;
            CONTINUE WHEN start IS NULL;
        END IF;
        FOR behind IN SELECT i.id, i.visible FROM @.pxrs_queue_items i WHERE i.queue = q
                AND i.lane = each.lane AND i.state = {WAITING} AND i.id >= start
                ORDER BY i.id LIMIT n - cardinality(wanted) LOOP
            EXIT WHEN behind.visible > now_ms;
            wanted := wanted || behind.id;
            from_base := from_base || start;
        END LOOP;
    END LOOP;
    FOR each IN SELECT i.id, i.place, i.lane, i.deliveries, i.suspect, u.base
            FROM unnest(wanted, from_base) WITH ORDINALITY AS u(id, base, at), LATERAL (
                SELECT t.id, t.ctid AS place, t.lane, t.deliveries, t.suspect
                FROM @.pxrs_queue_items t WHERE t.queue = q AND t.id = u.id OFFSET 0) i
            ORDER BY u.at LOOP
        IF each.deliveries >= in_most THEN
            IF each.lane IS NOT NULL THEN
                PERFORM 1 FROM @.pxrs_queue_lanes l WHERE l.queue = q AND l.lane = each.lane
                    FOR UPDATE SKIP LOCKED;
                CONTINUE WHEN NOT FOUND;
            END IF;
            UPDATE @.pxrs_queue_items i SET state = {DEAD}, dead_ms = now_ms,
                error = CASE i.error WHEN '' THEN '{USED_UP}' ELSE i.error END
                WHERE i.queue = q AND i.id = each.id;
            IF each.lane IS NOT NULL THEN
                PERFORM @.pxrs_queue_settle(q, each.lane, each.base);
            END IF;
            buried := true;
        ELSIF each.suspect THEN
            IF cardinality(chosen) = 0 AND NOT suspects THEN
                refused := true;
            ELSIF cardinality(chosen) = 0 THEN
                chosen := ARRAY[each.place];
                bases := ARRAY[each.base];
            END IF;
            EXIT;
        ELSE
            chosen := chosen || each.place;
            bases := bases || each.base;
            EXIT WHEN cardinality(chosen) >= n;
        END IF;
    END LOOP;
END $$;

-- `ranks` and `floors`: only look above these ids, by priority; everywhere, if there are none.
-- `after`: items that were due before have been dealt with. `noted_in`: the queue, by id, in which
-- the caller knows its session to be noted as a holder: a queue that was deleted and made again has
-- the same name, but no holders. The first row describes the search: its id is the queue's, its
-- delivery is how many pages it read, its put is when it began, its front is whether a suspect is
-- next that was not asked for (`suspects`). The other rows are items, to be ordered by `r_at`, or
-- by rank and id.
CREATE FUNCTION @.pxrs_queue_take(in_name text, in_session text, in_tx text, in_unit text,
    n int8, in_most int8, lock_ms int8, noted_in int8, sweep bool, ranks int8[], floors int8[],
    after int8, suspects bool)
RETURNS TABLE (r_at int8, r_id int8, r_delivery int8, r_body bytea, r_key text, r_rank int8,
    r_put int8, r_error text, r_front bool, r_due float8, r_spent float8, r_moved bool)
{OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    q int8;
    now_ms int8;
    began timestamptz;
    ids int8[];
    more int8[];
    rows tid[];
    more_rows tid[];
    bases int8[];
    special bool;
    is_special bool;
    again bool;
    is_due bool;
    is_unsettled bool;
    swept bool := false;
BEGIN
    IF in_unit <> '' THEN
        PERFORM pg_advisory_xact_lock(@.pxrs_queue_unit(in_session, in_unit));
        IF EXISTS (SELECT 1 FROM @.pxrs_queue_commits c
                WHERE c.session = in_session AND c.tx = in_unit) THEN
            RAISE EXCEPTION USING ERRCODE = '{GIVEN_UP}', MESSAGE = in_unit;
        END IF;
    END IF;
    {REQUIRED};
    r_moved := false;
    began := clock_timestamp();
    r_put := @.pxrs_now_ms();
    r_delivery := {PAGES_READ};
    SELECT k.id,
        EXISTS (SELECT 1 FROM @.pxrs_queue_items i WHERE i.queue = k.id AND i.state = {DELAYED}
            AND i.visible > after AND i.visible <= @.pxrs_now_ms()),
        EXISTS (SELECT 1 FROM @.pxrs_queue_unsettled u WHERE u.queue = k.id)
        INTO q, is_due, is_unsettled
        FROM @.pxrs_queues k WHERE k.name = in_name AND k.dropped IS NULL;
    IF NOT FOUND THEN
        RETURN NEXT;
        RETURN;
    END IF;
    r_spent := extract(epoch FROM clock_timestamp() - began)::float8;
    IF q IS DISTINCT FROM noted_in THEN
        INSERT INTO @.pxrs_queue_holders VALUES (q, in_session) ON CONFLICT DO NOTHING;
    END IF;
    r_id := q;
    LOOP
        IF sweep THEN
            r_moved := r_moved OR @.pxrs_queue_free(q, after) > 0;
            swept := true;
        END IF;
        IF is_due THEN
            PERFORM @.pxrs_queue_promote(q, after);
        END IF;
        IF is_unsettled THEN
            PERFORM @.pxrs_queue_settle_late(q);
        END IF;
        LOOP
            again := false;
            began := clock_timestamp();
            IF ranks IS NULL THEN
                SELECT array_agg(f.id), array_agg(f.place), bool_or(f.special)
                    INTO ids, rows, special FROM (
                    SELECT i.id, i.ctid AS place, i.suspect OR i.lane IS NOT NULL
                            OR coalesce(i.deliveries >= in_most, false) AS special
                        FROM @.pxrs_queue_items i WHERE i.queue = q AND i.state = {READY}
                        ORDER BY i.rank, i.id LIMIT n FOR UPDATE SKIP LOCKED) f;
            ELSE
                ids := NULL;
                rows := NULL;
                special := false;
                FOR at IN 1 .. cardinality(ranks) LOOP
                    SELECT array_agg(f.id), array_agg(f.place), bool_or(f.special)
                        INTO more, more_rows, is_special FROM (
                        SELECT i.id, i.ctid AS place, i.suspect OR i.lane IS NOT NULL
                                OR coalesce(i.deliveries >= in_most, false) AS special
                            FROM @.pxrs_queue_items i WHERE i.queue = q AND i.state = {READY}
                            AND i.rank = ranks[at] AND i.id > floors[at]
                            ORDER BY i.rank, i.id LIMIT n - coalesce(cardinality(ids), 0)
                            FOR UPDATE SKIP LOCKED) f;
                    ids := ids || more;
                    rows := rows || more_rows;
                    special := special OR coalesce(is_special, false);
                    EXIT WHEN cardinality(ids) >= n;
                END LOOP;
            END IF;
            r_spent := r_spent + extract(epoch FROM clock_timestamp() - began)::float8;
            ids := coalesce(ids, '{}');
            bases := NULL;
            r_front := false;
            IF NOT coalesce(special, false) AND cardinality(ids) < n THEN
                PERFORM 1 FROM @.pxrs_queue_items i WHERE i.session = in_session
                    AND i.tx = in_tx AND i.queue = q AND i.state = {HELD}
                    AND i.lane IS NOT NULL LIMIT 1;
                special := FOUND;
            END IF;
            IF special THEN
                SELECT p.chosen, p.bases, p.buried, p.refused INTO rows, bases, again, r_front
                    FROM @.pxrs_queue_pick(q, ids, in_session, in_tx, n, in_most, suspects) p;
                r_moved := r_moved OR again;
            END IF;
            EXIT WHEN NOT again;
        END LOOP;
        EXIT WHEN cardinality(rows) > 0 OR swept;
        sweep := true;
    END LOOP;
    IF coalesce(cardinality(rows), 0) = 0 THEN
        r_due := least(@.pxrs_queue_due(q, after), @.pxrs_queue_due_behind(q, in_session, in_tx));
        IF ranks IS NULL THEN
            PERFORM 1 FROM @.pxrs_queue_items i WHERE i.queue = q AND i.state = {READY} LIMIT 1;
            IF FOUND THEN
                r_due := least(r_due, {BUSY});
            END IF;
        END IF;
    END IF;
    r_delivery := {PAGES_READ} - r_delivery;
    RETURN NEXT;
    now_ms := @.pxrs_now_ms();
    IF bases IS NULL THEN
        RETURN QUERY UPDATE @.pxrs_queue_items i SET {HOLD}
            WHERE i.ctid = ANY (rows) RETURNING NULL::int8, {HELD_AS};
    ELSE
        RETURN QUERY UPDATE @.pxrs_queue_items i SET {HOLD}, base = u.base
            FROM unnest(rows, bases) WITH ORDINALITY AS u(row, base, at)
            WHERE i.ctid = u.row RETURNING u.at, {HELD_AS};
    END IF;
END $$;
