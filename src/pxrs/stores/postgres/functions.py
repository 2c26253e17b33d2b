"""What runs inside the database: each of these is one statement, so one round trip.

`@.` stands for the schema. Every statement inside a plpgsql function sees what was committed
before it began, so what is read after a lock was got is what the lock protects.

Locks are taken in one order everywhere: sessions by id, records by key, partitions by topic and
number. Keys sort by code point here ("C") and in Python alike.
"""

from __future__ import annotations

from pxrs.stores.rows import CHANCE_BITS

# Conditions that functions raise for; `failures.py` knows them.
OVERTAKEN = "PX001"
SESSION_LOST = "PX002"
BOUND = "PX003"
OLD_SNAPSHOT = "PX007"

# Whether the transaction is the caller's, at a level at which it does not see what others have
# committed since it began. What is not there then may be there: that is no verdict.
SEES_OLD = "current_setting('transaction_isolation') IN ('repeatable read', 'serializable')"

# What `pxrs_commit` is told to do with a key.
CHECK, PUT, DELETE = 0, 1, 2

# What `pxrs_append` says of a batch.
APPENDED, DUPLICATE, NO_TOPIC, NO_PARTITION, FENCED, GAP = range(6)

# A check reads with a lock. First everything is locked and judged, then everything is written:
# what is returned after a failed check is what was there, and nothing has to be undone.
#
# `places` says where the caller last saw a row. A row that is written all the time leaves dead
# versions behind, and while some old transaction keeps them from being removed every look by
# key has to pass all of them. A look by place does not. A place that does not fit any more is
# no harm: the key is compared too, and then it is looked for.
#
# A crash of the server, or a fail-over, may lose commits, and with them the sequence goes back: it
# would give the same numbers again, and an owner that was frozen would find its successor's record
# at the version that it remembers. So a part of each version is drawn by chance.
_NEXT_VERSION = (
    f"(nextval('@.pxrs_revision') << {CHANCE_BITS}) + floor(random() * {2**CHANCE_BITS})::int8"
)

COMMIT = f"""
CREATE OR REPLACE FUNCTION @.pxrs_commit(
    keys text[], kinds int8[], expected int8[], vals bytea[], owners text[], places text[])
RETURNS TABLE (failed bool, r_key text, r_version int8, r_place text, r_value bytea, r_session text)
LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s' AS $$
#variable_conflict use_column
DECLARE
    holder text;
    each record;
    there record;
    here tid;
    heres tid[];
    told int8;
    revision int8;
    any_failed bool := false;
BEGIN
    FOR holder IN SELECT DISTINCT u COLLATE "C" FROM unnest(owners) u WHERE u <> '' ORDER BY 1 LOOP
        PERFORM 1 FROM @.pxrs_sessions s
            WHERE s.id = holder AND s.deadline > clock_timestamp() FOR KEY SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING MESSAGE = holder,
                ERRCODE = CASE WHEN {SEES_OLD} THEN '{OLD_SNAPSHOT}' ELSE '{SESSION_LOST}' END;
        END IF;
    END LOOP;

    FOR each IN SELECT * FROM unnest(keys, kinds, expected, places) WITH ORDINALITY
            AS u(key, kind, expected, place, number) LOOP
        there := NULL;
        IF each.kind = {CHECK} THEN
            SELECT c.ctid AS place, c.* INTO there FROM @.pxrs_coord c
                WHERE c.key = each.key FOR SHARE;
        ELSE
            IF each.place <> '' THEN
                SELECT c.ctid AS place, c.* INTO there FROM @.pxrs_coord c
                    WHERE c.ctid = each.place::tid AND c.key = each.key FOR UPDATE;
            END IF;
            IF there IS NULL THEN
                SELECT c.ctid AS place, c.* INTO there FROM @.pxrs_coord c
                    WHERE c.key = each.key FOR UPDATE;
            END IF;
        END IF;
        heres[each.number] := there.place;
        IF each.expected >= 0 THEN
            IF there.session IS NOT NULL AND each.expected > 0 THEN
                RAISE EXCEPTION USING ERRCODE = '{BOUND}', MESSAGE = each.key;
            END IF;
            IF there.version IS NULL AND each.expected > 0 AND {SEES_OLD} THEN
                -- It fails if the record was made since.
                INSERT INTO @.pxrs_coord VALUES (each.key, '', 0, NULL);
                DELETE FROM @.pxrs_coord c WHERE c.key = each.key;
            END IF;
            IF coalesce(there.version, 0) <> each.expected THEN
                any_failed := true;
                failed := true;
                r_key := each.key;
                r_version := there.version;
                r_value := there.value;
                r_session := there.session;
                RETURN NEXT;
            END IF;
        END IF;
    END LOOP;
    IF any_failed THEN
        RETURN;
    END IF;

    failed := false;
    r_value := NULL;
    r_session := NULL;
    revision := {_NEXT_VERSION};
    FOR each IN SELECT * FROM unnest(keys, kinds, expected, vals, owners) WITH ORDINALITY
            AS u(key, kind, expected, value, owner, number) WHERE kind <> {CHECK} LOOP
        here := heres[each.number];
        IF each.kind = {DELETE} THEN
            DELETE FROM @.pxrs_coord c WHERE c.ctid = here AND c.key = each.key;
            CONTINUE;
        END IF;
        told := revision;
        IF here IS NOT NULL THEN
            UPDATE @.pxrs_coord c
                SET value = each.value, version = revision, session = nullif(each.owner, '')
                WHERE c.ctid = here AND c.key = each.key RETURNING c.ctid INTO here;
        ELSIF each.expected = 0 THEN
            INSERT INTO @.pxrs_coord AS c VALUES
                (each.key, each.value, revision, nullif(each.owner, ''))
                ON CONFLICT DO NOTHING RETURNING c.ctid INTO here;
        ELSE
            -- Somebody else may have made it meanwhile, at a version above ours.
            INSERT INTO @.pxrs_coord AS c VALUES
                (each.key, each.value, revision, nullif(each.owner, ''))
                ON CONFLICT (key) DO UPDATE SET value = excluded.value,
                    version = {_NEXT_VERSION}, session = excluded.session
                RETURNING c.ctid, c.version INTO here, told;
        END IF;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = '{OVERTAKEN}', MESSAGE = each.key;
        END IF;
        r_key := each.key;
        r_version := told;
        r_place := here::text;
        RETURN NEXT;
    END LOOP;
END $$"""

