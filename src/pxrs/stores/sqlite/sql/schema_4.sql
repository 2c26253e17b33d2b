-- What was handled is what was put and is neither there nor discarded: so a commit need not count
-- it. The index of held items is narrower, and what was applied lies in one tree instead of two.
ALTER TABLE pxrs_queues RENAME COLUMN done TO discarded;
UPDATE pxrs_queues SET discarded = max(0, put - discarded -
        (SELECT count(*) FROM pxrs_queue_items i WHERE i.queue = pxrs_queues.id));
DROP INDEX pxrs_queue_held;
CREATE INDEX pxrs_queue_held ON pxrs_queue_items (queue, session) WHERE state = 2;
ALTER TABLE pxrs_queue_commits RENAME TO pxrs_queue_commits_3;
CREATE TABLE pxrs_queue_commits (
        session TEXT NOT NULL, slot INTEGER NOT NULL, tx TEXT NOT NULL,
        PRIMARY KEY (session, slot)) WITHOUT ROWID;
INSERT INTO pxrs_queue_commits SELECT session, slot, tx FROM pxrs_queue_commits_3;
DROP TABLE pxrs_queue_commits_3;
