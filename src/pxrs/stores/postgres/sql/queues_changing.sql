-- Work queues inside the database: functions that extend, release, discard and redrive items.
--
-- Queues are named once, in `names`; for each item a place in it says which queue it is of. The
-- functions return, for each of the names, the lowest item that shows now and did not before: a
-- process that looks for items may have passed it.

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
    {REQUIRED};
    SELECT count(*), array_agg(DISTINCT names[f.place])
            FILTER (WHERE f.deadline IS NULL OR f.deadline > until) INTO mine, sooner FROM (
        SELECT u.place, i.deadline FROM unnest(places, ids, counts)
            AS u(place, id, delivery) JOIN @.pxrs_queue_items i ON {IS_MINE}
            FOR UPDATE OF i) f;
    IF mine < cardinality(ids) THEN
        RAISE EXCEPTION USING ERRCODE = '{FENCED}', MESSAGE = (cardinality(ids) - mine)
            || ' of ' || cardinality(ids);
    END IF;
    UPDATE @.pxrs_queue_items i SET deadline = until
        FROM unnest(places, ids, counts) AS u(place, id, delivery) WHERE {IS_MINE};
    RETURN QUERY SELECT unnest(sooner);
END $$;

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
            WHERE {IS_MINE} RETURNING u.place, i.queue, i.id, i.lane, i.base)
        SELECT b.place, b.queue, min(b.id) FILTER (WHERE b.lane IS NULL) AS lowest,
            array_agg(b.lane) AS lanes, array_agg(b.base) AS bases
            FROM back b GROUP BY b.place, b.queue LOOP
        lowest[each.place] := least(coalesce(each.lowest, 9223372036854775807),
            @.pxrs_queue_settle_all(each.queue, each.lanes, each.bases));
    END LOOP;
    RETURN lowest;
END $$;

-- Removes items in these states, lanes in order; returns how many. A due item counts as ready.
CREATE FUNCTION @.pxrs_queue_discard(in_name text, ids int8[], states int8[])
RETURNS int8 {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    queues int8[] := @.pxrs_queue_find(ARRAY[in_name]);
    rows tid[];
    gone int8;
    lanes text[];
BEGIN
    PERFORM @.pxrs_queue_lock_lanes_of(queues, ARRAY(SELECT 1::int8 FROM unnest(ids)), ids);
    rows := ARRAY(SELECT f.row FROM unnest(ids) AS u(id), LATERAL (
        SELECT i.ctid AS row FROM @.pxrs_queue_items i WHERE i.queue = queues[1] AND i.id = u.id
        AND CASE WHEN i.state = {DELAYED} AND i.visible <= @.pxrs_now_ms() THEN {READY}
            ELSE i.state END = ANY (states) OFFSET 0 FOR UPDATE) f);
    WITH gone AS (
        DELETE FROM @.pxrs_queue_items i WHERE i.ctid = ANY (rows) RETURNING i.lane)
    SELECT count(*), array_agg(g.lane) INTO gone, lanes FROM gone g;
    PERFORM @.pxrs_queue_settle_all(queues[1], lanes, NULL);
    RETURN gone;
END $$;

-- Puts dead items at the end, as if they had never been handed out; returns how many.
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
    dead_lanes := ARRAY(SELECT f.lane FROM unnest(ids) AS u(id), LATERAL (
        SELECT i.lane FROM @.pxrs_queue_items i WHERE i.queue = q AND i.id = u.id
        AND i.state + 0 = {DEAD} AND i.lane IS NOT NULL OFFSET 0) f);
    PERFORM @.pxrs_queue_lock_lanes('{}', '{}', '{}',
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
END $$;
