-- Ends sessions, with everything written with them, in one transaction: those whose connection is
-- closed, and those of `judged` whose time is still over, or too far ahead.
CREATE OR REPLACE FUNCTION @.pxrs_reap(unlocked text[], judged text[])
RETURNS SETOF text
LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s' AS $$
DECLARE
    ended text[];
BEGIN
    -- Whoever renews or writes with it right now is let be: there is a next time.
    WITH locked AS (
        SELECT s.id FROM @.pxrs_sessions s WHERE s.id = ANY (unlocked || judged)
            AND ((s.id = ANY (judged) AND ({IS_LATE} OR {IS_AHEAD})) OR {IS_UNLOCKED})
            ORDER BY s.id FOR UPDATE SKIP LOCKED)
    SELECT array_agg(id) INTO ended FROM locked;
    RETURN QUERY SELECT @.pxrs_end(ended);
END $$;

-- Returns the changes in the words of a notification: k and a record's key, q and a queue's name.
CREATE OR REPLACE FUNCTION @.pxrs_end(ids text[])
RETURNS SETOF text
LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s' AS $$
BEGIN
    WITH gone AS (DELETE FROM @.pxrs_sessions s WHERE s.id = ANY (ids) RETURNING s.id)
    INSERT INTO @.pxrs_ended_sessions SELECT g.id, clock_timestamp() FROM gone g;
    PERFORM 1 FROM @.pxrs_coord c WHERE c.session = ANY (ids) ORDER BY c.key FOR UPDATE;
    RETURN QUERY WITH gone AS (
        DELETE FROM @.pxrs_coord c WHERE c.session = ANY (ids) RETURNING c.key)
        SELECT 'k' || key FROM gone;
    -- What they held is freed by whoever takes next.
    UPDATE @.pxrs_queue_commits c SET ended = clock_timestamp() WHERE c.session = ANY (ids);
    RETURN QUERY SELECT DISTINCT 'q' || k.name FROM @.pxrs_queue_holders h
        JOIN @.pxrs_queues k ON k.id = h.queue
        WHERE h.session = ANY (ids) AND k.dropped IS NULL;
END $$;
