-- An item's id is its queue's id and its number in it, so a queue's items lie together. States:
-- 0 ready, 1 delayed, 2 held, 3 waiting behind another of its lane, 4 dead. Every index is
-- partial: an item stands in those of its state only, and nothing gets slower with the backlog.
-- Large bodies lie apart: a change of state rewrites the whole row.
CREATE TABLE pxrs_queues (
        id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, fifo INTEGER NOT NULL,
        created INTEGER NOT NULL, next INTEGER NOT NULL, put INTEGER NOT NULL,
        done INTEGER NOT NULL);
CREATE TABLE pxrs_queue_items (
        id INTEGER PRIMARY KEY, queue INTEGER NOT NULL, state INTEGER NOT NULL,
        rank INTEGER NOT NULL, lane TEXT, key TEXT, visible INTEGER NOT NULL,
        deliveries INTEGER NOT NULL, suspect INTEGER NOT NULL, most INTEGER,
        session TEXT, tx TEXT, lock_until REAL,
        put_ms INTEGER NOT NULL, taken_ms INTEGER, dead_ms INTEGER,
        error TEXT NOT NULL, body BLOB);
CREATE INDEX pxrs_queue_ready ON pxrs_queue_items (queue, rank) WHERE state = 0;
CREATE INDEX pxrs_queue_delayed ON pxrs_queue_items (queue, visible) WHERE state = 1;
CREATE INDEX pxrs_queue_held ON pxrs_queue_items (queue, session, tx) WHERE state = 2;
CREATE INDEX pxrs_queue_waiting ON pxrs_queue_items (queue, lane) WHERE state = 3;
CREATE INDEX pxrs_queue_fronts ON pxrs_queue_items (queue, lane)
        WHERE state < 3 AND lane IS NOT NULL;
CREATE INDEX pxrs_queue_dead ON pxrs_queue_items (queue) WHERE state = 4;
CREATE TABLE pxrs_queue_bodies (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE pxrs_queue_commits (
        session TEXT NOT NULL, slot INTEGER NOT NULL, tx TEXT NOT NULL,
        PRIMARY KEY (session, slot));
CREATE TABLE pxrs_queue_seen (
        queue INTEGER NOT NULL, key TEXT NOT NULL, until INTEGER NOT NULL,
        PRIMARY KEY (queue, key));
CREATE INDEX pxrs_queue_seen_until ON pxrs_queue_seen (queue, until);
