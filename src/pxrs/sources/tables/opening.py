"""Opens a table's database by its URL. Drivers are imported only when they are needed."""

from __future__ import annotations

from pxrs.config import (
    parse_url,
    postgres_settings,
    split_url,
    sql_settings,
    sqlite_settings,
)
from pxrs.errors import ConfigError, MissingExtra
from pxrs.sources.tables.api import Columns, TableDatabase
from pxrs.urls import public


def open_table_database(url: str, columns: Columns) -> TableDatabase:
    """Connect to the database at this URL; if it names several places, to the main one."""
    parsed = parse_url(split_url(url).main)
    scheme = parsed.scheme.partition("+")[0]
    if scheme == "sqlite":
        from pxrs.sources.tables.sqlite import SqliteTable

        return SqliteTable(parsed.place, columns, sqlite_settings(parsed.options).busy_timeout)
    if scheme in ("postgresql", "postgres"):
        try:
            from pxrs.sources.tables.postgres import PostgresTable
        except ImportError as error:
            raise MissingExtra("postgresql://", "postgres") from error
        return PostgresTable(postgres_settings(parsed).conninfo, columns)
    if scheme in ("mysql", "mariadb"):
        try:
            from pxrs.sources.tables.mysql import MysqlTable
        except ImportError as error:
            raise MissingExtra(f"{scheme}://", "sql") from error
        return MysqlTable(sql_settings(parsed), columns)
    raise ConfigError(
        f"{public(url)} has no tables; give the URL of the database that has {columns.table!r}: "
        "Table(…, url='postgresql://…')"
    )
