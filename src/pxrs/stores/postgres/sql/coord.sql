-- A check reads with a lock. First everything is locked and checked, then everything is written:
-- so a failed check returns the records as they were, and nothing has to be undone.
--
-- `places`: where the caller last saw a row (ctid). A row that is written all the time leaves dead
-- versions behind, and while some old transaction keeps them from being removed, every search by
-- key has to pass all of them. A read by place does not. A place that no longer fits does no harm:
-- the key is compared too, and if it differs the row is searched by key.
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
    revision := {NEXT_VERSION};
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
                    version = {NEXT_VERSION}, session = excluded.session
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
END $$;
