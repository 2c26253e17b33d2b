-- Work queues inside the database: the commit of a unit of work, in one statement.
--
-- Queues are named once, in `names`; for each item a place in it says which queue it is of.
-- Arguments that nearly every unit leaves out are NULL and cost nothing: places, if there is one
-- queue only; keys, priorities, delays and dedupe keys, if there are none.
--
-- Most queues have no lanes. Then nothing has to be locked or settled, and what is left is one
-- statement that removes items and one that puts items.

CREATE FUNCTION @.pxrs_queue_find(names text[]) RETURNS int8[] {PLAIN} AS $$
BEGIN
    RETURN ARRAY(SELECT k.id FROM unnest(names) WITH ORDINALITY AS u(name, at)
        LEFT JOIN @.pxrs_queues k ON k.name = u.name AND k.dropped IS NULL ORDER BY u.at);
END $$;

-- Which items are duplicates, by their place among those that are put. In the order of the keys, so
-- that two transactions with the same keys wait for each other and never deadlock.
CREATE FUNCTION @.pxrs_queue_seen_before(put_queues int8[], seen text[], windows int8[])
RETURNS int8[] {PLAIN} AS $$
DECLARE
    now_ms int8 := @.pxrs_now_ms();
    each record;
    last_queue int8;
    last_seen text;
    again int8[] := '{}';
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
END $$;

-- The lane of each item that is put, if some are put into a fifo queue.
CREATE FUNCTION @.pxrs_queue_lanes_in(names text[], are_fifo bool[], put_places int8[],
    ranks int8[], delays int8[], lanes text[]) RETURNS text[] {PLAIN} AS $$
DECLARE
    refused text;
BEGIN
    SELECT names[u.place] INTO refused
        FROM unnest(put_places, ranks, delays) AS u(place, rank, delay)
        WHERE are_fifo[u.place] AND (u.rank <> 0 OR u.delay > 0) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = '{STRICT}', MESSAGE = refused;
    END IF;
    RETURN ARRAY(SELECT CASE WHEN are_fifo[u.place] THEN '' ELSE u.lane END
        FROM unnest(put_places, lanes) WITH ORDINALITY AS u(place, lane, at) ORDER BY u.at);
END $$;

-- Removes items; returns how many, and for each queue the item that shows now. Locks the items
-- first: a transaction that extends one at this moment moves its row elsewhere.
CREATE FUNCTION @.pxrs_queue_remove(in_session text, in_tx text, queues int8[],
    places int8[], ids int8[], counts int8[], OUT gone int8, OUT lowest int8[]) {PLAIN} AS $$
DECLARE
    at_places int8[];
    rows tid[];
    each record;
BEGIN
    gone := 0;
    lowest := array_fill(NULL::int8, ARRAY[cardinality(queues)]);
    SELECT array_agg(f.place), array_agg(f.row) INTO at_places, rows
        FROM unnest(places, ids, counts) AS u(place, id, delivery), LATERAL (
            SELECT coalesce(u.place, 1) AS place, i.ctid AS row FROM @.pxrs_queue_items i
            WHERE {IS_MINE} OFFSET 0 FOR UPDATE OF i) f;
    FOR each IN WITH removed AS (
            DELETE FROM @.pxrs_queue_items i USING unnest(at_places, rows) AS u(place, row)
            WHERE i.ctid = u.row RETURNING u.place, i.queue, i.lane, i.base)
        SELECT r.place, r.queue, count(*) AS number, array_agg(r.lane) AS lanes,
            array_agg(r.base) AS bases FROM removed r GROUP BY r.place, r.queue LOOP
        gone := gone + each.number;
        IF array_remove(each.lanes, NULL) <> '{}' THEN
            lowest[each.place] := @.pxrs_queue_settle_all(each.queue, each.lanes, each.bases);
        END IF;
    END LOOP;
END $$;

