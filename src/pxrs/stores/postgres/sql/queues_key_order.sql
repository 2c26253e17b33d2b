-- Work queues inside the database: lanes, whose items stay in order; see `functions.py`.

-- Shows the first item of a lane, unless there is one at its front; returns the item, if it did. A
-- transaction with an old snapshot can't see the present items, and leaves it to the next take.
CREATE FUNCTION @.pxrs_queue_settle(q int8, in_lane text, in_base int8) RETURNS int8 {PLAIN} AS $$
DECLARE
    shown int8;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        INSERT INTO @.pxrs_queue_unsettled VALUES (q, in_lane);
        RETURN 0;
    END IF;
    PERFORM 1 FROM @.pxrs_queue_items i WHERE i.queue = q AND i.lane = in_lane
        AND i.lane IS NOT NULL AND i.state < {WAITING} AND i.id >= in_base
        ORDER BY i.id DESC LIMIT 1;
    IF NOT FOUND THEN
        SELECT i.id INTO shown FROM @.pxrs_queue_items i WHERE i.queue = q AND i.lane = in_lane
            AND i.state = {WAITING} AND i.id >= in_base ORDER BY i.id LIMIT 1;
        UPDATE @.pxrs_queue_items i SET state =
            CASE WHEN i.visible > @.pxrs_now_ms() THEN {DELAYED} ELSE {READY} END
            WHERE i.queue = q AND i.id = shown;
    END IF;
    RETURN shown;
END $$;

-- Settles several lanes in turn; returns the lowest item that shows now.
CREATE FUNCTION @.pxrs_queue_settle_all(q int8, lanes text[], bases int8[])
RETURNS int8 {PLAIN} AS $$
DECLARE
    lowest int8;
    each record;
BEGIN
    FOR each IN SELECT u.lane, min(u.base) AS base FROM unnest(lanes, bases) AS u(lane, base)
            WHERE u.lane IS NOT NULL GROUP BY u.lane LOOP
        lowest := least(lowest, @.pxrs_queue_settle(q, each.lane, coalesce(each.base, 0)));
    END LOOP;
    RETURN lowest;
END $$;

CREATE FUNCTION @.pxrs_queue_settle_late(q int8) RETURNS void {PLAIN} AS $$
DECLARE
    each record;
BEGIN
    FOR each IN SELECT DISTINCT u.lane FROM @.pxrs_queue_unsettled u WHERE u.queue = q LOOP
        PERFORM 1 FROM @.pxrs_queue_lanes l WHERE l.queue = q AND l.lane = each.lane
            FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            DELETE FROM @.pxrs_queue_unsettled u WHERE u.queue = q AND u.lane = each.lane;
            PERFORM @.pxrs_queue_settle(q, each.lane, 0);
        END IF;
    END LOOP;
END $$;

-- Locks, in order, the lanes of items that may be changed.
CREATE FUNCTION @.pxrs_queue_lock_lanes_of(queues int8[], places int8[], ids int8[])
RETURNS void {PLAIN} AS $$
BEGIN
    PERFORM 1 FROM @.pxrs_queue_items i, unnest(places, ids) AS u(place, id)
        WHERE i.queue = queues[coalesce(u.place, 1)] AND i.id = u.id AND i.lane IS NOT NULL LIMIT 1;
    IF FOUND THEN
        PERFORM 1 FROM (SELECT DISTINCT i.queue, i.lane
                FROM unnest(places, ids) AS u(place, id) JOIN @.pxrs_queue_items i
                ON i.queue = queues[coalesce(u.place, 1)] AND i.id = u.id AND i.lane IS NOT NULL
                ORDER BY i.queue, i.lane OFFSET 0) f
            JOIN @.pxrs_queue_lanes l ON l.queue = f.queue AND l.lane = f.lane
            ORDER BY l.queue, l.lane FOR UPDATE OF l;
    END IF;
END $$;

-- Locks the lanes that items are put into or removed from, in one order. Another process that
-- tidies up may remove an empty lane just before it is locked: then it is made again.
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
                ON i.queue = queues[coalesce(u.place, 1)] AND i.id = u.id AND i.lane IS NOT NULL
                UNION
                SELECT u.queue, u.lane FROM unnest(put_queues, put_lanes) AS u(queue, lane)
                WHERE u.lane IS NOT NULL ORDER BY 1, 2 OFFSET 0) f
            JOIN @.pxrs_queue_lanes l ON l.queue = f.queue AND l.lane = f.lane
            ORDER BY l.queue, l.lane FOR UPDATE OF l;
        SELECT count(*) > 0 INTO missing FROM unnest(put_queues, put_lanes) AS u(queue, lane)
            WHERE u.lane IS NOT NULL AND NOT EXISTS (SELECT 1 FROM @.pxrs_queue_lanes l
                WHERE l.queue = u.queue AND l.lane = u.lane);
    END LOOP;
END $$;
