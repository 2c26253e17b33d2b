"""The tables, and the time as the database tells it.

Keys are compared byte by byte in UTF-8, which is the order of their code points: databases'
collations take "a " for "a", or "A" for "a".
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Delete,
    Dialect,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Update,
)
from sqlalchemy.dialects import mysql, oracle
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import ColumnElement, FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

# 2: queues.
SCHEMA = 3
LONGEST_KEY = 1000
# Oracle's text has 4,000 bytes at most.
_LONGEST_TEXT = 1024


class KeyText(TypeDecorator[str]):
    """Text of so many bytes that is exact: bytes where the database's text is not."""

    impl = String
    cache_ok = True

    def __init__(self, length: int = LONGEST_KEY) -> None:
        super().__init__(length)
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.VARBINARY(self.length))
        return dialect.type_descriptor(String(min(self.length, _LONGEST_TEXT)))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        if value is None or dialect.name not in ("mysql", "mariadb"):
            return value
        return value.encode()

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        return value.decode() if isinstance(value, bytes) else value


class Body(TypeDecorator[bytes]):
    """A record's value. Oracle takes no bytes at all for NULL."""

    impl = LargeBinary
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.MEDIUMBLOB())
        return dialect.type_descriptor(LargeBinary())

    def process_result_value(self, value: Any, dialect: Dialect) -> bytes:
        return b"" if value is None else bytes(value)


_MOMENT = (
    DateTime()
    .with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
    .with_variant(oracle.TIMESTAMP(), "oracle")
)
_SECONDS: Double[float] = Double()

metadata = MetaData()

RECORDS = Table(
    "pxrs_coord",
    metadata,
    Column("name", KeyText, primary_key=True),
    Column("body", Body),
    Column("version", BigInteger, nullable=False),
    Column("session_id", String(64)),
    Index("pxrs_coord_session", "session_id"),
    Index("pxrs_coord_version", "version"),
    mysql_engine="InnoDB",
    mysql_default_charset="utf8mb4",
)

SESSIONS = Table(
    "pxrs_sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("ttl", _SECONDS, nullable=False),
    Column("deadline", _MOMENT, nullable=False),
    Column("holder", String(200), nullable=False),
    Index("pxrs_sessions_deadline", "deadline"),
    mysql_engine="InnoDB",
    mysql_default_charset="utf8mb4",
)

# One row. `revision` rises with every commit, `removals` with every one that removes a record.
META = Table(
    "pxrs_meta",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("removals", BigInteger, nullable=False),
    mysql_engine="InnoDB",
)


# What an operator sees: who owns which partition, and how far it is.
PARTITIONS_VIEW = """CREATE OR REPLACE VIEW pxrs_partitions AS
    SELECT SUBSTRING_INDEX(SUBSTRING(claim.k, 8), '/', 1) AS `group`, topic.name AS topic,
        CAST(SUBSTRING_INDEX(claim.k, '/', -1) AS UNSIGNED) AS `partition`,
        JSON_VALUE(claim.v, '$.name') AS owner,
        CAST(JSON_VALUE(claim.v, '$.checkpoint') AS SIGNED) AS checkpoint,
        CAST(JSON_VALUE(claim.v, '$.epoch') AS SIGNED) AS epoch,
        CAST(JSON_VALUE(claim.v, '$.at_ms') AS SIGNED) AS heartbeat
    FROM (SELECT CONVERT(name USING utf8mb4) AS k, CONVERT(body USING utf8mb4) AS v
            FROM pxrs_coord WHERE name > 'claims/' AND name < 'claims0') claim
    JOIN (SELECT SUBSTRING(CONVERT(name USING utf8mb4), 8) AS name,
                JSON_VALUE(CONVERT(body USING utf8mb4), '$.id') AS id
            FROM pxrs_coord WHERE name > 'topics/' AND name < 'topics0') topic
        ON topic.id = SUBSTRING_INDEX(SUBSTRING_INDEX(claim.k, '/', -2), '/', 1)"""


class utc_now(FunctionElement[Any]):  # noqa: N801 - reads as a function of SQL
    """When the statement began, by the database's clock."""

    type = DateTime()
    inherit_cache = True


class utc_later(FunctionElement[Any]):  # noqa: N801
    """So many seconds after `utc_now`."""

    type = DateTime()
    inherit_cache = True


@compiles(utc_now, "mysql")
@compiles(utc_now, "mariadb")
def _mysql_now(element: Any, compiler: Any, **options: Any) -> str:
    return "UTC_TIMESTAMP(6)"


@compiles(utc_now, "oracle")
def _oracle_now(element: Any, compiler: Any, **options: Any) -> str:
    return "SYS_EXTRACT_UTC(SYSTIMESTAMP)"


@compiles(utc_later, "mysql")
@compiles(utc_later, "mariadb")
def _mysql_later(element: Any, compiler: Any, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    return f"(UTC_TIMESTAMP(6) + INTERVAL ROUND(1000000 * {seconds}) MICROSECOND)"


@compiles(utc_later, "oracle")
def _oracle_later(element: Any, compiler: Any, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    return f"(SYS_EXTRACT_UTC(SYSTIMESTAMP) + NUMTODSINTERVAL({seconds}, 'SECOND'))"


class now_ms(FunctionElement[int]):  # noqa: N801
    """`utc_now` as milliseconds since 1970."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "mysql")
@compiles(now_ms, "mariadb")
def _mysql_now_ms(element: Any, compiler: Any, **options: Any) -> str:
    return "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000)"


@compiles(now_ms, "oracle")
def _oracle_now_ms(element: Any, compiler: Any, **options: Any) -> str:
    since = "(SYS_EXTRACT_UTC(SYSTIMESTAMP) - TIMESTAMP '1970-01-01 00:00:00')"
    parts = (("DAY", 86_400_000), ("HOUR", 3_600_000), ("MINUTE", 60_000), ("SECOND", 1000))
    whole = " + ".join(f"EXTRACT({name} FROM {since}) * {ms}" for name, ms in parts)
    return f"FLOOR({whole})"


def later(seconds: ColumnElement[float] | Any) -> utc_later:
    """So many seconds from now."""
    return utc_later(seconds)


def reading(statement: Any, *, latest: bool) -> Any:
    """A plain read, or one that sees the latest state in a transaction with an old snapshot."""
    return statement.with_for_update(read=True) if latest else statement


class KeyedUpdate(Update):
    """An update of rows that are named by their key: it looks at those, and locks no others.

    For a short table MariaDB prefers to look at all of it, and waits for what others have locked.
    """

    inherit_cache = True


class KeyedDelete(Delete):
    """See `KeyedUpdate`."""

    inherit_cache = True


@compiles(KeyedUpdate, "mysql")
@compiles(KeyedUpdate, "mariadb")
def _keyed_update(element: Any, compiler: Any, **options: Any) -> str:
    text: str = compiler.visit_update(element, **options)
    return text.replace(" SET ", " FORCE INDEX (PRIMARY) SET ", 1)


@compiles(KeyedDelete, "mysql")
@compiles(KeyedDelete, "mariadb")
def _keyed_delete(element: Any, compiler: Any, **options: Any) -> str:
    text: str = compiler.visit_delete(element, **options)
    table = element.table.name
    return text.replace(
        f"DELETE FROM {table}", f"DELETE {table} FROM {table} FORCE INDEX (PRIMARY)", 1
    )
