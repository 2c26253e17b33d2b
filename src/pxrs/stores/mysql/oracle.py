"""Oracle: translates the statements for MariaDB and sends them through python-oracledb.

Rendered and checked by tests, not executed: it was never run against a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pxrs.errors import ConfigError
from pxrs.stores.mysql.connection import Dialect
from pxrs.stores.mysql.schema import TABLES as MYSQL_TABLES
from pxrs.stores.mysql.statements import NOW_MS

_NOW = "SYS_EXTRACT_UTC(SYSTIMESTAMP)"
_SINCE_1970 = f"({_NOW} - TIMESTAMP '1970-01-01 00:00:00')"
_UNITS = {"DAY": 86_400_000, "HOUR": 3_600_000, "MINUTE": 60_000, "SECOND": 1000}
_ORACLE_NOW_MS = " + ".join(
    f"EXTRACT({unit} FROM {_SINCE_1970}) * {_UNITS[unit]}" for unit in _UNITS
)
# A table or an index of that name exists.
THERE_ALREADY = "ORA-00955"
# A column of text has 4,000 bytes at most.
_LONGEST_TEXT = 1024

_WORDS = (
    (re.escape(NOW_MS), f"FLOOR({_ORACLE_NOW_MS})"),
    (r"INTERVAL ROUND\(1000000 \* (\S+)\) MICROSECOND", r"NUMTODSINTERVAL(\1, 'SECOND')"),
    (r"UTC_TIMESTAMP\(6\)", _NOW),
    (r" FORCE INDEX \(\w+\)", ""),
    (r"DELETE (\w+) FROM \1", r"DELETE FROM \1"),
    (r"INSERT IGNORE", "INSERT"),
    (r"LOCK IN SHARE MODE", "FOR UPDATE"),
    # Rows can't be locked and limited at once (ORA-02014): they are locked as they are fetched.
    (r" LIMIT \S+(\s+FOR UPDATE)", r"\1"),
    (r" LIMIT (%\(\w+\)s|\d+)", r" FETCH FIRST \1 ROWS ONLY"),
)
_TYPES = (
    (r"IF NOT EXISTS ", ""),
    (r" ENGINE=.*", ""),
    (r"VARBINARY\(4096\)", f"VARCHAR2({_LONGEST_TEXT} CHAR)"),
    (r"VARBINARY\((\d+)\)", r"VARCHAR2(\1 CHAR)"),
    (r"VARCHAR\((\d+)\)", r"VARCHAR2(\1 CHAR)"),
    (r"MEDIUMBLOB", "BLOB"),
    (r"\bTEXT\b", "CLOB"),
    (r"DATETIME\(6\)", "TIMESTAMP"),
    (r"BIGINT", "NUMBER(19)"),
    (r"DOUBLE", "DOUBLE PRECISION"),
)
_INDEX = re.compile(r",\s+(UNIQUE )?INDEX (\w+) (\([^)]*\))")


@cache
def rendered(statement: str) -> str:
    """A statement for MariaDB as Oracle takes it; values are named as before."""
    for ours, theirs in _WORDS:
        statement = re.sub(ours, theirs, statement)
    return statement


# Values go by position: their names may be reserved words.
ORACLE = Dialect(rendered, ":{}")


def _tables() -> Iterator[str]:
    """Tables, then their indexes, which MariaDB makes with them."""
    for table in MYSQL_TABLES:
        name = table.split("(")[0].split()[-1]
        indexes = _INDEX.findall(table)
        text = _INDEX.sub("", table)
        for ours, theirs in _TYPES:
            text = re.sub(ours, theirs, text)
        yield text
        for unique, index, columns in indexes:
            yield f"CREATE {unique}INDEX {index} ON {name} {columns}"


TABLES = list(_tables())


def connect(options: Mapping[str, Any], *, autocommit: bool) -> Any:
    """A connection of python-oracledb that returns large values as bytes and text."""
    try:
        import oracledb
    except ModuleNotFoundError as error:
        raise ConfigError("the driver oracledb is not installed: pip install oracledb") from error
    oracledb.defaults.fetch_lobs = False
    driver = oracledb.connect(**options)
    driver.autocommit = autocommit
    return driver
