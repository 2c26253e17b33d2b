-- What a new file gets: what all steps (`schema_<N>.sql`) make together, character for character.
CREATE TABLE pxrs_meta (name TEXT PRIMARY KEY, value);
CREATE TABLE pxrs_coord (
        key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, session TEXT);
CREATE INDEX pxrs_coord_session ON pxrs_coord (session) WHERE session IS NOT NULL;
CREATE TABLE pxrs_log_partitions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, topic_id TEXT NOT NULL, partition INTEGER NOT NULL,
        start INTEGER NOT NULL, floor INTEGER NOT NULL, UNIQUE (topic_id, partition));
CREATE TABLE pxrs_log_batches (
        part INTEGER NOT NULL, base INTEGER NOT NULL, next INTEGER NOT NULL,
        max_timestamp INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL);
CREATE UNIQUE INDEX pxrs_log_index
        ON pxrs_log_batches (part, base, next, max_timestamp, size);
CREATE TABLE pxrs_log_producers (
        part INTEGER NOT NULL, producer INTEGER NOT NULL, state BLOB NOT NULL,
        used INTEGER NOT NULL, PRIMARY KEY (part, producer));
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
CREATE TABLE pxrs_queues (
        id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, fifo INTEGER NOT NULL,
        created INTEGER NOT NULL, next INTEGER NOT NULL, put INTEGER NOT NULL,
        discarded INTEGER NOT NULL);
CREATE TABLE pxrs_queue_items (
        id INTEGER PRIMARY KEY, queue INTEGER NOT NULL, state INTEGER NOT NULL,
        rank INTEGER NOT NULL, lane TEXT, key TEXT, visible INTEGER NOT NULL,
        deliveries INTEGER NOT NULL, suspect INTEGER NOT NULL, most INTEGER,
        session TEXT, tx TEXT, lock_until REAL,
        put_ms INTEGER NOT NULL, taken_ms INTEGER, dead_ms INTEGER,
        error TEXT NOT NULL, body BLOB);
CREATE INDEX pxrs_queue_ready ON pxrs_queue_items (queue, rank) WHERE state = 0;
CREATE INDEX pxrs_queue_delayed ON pxrs_queue_items (queue, visible) WHERE state = 1;
CREATE INDEX pxrs_queue_waiting ON pxrs_queue_items (queue, lane) WHERE state = 3;
CREATE INDEX pxrs_queue_fronts ON pxrs_queue_items (queue, lane)
        WHERE state < 3 AND lane IS NOT NULL;
CREATE INDEX pxrs_queue_dead ON pxrs_queue_items (queue) WHERE state = 4;
CREATE TABLE pxrs_queue_bodies (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE pxrs_queue_seen (
        queue INTEGER NOT NULL, key TEXT NOT NULL, until INTEGER NOT NULL,
        PRIMARY KEY (queue, key));
CREATE INDEX pxrs_queue_seen_until ON pxrs_queue_seen (queue, until);
CREATE INDEX pxrs_queue_held ON pxrs_queue_items (queue, session) WHERE state = 2;
CREATE TABLE pxrs_queue_units (
        session TEXT NOT NULL, unit TEXT NOT NULL, state INTEGER NOT NULL,
        PRIMARY KEY (session, unit)) WITHOUT ROWID;
CREATE TABLE pxrs_age (ms INTEGER NOT NULL, read INTEGER);
CREATE TABLE pxrs_queue_ended (
        session TEXT PRIMARY KEY, age INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO pxrs_meta VALUES ('schema', 6), ('revision', 0);
INSERT INTO pxrs_age VALUES (0, NULL);
