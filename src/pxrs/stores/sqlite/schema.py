"""Tables, and how an older file becomes a newer one.

Everything pxrs keeps in a file has the prefix `pxrs_`, so it can live beside the caller's own
tables. Plain rowid tables: WITHOUT ROWID on blobs is twice as slow to insert.
"""

from __future__ import annotations

import sqlite3

from pxrs.errors import ConfigError, SchemaMismatch

VERSION = 6
OLDEST_SQLITE = (3, 35, 0)

_V1 = (
    "CREATE TABLE pxrs_meta (name TEXT PRIMARY KEY, value)",
    """CREATE TABLE pxrs_coord (
        key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, session TEXT)""",
    "CREATE INDEX pxrs_coord_session ON pxrs_coord (session) WHERE session IS NOT NULL",
    # `start` and `floor` change only when old batches go: the end of a partition is the end of
    # its last batch, or `floor` once there is none.
    """CREATE TABLE pxrs_log_partitions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, topic_id TEXT NOT NULL, partition INTEGER NOT NULL,
        start INTEGER NOT NULL, floor INTEGER NOT NULL, UNIQUE (topic_id, partition))""",
    """CREATE TABLE pxrs_log_batches (
        part INTEGER NOT NULL, base INTEGER NOT NULL, next INTEGER NOT NULL,
        max_timestamp INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL)""",
    # Covering: retention, timestamps and bounds never touch the blobs.
    """CREATE UNIQUE INDEX pxrs_log_index
        ON pxrs_log_batches (part, base, next, max_timestamp, size)""",
    """CREATE TABLE pxrs_log_producers (
        part INTEGER NOT NULL, producer INTEGER NOT NULL, state BLOB NOT NULL,
        used INTEGER NOT NULL, PRIMARY KEY (part, producer))""",
    "INSERT INTO pxrs_meta VALUES ('schema', 1), ('revision', 0)",
)

# For people and dashboards; pxrs itself never reads it. A value is JSON in a blob, which
# SQLite's JSON functions refuse or take for their own binary form: it has to be cast. A key is
# `claims/<group>/<topic id>/<partition>`, and '0' is the character after '/'. Claims outlive
# their group and their topic; here they do not show then.
_V2 = (
    """CREATE VIEW pxrs_partitions AS
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
        WHERE EXISTS (SELECT 1 FROM pxrs_coord WHERE key = 'group/' || "group")""",
)

