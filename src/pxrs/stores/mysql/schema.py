"""The tables and their version."""

from __future__ import annotations

from pxrs.stores.sql_files import statements

# 2: queues. 4: the store's identity.
VERSION = 4
LONGEST_KEY = 1000
LONGEST_LANE = 600

SERVER = "SELECT VERSION(), @@GLOBAL.max_allowed_packet"
FOUND_VERSION = "SELECT schema_version FROM pxrs_meta"
FIRST_META = f"""INSERT INTO pxrs_meta (id, schema_version, revision, removals)
    VALUES (1, {VERSION}, 0, 0)"""
FIRST_IDENTITY = "INSERT INTO pxrs_identity (id, word) VALUES (1, %(word)s)"
IDENTITY = "SELECT word FROM pxrs_identity"
SET_VERSION = "UPDATE pxrs_meta SET schema_version = %(new)s WHERE schema_version = %(old)s"


TABLES = list(statements(__package__, "tables"))
(PARTITIONS_VIEW,) = statements(__package__, "partitions_view")


def is_missing_table(error: BaseException | None) -> bool:
    """Whether a driver's error means that there is no such table."""
    return error is not None and (error.args[:1] == (1146,) or "ORA-00942" in str(error))
