"""Oracle: rendered and checked, not executed. No server can be had here.

Each statement is rendered as python-oracledb gets it, and checked for what a real server is known
to refuse.
"""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from pxrs.stores.mysql import schema, statements
from pxrs.stores.mysql.oracle import ORACLE, TABLES, rendered
from pxrs.stores.mysql.queues import statements as queue_statements
from pxrs.stores.rows import DEAD, DELAYED, HELD, READY

_LONGEST_NAME = 30
# Words that can't name a column or table there without quotes.
_RESERVED = {
    "access", "comment", "date", "file", "level", "mode", "number", "option", "public", "raw",
    "resource", "row", "rows", "session", "size", "start", "uid", "user", "validate", "values",
}  # fmt: skip
# What only MariaDB and MySQL understand.
_FOREIGN = re.compile(
    r"`|%|@@|\bLIMIT\b|UTC_TIMESTAMP|TIMESTAMPDIFF|MICROSECOND|\bDIV\b|ON DUPLICATE|IGNORE"
    r"|FORCE INDEX|LOCK IN SHARE|DELETE (?!FROM)|\{|\}"
)
_TABLES = re.findall(r"CREATE TABLE (\w+)", "\n".join(TABLES))
_COLUMNS = set(re.findall(r"^    ([a-z_]+) ", "\n".join(TABLES), re.MULTILINE))


def named(module: ModuleType) -> dict[str, str]:
    """A module's statements: what is written in capitals and begins with a verb."""
    verbs = ("SELECT", "INSERT", "UPDATE", "DELETE")
    found = {name: value for name, value in vars(module).items() if name.isupper()}
    return {name: value for name, value in found.items() if str(value).startswith(verbs)}


def both_ways(statement: str) -> list[str]:
    return [queue_statements.standing(statement, states) for states in ([READY, DEAD], [DELAYED])]


_OF_SCHEMA = ("FOUND_VERSION", "FIRST_META", "FIRST_IDENTITY", "IDENTITY", "SET_VERSION")
EVERY = {
    f"{module.__name__.removeprefix('pxrs.stores.mysql.')} {name} {number}": text
    for module in (statements, queue_statements)
    for name, statement in named(module).items()
    if not name.startswith("_")
    for number, text in enumerate(both_ways(statement) if "{" in statement else [statement])
} | {name: getattr(schema, name) for name in _OF_SCHEMA}


def test_every_statement_is_found() -> None:
    assert len(EVERY) > 75
    assert {name.split()[0] for name in EVERY} > {"statements", "queues.statements"}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_statement_is_rendered(name: str) -> None:
    names = re.findall(r"%\((\w+)\)s", EVERY[name])
    lists = {"ids", "keys", "names", "lanes", "gone", "states", "units", "numbers"}
    values = {each: ["a", "b"] if each in lists else "a" for each in names} | {"pairs": [(1, 2)]}
    text, given = ORACLE.one(EVERY[name], values)
    assert not _FOREIGN.search(text)
    locks = "FOR UPDATE" in text
    limits = re.search(r"FETCH FIRST|ROWNUM|DISTINCT|GROUP BY", text)
    assert not (locks and limits), "ORA-02014: rows can't be locked and limited at once"
    # Values go by position, so that none is named by a reserved word: ORA-01745.
    assert re.findall(r":(\w+)", re.sub(r"'[^']*'", "", text)) == [
        str(number + 1) for number in range(len(given))
    ]
    assert text.count("(") == text.count(")")
    froms = re.findall(r"\bFROM \w", text.replace("DELETE FROM ", ""))
    assert text.count("SELECT") == len(froms), "ORA-00923: every SELECT is from a table, or DUAL"
    for table in re.findall(r"(?:FROM|INTO|UPDATE|JOIN) (\w+)", text):
        assert table in {*_TABLES, "DUAL", "SKIP"}


def test_taking_skips_what_is_locked_and_is_limited_by_how_much_is_fetched() -> None:
    text = rendered(queue_statements.FRONTS)
    assert text.endswith("ORDER BY grade, item_id FOR UPDATE SKIP LOCKED")


def test_lists_become_as_many_values() -> None:
    held = {"queue": 7, "session": "s", "tx": "t", "ids": [1, 2], "pairs": [(1, 3), (2, 4)]}
    text, values = ORACLE.one(queue_statements.REMOVE, held)
    assert text.startswith(
        "DELETE FROM pxrs_queue_items WHERE queue_id = :1 AND item_id IN (:2, :3)"
        f" AND (item_id, deliveries) IN ((:4, :5), (:6, :7)) AND state = {HELD}"
        " AND session_id = :8 AND tx = :9"
    )
    assert values == [7, 1, 2, 1, 3, 2, 4, "s", "t"]


def test_a_page_is_limited_without_a_lock() -> None:
    text = rendered(statements.LIST_FROM)
    assert text.endswith("ORDER BY name FETCH FIRST %(limit)s ROWS ONLY")
    assert "FOR UPDATE" not in text


def test_time_is_the_servers() -> None:
    assert "SYS_EXTRACT_UTC(SYSTIMESTAMP)" in rendered(statements.SUSPECTS)
    assert "NUMTODSINTERVAL(ttl, 'SECOND')" in rendered(statements.RENEW)
    assert "NUMTODSINTERVAL(%(ttl)s, 'SECOND')" in rendered(statements.OPEN)
    assert "EXTRACT(DAY FROM (SYS_EXTRACT_UTC(SYSTIMESTAMP)" in rendered(queue_statements.NOW)


def test_tables() -> None:
    kept = {"pxrs_coord", "pxrs_sessions", "pxrs_meta", "pxrs_identity", "pxrs_queues"}
    assert set(_TABLES) == kept | {f"pxrs_queue_{name}" for name in ("items", "commits", "seen")}
    tables = {text.split()[2]: text for text in TABLES if text.startswith("CREATE TABLE")}
    assert "item_key VARCHAR2(1024 CHAR)" in tables["pxrs_queue_items"]
    assert "error_text CLOB" in tables["pxrs_queue_items"]
    assert "name VARCHAR2(1000 CHAR)" in tables["pxrs_coord"]
    assert "body BLOB" in tables["pxrs_coord"]
    assert "deadline TIMESTAMP" in tables["pxrs_sessions"]
    indexes = [text for text in TABLES if text not in tables.values()]
    made = re.compile(r"CREATE (?:UNIQUE )?INDEX (\w+) ON (\w+) \(([\w, ]+)\)")
    found = [made.fullmatch(text) for text in indexes]
    assert len(found) == 10
    for index in found:
        assert index is not None
        assert index[2] in tables
        assert set(index[3].split(", ")) <= _COLUMNS
    names = [*_TABLES, *_COLUMNS, *(index[1] for index in found if index)]
    assert not {name for name in names if name in _RESERVED}
    assert all(len(name) <= _LONGEST_NAME for name in names)
    for text in tables.values():
        assert re.fullmatch(r"CREATE TABLE \w+ \(.*PRIMARY KEY \([\w, ]+\)\n\)", text, re.DOTALL)
        for foreign in ("ENGINE", "BIGINT", "VARBINARY", "MEDIUMBLOB", "IF NOT", " INDEX "):
            assert foreign not in text
