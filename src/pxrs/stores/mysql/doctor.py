"""Examines a MariaDB or MySQL server: clusters, durability, clock, queues, long transactions."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pxrs.errors import StoreError
from pxrs.stores.findings import Finding, judge_clock, note, ok, problem, warning
from pxrs.stores.mysql.database import Database
from pxrs.stores.mysql.queues.admin import LIMITS

_LONG = 60
# Values of innodb_flush_log_at_trx_commit: synced with every commit (3 is MariaDB's own), and only
# handed to the operating system.
_SYNCED, _WRITTEN = (1, 3), 2
_SETTINGS = """SELECT @@version, @@innodb_flush_log_at_trx_commit, @@sync_binlog, @@log_bin,
    @@read_only OR @@innodb_read_only"""
# Variables that only some servers have.
_GALERA = """SHOW GLOBAL VARIABLES WHERE Variable_name = 'wsrep_on' AND Value = 'ON'
    OR Variable_name = 'wsrep_provider' AND Value NOT IN ('', 'none')"""
# MySQL's own replication of groups of servers; MariaDB has none of these variables.
_GROUP = """SHOW GLOBAL VARIABLES WHERE Variable_name IN ('group_replication_group_name',
    'group_replication_single_primary_mode', 'group_replication_consistency')"""
_MEMBER = """SELECT member_state FROM performance_schema.replication_group_members
    WHERE member_id = @@server_uuid"""
_LONG_ONES = """SELECT trx_mysql_thread_id, timestampdiff(SECOND, trx_started, now())
    FROM information_schema.innodb_trx
    WHERE trx_started <= now() - INTERVAL %(after)s SECOND
    AND trx_mysql_thread_id <> connection_id() ORDER BY trx_started LIMIT 5"""


def findings(database: Database, long_after: int = _LONG) -> list[Finding]:
    """Examine MariaDB or MySQL; for Oracle there are no checks."""
    if database.is_oracle:
        return [note("version", "pxrs has no checks for Oracle")]
    ((version, flush, binlog, logs, read_only),) = database.read(_SETTINGS)
    found = [
        ok("version", str(version)),
        _server(database, read_only),
        _durability(flush, binlog, logs),
        _clock(database),
        _queues(database),
    ]
    return found + _long_transactions(database, long_after)


def _server(database: Database, read_only: int) -> Finding:
    if len(database.read(_GALERA)) == 2:
        return problem(
            "server",
            "this is a node of a Galera cluster: two nodes can each accept a write of the same "
            "record, and a node may read a record that another has replaced, so fences do not hold",
            "keep pxrs in a server with one primary and replicas, in PostgreSQL, or in etcd",
        )
    if read_only:
        return problem(
            "server",
            "this server is read-only: a replica or a reader endpoint",
            "connect to the primary",
        )
    group = {str(name): str(value) for name, value in database.read(_GROUP)}
    if group.get("group_replication_group_name"):
        return judge_group(group, _state_in_group(database))
    return ok("server", "this server takes writes, and is no node of a Galera cluster")


def _state_in_group(database: Database) -> str | None:
    """The state of this server in its group; None if this user may not see it."""
    try:
        rows = database.read(_MEMBER)
    except StoreError:
        return None
    return str(rows[0][0]) if rows else "OFFLINE"


def judge_group(variables: Mapping[str, str], state: str | None) -> Finding:
    """Judges a server of MySQL's Group Replication that takes writes.

    A secondary of a group with one primary is read-only, and found by that.
    """
    if state == "OFFLINE":
        return ok("server", "this server takes writes; its Group Replication does not run")
    if variables.get("group_replication_single_primary_mode") != "ON":
        return problem(
            "server",
            "this server is in Group Replication with several primaries: each of them accepts "
            "writes, and may read a record that another has replaced, so fences do not hold",
            "let the group have one primary: "
            "SELECT group_replication_switch_to_single_primary_mode()",
        )
    if state not in ("ONLINE", None):
        return problem(
            "server",
            f"this server is {state} in its Group Replication, and does not have all commits yet",
            "connect to the primary, through a router that knows it",
        )
    if variables.get("group_replication_consistency") == "EVENTUAL":
        return warning(
            "server",
            "group_replication_consistency=EVENTUAL: after a fail-over the new primary may answer "
            "from before the last commits, until it has applied them",
            "set group_replication_consistency=BEFORE_ON_PRIMARY_FAILOVER on all of its servers",
        )
    return ok("server", "this server takes writes: the primary of its Group Replication")


def _durability(flush: int, binlog: int, logs: int) -> Finding:
    if flush not in _SYNCED:
        what = "a power cut" if flush == _WRITTEN else "a crash of the server"
        return warning(
            "durability",
            f"innodb_flush_log_at_trx_commit={flush}: {what} may take the last commits",
            "set innodb_flush_log_at_trx_commit=1",
        )
    if logs and binlog != 1 and flush == 1:
        return warning(
            "durability",
            f"sync_binlog={binlog} with a binary log: InnoDB leaves the last sync of a commit to "
            "that log, so a power cut may take the last commits, here and on replicas",
            "set sync_binlog=1",
        )
    return ok("durability", "every commit is synced")


def _queues(database: Database) -> Finding:
    """Whether items can be taken, and the largest of them put."""
    if not database.skips_locked:
        return warning(
            "queues",
            "this server has no SKIP LOCKED: nothing can be taken from queues",
            "upgrade to MariaDB 10.6, or MySQL 8.0",
        )
    ((packet,),) = database.read("SELECT @@GLOBAL.max_allowed_packet")
    if packet < 2 * LIMITS.body_bytes:
        return note(
            "queues",
            f"max_allowed_packet={packet}: items and records of over {packet // 2} bytes may be "
            "refused, because a byte may be sent as two digits",
            "set max_allowed_packet=16M",
        )
    return ok("queues", "items can be taken side by side (SKIP LOCKED)")


def _clock(database: Database) -> Finding:
    before = time.time()
    ((theirs,),) = database.read("SELECT unix_timestamp(sysdate(6))")
    return judge_clock(float(theirs) - (before + time.time()) / 2)


def _long_transactions(database: Database, after: int) -> list[Finding]:
    try:
        rows = database.read(_LONG_ONES, after=after)
    except Exception as error:  # noqa: BLE001 - a role without PROCESS may not see transactions
        return [note("long transactions", f"this user may not see transactions: {error}")]
    return [
        warning(
            "long transactions",
            f"thread {thread} has had a transaction open for {age} s",
            f"end it, or: KILL {thread}",
        )
        for thread, age in rows
    ] or [ok("long transactions", f"none is older than {after} s")]