# The rules of `pxrs.core.sequences.judge`, with a producer's last batches read from the log itself:
# no row is written over and over. What retention removes is remembered in `pxrs_log_producers`.
APPEND = f"""
CREATE OR REPLACE FUNCTION @.pxrs_append(
    topics text[], partitions int8[], counts int8[], stamps int8[],
    producers int8[], epochs int8[], sequences int8[], datas bytea[])
RETURNS TABLE (status int8, r_base int8, detail int8)
LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s' AS $$
#variable_conflict use_column
DECLARE
    each record;
    my_topic text;
    my_partition int8;
    my_part int8;
    head int8;
    my_floor int8;
BEGIN
    FOR each IN SELECT * FROM unnest(
            topics, partitions, counts, stamps, producers, epochs, sequences, datas)
            AS u(topic, partition, count, stamp, producer, epoch, sequence, data) LOOP
        IF my_topic IS DISTINCT FROM each.topic
                OR my_partition IS DISTINCT FROM each.partition THEN
            my_topic := each.topic;
            my_partition := each.partition;
            SELECT p.id, p.floor INTO my_part, my_floor FROM @.pxrs_log_partitions p
                WHERE p.topic_id = my_topic AND p.partition = my_partition FOR UPDATE;
            head := NULL;
            IF my_part IS NOT NULL THEN
                SELECT b.next INTO head FROM @.pxrs_log_batches b
                    WHERE b.part = my_part ORDER BY b.base DESC LIMIT 1;
                head := coalesce(head, my_floor);
            END IF;
        END IF;
        status := {APPENDED};
        detail := NULL;
        IF my_part IS NULL THEN
            IF {SEES_OLD} THEN
                RAISE EXCEPTION USING ERRCODE = '{OLD_SNAPSHOT}', MESSAGE = my_topic;
            END IF;
            r_base := NULL;
            SELECT count(*) INTO detail FROM @.pxrs_log_partitions p
                WHERE p.topic_id = my_topic;
            status := CASE detail WHEN 0 THEN {NO_TOPIC} ELSE {NO_PARTITION} END;
        ELSE
            r_base := head;
            IF each.producer >= 0 THEN
                SELECT j.status, j.base, j.detail INTO status, r_base, detail FROM @.pxrs_judge(
                    my_part, each.producer, each.epoch, each.sequence, each.count, head) AS j;
            END IF;
        END IF;
        IF status = {APPENDED} THEN
            INSERT INTO @.pxrs_log_batches VALUES (
                my_part, head, head + each.count, each.stamp, octet_length(each.data) + 8,
                each.producer, each.epoch, each.sequence, int8send(head) || each.data);
            head := head + each.count;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$"""