-- Puts items that have lanes or dedupe keys; returns their numbers, NULL for a duplicate. Lanes are
-- locked by now: items that are put into one later get higher numbers.
CREATE FUNCTION @.pxrs_queue_put(put_queues int8[], bodies bytea[], ranks int8[], delays int8[],
    keys text[], lanes text[], seen text[], windows int8[]) RETURNS int8[] {PLAIN} AS $$
DECLARE
    now_ms int8;
    numbers int8[];
    again int8[] := '{}';
    each record;
BEGIN
    IF seen IS NOT NULL THEN
        again := @.pxrs_queue_seen_before(put_queues, seen, windows);
    END IF;
    now_ms := @.pxrs_now_ms();
    numbers := ARRAY(SELECT CASE WHEN u.at = ANY (again) THEN NULL
            ELSE nextval('@.pxrs_queue_numbers') END
        FROM unnest(put_queues) WITH ORDINALITY AS u(queue, at) ORDER BY u.at);
    INSERT INTO @.pxrs_queue_items (queue, id, state, rank, lane, key, visible, deliveries,
            suspect, put_ms, error, body)
        SELECT u.queue, u.number,
            CASE WHEN u.lane IS NOT NULL THEN {WAITING}
                WHEN u.delay > 0 THEN {DELAYED} ELSE {READY} END,
            coalesce(u.rank, 0), u.lane, u.key, now_ms + coalesce(u.delay, 0), 0, false, now_ms,
            '', u.body
        FROM unnest(put_queues, numbers, ranks, lanes, keys, delays, bodies)
            AS u(queue, number, rank, lane, key, delay, body)
        WHERE u.number IS NOT NULL;
    FOR each IN SELECT u.queue, array_agg(u.lane) AS lanes FROM unnest(put_queues, lanes)
            AS u(queue, lane) WHERE u.lane IS NOT NULL GROUP BY u.queue LOOP
        PERFORM @.pxrs_queue_settle_all(each.queue, each.lanes, NULL);
    END LOOP;
    RETURN numbers;
END $$;

-- The unit's record comes last: if another process gives the unit up meanwhile, its record is in
-- the way, and all of the unit is undone. A unit without a name leaves no record: only its puts and
-- removals are counted.
CREATE FUNCTION @.pxrs_queue_apply(in_session text, in_tx text, in_unit text, names text[],
    places int8[], ids int8[], counts int8[],
    put_places int8[], bodies bytea[], ranks int8[], delays int8[],
    keys text[], lanes text[], seen text[], windows int8[],
    puts int8[], dones int8[], forget text[])
RETURNS TABLE (r_numbers int8[], r_lowest int8[]) {OPTIONS} AS $$
#variable_conflict use_column
DECLARE
    now_ms int8;
    queues int8[];
    are_fifo bool[];
    laned bool;
    put_queues int8[];
    found_ids int8[];
    found_counts int8[];
    rows tid[];
    gone int8 := 0;
    more int8;