# An item's id is its queue's id and its number in it, so a queue's items lie together. States:
# 0 ready, 1 delayed, 2 held, 3 waiting behind another of its lane, 4 dead. Every index is
# partial: an item stands in those of its state only, and nothing gets slower with the backlog.
# Large bodies lie apart: a change of state rewrites the whole row.
_V3 = (
    """CREATE TABLE pxrs_queues (
        id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, fifo INTEGER NOT NULL,
        created INTEGER NOT NULL, next INTEGER NOT NULL, put INTEGER NOT NULL,
        done INTEGER NOT NULL)""",
    """CREATE TABLE pxrs_queue_items (
        id INTEGER PRIMARY KEY, queue INTEGER NOT NULL, state INTEGER NOT NULL,
        rank INTEGER NOT NULL, lane TEXT, key TEXT, visible INTEGER NOT NULL,
        deliveries INTEGER NOT NULL, suspect INTEGER NOT NULL, most INTEGER,
        session TEXT, tx TEXT, lock_until REAL,
        put_ms INTEGER NOT NULL, taken_ms INTEGER, dead_ms INTEGER,
        error TEXT NOT NULL, body BLOB)""",
    "CREATE INDEX pxrs_queue_ready ON pxrs_queue_items (queue, rank) WHERE state = 0",
    "CREATE INDEX pxrs_queue_delayed ON pxrs_queue_items (queue, visible) WHERE state = 1",
    "CREATE INDEX pxrs_queue_held ON pxrs_queue_items (queue, session, tx) WHERE state = 2",
    "CREATE INDEX pxrs_queue_waiting ON pxrs_queue_items (queue, lane) WHERE state = 3",
    """CREATE INDEX pxrs_queue_fronts ON pxrs_queue_items (queue, lane)
        WHERE state < 3 AND lane IS NOT NULL""",
    "CREATE INDEX pxrs_queue_dead ON pxrs_queue_items (queue) WHERE state = 4",
    "CREATE TABLE pxrs_queue_bodies (id INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    """CREATE TABLE pxrs_queue_commits (
        session TEXT NOT NULL, slot INTEGER NOT NULL, tx TEXT NOT NULL,
        PRIMARY KEY (session, slot))""",
    """CREATE TABLE pxrs_queue_seen (
        queue INTEGER NOT NULL, key TEXT NOT NULL, until INTEGER NOT NULL,
        PRIMARY KEY (queue, key))""",
    "CREATE INDEX pxrs_queue_seen_until ON pxrs_queue_seen (queue, until)",
)

# What was handled is what was put and is neither there nor discarded: so a commit need not count
# it. The index of held items is narrower, and what was applied lies in one tree instead of two.
_V4 = (
    "ALTER TABLE pxrs_queues RENAME COLUMN done TO discarded",
    """UPDATE pxrs_queues SET discarded = max(0, put - discarded -
        (SELECT count(*) FROM pxrs_queue_items i WHERE i.queue = pxrs_queues.id))""",
    "DROP INDEX pxrs_queue_held",
    "CREATE INDEX pxrs_queue_held ON pxrs_queue_items (queue, session) WHERE state = 2",
    "ALTER TABLE pxrs_queue_commits RENAME TO pxrs_queue_commits_3",
    """CREATE TABLE pxrs_queue_commits (
        session TEXT NOT NULL, slot INTEGER NOT NULL, tx TEXT NOT NULL,
        PRIMARY KEY (session, slot)) WITHOUT ROWID""",
    "INSERT INTO pxrs_queue_commits SELECT session, slot, tx FROM pxrs_queue_commits_3",
    "DROP TABLE pxrs_queue_commits_3",
)

# A unit of work is remembered until its committer knows what became of it, not by a ring of the
# latest ones; one that was given up (state 1) is refused when it comes.
_V5 = (
    """CREATE TABLE pxrs_queue_units (
        session TEXT NOT NULL, unit TEXT NOT NULL, state INTEGER NOT NULL,
        PRIMARY KEY (session, unit)) WITHOUT ROWID""",
    "INSERT OR IGNORE INTO pxrs_queue_units SELECT session, tx, 0 FROM pxrs_queue_commits",
    "DROP TABLE pxrs_queue_commits",
)

# How long the file has been in use, at least, in ms, and what the host's monotonic clock showed
# then: see `age.py`. By that producers are forgotten, not by a wall clock, and units of sessions
# that have ended: how old the file was when that was first seen.
_V6 = (
    "CREATE TABLE pxrs_age (ms INTEGER NOT NULL, read INTEGER)",
    "INSERT INTO pxrs_age VALUES (0, NULL)",
    """CREATE TABLE pxrs_queue_ended (
        session TEXT PRIMARY KEY, age INTEGER NOT NULL) WITHOUT ROWID""",
    "UPDATE pxrs_log_producers SET used = 0",
)

# From version N to N+1. Each step runs in the transaction that records the new version.
_MIGRATIONS: dict[int, tuple[str, ...]] = {0: _V1, 1: _V2, 2: _V3, 3: _V4, 4: _V5, 5: _V6}


def found_version(connection: sqlite3.Connection) -> int:
    """The schema version of the file; 0 if pxrs has never used it."""
    try:
        row = connection.execute("SELECT value FROM pxrs_meta WHERE name = 'schema'").fetchone()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return 0
        raise
    return int(row[0]) if row else 0


def check_usable(connection: sqlite3.Connection, path: str) -> None:
    """Refuse a file that this version can't work with."""
    version = found_version(connection)
    if version > VERSION:
        raise SchemaMismatch(
            f"{path} was written by a newer pxrs (schema {version}, this one knows {VERSION}); "
            "upgrade pxrs to open it"
        )
    encoding = connection.execute("PRAGMA encoding").fetchone()[0]
    if encoding != "UTF-8":
        raise ConfigError(
            f"{path} keeps its text as {encoding}, which does not sort by code points; "
            "copy it into a database made with PRAGMA encoding='UTF-8', or use another file"
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the file to this version. Inside a write transaction; the caller commits."""
    for step in range(found_version(connection), VERSION):
        for statement in _MIGRATIONS[step]:
            connection.execute(statement)
        connection.execute("UPDATE pxrs_meta SET value = ? WHERE name = 'schema'", (step + 1,))
