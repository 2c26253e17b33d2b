"""A table's database behind a SQLAlchemy engine of the user's own.

Connections come from the engine, with all that it adds to them (credentials, TLS, a `creator`), and
leave its pool: pxrs keeps them as long as the source is open. Other processes only have the
engine's URL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pxrs.config import SqlSettings
from pxrs.errors import ConfigError, InvalidRequest, MissingExtra
from pxrs.redaction import remember
from pxrs.sources.tables.api import Columns, TableDatabase
from pxrs.urls import is_secret

if TYPE_CHECKING:
    from sqlalchemy import Engine

# The drivers whose connections pxrs can read with.
_DRIVERS = {
    "sqlite": "pysqlite",
    "postgresql": "psycopg",
    "mysql": "pymysql",
    "mariadb": "pymysql",
}


def check_engine(engine: object) -> None:
    """Refuse an object that is no engine, or an engine whose connections can't be used here."""
    name = type(engine).__name__
    is_one = all(hasattr(engine, each) for each in ("raw_connection", "dialect", "url"))
    if not is_one or hasattr(engine, "sync_engine"):
        raise InvalidRequest(
            f"engine must be a sqlalchemy.Engine, made by create_engine(…), got {name}"
        )
    dialect: Any = getattr(engine, "dialect", None)
    wanted = _DRIVERS.get(dialect.name)
    if wanted is None:
        raise InvalidRequest(
            f"engine must be one of {', '.join(_DRIVERS)}, got {dialect.name}; pxrs does not know "
            "how to read its tables without skipping rows"
        )
    if dialect.driver != wanted:
        raise InvalidRequest(
            f"engine must use the driver {wanted}, got {dialect.driver}: "
            f"create_engine('{dialect.name}+{wanted}://…'), or give url= instead"
        )


def recorded_url(engine: Engine) -> str:
    """The URL by which other processes find the database; without a password and the driver."""
    remember(None if engine.url.password is None else str(engine.url.password))
    url = engine.url.set(drivername=engine.url.get_backend_name())
    url = url.difference_update_query([name for name in url.query if is_secret(name)])
    # `set` leaves a password as it is if it gets None.
    return url._replace(password=None).render_as_string(hide_password=False)


def open_on_engine(engine: Engine, columns: Columns) -> TableDatabase:
    """Read the table on connections of this engine."""
    connect = _connecting(engine)
    name, place = engine.dialect.name, recorded_url(engine)
    if name == "sqlite":
        from pxrs.sources.tables.sqlite import SqliteTable

        path = engine.url.database
        if not path or path == ":memory:" or path.startswith("file:"):
            raise ConfigError(
                f"the engine's database must be a file, got {path or ':memory:'}: other processes "
                "could not read what is in memory"
            )
        return SqliteTable(path, columns, connect=connect)
    try:
        if name == "postgresql":
            from pxrs.sources.tables.postgres import PostgresTable

            return PostgresTable("", columns, connect=connect, place=place)
        from pxrs.sources.tables.mysql import MysqlTable
    except ImportError as error:
        extra = "postgres" if name == "postgresql" else "sql"
        raise MissingExtra(f"{name}://", extra) from error
    settings = SqlSettings(url=place, shown=place, dialect="mysql", options={})
    return MysqlTable(settings, columns, connect=connect)


def _connecting(engine: Engine) -> Callable[[], Any]:
    from sqlalchemy.exc import DBAPIError

    def connect() -> Any:
        try:
            pooled = engine.raw_connection()
        except DBAPIError as error:
            # The driver's own error: the code that reads the table knows those.
            raise (error.orig or error) from error
        driver = pooled.driver_connection
        pooled.detach()
        return driver

    return connect
