"""The tables of work queues.

A lane is what has to stay in order: the items of a key, or all of a fifo queue. At its front is
one item that is ready or delayed, or those that one transaction holds; all others wait.

`due_ms` of an item says when its state may end: a delayed or waiting one can be had from then on,
a held one is free again. One index serves both.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Index, Integer, SmallInteger, String, Table, Text

from pxrs.stores.mysql.schema import Body, KeyText, metadata

# A hold without a deadline ends then.
NEVER = 2**62
_NAME_BYTES = 1000
LANE_BYTES = 600
_TX_BYTES = 255
_KEY_BYTES = 4096
_OPTIONS: dict[str, Any] = {"mysql_engine": "InnoDB", "mysql_default_charset": "utf8mb4"}

# `changes` rises whenever there may be something to take that was not there before. Whoever puts,
# or changes the front of a lane, locks this row first and keeps it until its commit.
QUEUES = Table(
    "pxrs_queues",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", KeyText(_NAME_BYTES), nullable=False),
    Column("fifo", SmallInteger, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("next_item", BigInteger, nullable=False),
    Column("changes", BigInteger, nullable=False),
    Column("put", BigInteger, nullable=False),
    Column("done", BigInteger, nullable=False),
    Index("pxrs_queues_name", "name", unique=True),
    **_OPTIONS,
)

ITEMS = Table(
    "pxrs_queue_items",
    metadata,
    Column("queue_id", BigInteger, primary_key=True, autoincrement=False),
    Column("item_id", BigInteger, primary_key=True, autoincrement=False),
    Column("state", SmallInteger, nullable=False),
    Column("grade", BigInteger, nullable=False),
    Column("lane", KeyText(LANE_BYTES)),
    Column("item_key", KeyText(_KEY_BYTES)),
    Column("due_ms", BigInteger, nullable=False),
    Column("deliveries", Integer, nullable=False),
    Column("suspect", SmallInteger, nullable=False),
    Column("most", BigInteger),
    Column("session_id", String(64)),
    Column("tx", KeyText(_TX_BYTES)),
    Column("put_ms", BigInteger, nullable=False),
    Column("taken_ms", BigInteger),
    Column("dead_ms", BigInteger),
    Column("error_text", Text),
    Column("body", Body),
    Index("pxrs_items_ready", "queue_id", "state", "grade", "item_id"),
    Index("pxrs_items_due", "queue_id", "state", "due_ms"),
    Index("pxrs_items_lane", "queue_id", "lane", "state", "item_id"),
    **_OPTIONS,
)

# Changes that were applied, for whoever did not hear the answer, and how many items each removed.
# `n` is the time, and something to tell apart what happens at once.
COMMITS = Table(
    "pxrs_queue_commits",
    metadata,
    Column("session_id", String(64), primary_key=True),
    Column("n", BigInteger, primary_key=True, autoincrement=False),
    Column("tx", KeyText(_TX_BYTES), nullable=False),
    Column("queue_id", BigInteger, nullable=False),
    Column("done", BigInteger, nullable=False),
    Index("pxrs_commits_tx", "session_id", "tx"),
    Index("pxrs_commits_queue", "queue_id"),
    **_OPTIONS,
)

# Dedupe keys, and until when each counts.
SEEN = Table(
    "pxrs_queue_seen",
    metadata,
    Column("queue_id", BigInteger, primary_key=True, autoincrement=False),
    Column("seen_key", KeyText(LANE_BYTES), primary_key=True),
    Column("until_ms", BigInteger, nullable=False),
    Index("pxrs_seen_until", "queue_id", "until_ms"),
    **_OPTIONS,
)
