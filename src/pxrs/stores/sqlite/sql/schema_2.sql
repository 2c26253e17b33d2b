-- For people and dashboards; pxrs itself never reads it. A value is JSON in a blob, which
-- SQLite's JSON functions refuse or take for their own binary form: it has to be cast. A key is
-- `claims/<group>/<topic id>/<partition>`, and '0' is the character after '/'. Claims outlive
-- their group and their topic; here they do not show then.
CREATE VIEW pxrs_partitions AS
        WITH
        claims (rest, record) AS (
            SELECT substr(key, 8), CAST(value AS TEXT) FROM pxrs_coord
            WHERE key > 'claims/' AND key < 'claims0'),
        places ("group", place, record) AS (
            SELECT substr(rest, 1, instr(rest, '/') - 1), substr(rest, instr(rest, '/') + 1), record
            FROM claims),
        topics (name, id) AS (
            SELECT substr(key, 8), json_extract(CAST(value AS TEXT), '$.id') FROM pxrs_coord
            WHERE key > 'topics/' AND key < 'topics0')
        SELECT "group", topics.name AS topic,
            CAST(substr(place, instr(place, '/') + 1) AS INTEGER) AS partition,
            json_extract(record, '$.name') AS owner,
            json_extract(record, '$.checkpoint') AS checkpoint,
            json_extract(record, '$.epoch') AS epoch,
            json_extract(record, '$.at_ms') AS heartbeat
        FROM places JOIN topics ON topics.id = substr(place, 1, instr(place, '/') - 1)
        WHERE EXISTS (SELECT 1 FROM pxrs_coord WHERE key = 'group/' || "group");
