"""Settings, checked. URLs and the environment are read only here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from pxrs.errors import ConfigError, InvalidRequest, quoted
from pxrs.types import RESERVED
from pxrs.urls import Shy, StoreUrl, is_secret, public, split, take_apart

# By topic, the last offset that was handled elsewhere; or one of the words.
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
# A year; and half of the bytes that a batch or a value in SQLite can hold.
_MOST_SECONDS = 365 * 24 * 3600
MOST_BYTES = 2**29
# Consumers refuse compressed batches that are larger, or have more messages than fit into these.
MOST_COMPRESSED_BATCH = 4 * 2**20
MOST_COMPRESSED_MESSAGE = 64 * 2**20
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class UrlParts(Shy, frozen=True):
    """The URLs of a store: the main one, and those of parts kept elsewhere."""

    main: str
    coord: str | None = None
    log: str | None = None

    @property
    def whole(self) -> str:
        """All of them as one text, with their secrets; `split_url` takes it apart again."""
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
        raise ConfigError(
            f"a store URL must be text such as sqlite:///app.db, got {type(url).__name__}"
        )
    main, named = split(url)
    parts: dict[str, str | None] = {"coord": coord, "log": log}
    for name, place in named:
        if parts[name] is not None:
            raise ConfigError(f"{name} is given twice for {public(main)!r}")
        parts[name] = place
    return UrlParts(main, **parts)


def parse_url(url: str) -> StoreUrl:
    """Parse a store URL; raises `ConfigError` if it is wrong, which shows no secrets."""
    found = take_apart(url)
    engine, _, driver = found.scheme.partition("+")
    if engine not in _SCHEMES or (driver and engine not in _DRIVEN):
        raise ConfigError(
            f"unknown scheme {quoted(found.scheme)}; pxrs knows "
            f"{', '.join(f'{scheme}://' for scheme in _SCHEMES)}"
            + ("; nodes of pxrs serve are pxrs://host:port" if engine in ("http", "https") else "")
        )
    if engine == "sqlite":
        # SQLAlchemy's name of a driver says nothing about the file.
        return StoreUrl(engine, _sqlite_path(found), query=found.query)
    return found


def _sqlite_path(url: StoreUrl) -> str:
    """Returns the path; as in SQLAlchemy, three slashes are relative, four are absolute."""
    path = unquote(url.path)
    if not path:
        raise ConfigError("a sqlite:// URL names no file; write sqlite:///app.db")
    if path == ":memory:":
        raise ConfigError(
            "sqlite:///:memory: is not supported; use memory://, with the same promises"
        )
    return path


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
    have the same messages in hand before that is reported. `static`: the member keeps its name,
    and its partitions wait for it.
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
    value and headers, and gets headers with its origin and the error.
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


class Address(Shy, frozen=True):
    """The part of a server's URL between `://` and `?`: login, hosts and path."""

    hosts: tuple[str, ...]
    path: str = ""
    user: str | None = None
    password: str | None = None


def split_address(url: StoreUrl, port: int) -> Address:
    """`user:password@host:port,host:port/path`; the port may be left out."""
    found = tuple(_with_port(host, port, url.scheme) for host in url.hosts.split(",") if host)
    if not found:
        raise ConfigError(f"{url.scheme}:// names no host; write {url.scheme}://127.0.0.1:{port}")
    return Address(
        hosts=found, path=unquote(url.path).strip("/"), user=url.user, password=url.password
    )


def _with_port(host: str, default: int, scheme: str) -> str:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return f"{host}:{default}"
    if not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"a {scheme}:// URL must name host:port, with a port from 1 to 65535")
    return host


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files: trusted authorities, our certificate and key. Without `ca`: the system's."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class PostgresSettings(Shy, frozen=True, kw_only=True):
    """`conninfo` goes to the driver: everything but our own options."""

    url: str
    conninfo: str
    schema: str = "pxrs"
    connections: int = 8
    busy_timeout: float = 10.0


def postgres_settings(url: StoreUrl) -> PostgresSettings:
    """`postgresql://user@host:5432/database?schema=pxrs&connections=8&busy_timeout=10`.

    Other options are libpq's, such as `sslmode`; the driver refuses unknown ones.
    """
    own = ("schema", "connections", "busy_timeout")
    rest = tuple(each for each in url.query if each.partition("=")[0] not in own)
    connections = url.options.get("connections", "8")
    if not connections.isdecimal() or not 1 <= int(connections) <= 1000:
        raise ConfigError(
            f"connections must be an integer from 1 to 1000, got {quoted(connections)}"
        )
    url = msgspec.structs.replace(url, scheme="postgresql")
    return PostgresSettings(
        url=url.whole,
        conninfo=msgspec.structs.replace(url, query=rest).whole,
        schema=url.options.get("schema", "pxrs"),
        connections=int(connections),
        busy_timeout=positive_seconds(url.options, "busy_timeout", 10.0),
    )


