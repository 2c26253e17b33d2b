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

from pxrs.stores.mysql import statements
from pxrs.stores.mysql.queues import admin_statements as queue_upkeep_statements
from pxrs.stores.mysql.queues import statements as queue_statements
from pxrs.stores.mysql.schema import metadata

_DIALECT = oracle.dialect()  # type: ignore[no-untyped-call]
_LONGEST_NAME = 30
# Words that can't name a column or table there without quotes.
_RESERVED = {
    "access", "comment", "date", "file", "level", "mode", "number", "option", "public", "raw",
    "resource", "row", "rows", "session", "size", "start", "uid", "user", "validate", "values",
}  # fmt: skip


def compiled(statement: object) -> str:
    return str(statement.compile(dialect=_DIALECT))  # type: ignore[attr-defined]


EVERY = {
    **{f"coord {name}": each for name, each in statements.ALL.items()},
    **{f"queue {name}": each for name, each in queue_statements.ALL.items()},
    **{f"upkeep {name}": each for name, each in queue_upkeep_statements.ALL.items()},
}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_statement_compiles(name: str) -> None:
    text = compiled(EVERY[name])
    locks = "FOR UPDATE" in text
    limits = re.search(r"FETCH FIRST|ROWNUM|DISTINCT|GROUP BY", text)
    assert not (locks and limits), "ORA-02014: rows can't be locked and limited at once"
    for foreign in ("UTC_TIMESTAMP", "ON DUPLICATE", "IGNORE", "FORCE INDEX", "LOCK IN SHARE"):
        assert foreign not in text


def test_taking_skips_what_is_locked_and_is_limited_by_how_much_is_fetched() -> None:
    text = compiled(queue_statements.FRONTS)
    assert text.endswith("FOR UPDATE SKIP LOCKED")
    assert "ORDER BY pxrs_queue_items.grade, pxrs_queue_items.item_id" in text


def test_a_page_is_limited_without_a_lock() -> None:
    text = compiled(statements.LIST_FROM.limit(10))
    assert "FETCH FIRST" in text
    assert "FOR UPDATE" not in text


def test_time_is_the_servers() -> None:
    assert "SYS_EXTRACT_UTC(SYSTIMESTAMP)" in compiled(statements.SUSPECTS)
    assert "NUMTODSINTERVAL(pxrs_sessions.ttl, 'SECOND')" in compiled(statements.RENEW)
    assert "EXTRACT(DAY FROM (SYS_EXTRACT_UTC(SYSTIMESTAMP)" in compiled(queue_statements.NOW)


def test_tables() -> None:
    tables = {table.name: str(CreateTable(table).compile(dialect=_DIALECT)) for table in tables_()}
    kept = {"pxrs_coord", "pxrs_sessions", "pxrs_meta", "pxrs_queues"}
    assert set(tables) == kept | {f"pxrs_queue_{name}" for name in ("items", "commits", "seen")}
    assert "item_key VARCHAR2(1024 CHAR)" in tables["pxrs_queue_items"]
    assert "error_text CLOB" in tables["pxrs_queue_items"]
    assert "name VARCHAR2(1000 CHAR)" in tables["pxrs_coord"]
    assert "body BLOB" in tables["pxrs_coord"]
    assert "deadline TIMESTAMP" in tables["pxrs_sessions"]
    for table in tables_():
        names = [table.name, *(column.name for column in table.columns)]
        assert not {name for name in names if name in _RESERVED}
        assert all(len(name) <= _LONGEST_NAME for name in names)
        for index in table.indexes:
            assert len(str(index.name)) <= _LONGEST_NAME
            assert re.match(
                r"CREATE (UNIQUE )?INDEX", str(CreateIndex(index).compile(dialect=_DIALECT))
            )


def tables_() -> list[Table]:
    return list(metadata.tables.values())
