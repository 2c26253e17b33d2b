-- Work queues inside the database: upkeep that is done now and then.

-- A commit's record has how many items it put and removed, too. Before it is forgotten, these
-- counts are added up.
CREATE FUNCTION @.pxrs_queue_fold(all_queues int8[], all_puts int8[], all_dones int8[])
RETURNS void {PLAIN} AS $$
BEGIN
    INSERT INTO @.pxrs_queue_counts (queue, put, done)
        SELECT u.queue, sum(u.put), sum(u.done)
        FROM unnest(all_queues, all_puts, all_dones) AS u(queue, put, done)
        WHERE EXISTS (SELECT 1 FROM @.pxrs_queues k WHERE k.id = u.queue)
        GROUP BY u.queue HAVING sum(u.put) > 0 OR sum(u.done) > 0;
END $$;

-- Forgets units of a session whose outcome their committer knows.
CREATE FUNCTION @.pxrs_queue_forget(in_session text, units text[]) RETURNS void {PLAIN} AS $$
#variable_conflict use_column
DECLARE
    queues int8[];
    puts int8[];
    dones int8[];
BEGIN
    WITH gone AS (DELETE FROM @.pxrs_queue_commits c
        WHERE c.session = in_session AND c.tx = ANY (units) RETURNING c.*)
    SELECT array_agg(u.queue), array_agg(u.put), array_agg(u.done) INTO queues, puts, dones
        FROM gone g, unnest(g.queues, g.puts, g.dones) AS u(queue, put, done);
    PERFORM @.pxrs_queue_fold(queues, puts, dones);
END $$;

-- The outcome of a unit: unless its record exists, the unit is given up, by a record in its place.
-- The index decides which record was first, and waits for a unit that is being committed at this
-- moment. If the session neither exists nor is known to have ended, the unit's record may have
-- existed and been forgotten.
CREATE FUNCTION @.pxrs_queue_outcome(in_session text, in_unit text) RETURNS text {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    is_void bool;
BEGIN
    LOOP
        INSERT INTO @.pxrs_queue_commits (session, tx, at, queues, puts, dones, void)
            VALUES (in_session, in_unit, clock_timestamp(), '{}', '{}', '{}', true)
            ON CONFLICT (session, tx) DO NOTHING;
        IF FOUND THEN
            PERFORM 1 FROM @.pxrs_sessions s WHERE s.id = in_session FOR KEY SHARE;
            IF FOUND THEN
                RETURN 'never';
            END IF;
            PERFORM 1 FROM @.pxrs_ended_sessions e WHERE e.session = in_session;
            IF FOUND THEN
                RETURN 'never';
            END IF;
            DELETE FROM @.pxrs_queue_commits c WHERE c.session = in_session AND c.tx = in_unit;
            RETURN 'unknown';
        END IF;
        SELECT c.void INTO is_void FROM @.pxrs_queue_commits c
            WHERE c.session = in_session AND c.tx = in_unit;
        IF FOUND THEN
            RETURN CASE WHEN is_void THEN 'never' ELSE 'done' END;
        END IF;
    END LOOP;
END $$;

-- Refuses this take from now on; waits for it if it is under way.
CREATE FUNCTION @.pxrs_queue_give_up(in_session text, in_unit text) RETURNS void {OPTIONS} AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(@.pxrs_queue_unit(in_session, in_unit));
    INSERT INTO @.pxrs_queue_commits (session, tx, at, queues, puts, dones, void)
        VALUES (in_session, in_unit, clock_timestamp(), '{}', '{}', '{}', true)
        ON CONFLICT (session, tx) DO NOTHING;
END $$;

-- Frees and shows items in every queue; returns the queues where it did, and when to look again.
CREATE FUNCTION @.pxrs_queue_sweep(OUT r_freed text[], OUT r_due float8) {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    each record;
BEGIN
    r_freed := '{}';
    FOR each IN SELECT k.id, k.name FROM @.pxrs_queues k WHERE k.dropped IS NULL ORDER BY k.id LOOP
        IF @.pxrs_queue_free(each.id, 0) > 0 THEN
            r_freed := r_freed || each.name;
        END IF;
        PERFORM @.pxrs_queue_promote(each.id, 0);
        PERFORM @.pxrs_queue_settle_late(each.id);
        r_due := least(r_due, @.pxrs_queue_due(each.id, 0));
    END LOOP;
END $$;

-- Removes what no process needs: commits of sessions that ended long ago, dedupe keys whose time is
-- over, lanes without items, queues that were deleted. No transaction waits for it, and it waits
-- for none. As long as the end of a session is kept, none of its units is forgotten.
CREATE FUNCTION @.pxrs_queue_tidy() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s' AS $$
#variable_conflict use_column
DECLARE
    each record;
    queues int8[];
    puts int8[];
    dones int8[];
BEGIN
    DELETE FROM @.pxrs_ended_sessions d WHERE d.session IN (
        SELECT e.session FROM @.pxrs_ended_sessions e
        WHERE e.at < clock_timestamp() - {REMEMBERED_FOR} * interval '1 s'
        FOR UPDATE SKIP LOCKED);
    WITH gone AS (DELETE FROM @.pxrs_queue_commits d WHERE d.n IN (
        SELECT c.n FROM @.pxrs_queue_commits c
        WHERE coalesce(c.ended, c.at) < clock_timestamp() - {REMEMBERED_FOR} * interval '1 s'
        AND NOT EXISTS (SELECT 1 FROM @.pxrs_sessions s WHERE s.id = c.session)
        AND NOT EXISTS (SELECT 1 FROM @.pxrs_ended_sessions e WHERE e.session = c.session)
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
END $$;
