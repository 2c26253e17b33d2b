"""URL → stores. Backends are imported only when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pxrs.config import parse_url, refuse_url_options, split_url, sqlite_settings
from pxrs.errors import ConfigError, MissingExtra
from pxrs.stores.api import Atomic, CoordStore, LogStore, QueueStore, Stores
from pxrs.stores.composite import NO_MESSAGES, CompositeStores
from pxrs.stores.findings import Finding, warning
from pxrs.urls import StoreUrl, public


class Opened(NamedTuple):
    """The stores that one URL opens: all of them, or only coordination, or only logs."""

    close: Callable[[], None]
    coord: CoordStore | None = None
    log: LogStore | None = None
    queues: QueueStore | None = None
    whole: Stores | None = None
    # Examines the engine: see `pxrs.stores.findings`.
    findings: Callable[[], list[Finding]] = list
    # One commit of coordination and queues, where messages are kept elsewhere anyway.
    atomic: Callable[[Any], AbstractContextManager[Atomic]] | None = None


def open_stores(url: str, *, coord: str | None = None, log: str | None = None) -> Stores:
    """Open what the URL names, creating it if need be; `coord` and `log` replace parts of it.

    One text can name all of it: `"sqlite:///app.db coord=etcd://host:2379"`.
    """
    parts = split_url(url, coord, log)
    opened: list[Opened] = []
    try:
        main = _open(parts.main, opened)
        if main.whole is not None and parts.coord is None and parts.log is None:
            return main.whole
        of_coord = main if parts.coord is None else _open(parts.coord, opened)
        of_log = main if parts.log is None else _open(parts.log, opened)
        if of_coord.coord is None:
            raise ConfigError(
                f"{_place(parts.coord or parts.main)} keeps messages only; say where coordination "
                f"is kept: '{_place(parts.main)} coord=etcd://host:2379'"
            )
        if of_log.log is None and (parts.log is not None or of_coord.queues is None):
            raise ConfigError(NO_MESSAGES.format(_place(parts.log or parts.main)))
    except BaseException:
        for each in opened:
            each.close()
        raise
    return CompositeStores(
        parts.whole,
        of_coord.coord,
        of_log.log,
        of_coord.queues,
        [each.close for each in opened],
        of_coord.atomic,
    )


def require_stores(url: str, *, coord: str | None = None, log: str | None = None) -> None:
    """Raises `ConfigError` if opening would create a file: the path may be mistyped."""
    for place in split_url(url, coord, log).urls():
        parsed = parse_url(place)
        if parsed.scheme == "sqlite" and not Path(parsed.place).exists():
            raise ConfigError(
                f"there is no store at {_place(place)}; is the path right? "
                "Creating a topic there, or putting an item, creates the store"
            )


class Migrated(NamedTuple):
    """The versions of a store's tables before and after; None where there are no versions."""

    before: int | None = None
    after: int | None = None


def migrate_stores(url: str, *, coord: str | None = None, log: str | None = None) -> list[Migrated]:
    """Bring every place that the URL names to this version of pxrs, creating what is not there.

    Opening a store does that too; this is for a role that may change tables where others may not.
    """
    done = []
    for place in split_url(url, coord, log).urls():
        parsed = parse_url(place)
        if parsed.scheme in ("postgresql", "postgres"):
            from pxrs.config import postgres_settings

            settings = postgres_settings(parsed)
            with _needing("postgresql://", "postgres"):
                from pxrs.stores.postgres.database import migrate
            done.append(Migrated(*migrate(settings.conninfo, settings.schema)))
        else:
            _opener(parsed)(parsed).close()
            done.append(Migrated())
    return done