BEGIN
    IF ids IS NOT NULL THEN
        {REQUIRED};
    END IF;
    {KNOW};
    IF bodies IS NOT NULL AND array_position(queues, NULL) IS NOT NULL THEN
        INSERT INTO @.pxrs_queues (name, fifo, created)
            SELECT DISTINCT names[coalesce(u.place, 1)], false, @.pxrs_now_ms()
            FROM unnest(put_places, bodies) AS u(place, body)
            WHERE queues[coalesce(u.place, 1)] IS NULL ORDER BY 1
            ON CONFLICT (name) WHERE dropped IS NULL DO NOTHING;
        {KNOW};
    END IF;
    puts := coalesce(puts, ARRAY[coalesce(cardinality(bodies), 0)]);
    dones := coalesce(dones, ARRAY[coalesce(cardinality(ids), 0)]);

    IF bodies IS NOT NULL AND (laned OR lanes IS NOT NULL OR seen IS NOT NULL) THEN
        put_places := coalesce(put_places, array_fill(1::int8, ARRAY[cardinality(bodies)]));
        put_queues := ARRAY(SELECT queues[u.place] FROM unnest(put_places) WITH ORDINALITY
            AS u(place, at) ORDER BY u.at);
        IF true = ANY (are_fifo) THEN
            lanes := @.pxrs_queue_lanes_in(names, are_fifo, put_places, ranks, delays, lanes);
        END IF;
    END IF;
    IF lanes IS NOT NULL THEN
        PERFORM @.pxrs_queue_lock_lanes(queues, places, ids, put_queues, lanes);
    ELSIF laned AND ids IS NOT NULL THEN
        PERFORM @.pxrs_queue_lock_lanes_of(queues, places, ids);
    END IF;

    IF ids IS NOT NULL THEN
        IF places IS NULL AND NOT coalesce(laned, false) THEN
            SELECT array_agg(f.id), array_agg(f.deliveries), array_agg(f.row)
                INTO found_ids, found_counts, rows FROM (
                SELECT i.id, i.deliveries, i.ctid AS row FROM {HELD_IN} ORDER BY i.id) f;
            IF found_ids = ids AND found_counts = counts THEN
                -- The fence again: somebody may be freeing one at this moment.
                DELETE FROM @.pxrs_queue_items i WHERE i.ctid = ANY (rows)
                    AND i.state + 0 = {HELD} AND i.session = in_session AND i.tx = in_tx;
                GET DIAGNOSTICS gone = ROW_COUNT;
            END IF;
        END IF;
        IF gone < cardinality(ids) THEN
            SELECT r.gone, r.lowest INTO more, r_lowest FROM @.pxrs_queue_remove(
                in_session, in_tx, queues, places, ids, counts) r;
            gone := gone + more;
        END IF;
        IF gone < cardinality(ids) THEN
            RAISE EXCEPTION USING MESSAGE = (cardinality(ids) - gone)
                || ' of ' || cardinality(ids),
                ERRCODE = CASE WHEN {SEES_OLD} THEN '{OLD_SNAPSHOT}' ELSE '{FENCED}' END;
        END IF;
    END IF;

    IF put_queues IS NOT NULL THEN
        r_numbers := @.pxrs_queue_put(
            put_queues, bodies, ranks, delays, keys, lanes, seen, windows);
        FOR at IN 1 .. cardinality(r_numbers) LOOP
            IF r_numbers[at] IS NULL THEN
                puts[put_places[at]] := puts[put_places[at]] - 1;
            END IF;
        END LOOP;
    ELSIF bodies IS NOT NULL THEN
        now_ms := @.pxrs_now_ms();
        IF coalesce(put_places, ranks, delays) IS NULL THEN
            WITH new AS (INSERT INTO @.pxrs_queue_items ({COLUMNS})
                SELECT queues[1], nextval('@.pxrs_queue_numbers'), {READY}, 0, now_ms, 0, false,
                    now_ms, '', unnest(bodies) RETURNING id)
            SELECT array_agg(n.id) INTO r_numbers FROM new n;
        ELSE
            WITH new AS (INSERT INTO @.pxrs_queue_items ({COLUMNS})
                SELECT queues[coalesce(u.place, 1)], nextval('@.pxrs_queue_numbers'),
                    CASE WHEN u.delay > 0 THEN {DELAYED} ELSE {READY} END, coalesce(u.rank, 0),
                    now_ms + coalesce(u.delay, 0), 0, false, now_ms, '', u.body
                FROM unnest(put_places, ranks, delays, bodies) AS u(place, rank, delay, body)
                RETURNING id)
            SELECT array_agg(n.id) INTO r_numbers FROM new n;
        END IF;
    END IF;

    IF in_unit = '' THEN
        PERFORM @.pxrs_queue_fold(queues, puts, dones);
    ELSE
        INSERT INTO @.pxrs_queue_commits (session, tx, at, queues, puts, dones)
            VALUES (in_session, in_unit, clock_timestamp(), coalesce(queues, '{}'), puts, dones)
            ON CONFLICT (session, tx) DO NOTHING;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = '{GIVEN_UP}', MESSAGE = in_unit;
        END IF;
    END IF;
    IF forget IS NOT NULL THEN
        PERFORM @.pxrs_queue_forget(in_session, forget);
    END IF;
    RETURN NEXT;
END $$;
