"""Tables and functions in a schema of their own, and the migration of an older schema.

`sql/schema_<N>.sql` has the step from version N-1 to N of the tables, the other files there have
the functions, which every migration creates again.

Rows that are written all the time stay HOT: pages keep room for the next version, and no index
holds a column that changes. The log is only ever appended to: no row is written twice there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from pxrs.errors import ConfigError, SchemaMismatch, StoreReadOnly, quoted
from pxrs.stores.postgres import functions
from pxrs.stores.postgres.queues import functions as queue_functions
from pxrs.stores.sql_files import statements

VERSION = 5
OLDEST_SERVER = 13_00_00
DEFAULT_SCHEMA = "pxrs"
_LONGEST_NAME = 63

# The files in `sql/` with functions, and the constants that these need.
_FUNCTIONS = (
    *((name, vars(functions)) for name in ("coord", "log", "sessions")),
    *(
        (f"queues_{name}", vars(queue_functions))
        for name in ("forget", "taking", "key_order", "committing", "changing", "upkeep", "restore")
    ),
)


def check_schema_name(name: str) -> str:
    """Refuse a name that PostgreSQL would not keep as it is."""
    if not name or len(name.encode()) > _LONGEST_NAME or not name.isprintable() or '"' in name:
        raise ConfigError(
            f"schema must be a name of 1 to {_LONGEST_NAME} characters, got {quoted(name)}"
        )
    if name.startswith("pg_"):
        raise ConfigError(f"schema must not start with pg_ (reserved by PostgreSQL), got {name!r}")
    return name


def in_schema(statement: str, schema: str) -> str:
    """The statement with `@.` replaced by the schema."""
    return statement.replace("@.", f'"{schema}".')


def found_version(connection: psycopg.Connection[Any], schema: str) -> int:
    """The version of the schema's tables; 0 if pxrs has never used the schema."""
    row = connection.execute(
        "SELECT to_regclass(%s) IS NOT NULL", (in_schema("@.pxrs_meta", schema),)
    ).fetchone()
    if row is None or not row[0]:
        return 0
    row = connection.execute(
        in_schema("SELECT value FROM @.pxrs_meta WHERE name = 'schema'", schema)
    ).fetchone()
    return int(row[0]) if row else 0


def refuse_newer(version: int, schema: str, place: str) -> None:
    """Refuse a schema that only a newer pxrs understands."""
    if version > VERSION:
        raise SchemaMismatch(
            f"schema {schema!r} of {place} was made by a newer pxrs (version {version}, this one "
            f"knows {VERSION}); upgrade pxrs to use it"
        )


def migrate(
    connection: psycopg.Connection[Any], schema: str, place: str, to: int = VERSION
) -> tuple[int, int]:
    """Bring the schema to this version, or an older one; returns the versions before and after.

    One process at a time does it, in one transaction. A role that owns the schema needs no
    right to create one.
    """
    if connection.info.server_version < OLDEST_SERVER:
        raise ConfigError(f"PostgreSQL {connection.info.server_version // 10000} is too old")
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (schema,))
        _refuse_encoding(connection, place)
        exists = connection.execute(
            "SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)
        ).fetchone()
        if not exists:
            _create(connection, schema, place)
        before = found_version(connection, schema)
        refuse_newer(before, schema, place)
        for statement in steps(before, to):
            connection.execute(in_schema(statement, schema))
        if before < to:
            connection.execute(
                in_schema("UPDATE @.pxrs_meta SET value = %s WHERE name = 'schema'", schema),
                (str(to),),
            )
    return before, max(before, to)


def steps(before: int, to: int) -> Iterator[str]:
    """Yields the statements from one version to another: tables step by step, then all functions.

    An older version, which only tests ask for, gets its tables only.
    """
    for version in range(before + 1, to + 1):
        yield from statements(__package__, f"schema_{version}")
    if before < to == VERSION:
        for name, constants in _FUNCTIONS:
            yield from statements(__package__, name, constants)


def _create(connection: psycopg.Connection[Any], schema: str, place: str) -> None:
    try:
        connection.execute(f'CREATE SCHEMA "{schema}"')
    except psycopg.errors.InsufficientPrivilege as error:
        user = connection.info.user
        raise StoreReadOnly(
            f"{place} has no schema {schema!r}, and {user!r} may not make one; let an "
            f'administrator run: CREATE SCHEMA "{schema}" AUTHORIZATION "{user}"'
        ) from error


def _refuse_encoding(connection: psycopg.Connection[Any], place: str) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise ConfigError(
            f"{place} keeps its text as {encoding}, which can't hold every key; use a database "
            "made with ENCODING 'UTF8'"
        )
