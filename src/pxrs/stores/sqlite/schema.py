"""Tables, and the migration of older files.

Everything pxrs keeps in a file has the prefix `pxrs_`, so it can live beside the caller's own
tables. Plain rowid tables: WITHOUT ROWID on blobs is twice as slow to insert.

`sql/schema.sql` makes a new file at once, `sql/schema_<N>.sql` has the step from version N-1 to N.
Both end in the same schema. SQLite keeps the text of statements that make a table as it is, so
their indentation stays too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from pxrs.errors import ConfigError, SchemaMismatch
from pxrs.stores.sql_files import statements

VERSION = 6
OLDEST_SQLITE = (3, 35, 0)


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
    found = found_version(connection)
    if not found:
        for statement in statements(__package__, "schema"):
            connection.execute(statement)
        return
    for version in range(found + 1, VERSION + 1):
        for statement in step_to(version):
            connection.execute(statement)
        connection.execute("UPDATE pxrs_meta SET value = ? WHERE name = 'schema'", (version,))


def step_to(version: int) -> Iterator[str]:
    """Yields the statements that migrate a file from the version before to this one."""
    return statements(__package__, f"schema_{version}")
