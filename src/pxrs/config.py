"""Settings, checked. URLs and the environment are read only here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from pxrs.errors import ConfigError, InvalidRequest, quoted
from pxrs.types import RESERVED

# The last offset of each topic that was handled elsewhere, or one of the words.
Start = Literal["earliest", "latest", "error"] | Mapping[str, int]
OnTrimmed = Literal["error", "earliest", "latest"]
Strategy = Literal["sticky", "fair", "range"]
Parallel = Literal["partition", "key"]
URL_VARIABLE = "PXRS_URL"
_SQL = ("mysql", "mariadb", "oracle")
# Some engines keep coordination only, some messages only.
_NO_LOG = ("etcd", "zookeeper", *_SQL)
_NO_COORD = ("nats",)
_SERVERS = ("postgresql", "postgres", "etcd", "zookeeper", "nats", *_SQL)
_SCHEMES = ("memory", "sqlite", *_SERVERS, "pxrs")
# Where a URL may name a driver, as SQLAlchemy's do: mysql+pymysql://.
_DRIVEN = ("sqlite", "postgresql", "postgres", *_SQL)
_LONGEST_NAME = 249
_MOST_PARTITIONS = 100_000
# A year, and half of what a batch or a value in SQLite can hold.
_MOST_SECONDS = 365 * 24 * 3600
MOST_BYTES = 2**29
# Consumers refuse compressed batches that are larger, or have more messages than fit into these.
MOST_COMPRESSED_BATCH = 4 * 2**20
MOST_COMPRESSED_MESSAGE = 64 * 2**20
_LOGIN = re.compile(r"(?P<scheme>[\w+]*://)(?P<user>[^/@:\s]*)(?P<colon>:?)[^/\s]*@")
_SECRETS = re.compile(r"(?<=[?&])((?:ssl)?passw(?:or)?d=)[^&\s]*", re.IGNORECASE)
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class StoreUrl(msgspec.Struct, frozen=True):
    """A store's URL, taken apart. `place` is a path for `sqlite`, a name for `memory`."""

    scheme: str
    place: str
    options: Mapping[str, str]


class UrlParts(msgspec.Struct, frozen=True):
    """The URLs of a store: the main one, and those of parts kept elsewhere. `str` joins them."""

    main: str
    coord: str | None = None
    log: str | None = None

    def __str__(self) -> str:
        named = [("coord", self.coord), ("log", self.log)]
        return " ".join([self.main, *(f"{name}={url}" for name, url in named if url)])

    def urls(self) -> list[str]:
        """Return all URLs."""
        return [url for url in (self.main, self.coord, self.log) if url is not None]

    def completed(self, other: str) -> UrlParts:
        """Add `other` for the part that the main engine does not keep, unless a URL names it."""
        scheme = parse_url(self.main).scheme.partition("+")[0]
        if scheme in _NO_LOG and self.log is None:
            return msgspec.structs.replace(self, log=other)
        if scheme in _NO_COORD and self.coord is None:
            return msgspec.structs.replace(self, coord=other)
        return self


def split_url(url: str, coord: str | None = None, log: str | None = None) -> UrlParts:
    """Split a text that names several stores: "sqlite:///app.db coord=etcd://host:2379"."""
    if not isinstance(url, str):
        raise ConfigError(f"a store URL must be text such as sqlite:///app.db, got {_shown(url)}")
    main, *rest = re.split(r" +(coord|log)=", url)
    parts: dict[str, str | None] = {"coord": coord, "log": log}
    for name, place in zip(rest[::2], rest[1::2], strict=True):
        if parts[name] is not None:
            raise ConfigError(f"{name} is given twice for {public(main)!r}")
        parts[name] = place
    return UrlParts(main, **parts)


def public(url: str) -> str:
    """Remove passwords and tokens from a URL, or from a text with URLs."""

    def hide(login: re.Match[str]) -> str:
        # NATS and our own nodes take a user without a password for a token.
        token = login["scheme"] in ("nats://", "pxrs://") and not login["colon"]
        return login["scheme"] + ("" if token else f"{login['user']}@")

    return _SECRETS.sub(r"\1…", _LOGIN.sub(hide, url))


