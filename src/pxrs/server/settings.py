"""The settings of a node: flags of `pxrs serve`, environment variables and a TOML file."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import stat
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from pxrs.config import default_url
from pxrs.errors import ConfigError, quoted
from pxrs.urls import Shy, has_secret

_VARIABLE = "PXRS_SERVE_"
_KINDS = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
_NODE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Endpoint(NamedTuple):
    """A host and a port; port 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class ServeSettings(Shy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of `pxrs serve`, in seconds and bytes.

    store: the URL of the store to serve.
    listen: host:port of the HTTP API.
    node_id: the name of this node; the host's name and the port by default.
    advertise: host:port under which clients and other nodes reach it; `listen` by default.
    grpc_listen: host:port of the gRPC API; not served by default.
    grpc_advertise: host:port under which clients reach it; the host of `advertise`, or
        `grpc_listen`, by default.
    auth: "tokens" requires one from every client, "off" none; "auto" requires one if the store has
        any.
    tls_cert, tls_key: files of a certificate and its key: HTTPS instead of HTTP.
    tls_client_ca: a file of certificates; clients must have one that these have signed.
    tls_ca: a file of certificates that have signed those of the other nodes; `tls_client_ca` by
        default, else `tls_cert`, for nodes that share one.
    insecure: serve an address that is not loopback in the clear or without tokens.
    log_format: "text", or "json" for one object per line.
    max_body: the largest request.
    max_connections: further connections are answered 503.
    max_inflight: bytes of requests being worked on; further ones wait, then get 503.
    max_wait: the longest that a request may wait for messages.
    request_timeout: how long a client may take to send a request, and a request for the store.
    session_timeout: how long a member of a group may be silent before it is gone.
    session_ttl: how long others wait for this node if the store can't detect that it died.
    drain: how long requests may take to finish after SIGTERM.
    """

    store: str = ""
    listen: str = "127.0.0.1:6080"
    node_id: str = ""
    advertise: str = ""
    grpc_listen: str = ""
    grpc_advertise: str = ""
    auth: Literal["auto", "tokens", "off"] = "auto"
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tls_ca: str = ""
    insecure: bool = False
    log_format: Literal["text", "json"] = "text"
    max_body: int = 16 * 2**20
    max_connections: int = 10_000
    max_inflight: int = 256 * 2**20
    max_wait: float = 60.0
    request_timeout: float = 30.0
    session_timeout: float = 10.0
    session_ttl: float = 10.0
    drain: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_body", "max_connections", "max_inflight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_wait", "request_timeout", "session_timeout", "drain"):
            if not 0 <= getattr(self, name) <= 3600:
                raise ConfigError(f"{name} must be 0 to 3600 seconds, got {getattr(self, name)}")
        if not 0 < self.session_ttl <= 3600:
            raise ConfigError(f"session_ttl must be up to 3600 seconds, got {self.session_ttl}")
        if self.node_id and not _NODE_ID.fullmatch(self.node_id):
            raise ConfigError(
                f"node_id must be 1 to 64 letters, digits, '.', '_' or '-', got {self.node_id!r}"
            )
        authorities = self.tls_client_ca or self.tls_ca
        if bool(self.tls_cert) != bool(self.tls_key) or (authorities and not self.tls_cert):
            raise ConfigError(
                "tls_cert and tls_key must be given together, tls_client_ca and tls_ca with them"
            )
        protected = self.tls_cert and (self.auth == "tokens" or self.tls_client_ca)
        for name in ("listen", "grpc_listen") if self.grpc_listen else ("listen",):
            address = getattr(self, name)
            loopback = parse_endpoint(name, address).is_loopback
            if not loopback and not protected and not self.insecure:
                raise ConfigError(
                    f"{name}={address!r} can be reached by other hosts: it needs TLS (--tls-cert, "
                    "--tls-key) and tokens (--auth tokens) or client certificates "
                    "(--tls-client-ca). Listen on 127.0.0.1, or allow it with --insecure"
                )

    @property
    def store_url(self) -> str:
        return self.store or default_url()

    @property
    def endpoint(self) -> Endpoint:
        return parse_endpoint("listen", self.listen)

    @property
    def grpc_endpoint(self) -> Endpoint:
        return parse_endpoint("grpc_listen", self.grpc_listen)

    def server_tls(self) -> ssl.SSLContext | None:
        """The TLS context of the port; None without a certificate."""
        if not self.tls_cert:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(context)
        if self.tls_client_ca:
            context.load_verify_locations(self.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def node_tls(self) -> ssl.SSLContext | None:
        """The TLS context for requests to other nodes, with certificates of the same authority."""
        if not self.tls_cert:
            return None
        context = ssl.create_default_context(
            cafile=self.tls_ca or self.tls_client_ca or self.tls_cert
        )
        context.check_hostname = False
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificate {self.tls_cert!r} can't be used: {error}") from None

    def name(self, port: int) -> str:
        """The node's name, given the port that it listens on."""
        host = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname())
        return self.node_id or f"{host[:50] or 'node'}-{port}"

    def advertised(self, port: int) -> Endpoint:
        """The address at which others reach the node, given the port that it listens on."""
        if self.advertise:
            return parse_endpoint("advertise", self.advertise)
        return self.endpoint._replace(port=port)

    def grpc_advertised(self, port: int) -> Endpoint:
        """The address at which clients reach its gRPC API, given the port that it listens on."""
        if self.grpc_advertise:
            return parse_endpoint("grpc_advertise", self.grpc_advertise)
        if self.advertise:
            return self.advertised(port)._replace(port=port)
        return self.grpc_endpoint._replace(port=port)


