"""Examines a PostgreSQL server, with the rights of a role that owns one schema."""

from __future__ import annotations

import time

from pxrs.stores.findings import Finding, judge_clock, note, ok, problem, warning
from pxrs.stores.postgres.database import Database

_LONG = 60
_SETTINGS = """SELECT current_setting('server_version'), current_setting('synchronous_commit'),
    current_setting('fsync'), current_setting('full_page_writes'), pg_is_in_recovery(),
    current_setting('autovacuum'), current_setting('max_connections')::int,
    (SELECT count(*) FROM pg_stat_activity),
    (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit')"""
_SYNC = "set synchronous_commit=on for this role: ALTER ROLE … SET synchronous_commit = on"
_LONG_ONES = """SELECT pid, coalesce(usename::text, ''), coalesce(application_name, ''), state,
    extract(epoch FROM clock_timestamp() - xact_start)::float
    FROM pg_stat_activity WHERE xact_start < clock_timestamp() - %s * interval '1 s'
    AND pid <> pg_backend_pid() AND backend_type = 'client backend' ORDER BY xact_start LIMIT 5"""


def findings(database: Database, long_after: float = _LONG) -> list[Finding]:
    """Return everything that can be found out without changing anything."""
    version, commit, fsync, pages, standby, vacuum, most, used, usual = database.read(_SETTINGS)[0]
    server = [
        ok("version", f"PostgreSQL {version}, schema {database.schema} {database.versions[1]}"),
        _server(standby),
    ]
    if standby:
        # Nothing else can be tried on a standby, not even a wake-up.
        return server
    return [
        *server,
        *_durability(commit, usual, fsync, pages),
        _clock(database),
        _notifications(database),
        *_long_transactions(database, long_after),
        _vacuum(vacuum),
        _connections(most, used),
    ]


def _server(standby: bool) -> Finding:
    if standby:
        return problem(
            "server",
            "this is a standby, a read replica or a reader endpoint: it can't be written",
            "connect to the primary",
        )
    return ok("server", "this is the primary")


def _durability(commit: str, usual: str, fsync: str, pages: str) -> list[Finding]:
    """`commit` is synchronous_commit on pxrs' own connections, `usual` on others of the role."""
    found = []
    if commit == "off":
        found.append(
            warning(
                "durability",
                "synchronous_commit=off, by the URL or behind a pooler: a crash of the server may "
                "take acknowledged messages, items and checkpoints",
                _SYNC,
            )
        )
    elif usual == "off":
        found.append(
            warning(
                "durability",
                "synchronous_commit=off: pxrs waits for the disk all the same, but a crash of the "
                "server may take units of work on connections of your own",
                _SYNC,
            )
        )
    for name, value in (("fsync", fsync), ("full_page_writes", pages)):
        if value != "on":
            found.append(
                warning(
                    "durability",
                    f"{name}={value}: a power cut can damage the whole database",
                    f"set {name}=on in postgresql.conf, unless all of it may be lost",
                )
            )
    return found or [ok("durability", f"synchronous_commit={commit}, fsync=on")]


def _clock(database: Database) -> Finding:
    before = time.time()
    theirs: float = database.read("SELECT extract(epoch FROM clock_timestamp())::float")[0][0]
    return judge_clock(theirs - (before + time.time()) / 2)


def _notifications(database: Database) -> Finding:
    if database.pooled:
        return warning(
            "wake-ups",
            "there is a pooler in between: NOTIFY does not get through, so pxrs polls instead, and "
            "the death of a process is noticed by the clock only",
            "let pxrs connect to the server itself; its connections are few",
        )
    listener, sender = database.connect(), database.connect()
    channel = f"pxrs_doctor_{listener.info.backend_pid}"
    try:
        listener.execute(f"LISTEN {channel}".encode())
        started = time.monotonic()
        sender.execute(f"NOTIFY {channel}".encode())
        heard = list(listener.notifies(timeout=5.0, stop_after=1))
        took = time.monotonic() - started
    finally:
        database.drop(listener)
        database.drop(sender)
    if not heard:
        return warning(
            "wake-ups",
            "a NOTIFY did not arrive within 5 s: pxrs polls instead, which is slower",
            "look for a proxy between here and the server",
        )
    return ok("wake-ups", f"NOTIFY arrives after {took * 1000:.1f} ms")


def _long_transactions(database: Database, after: float) -> list[Finding]:
    rows = database.read(_LONG_ONES, (after,))
    if not rows:
        return [ok("long transactions", f"none is older than {after:g} s")]
    return [
        warning(
            "long transactions",
            f"{user or 'a user'} ({application or 'no name'}, pid {pid}, {state}) has had a "
            f"transaction open for {age:.0f} s: nothing that died since can be vacuumed",
            f"end it, or: SELECT pg_terminate_backend({pid})",
        )
        for pid, user, application, state, age in rows
    ]


def _vacuum(setting: str) -> Finding:
    if setting != "on":
        return warning("vacuum", "autovacuum is off: tables grow without end", "set autovacuum=on")
    return ok("vacuum", "autovacuum is on")


def _connections(most: int, used: int) -> Finding:
    says = f"{used} of {most} connections are in use"
    if used > 0.8 * most:
        return note("connections", says, "raise max_connections, or use connections=… in the URL")
    return ok("connections", says)
