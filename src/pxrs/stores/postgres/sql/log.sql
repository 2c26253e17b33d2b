CREATE OR REPLACE FUNCTION @.pxrs_judge(
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
END $$;

-- The rules of `pxrs.core.sequences.judge`, with a producer's last batches read from the log
-- itself: no row is written over and over. `pxrs_log_producers` keeps the batches that retention
-- removes.
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
END $$;

CREATE OR REPLACE FUNCTION @.pxrs_trim(in_part int8, before int8, most int8)
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
END $$;
