"""The tables and their version."""

from __future__ import annotations

import re
from importlib.resources import files

# 2: queues.
VERSION = 3
LONGEST_KEY = 1000
LONGEST_LANE = 600

SERVER = "SELECT VERSION() FROM DUAL"
FOUND_VERSION = "SELECT schema_version FROM pxrs_meta"
FIRST_META = f"""INSERT INTO pxrs_meta (id, schema_version, revision, removals)
    VALUES (1, {VERSION}, 0, 0)"""
SET_VERSION = "UPDATE pxrs_meta SET schema_version = %(new)s WHERE schema_version = %(old)s"


def _read(name: str) -> str:
    """A file of SQL beside this module, without its comments."""
    text = files(__package__).joinpath(name).read_text("utf-8")
    return re.sub(r"^--.*\n", "", text, flags=re.MULTILINE).strip()


TABLES = [each.strip() for each in _read("tables.sql").split(";") if each.strip()]
PARTITIONS_VIEW = _read("partitions_view.sql")


def is_missing_table(error: BaseException | None) -> bool:
    """Whether a driver's error says that there is no such table."""
    return error is not None and (error.args[:1] == (1146,) or "ORA-00942" in str(error))