def parse_endpoint(name: str, text: str) -> Endpoint:
    """`host:port`, `[v6]:port`, `:port` (all addresses of this host) or `port` on loopback."""
    match = re.fullmatch(
        r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]/\s]*)):(?P<port>\d{1,5})", text
    )
    if match is None and text.isdigit():
        return parse_endpoint(name, f"127.0.0.1:{text}")
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(f"{name} must be host:port, got {text!r}")
    return Endpoint(match["v6"] or match["host"] or "0.0.0.0", int(match["port"]))


def load_settings(
    flags: Mapping[str, Any], file: Path | None, environment: Mapping[str, str] | None = None
) -> ServeSettings:
    """Combines the sources: a flag wins over a variable, a variable over the file."""
    environment = os.environ if environment is None else environment
    values = _from_file(file) if file is not None else {}
    origins = {name: f"{name} in {file}" for name in values}
    for name in ServeSettings.__struct_fields__:
        variable = _VARIABLE + name.upper()
        if (text := environment.get(variable)) is not None:
            values[name], origins[name] = text, variable
        if (flag := flags.get(name)) is not None:
            values[name], origins[name] = flag, f"--{name.replace('_', '-')}"
    return ServeSettings(**{name: _typed(name, values[name], origins[name]) for name in values})


def _typed(name: str, value: Any, origin: str) -> Any:
    """Returns the value in the type of the setting; `origin` is how errors name it."""
    types = {field.name: field.type for field in msgspec.structs.fields(ServeSettings)}
    if name not in types:
        near = get_close_matches(name, types, 1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(types)}"
        raise ConfigError(f"{origin} is not a setting of pxrs serve; {advice}")
    kind = types[name]
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        wanted = _KINDS.get(kind) or f"one of {', '.join(get_args(kind))}"
        raise ConfigError(f"{origin} must be {wanted}, got {quoted(value)}") from None


def misspelled(environment: Mapping[str, str] | None = None) -> list[str]:
    """Warnings for the log about variables that look like settings and are none.

    No errors: Kubernetes makes variables like `PXRS_SERVE_PORT` for a service of that name.
    """
    names = ServeSettings.__struct_fields__
    known = {_VARIABLE + name.upper() for name in names}
    given = os.environ if environment is None else environment
    others = [name for name in given if name.startswith(_VARIABLE) and name not in known]
    nearest = {name: get_close_matches(name, known, 1, cutoff=0.9) for name in sorted(others)}
    return [
        f"the variable {name} is no setting of pxrs serve and does nothing; did you mean {near[0]}?"
        for name, near in nearest.items()
        if near
    ]


def open_to_others(settings: ServeSettings, file: Path | None) -> list[str]:
    """Warnings for the log about files that other users of this host can read or change."""
    found = []
    if file is not None and (mode := _mode(file)) is not None:
        if mode & stat.S_IWOTH:
            found.append(f"{file} can be changed by every user of this host: chmod o-w it")
        if mode & stat.S_IROTH and settings.store and has_secret(settings.store):
            found.append(
                f"{file} can be read by every user of this host, and the store's URL has a "
                "password: chmod o-r it"
            )
    if settings.tls_key and (_mode(Path(settings.tls_key)) or 0) & stat.S_IROTH:
        found.append(f"{settings.tls_key}, the key, can be read by every user of this host")
    return found


def _mode(file: Path) -> int | None:
    try:
        return file.stat().st_mode
    except OSError:
        return None


def _from_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} could not be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} must be TOML: {error}") from None
