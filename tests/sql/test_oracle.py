"""Oracle: compiled, not executed. No server can be had here; what is known of one is held to.

Each statement is compiled as SQLAlchemy would send it, and checked for what a real server is
known to refuse.
"""

from __future__ import annotations

import re

import pytest
from sqlalchemy import Table
from sqlalchemy.dialects import oracle
from sqlalchemy.schema import CreateIndex, CreateTable

from pxrs.stores.sql import statements
from pxrs.stores.sql.schema import metadata

_DIALECT = oracle.dialect()  # type: ignore[no-untyped-call]
_LONGEST_NAME = 30
# Words that can't name a column or table there without quotes.
_RESERVED = {
    "access", "comment", "date", "file", "level", "mode", "number", "option", "public", "raw",
    "resource", "row", "rows", "session", "size", "start", "uid", "user", "validate", "values",
}  # fmt: skip


def compiled(statement: object) -> str:
    return str(statement.compile(dialect=_DIALECT))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(statements.ALL))
def test_every_statement_compiles(name: str) -> None:
    text = compiled(statements.ALL[name])
    locks = "FOR UPDATE" in text
    limits = re.search(r"FETCH FIRST|ROWNUM|DISTINCT|GROUP BY", text)
    assert not (locks and limits), "ORA-02014: rows can't be locked and limited at once"
    assert "UTC_TIMESTAMP" not in text
    assert "ON DUPLICATE" not in text


def test_a_page_is_limited_without_a_lock() -> None:
    text = compiled(statements.LIST_FROM.limit(10))
    assert "FETCH FIRST" in text
    assert "FOR UPDATE" not in text


def test_time_is_the_servers() -> None:
    assert "SYS_EXTRACT_UTC(SYSTIMESTAMP)" in compiled(statements.GET)
    assert "NUMTODSINTERVAL(pxrs_sessions.ttl, 'SECOND')" in compiled(statements.RENEW)


def test_tables() -> None:
    tables = {table.name: str(CreateTable(table).compile(dialect=_DIALECT)) for table in tables_()}
    assert set(tables) == {"pxrs_coord", "pxrs_sessions", "pxrs_meta"}
    assert "name VARCHAR2(1000 CHAR)" in tables["pxrs_coord"]
    assert "body BLOB" in tables["pxrs_coord"]
    assert "deadline TIMESTAMP" in tables["pxrs_sessions"]
    for table in tables_():
        names = [table.name, *(column.name for column in table.columns)]
        assert not {name for name in names if name in _RESERVED}
        assert all(len(name) <= _LONGEST_NAME for name in names)
        for index in table.indexes:
            assert len(str(index.name)) <= _LONGEST_NAME
            assert "CREATE INDEX" in str(CreateIndex(index).compile(dialect=_DIALECT))


def tables_() -> list[Table]:
    return list(metadata.tables.values())