def parse_url(url: str) -> StoreUrl:
    """Parse a store URL; raises `ConfigError` if it is wrong."""
    if not isinstance(url, str) or "://" not in url:
        raise ConfigError(
            "a store URL must look like sqlite:///app.db, sqlite:////var/lib/app.db or "
            f"memory://, got {_shown(url)}"
        )
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{_shown(url)} is not a store URL: {error}") from None
    engine, _, driver = parts.scheme.partition("+")
    if engine not in _SCHEMES or (driver and engine not in _DRIVEN):
        raise ConfigError(
            f"unknown scheme {quoted(parts.scheme)} in {_shown(url)}; pxrs knows "
            f"{', '.join(f'{scheme}://' for scheme in _SCHEMES)}"
        )
    if "#" in url or "\0" in unquote(url):
        raise ConfigError(f"{_shown(url)} contains # or NUL; write %23 for #")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    if len({name for name, _ in pairs}) < len(pairs):
        raise ConfigError(f"an option is given twice in {_shown(url)}")
    if engine == "sqlite":
        # SQLAlchemy's name of a driver says nothing about the file.
        return StoreUrl(engine, _sqlite_path(url), dict(pairs))
    return StoreUrl(parts.scheme, parts.netloc + parts.path, dict(pairs))


def _shown(url: object) -> str:
    return quoted(public(url) if isinstance(url, str) else url)


def _sqlite_path(url: str) -> str:
    """Returns the path; as in SQLAlchemy, three slashes are relative, four are absolute."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc:
        raise ConfigError(
            f"{_shown(url)} names a host; write sqlite:///relative or sqlite:////absolute"
        )
    if path in ("", "/"):
        raise ConfigError(f"{_shown(url)} names no file; write sqlite:///app.db")
    if path == "/:memory:":
        raise ConfigError(
            "sqlite:///:memory: is not supported; use memory://, with the same promises"
        )
    return path[1:]


def default_url() -> str:
    """Return the URL that the command line uses if none is given."""
    return os.environ.get(URL_VARIABLE, "sqlite:///pxrs.db")


class SqliteSettings(msgspec.Struct, frozen=True):
    """`durability`: "full" syncs every commit, "relaxed" may lose the last ones in a power cut."""

    durability: str = "full"
    busy_timeout: float = 10.0

    def __post_init__(self) -> None:
        if self.durability not in ("full", "relaxed"):
            raise ConfigError(f"durability must be full or relaxed, got {quoted(self.durability)}")
        check_seconds("busy_timeout", self.busy_timeout)


def sqlite_settings(options: Mapping[str, str]) -> SqliteSettings:
    """Settings from a URL's options."""
    refuse_url_options(options, set(SqliteSettings.__struct_fields__), "sqlite://")
    defaults = SqliteSettings()
    return SqliteSettings(
        durability=options.get("durability", defaults.durability),
        busy_timeout=_number(options, "busy_timeout", defaults.busy_timeout),
    )


class ProducerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a producer's batches, waits and timeouts. Seconds and bytes."""

    linger: float = 0.005
    batch_bytes: int = 256 * 2**10
    buffer_bytes: int = 4 * 2**20
    max_message_bytes: int = 2**20
    max_block: float = 60.0
    delivery_timeout: float = 120.0
    compression: str = "none"

    def __post_init__(self) -> None:
        check_seconds("linger", self.linger)
        check_seconds("max_block", self.max_block)
        check_seconds("delivery_timeout", self.delivery_timeout)
        _bytes("batch_bytes", self.batch_bytes)
        _bytes("max_message_bytes", self.max_message_bytes)
        _bytes("buffer_bytes", self.buffer_bytes, most=2**40)
        if self.buffer_bytes < self.max_message_bytes:
            raise ConfigError(
                f"buffer_bytes must be at least max_message_bytes ({self.max_message_bytes}), "
                f"got {self.buffer_bytes}"
            )
        if self.compression != "none":
            _bytes("batch_bytes with compression", self.batch_bytes, MOST_COMPRESSED_BATCH)
            _bytes(
                "max_message_bytes with compression",
                self.max_message_bytes,
                MOST_COMPRESSED_MESSAGE,
            )


class ConsumerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a member of a group. Seconds and bytes.

    `start`: where to begin in a partition without a checkpoint; `on_trimmed`: what to do when
    the checkpoint points to messages that retention has removed. `prefetch_bytes`: how much is
    fetched ahead, decompressed, of all partitions together. `stuck_after`: how long a handler may
    be at the same messages before that is reported. `static`: the member keeps its name, and its
    partitions wait for it.
    """

    group: str
    member_name: str
    static: bool = False
    client: str = ""
    auto_commit: bool = True
    auto_commit_interval: float = 1.0
    start: Start = "earliest"
    on_trimmed: OnTrimmed = "error"
    prefetch_bytes: int = 16 * 2**20
    stuck_after: float = 60.0
    session_ttl: float = 10.0
    debounce: float = 0.1
    revoke_timeout: float | None = 30.0
    rejoin_timeout: float = 30.0
    strategy: Strategy = "sticky"

    def __post_init__(self) -> None:
        check_group_name(self.group)
        if not isinstance(self.auto_commit, bool):
            raise ConfigError(f"auto_commit must be True or False, got {quoted(self.auto_commit)}")
        if isinstance(self.start, Mapping):
            _check_last_offsets(self.start)
        else:
            check_one_of("start", self.start, ("earliest", "latest", "error"))
        check_one_of("on_trimmed", self.on_trimmed, ("error", "earliest", "latest"))
        _bytes("prefetch_bytes", self.prefetch_bytes)
        check_seconds("stuck_after", self.stuck_after)
        check_seconds("session_ttl", self.session_ttl, 0.2)
        check_seconds("debounce", self.debounce)
        check_seconds("rejoin_timeout", self.rejoin_timeout)
        check_seconds("auto_commit_interval", self.auto_commit_interval, 0.001)
        if self.revoke_timeout is not None:
            check_seconds("revoke_timeout", self.revoke_timeout)


def _check_last_offsets(start: Mapping[str, int]) -> None:
    for topic, last in start.items():
        check_topic_name(topic)
        if type(last) is not int or not -1 <= last < 2**63 - 1:
            raise ConfigError(
                f"start must name the last offset of {topic!r} that was handled, got {quoted(last)}"
            )


def refuse_url_options(options: Mapping[str, str], known: set[str], where: str) -> None:
    """Rejects options that are not known, such as mistyped ones."""
    for name in options:
        if name not in known:
            takes = ", ".join(sorted(known)) if known else "no options"
            raise ConfigError(f"{where} does not know the option {quoted(name)}; it takes {takes}")


def check_topic_name(name: str) -> str:
    """Returns the name; rejects topic names that some engine could not store."""
    return _check_name("topic", name)


def check_group_name(name: str) -> str:
    """Returns the name; rejects group names that some engine could not store."""
    return _check_name("group", name)


def check_member_name(name: str) -> str:
    """Returns the name; rejects member names that some engine could not store."""
    return _check_name("member", name)


def _check_name(kind: str, name: str) -> str:
    if not isinstance(name, str):
        raise InvalidRequest(f"a {kind} name must be text, got {type(name).__name__}")
    if not 1 <= len(name) <= _LONGEST_NAME:
        raise InvalidRequest(
            f"a {kind} name must have 1 to {_LONGEST_NAME} characters, got {len(name)}"
        )
    if name.startswith(RESERVED):
        raise InvalidRequest(f"a {kind} name must not begin with {RESERVED!r}, got {quoted(name)}")
    if name in (".", "..") or not set(name) <= _NAME_CHARACTERS:
        raise InvalidRequest(
            f"a {kind} name must consist of letters, digits, '.', '_' and '-', got {quoted(name)}"
        )
    return name


def check_partitions(count: int) -> int:
    """Returns the count; rejects numbers of partitions that a topic can't have."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_PARTITIONS:
        raise InvalidRequest(
            f"partitions must be an integer from 1 to {_MOST_PARTITIONS}, got {quoted(count)}; it "
            "can't be changed later, so choose the largest number of consumers you will ever have"
        )
    return count