JUDGE = f"""
CREATE FUNCTION @.pxrs_judge(
    in_part int8, in_producer int8, in_epoch int8, in_sequence int8, in_count int8, head int8)
RETURNS TABLE (status int8, base int8, detail int8)
LANGUAGE plpgsql SET search_path = pg_catalog AS $$
#variable_conflict use_column
DECLARE
    each record;
    newest record;
BEGIN
    base := head;
    FOR each IN
        (SELECT b.epoch::int8 AS epoch, b.sequence::int8 AS sequence, b.base,
                b.next - b.base AS length
            FROM @.pxrs_log_batches b
            WHERE b.part = in_part AND b.producer = in_producer AND b.producer >= 0
            ORDER BY b.base DESC LIMIT 5)
        UNION ALL
        (SELECT p.epoch::int8, u.sequence::int8, u.base, u.length::int8
            FROM @.pxrs_log_producers p, unnest(p.sequences, p.bases, p.lengths)
                AS u(sequence, base, length)
            WHERE p.part = in_part AND p.producer = in_producer)
        ORDER BY 3 DESC LIMIT 5
    LOOP
        IF newest IS NULL THEN
            newest := each;
            IF in_epoch < each.epoch THEN
                status := {FENCED};
                detail := each.epoch;
                RETURN NEXT;
                RETURN;
            END IF;
            detail := CASE WHEN in_epoch > each.epoch THEN 0
                ELSE (each.sequence + each.length) % 2147483648 END;
            EXIT WHEN in_sequence = detail OR in_epoch > each.epoch;
        END IF;
        IF each.epoch = in_epoch AND each.sequence = in_sequence AND each.length = in_count THEN
            status := {DUPLICATE};
            base := each.base;
            RETURN NEXT;
            RETURN;
        END IF;
    END LOOP;
    status := CASE WHEN newest IS NULL OR in_sequence = detail THEN {APPENDED} ELSE {GAP} END;
    RETURN NEXT;
END $$"""

TRIM = """
CREATE FUNCTION @.pxrs_trim(in_part int8, before int8, most int8)
RETURNS TABLE (r_start int8, gone int8)
LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s' AS $$
#variable_conflict use_column
DECLARE
    head int8;
BEGIN
    SELECT p.floor INTO head FROM @.pxrs_log_partitions p WHERE p.id = in_part FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    head := coalesce((SELECT b.next FROM @.pxrs_log_batches b WHERE b.part = in_part
        ORDER BY b.base DESC LIMIT 1), head);
    WITH removed AS (
        DELETE FROM @.pxrs_log_batches b WHERE b.part = in_part AND b.base IN (
            SELECT o.base FROM @.pxrs_log_batches o
            WHERE o.part = in_part AND o.base < before AND o.next <= before
            ORDER BY o.base LIMIT most)
        RETURNING b.producer, b.epoch, b.sequence, b.base, (b.next - b.base)::int4 AS length),
    known AS (
        SELECT * FROM removed WHERE producer >= 0
        UNION ALL
        SELECT p.producer, p.epoch, u.sequence, u.base, u.length
        FROM @.pxrs_log_producers p, unnest(p.sequences, p.bases, p.lengths)
            AS u(sequence, base, length)
        WHERE p.part = in_part AND p.producer IN (SELECT producer FROM removed)),
    ranked AS (
        SELECT *, row_number() OVER w AS rank, first_value(epoch) OVER w AS newest
        FROM known WINDOW w AS (PARTITION BY producer ORDER BY base DESC)),
    kept AS (
        INSERT INTO @.pxrs_log_producers AS p
        SELECT in_part, producer, newest, array_agg(sequence ORDER BY base),
            array_agg(base ORDER BY base), array_agg(length ORDER BY base), clock_timestamp()
        FROM ranked WHERE rank <= 5 AND epoch = newest GROUP BY producer, newest
        ON CONFLICT (part, producer) DO UPDATE SET epoch = excluded.epoch,
            sequences = excluded.sequences, bases = excluded.bases, lengths = excluded.lengths,
            used = excluded.used)
    SELECT count(*) INTO gone FROM removed;
    DELETE FROM @.pxrs_log_producers p
        WHERE p.part = in_part AND p.used < clock_timestamp() - interval '7 days';
    SELECT coalesce(min(b.base), head) INTO r_start FROM @.pxrs_log_batches b
        WHERE b.part = in_part;
    UPDATE @.pxrs_log_partitions p SET start = r_start, floor = head WHERE p.id = in_part;
    RETURN NEXT;
END $$"""

