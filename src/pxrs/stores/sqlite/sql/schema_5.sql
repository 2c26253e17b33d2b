-- A unit of work is remembered until its committer knows what became of it, not by a ring of the
-- latest ones; one that was given up (state 1) is refused when it comes.
CREATE TABLE pxrs_queue_units (
        session TEXT NOT NULL, unit TEXT NOT NULL, state INTEGER NOT NULL,
        PRIMARY KEY (session, unit)) WITHOUT ROWID;
INSERT OR IGNORE INTO pxrs_queue_units SELECT session, tx, 0 FROM pxrs_queue_commits;
DROP TABLE pxrs_queue_commits;
