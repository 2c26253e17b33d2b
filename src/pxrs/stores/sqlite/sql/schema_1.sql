CREATE TABLE pxrs_meta (name TEXT PRIMARY KEY, value);
CREATE TABLE pxrs_coord (
        key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, session TEXT);
CREATE INDEX pxrs_coord_session ON pxrs_coord (session) WHERE session IS NOT NULL;
-- `start` and `floor` change only when old batches go: the end of a partition is the end of
-- its last batch, or `floor` once there is none.
CREATE TABLE pxrs_log_partitions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, topic_id TEXT NOT NULL, partition INTEGER NOT NULL,
        start INTEGER NOT NULL, floor INTEGER NOT NULL, UNIQUE (topic_id, partition));
CREATE TABLE pxrs_log_batches (
        part INTEGER NOT NULL, base INTEGER NOT NULL, next INTEGER NOT NULL,
        max_timestamp INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL);
-- Covering: retention, timestamps and bounds never touch the blobs.
CREATE UNIQUE INDEX pxrs_log_index
        ON pxrs_log_batches (part, base, next, max_timestamp, size);
CREATE TABLE pxrs_log_producers (
        part INTEGER NOT NULL, producer INTEGER NOT NULL, state BLOB NOT NULL,
        used INTEGER NOT NULL, PRIMARY KEY (part, producer));
INSERT INTO pxrs_meta VALUES ('schema', 1), ('revision', 0);