def _number(options: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(options.get(name, default))
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {quoted(options[name])}") from None


def check_seconds(name: str, value: float, least: float = 0) -> None:
    """Rejects values that are not seconds from `least` to a year."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not least <= value <= _MOST_SECONDS
    ):
        raise ConfigError(
            f"{name} must be seconds from {least:g} to {_MOST_SECONDS}, got {quoted(value)}"
        )


def _bytes(name: str, value: int, most: int = MOST_BYTES) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{name} must be a number of bytes from 1 to {most}, got {quoted(value)}")


def check_at_least_one(name: str, value: int) -> None:
    """Rejects values that are not integers of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {quoted(value)}")


def check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Rejects values that are not one of the known words."""
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}; got {quoted(value)}")


# The name of a topic's dead letters ends with it.
SUFFIX = ".dlq"


class DeadLetter(msgspec.Struct, frozen=True):
    """Write the message to a topic of dead letters and go on.

    That topic is `<topic>.dlq` unless named here, and is created when needed. The letter keeps key,
    value and headers, and gets headers that say where it came from and what failed.
    """

    topic: str | None = None

    def __post_init__(self) -> None:
        if self.topic is not None:
            check_topic_name(self.topic)

    def name_for(self, topic: str) -> str:
        """Return the name of the topic for the dead letters of `topic`."""
        return self.topic or f"{topic}{SUFFIX}"


class Stop(msgspec.Struct, frozen=True):
    """End the run with `HandlerFailed`; nothing after the message in its partition is committed."""


OnFailure = DeadLetter | Stop


_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class Address(msgspec.Struct, frozen=True):
    """The part of a server's URL between `://` and `?`: login, hosts and path."""

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
        raise ConfigError(f"{url.scheme}:// names no host; write {url.scheme}://127.0.0.1:{port}")
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
        raise ConfigError(f"a {scheme}:// URL must name host:port, got {quoted(host)}")
    return host


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files: trusted authorities, our certificate and key. Without `ca`: the system's."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class PostgresSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`conninfo` goes to the driver: everything but our own options."""

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
        raise ConfigError(
            f"connections must be an integer from 1 to 1000, got {quoted(connections)}"
        )
    place = f"postgresql://{url.place}"
    return PostgresSettings(
        url=place + (f"?{urlencode(url.options)}" if url.options else ""),
        conninfo=place + (f"?{urlencode(rest)}" if rest else ""),
        schema=url.options.get("schema", "pxrs"),
        connections=int(connections),
        busy_timeout=positive_seconds(url.options, "busy_timeout", 10.0),
    )


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Servers of etcd or ZooKeeper: `prefix` keeps several users of them apart.

    `timeout`: seconds after which a request that was not answered gives up.
    """

    hosts: tuple[str, ...]
    prefix: str = "pxrs"
    user: str | None = None
    password: str | None = None
    tls: TlsFiles | None = None
    timeout: float = 10.0


def etcd_settings(url: StoreUrl) -> ServerSettings:
    """`etcd://host:2379,host2:2379/prefix?timeout=10&tls=true&ca=…&cert=…&key=…`."""
    return ServerSettings(**_of_servers(url, 2379))


def zookeeper_settings(url: StoreUrl) -> ServerSettings:
    """`zookeeper://host:2181,host2:2181/root?timeout=10&tls=true&ca=…&cert=…&key=…`."""
    return ServerSettings(**_of_servers(url, 2181))


def _of_servers(url: StoreUrl, port: int, *more: str, timeout: float = 10.0) -> dict[str, Any]:
    """Reads `ServerSettings` from a URL that takes `more` options."""
    known = {"timeout", "tls", "ca", "cert", "key", *more}
    refuse_url_options(url.options, known, f"{url.scheme}://")
    address = split_address(url, port)
    return {
        "hosts": address.hosts,
        "prefix": address.path or "pxrs",
        "user": address.user,
        "password": address.password,
        "tls": _tls(url.options),
        "timeout": positive_seconds(url.options, "timeout", timeout),
    }


class NatsSettings(ServerSettings, frozen=True, kw_only=True):
    """JetStream's servers, the number of replicas of each topic, and files with a login.

    `timeout`: seconds that an operation may take, the election of a leader included.
    """

    credentials: str | None = None
    nkey: str | None = None
    replicas: int = 1
    domain: str | None = None
    timeout: float = 20.0


def nats_settings(url: StoreUrl) -> NatsSettings:
    """`nats://host:4222,host2:4222/prefix?replicas=3&timeout=20&tls=true&credentials=…`.

    A user without a password is a token, as in NATS' own URLs.
    """
    files = ("credentials", "nkey", "domain")
    servers = _of_servers(url, 4222, "replicas", *files, timeout=20.0)
    prefix = servers["prefix"]
    if not set(prefix) <= _WORD or len(prefix) > 100:
        raise ConfigError(
            f"a nats:// prefix must be up to 100 letters, digits, '_' and '-', got {quoted(prefix)}"
        )
    replicas = url.options.get("replicas", "1")
    if replicas not in ("1", "3", "5"):
        raise ConfigError(f"replicas must be 1, 3 or 5, got {quoted(replicas)}")
    named: dict[str, Any] = {name: url.options.get(name) for name in files}
    return NatsSettings(**servers, **named, replicas=int(replicas))


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of `pxrs serve`. `timeout`: seconds until a call that no node answers gives up.

    Pauses between the attempts of one call grow from `retry_first` to `retry_longest` seconds;
    `attempts` None tries until then.
    """

    url: str
    hosts: tuple[str, ...]
    token: str | None = None
    tls: TlsFiles | None = None
    timeout: float = 15.0
    attempts: int | None = None
    retry_first: float = 0.01
    retry_longest: float = 1.0


def remote_settings(url: StoreUrl) -> RemoteSettings:
    """`pxrs://token@host:6080,host2:6080?timeout=15&tls=true&ca=…&cert=…&key=…`.

    Also `attempts=5&retry_first=0.01&retry_longest=1`.
    """
    known = {"timeout", "attempts", "retry_first", "retry_longest", "tls", "ca", "cert", "key"}
    refuse_url_options(url.options, known, "pxrs://")
    address = split_address(url, 6080)
    if address.path:
        raise ConfigError(f"a pxrs:// URL has no path, got {quoted(address.path)}")
    options = f"?{urlencode(url.options)}" if url.options else ""
    return RemoteSettings(
        url=f"pxrs://{url.place}{options}",
        hosts=address.hosts,
        token=address.password if address.password is not None else address.user,
        tls=_tls(url.options),
        timeout=positive_seconds(url.options, "timeout", 15.0),
        attempts=_attempts(url.options.get("attempts")),
        retry_first=positive_seconds(url.options, "retry_first", 0.01),
        retry_longest=positive_seconds(url.options, "retry_longest", 1.0),
    )


def _attempts(given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isdecimal() or not 1 <= int(given) <= 1000:
        raise ConfigError(f"attempts must be a number from 1 to 1000, got {quoted(given)}")
    return int(given)


class SqlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`options` are arguments of the driver's connect(). `shown` is the URL without a password."""

    url: str
    shown: str
    dialect: Literal["mysql", "oracle"]
    options: dict[str, Any]


# A network that goes silent must not hold a member for ever; longer than a lock may be waited for.
_PATIENCE = {"connect_timeout": 5, "read_timeout": 15, "write_timeout": 15}
_DRIVERS = {"mysql": "pymysql", "mariadb": "pymysql", "oracle": "oracledb"}
_TLS_OPTIONS = ("ssl_ca", "ssl_capath", "ssl_cert", "ssl_key", "ssl_cipher", "ssl_check_hostname")


def sql_settings(url: StoreUrl) -> SqlSettings:
    """`mysql://user:password@host/database?read_timeout=15`; options are the driver's own."""
    scheme, _, driver = url.scheme.partition("+")
    if driver not in ("", _DRIVERS[scheme]):
        raise ConfigError(
            f"the driver of {scheme}:// must be {_DRIVERS[scheme]}, got {driver}; leave it out"
        )
    parts = urlsplit(f"//{url.place}")
    database = parts.path[1:]
    if not database:
        raise ConfigError(f"{scheme}:// names no database; write {scheme}://user@host/database")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{scheme}://{parts.netloc.rpartition('@')[2]}: {error}") from None
    is_oracle = scheme == "oracle"
    options: dict[str, Any] = {} if is_oracle else dict(_PATIENCE)
    options |= {name: _typed(value) for name, value in url.options.items()}
    tls = {name[4:]: options.pop(name) for name in _TLS_OPTIONS if name in options}
    if tls:
        # Given so, PyMySQL checks the server's certificate and its name.
        options["ssl"] = tls
    if "service_name" not in options:
        options["sid" if is_oracle else "database"] = unquote(database)
    address = {"host": parts.hostname, "port": port}
    address |= {"user": parts.username, "password": parts.password}
    for name, value in address.items():
        if value is not None:
            options[name] = unquote(value) if isinstance(value, str) else value
    return SqlSettings(
        url=f"{url.scheme}://{url.place}{f'?{urlencode(url.options)}' if url.options else ''}",
        shown=f"{scheme}://{url.place.rpartition('@')[2]}",
        dialect="oracle" if is_oracle else "mysql",
        options=options,
    )


def _typed(value: str) -> str | int | bool:
    """Converts an option to an integer, a bool, or text."""
    if value.isdecimal():
        return int(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def positive_seconds(options: Mapping[str, str], name: str, default: float) -> float:
    """Returns an option as seconds above 0, up to an hour."""
    value = _number(options, name, default)
    if not 0 < value <= 3600:
        raise ConfigError(
            f"{name} must be seconds above 0, up to 3600, got {quoted(options[name])}"
        )
    return value


def _tls(options: Mapping[str, str]) -> TlsFiles | None:
    files = TlsFiles(options.get("ca"), options.get("cert"), options.get("key"))
    wanted = options.get("tls", "true" if files != TlsFiles() else "false")
    if wanted not in ("true", "false"):
        raise ConfigError(f"tls must be true or false, got {quoted(wanted)}")
    if wanted == "false" and files != TlsFiles():
        raise ConfigError("tls=false can't be combined with ca, cert or key")
    if (files.cert is None) != (files.key is None):
        raise ConfigError("cert and key must be given together")
    return files if wanted == "true" else None
