-- Items that come from another store, under the numbers they had there.

-- Returns how many were new; NULL if there is no such queue. A lane's front waits again until all
-- items are in their place: restored items may belong before it.
--
-- Later numbers have to be higher. Altering the sequence, though nothing is altered, is the only
-- way to keep others from taking numbers of it until the commit: between reading its value and
-- setting it, it could have moved on.
CREATE FUNCTION @.pxrs_queue_restore(in_name text, ids int8[], ranks int8[], keys text[],
    lanes text[], visibles int8[], counts int8[], suspects bool[], puts int8[], takens int8[],
    are_dead bool[], dead_at int8[], errors text[], bodies bytea[]) RETURNS int8 {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    q int8;
    is_fifo bool;
    now_ms int8;
    highest int8;
    added int8;
    in_lane text;
BEGIN
    SELECT k.id, k.fifo INTO q, is_fifo FROM @.pxrs_queues k
        WHERE k.name = in_name AND k.dropped IS NULL;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF is_fifo THEN
        lanes := array_fill(''::text, ARRAY[cardinality(ids)]);
    END IF;
    PERFORM @.pxrs_queue_lock_lanes('{}', '{}', '{}',
        array_fill(q, ARRAY[cardinality(ids)]), lanes);
    SELECT max(u.id) INTO highest FROM unnest(ids) AS u(id);
    IF highest >= (SELECT s.last_value FROM @.pxrs_queue_numbers s) THEN
        ALTER SEQUENCE @.pxrs_queue_numbers CACHE 1;
        PERFORM setval('@.pxrs_queue_numbers', greatest(s.last_value, highest))
            FROM @.pxrs_queue_numbers s;
    END IF;
    FOR in_lane IN SELECT DISTINCT u.lane FROM unnest(lanes) AS u(lane)
            WHERE u.lane IS NOT NULL ORDER BY 1 LOOP
        UPDATE @.pxrs_queue_items i SET state = {WAITING} WHERE i.queue = q AND i.lane = in_lane
            AND i.lane IS NOT NULL AND i.state < {WAITING} AND i.state <> {HELD};
    END LOOP;
    now_ms := @.pxrs_now_ms();
    INSERT INTO @.pxrs_queue_items (queue, id, state, rank, lane, key, visible, deliveries,
            suspect, put_ms, taken_ms, dead_ms, error, body)
        SELECT q, u.id, CASE WHEN u.is_dead THEN {DEAD} WHEN u.lane IS NOT NULL THEN {WAITING}
                WHEN u.visible > now_ms THEN {DELAYED} ELSE {READY} END,
            u.rank, u.lane, u.key, u.visible, u.count, u.suspect, u.put, u.taken, u.dead,
            u.error, u.body
        FROM unnest(ids, ranks, keys, lanes, visibles, counts, suspects, puts, takens, are_dead,
            dead_at, errors, bodies) AS u(id, rank, key, lane, visible, count, suspect, put,
            taken, is_dead, dead, error, body)
        ON CONFLICT (queue, id) DO NOTHING;
    GET DIAGNOSTICS added = ROW_COUNT;
    PERFORM @.pxrs_queue_settle_all(q, lanes, NULL);
    IF added > 0 THEN
        INSERT INTO @.pxrs_queue_counts (queue, put, done) VALUES (q, added, 0);
    END IF;
    RETURN added;
END $$;