class ServerSettings(Shy, frozen=True, kw_only=True):
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


class RemoteSettings(Shy, frozen=True, kw_only=True):
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
    token = address.password if address.password is not None else address.user
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ConfigError("the token of a pxrs:// URL must be printable ASCII characters")
    return RemoteSettings(
        url=url.whole,
        hosts=address.hosts,
        token=token,
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


class MysqlTls(Shy, frozen=True, kw_only=True):
    """Files as in `TlsFiles`, and the checks: all of them, unless the URL turns one off."""

    ca: str | None = None
    capath: str | None = None
    cert: str | None = None
    key: str | None = None
    key_password: str | None = None
    cipher: str | None = None
    checks_name: bool = True
    verifies: bool = True


class SqlSettings(Shy, frozen=True, kw_only=True):
    """`options` are arguments of the driver's connect(). `shown` is the URL without a login."""

    url: str
    shown: str
    dialect: Literal["mysql", "oracle"]
    options: dict[str, Any]
    tls: MysqlTls | None = None


# A network that goes silent must not block a member for ever; longer than a wait for a lock.
_PATIENCE = {"connect_timeout": 5, "read_timeout": 15, "write_timeout": 15}
_DRIVERS = {"mysql": "pymysql", "mariadb": "pymysql", "oracle": "oracledb"}
_TLS_FILES = ("ca", "capath", "cert", "key", "key_password", "cipher")


def sql_settings(url: StoreUrl) -> SqlSettings:
    """`mysql://user:password@host/database?read_timeout=15`; options are the driver's own."""
    scheme, _, driver = url.scheme.partition("+")
    if driver not in ("", _DRIVERS[scheme]):
        raise ConfigError(
            f"the driver of {scheme}:// must be {_DRIVERS[scheme]}, got {driver}; leave it out"
        )
    database = url.path
    if not database:
        raise ConfigError(f"{scheme}:// names no database; write {scheme}://user@host/database")
    host, port = _host_and_port(url.hosts, scheme)
    is_oracle = scheme == "oracle"
    options: dict[str, Any] = {} if is_oracle else dict(_PATIENCE)
    options |= {
        name: value if is_secret(name) else _typed(value) for name, value in url.options.items()
    }
    tls = None if is_oracle else _mysql_tls(options)
    if "service_name" not in options:
        options["sid" if is_oracle else "database"] = unquote(database)
    address = {"host": host, "port": port, "user": url.user, "password": url.password}
    options |= {name: value for name, value in address.items() if value is not None}
    if not is_oracle and "passwd" in options:
        options.setdefault("password", options.pop("passwd"))
    if not is_oracle and "password" in options:
        # PyMySQL takes text for Latin-1, and quotes all of it if it is not.
        options["password"] = options["password"].encode()
    return SqlSettings(
        url=url.whole,
        shown=f"{scheme}://{url.place}",
        dialect="oracle" if is_oracle else "mysql",
        options=options,
        tls=tls,
    )


def _mysql_tls(options: dict[str, Any]) -> MysqlTls | None:
    """Takes the options of TLS out of the others."""
    files = {name: options.pop(f"ssl_{name}", None) for name in _TLS_FILES}
    checks = ("ssl_check_hostname", "ssl_verify_identity", "ssl_verify_cert", "tls")
    found = {name: options.pop(name) for name in checks if name in options}
    for name, value in found.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {quoted(value)}")
    asked = any(value is not None for value in files.values())
    if found.get("tls") is False or options.get("ssl_disabled"):
        if asked:
            raise ConfigError("tls=false and ssl_disabled can't be combined with files for TLS")
        return None
    if not asked and not any(found.values()):
        return None
    if (files["cert"] is None) != (files["key"] is None):
        raise ConfigError("ssl_cert and ssl_key must be given together")
    names = found.get("ssl_check_hostname", found.get("ssl_verify_identity", True))
    return MysqlTls(
        **{name: None if value is None else str(value) for name, value in files.items()},
        checks_name=names,
        verifies=found.get("ssl_verify_cert", True),
    )


def _host_and_port(authority: str, scheme: str) -> tuple[str | None, int | None]:
    if "," in authority:
        raise ConfigError(f"a {scheme}:// URL must name one host")
    name, _, port = _with_port(authority or "localhost", 0, scheme).rpartition(":")
    return unquote(name.strip("[]")) if authority else None, int(port) or None


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
