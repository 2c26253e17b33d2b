-- How long the file has been in use, at least, in ms, and what the host's monotonic clock showed
-- then: see `age.py`. By that producers are forgotten, not by a wall clock, and units of sessions
-- that have ended: how old the file was when that was first seen.
CREATE TABLE pxrs_age (ms INTEGER NOT NULL, read INTEGER);
INSERT INTO pxrs_age VALUES (0, NULL);
CREATE TABLE pxrs_queue_ended (
        session TEXT PRIMARY KEY, age INTEGER NOT NULL) WITHOUT ROWID;
UPDATE pxrs_log_producers SET used = 0;
