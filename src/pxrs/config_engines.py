"""Settings of the engines that are reached over a network."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote, urlencode

import msgspec

from pxrs.config import StoreUrl, refuse_unknown
from pxrs.errors import ConfigError

_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class Address(msgspec.Struct, frozen=True):
    """What stands between `://` and `?` in the URL of a server, or of several."""

    hosts: tuple[str, ...]
    path: str = ""
    user: str | None = None
    password: str | None = None


def split_address(url: StoreUrl, port: int) -> Address:
    """`user:password@host:port,host:port/path`; the port may be left out."""
    authority, _, path = url.place.partition("/")
    login, at, hosts = authority.rpartition("@")
    user, colon, password = login.partition(":")
    found = tuple(_with_port(host, port, url.scheme) for host in hosts.split(",") if host)
    if not found:
        raise ConfigError(f"{url.scheme}:// names no host; try {url.scheme}://127.0.0.1:{port}")
    return Address(
        hosts=found,
        path=unquote(path).strip("/"),
        user=unquote(user) if at else None,
        password=unquote(password) if colon else None,
    )


def _with_port(host: str, default: int, scheme: str) -> str:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return f"{host}:{default}"
    if not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{host!r} in a {scheme}:// URL; host:port is needed")
    return host


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files: whom to trust, and who we are. Without `ca`: whom the system trusts."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class PostgresSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`conninfo` is what the driver gets: everything but our own options."""

    url: str
    conninfo: str
    schema: str = "pxrs"
    connections: int = 8
    busy_timeout: float = 10.0


def postgres_settings(url: StoreUrl) -> PostgresSettings:
    """`postgresql://user@host:5432/database?schema=pxrs&connections=8&busy_timeout=10`.

    Other options are libpq's, such as `sslmode`; the driver refuses what it does not know.
    """
    own = ("schema", "connections", "busy_timeout")
    rest = {name: value for name, value in url.options.items() if name not in own}
    connections = url.options.get("connections", "8")
    if not connections.isdecimal() or not 1 <= int(connections) <= 1000:
        raise ConfigError(f"connections={connections!r}; a whole number from 1 to 1000")
    place = f"postgresql://{url.place}"
    return PostgresSettings(
        url=place + (f"?{urlencode(url.options)}" if url.options else ""),
        conninfo=place + (f"?{urlencode(rest)}" if rest else ""),
        schema=url.options.get("schema", "pxrs"),
        connections=int(connections),
        busy_timeout=positive_seconds(url.options, "busy_timeout", 10.0),
    )


class EtcdSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`timeout`: seconds after which a request that no node has answered gives up."""

    hosts: tuple[str, ...]
    prefix: str = "pxrs"
    user: str | None = None
    password: str | None = None
    tls: TlsFiles | None = None
    timeout: float = 10.0


def etcd_settings(url: StoreUrl) -> EtcdSettings:
    """`etcd://host:2379,host2:2379/prefix?timeout=10&tls=true&ca=…&cert=…&key=…`."""
    refuse_unknown(url.options, {"timeout", "tls", "ca", "cert", "key"}, "etcd://")
    address = split_address(url, 2379)
    return EtcdSettings(
        hosts=address.hosts,
        prefix=address.path or "pxrs",
        user=address.user,
        password=address.password,
        tls=_tls(url.options),
        timeout=positive_seconds(url.options, "timeout", 10.0),
    )


class ZooKeeperSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`timeout`: seconds after which a request that was not answered gives up."""

    hosts: tuple[str, ...]
    root: str = "pxrs"
    user: str | None = None
    password: str | None = None
    tls: TlsFiles | None = None
    timeout: float = 10.0


def zookeeper_settings(url: StoreUrl) -> ZooKeeperSettings:
    """`zookeeper://host:2181,host2:2181/root?timeout=10&tls=true&ca=…&cert=…&key=…`."""
    refuse_unknown(url.options, {"timeout", "tls", "ca", "cert", "key"}, "zookeeper://")
    address = split_address(url, 2181)
    return ZooKeeperSettings(
        hosts=address.hosts,
        root=address.path or "pxrs",
        user=address.user,
        password=address.password,
        tls=_tls(url.options),
        timeout=positive_seconds(url.options, "timeout", 10.0),
    )


class NatsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where JetStream is, how many servers keep each topic, and how to prove who we are.

    `prefix` keeps several users of one account apart; `credentials` and `nkey` are files.
    `timeout`: seconds that an operation may take, the election of a leader included.
    """

    hosts: tuple[str, ...]
    prefix: str = "pxrs"
    user: str | None = None
    password: str | None = None
    credentials: str | None = None
    nkey: str | None = None
    tls: TlsFiles | None = None
    replicas: int = 1
    domain: str | None = None
    timeout: float = 20.0


def nats_settings(url: StoreUrl) -> NatsSettings:
    """`nats://host:4222,host2:4222/prefix?replicas=3&timeout=20&tls=true&credentials=…`.

    A user without a password is a token, as in NATS' own URLs.
    """
    own = {"replicas", "timeout", "credentials", "nkey", "domain"}
    refuse_unknown(url.options, own | {"tls", "ca", "cert", "key"}, "nats://")
    address = split_address(url, 4222)
    prefix = address.path or "pxrs"
    if not set(prefix) <= _WORD or len(prefix) > 100:
        raise ConfigError(f"nats://…/{prefix}: letters, digits, '_' and '-' make a prefix")
    replicas = url.options.get("replicas", "1")
    if replicas not in ("1", "3", "5"):
        raise ConfigError(f"replicas={replicas}; JetStream keeps 1, 3 or 5")
    return NatsSettings(
        hosts=address.hosts,
        prefix=prefix,
        user=address.user,
        password=address.password,
        credentials=url.options.get("credentials"),
        nkey=url.options.get("nkey"),
        tls=_tls(url.options),
        replicas=int(replicas),
        domain=url.options.get("domain"),
        timeout=positive_seconds(url.options, "timeout", 20.0),
    )


class SqlSettings(msgspec.Struct, frozen=True):
    """A URL as SQLAlchemy takes it, and one without a password for messages."""

    url: str
    shown: str


# A network that goes silent must not hold a member for ever; longer than a lock may be waited for.
_PATIENCE = {"connect_timeout": "5", "read_timeout": "15", "write_timeout": "15"}
_DRIVERS = {"mysql": "pymysql", "mariadb": "pymysql", "oracle": "oracledb"}


def sql_settings(url: StoreUrl) -> SqlSettings:
    """`mysql://user:password@host/database`; options are the driver's own."""
    dialect, plus, driver = url.scheme.partition("+")
    driver = driver if plus else _DRIVERS[dialect]
    options = {**(_PATIENCE if driver == "pymysql" else {}), **url.options}
    query = f"?{urlencode(options)}" if options else ""
    if not url.place.partition("/")[2]:
        raise ConfigError(f"{dialect}:// names no database; try {dialect}://user@host/database")
    return SqlSettings(
        url=f"{dialect}+{driver}://{url.place}{query}",
        shown=f"{dialect}://{url.place.rpartition('@')[2]}",
    )


def positive_seconds(options: Mapping[str, str], name: str, default: float) -> float:
    """A number of seconds above 0, up to an hour."""
    try:
        value = float(options.get(name, default))
    except ValueError:
        raise ConfigError(f"{name}={options[name]!r} is not a number") from None
    if not 0 < value <= 3600:
        raise ConfigError(f"{name}={options[name]!r}; seconds above 0, up to 3600")
    return value


def _tls(options: Mapping[str, str]) -> TlsFiles | None:
    files = TlsFiles(options.get("ca"), options.get("cert"), options.get("key"))
    wanted = options.get("tls", "true" if files != TlsFiles() else "false")
    if wanted not in ("true", "false"):
        raise ConfigError(f"tls={wanted!r}; there are true and false")
    if wanted == "false" and files != TlsFiles():
        raise ConfigError("tls=false, but files for TLS are named")
    if (files.cert is None) != (files.key is None):
        raise ConfigError("cert and key go together")
    return files if wanted == "true" else None