@contextmanager
def _needing(what: str, extra: str) -> Iterator[None]:
    """Turns a failed import of a backend that needs an extra into `MissingExtra`."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(what, extra) from error


def open_place(url: str) -> Opened:
    """Open one place by itself, whatever it keeps, in order to examine it."""
    return _open(url, [])


def _open(url: str, opened: list[Opened]) -> Opened:
    parsed = parse_url(url)
    part = _opener(parsed)(parsed)
    opened.append(part)
    return part


def _opener(url: StoreUrl) -> Callable[[StoreUrl], Opened]:
    """Find the opener by the scheme, without the driver that may stand behind a plus."""
    return _OPENERS[url.scheme.partition("+")[0]]


def _place(url: str) -> str:
    """A URL as errors may show it: without a password and options."""
    return public(url).partition("?")[0]


def _whole(stores: Stores) -> Opened:
    return Opened(stores.close, stores.coord, stores.log, stores.queues, stores)


def _sqlite(url: StoreUrl) -> Opened:
    from pxrs.stores.sqlite.stores import SqliteStores

    settings = sqlite_settings(url.options)
    stores = SqliteStores(
        url.place, durability=settings.durability, busy_timeout=settings.busy_timeout
    )
    return _whole(stores)._replace(findings=stores.findings)


def _memory(url: StoreUrl) -> Opened:
    from pxrs.stores.memory.stores import open_memory

    refuse_url_options(url.options, set(), "memory://")
    kept = warning(
        "durability",
        "messages live as long as this process",
        "use sqlite:/// for what must be kept",
    )
    return _whole(open_memory(url.place))._replace(findings=lambda: [kept])


def _postgres(url: StoreUrl) -> Opened:
    from pxrs.config import postgres_settings

    settings = postgres_settings(url)
    with _needing("postgresql://", "postgres"):
        from pxrs.stores.postgres.stores import PostgresStores
    stores = PostgresStores(
        settings.conninfo,
        schema=settings.schema,
        connections=settings.connections,
        busy_timeout=settings.busy_timeout,
        url=settings.url,
    )
    return _whole(stores)._replace(findings=stores.findings)


def _etcd(url: StoreUrl) -> Opened:
    from pxrs.config import etcd_settings

    with _needing("etcd://", "etcd"):
        from pxrs.stores.etcd.coord import EtcdCoord

    coord = EtcdCoord(etcd_settings(url))
    return _with_recipe(coord)._replace(findings=coord.findings)


def _zookeeper(url: StoreUrl) -> Opened:
    from pxrs.config import zookeeper_settings

    with _needing("zookeeper://", "zookeeper"):
        from pxrs.stores.zookeeper.coord import ZooKeeperCoord

    coord = ZooKeeperCoord(zookeeper_settings(url))
    return _with_recipe(coord)._replace(findings=coord.findings)


def _with_recipe(coord: CoordStore) -> Opened:
    """Coordination, and queues that are built on it."""
    from pxrs.stores.queues_on_coord.queues import RecipeQueues

    queues = RecipeQueues(coord)

    def close() -> None:
        queues.close()
        coord.close()

    return Opened(close, coord=coord, queues=queues)


def _nats(url: StoreUrl) -> Opened:
    from pxrs.config import nats_settings

    settings = nats_settings(url)
    with _needing("nats://", "nats"):
        from pxrs.stores.jetstream.log import JetStreamLog
    log = JetStreamLog(settings)
    return Opened(log.close, log=log, findings=log.findings)


def _remote(url: StoreUrl) -> Opened:
    from pxrs.config import remote_settings

    settings = remote_settings(url)
    with _needing("pxrs://", "remote"):
        import websockets  # noqa: F401

        from pxrs.stores.remote.stores import RemoteStores
    stores = RemoteStores(settings)
    return Opened(stores.close, stores.coord, stores.log, None, stores)


def _sql(url: StoreUrl) -> Opened:
    from pxrs.config import sql_settings

    settings = sql_settings(url)
    with _needing(f"{url.scheme}://", "sql"):
        from pxrs.stores.mysql.stores import SqlStores
    stores = SqlStores(settings)
    return Opened(
        stores.close,
        stores.coord,
        None,
        stores.queues,
        stores,
        stores.findings,
        stores.atomic,
    )


_OPENERS: dict[str, Callable[[StoreUrl], Opened]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgresql": _postgres,
    "postgres": _postgres,
    "etcd": _etcd,
    "zookeeper": _zookeeper,
    "nats": _nats,
    "pxrs": _remote,
    "mysql": _sql,
    "mariadb": _sql,
    "oracle": _sql,
}