# Whether the connection that held its lock is closed. Under another start of the server that can't
# be told: a restart frees every lock.
_IS_UNLOCKED = """CASE WHEN s.lock IS NOT NULL AND s.started = pg_postmaster_start_time()
        THEN pg_try_advisory_xact_lock_shared(s.lock) ELSE false END"""
_IS_LATE = "s.deadline <= clock_timestamp()"
# Further ahead than it can be, unless the server's clock was set back.
_IS_AHEAD = "s.deadline > clock_timestamp() + s.ttl * interval '1 second'"

# The server's start and, as JSON, the sessions that may be over: id, TTL, deadline, whether it has
# passed, whether the session's connection is closed. See `pxrs.stores.observer`.
SUSPECTS = f"""pg_postmaster_start_time(), (
    SELECT json_agg(json_build_array(o.id, o.ttl, o.deadline, o.late, o.unlocked))::text FROM (
        SELECT s.id, s.ttl, (extract(epoch FROM s.deadline) * 1000000)::int8 AS deadline,
            {_IS_LATE} AS late, {_IS_UNLOCKED} AS unlocked, {_IS_AHEAD} AS ahead
        FROM @.pxrs_sessions s OFFSET 0) o
    WHERE o.late OR o.unlocked OR o.ahead)"""

# Ends sessions, with everything written with them, in one transaction: those whose connection is
# closed, and of `judged` those whose time is still over, or too far ahead.
REAP = f"""
CREATE OR REPLACE FUNCTION @.pxrs_reap(unlocked text[], judged text[])
RETURNS SETOF text
LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s' AS $$
DECLARE
    ended text[];
BEGIN
    -- Whoever renews or writes with it right now is let be: there is a next time.
    WITH locked AS (
        SELECT s.id FROM @.pxrs_sessions s WHERE s.id = ANY (unlocked || judged)
            AND ((s.id = ANY (judged) AND ({_IS_LATE} OR {_IS_AHEAD})) OR {_IS_UNLOCKED})
            ORDER BY s.id FOR UPDATE SKIP LOCKED)
    SELECT array_agg(id) INTO ended FROM locked;
    RETURN QUERY SELECT @.pxrs_end(ended);
END $$"""

# As versions up to 3 had it: it knew by the server's clock since when the caller was in touch.
FORGET_FIRST_REAP = "DROP FUNCTION IF EXISTS @.pxrs_reap(text[], timestamptz, timestamptz)"

# Says what has changed as the bell says it: k and a record's key, q and a queue's name.
END = """
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
END $$"""

# As the first version had it, which knew no queues.
FIRST_END = """
CREATE FUNCTION @.pxrs_end(ids text[])
RETURNS SETOF text
LANGUAGE plpgsql SET search_path = pg_catalog SET lock_timeout = '10s' AS $$
BEGIN
    DELETE FROM @.pxrs_sessions s WHERE s.id = ANY (ids);
    PERFORM 1 FROM @.pxrs_coord c WHERE c.session = ANY (ids) ORDER BY c.key FOR UPDATE;
    RETURN QUERY WITH gone AS (
        DELETE FROM @.pxrs_coord c WHERE c.session = ANY (ids) RETURNING c.key)
        SELECT key FROM gone;
END $$"""

FIRST = (COMMIT, JUDGE, APPEND, TRIM, FIRST_END, REAP)
