-- Keys (VARBINARY) are compared byte by byte in UTF-8, which is the order of their code points:
-- collations take "a " for "a", or "A" for "a".

CREATE TABLE IF NOT EXISTS pxrs_coord (
    name VARBINARY(1000) NOT NULL,
    body MEDIUMBLOB,
    version BIGINT NOT NULL,
    session_id VARCHAR(64),
    PRIMARY KEY (name),
    INDEX pxrs_coord_version (version),
    INDEX pxrs_coord_session (session_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS pxrs_sessions (
    id VARCHAR(64) NOT NULL,
    ttl DOUBLE NOT NULL,
    deadline DATETIME(6) NOT NULL,
    holder VARCHAR(200) NOT NULL,
    PRIMARY KEY (id),
    INDEX pxrs_sessions_deadline (deadline)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- One row. `revision` rises with every commit, `removals` with every one that removes a record.
CREATE TABLE IF NOT EXISTS pxrs_meta (
    id INTEGER NOT NULL,
    schema_version INTEGER NOT NULL,
    revision BIGINT NOT NULL,
    removals BIGINT NOT NULL,
    PRIMARY KEY (id)
) ENGINE=InnoDB;

-- One row: a random word, by which a process knows that the database was dropped and made anew.
CREATE TABLE IF NOT EXISTS pxrs_identity (
    id INTEGER NOT NULL,
    word VARCHAR(32) NOT NULL,
    PRIMARY KEY (id)
) ENGINE=InnoDB;

-- `changes` rises whenever there may be something to take that was not there before. A transaction
-- that puts, or changes the front of a lane, locks this row first and keeps it until its commit.
CREATE TABLE IF NOT EXISTS pxrs_queues (
    id BIGINT NOT NULL,
    name VARBINARY(1000) NOT NULL,
    fifo SMALLINT NOT NULL,
    created_ms BIGINT NOT NULL,
    next_item BIGINT NOT NULL,
    changes BIGINT NOT NULL,
    put BIGINT NOT NULL,
    done BIGINT NOT NULL,
    PRIMARY KEY (id),
    UNIQUE INDEX pxrs_queues_name (name)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- A lane is what has to stay in order: the items of a key, or all of a fifo queue. At its front is
-- one item that is ready or delayed, or those that one transaction holds; all others wait.
--
-- `due_ms` says when the item's state may end: a delayed or waiting one can be taken from then on, a
-- held one is free again. One index serves both.
CREATE TABLE IF NOT EXISTS pxrs_queue_items (
    queue_id BIGINT NOT NULL,
    item_id BIGINT NOT NULL,
    state SMALLINT NOT NULL,
    grade BIGINT NOT NULL,
    lane VARBINARY(600),
    item_key VARBINARY(4096),
    due_ms BIGINT NOT NULL,
    deliveries INTEGER NOT NULL,
    suspect SMALLINT NOT NULL,
    most BIGINT,
    session_id VARCHAR(64),
    tx VARBINARY(255),
    put_ms BIGINT NOT NULL,
    taken_ms BIGINT,
    dead_ms BIGINT,
    error_text TEXT,
    body MEDIUMBLOB,
    PRIMARY KEY (queue_id, item_id),
    INDEX pxrs_items_ready (queue_id, state, grade, item_id),
    INDEX pxrs_items_due (queue_id, state, due_ms),
    INDEX pxrs_items_lane (queue_id, lane, state, item_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Changes that were applied, for those who did not hear the answer, and how many items each removed.
-- `n` is the time, and something to tell apart what happens at once.
CREATE TABLE IF NOT EXISTS pxrs_queue_commits (
    session_id VARCHAR(64) NOT NULL,
    n BIGINT NOT NULL,
    tx VARBINARY(255) NOT NULL,
    queue_id BIGINT NOT NULL,
    done BIGINT NOT NULL,
    PRIMARY KEY (session_id, n),
    INDEX pxrs_commits_queue (queue_id),
    INDEX pxrs_commits_tx (session_id, tx)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Dedupe keys, and until when each counts.
CREATE TABLE IF NOT EXISTS pxrs_queue_seen (
    queue_id BIGINT NOT NULL,
    seen_key VARBINARY(600) NOT NULL,
    until_ms BIGINT NOT NULL,
    PRIMARY KEY (queue_id, seen_key),
    INDEX pxrs_seen_until (queue_id, until_ms)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
