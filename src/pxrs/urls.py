"""URLs taken apart, and shown without their secrets.

By hand, and strictly: `urlsplit` and the drivers quote what they do not understand, and each
guesses in its own way what a password with an unencoded `/`, `?` or `@` might be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote, unquote_plus

import msgspec

from pxrs.errors import ConfigError
from pxrs.redaction import HIDDEN, remember

# Hundreds of hosts fit into it.
LONGEST_URL = 8192
# A user without a password is a token.
_TOKENS = ("nats", "pxrs")
_FILES = ("sqlite", "memory")
_SECRET_NAMES = ("passw", "pwd", "secret", "token", "passphrase", "scram_")
# An & in a password makes options of its parts: beside a secret only these are shown.
_HARMLESS = frozenset((
    "application_name", "busy_timeout", "channel_binding", "charset", "client_encoding",
    "connect_timeout", "connections", "database", "db", "dbname", "fallback_application_name",
    "gssencmode", "host", "hostaddr", "keepalives", "keepalives_count", "keepalives_idle",
    "keepalives_interval", "load_balance_hosts", "options", "passfile", "port", "protocol",
    "read_timeout", "replication", "require_auth", "requirepeer", "requiressl", "schema",
    "service", "service_name", "sid", "socket_timeout", "ssl", "ssl_ca", "ssl_ca_certs",
    "ssl_capath", "ssl_cert", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_cipher",
    "ssl_key", "ssl_keyfile", "ssl_max_protocol_version", "ssl_min_protocol_version",
    "ssl_verify_cert", "ssl_verify_identity", "sslcert", "sslcertmode", "sslcompression",
    "sslcrl", "sslcrldir", "sslkey", "sslmode", "sslnegotiation", "sslrootcert", "sslsni",
    "target_session_attrs", "tcp_user_timeout", "timeout", "unix_socket", "user", "write_timeout",
))  # fmt: skip
_PARTS = ("coord", "log")
_URLS = ("url", "main", "coord", "log", "store")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,30}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_BARE_PERCENT = re.compile(r"%(?![0-9a-fA-F]{2})")
_HOST = re.compile(r"(?:\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|[\w.%~-]*)(?::\d{0,5})?")
_ENCODE = (
    "percent-encode these characters in user and password (%2F for /, %3F for ?, %23 for #, %40 "
    "for @, %25 for %), and write %40 for an @ behind the host"
)


class Shy(msgspec.Struct, frozen=True):
    """Settings whose `repr` shows no secrets."""

    def __rich_repr__(self) -> Any:
        for name in self.__struct_fields__:
            yield name, _shown(name, getattr(self, name))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({fields})"


class StoreUrl(Shy, frozen=True):
    """A URL, taken apart.

    `scheme` is in lower case. `place` is a path for `sqlite`, a name for `memory`; of a server it
    has hosts and path as they were written. `query` has the options as they were written.
    """

    scheme: str
    place: str
    user: str | None = None
    password: str | None = None
    query: tuple[str, ...] = ()

    @property
    def hosts(self) -> str:
        return self.place.partition("/")[0]

    @property
    def path(self) -> str:
        """The part after the slash behind the hosts, as it was written."""
        return self.place.partition("/")[2]

    @property
    def options(self) -> dict[str, str]:
        """The options by name, decoded."""
        pairs = (each.partition("=") for each in self.query)
        return {unquote_plus(name): unquote_plus(value) for name, _, value in pairs}

    @property
    def public(self) -> str:
        """The URL without passwords and tokens."""
        login = ""
        # Nodes take the password as the token, and ignore the user then.
        if self.user and self.scheme != "pxrs" and not self._is_token:
            login = f"{_encoded(self.user)}@"
        return self._joined(login, _without_secrets(self.query))

    @property
    def _is_token(self) -> bool:
        return self.password is None and self.scheme in _TOKENS

    @property
    def whole(self) -> str:
        """The URL with all secrets, encoded so that every driver reads the same."""
        login = "" if self.user is None else _encoded(self.user)
        if self.password is not None:
            login += f":{_encoded(self.password)}"
        if self.user is not None:
            login += "@"
        return self._joined(login, self.query)

    def _joined(self, login: str, query: Sequence[str]) -> str:
        options = f"?{'&'.join(query)}" if query else ""
        return f"{self.scheme}://{login}{self.place}{options}"


def take_apart(url: object) -> StoreUrl:
    """Take a URL apart; raises `ConfigError`, which shows nothing that might be a secret."""
    if not isinstance(url, str) or "://" not in url:
        what = "text without ://" if isinstance(url, str) else f"a {type(url).__name__}"
        raise ConfigError(
            "a store URL must look like sqlite:///app.db, sqlite:////var/lib/app.db or "
            f"memory://, got {what}"
        )
    if len(url) > LONGEST_URL:
        raise ConfigError(f"a URL must have up to {LONGEST_URL} characters, got {len(url)}")
    scheme, _, rest = url.partition("://")
    if not _SCHEME.fullmatch(scheme):
        raise ConfigError("a URL must begin with a scheme such as sqlite://")
    shown = f"{scheme.lower()}://{HIDDEN}"
    if "#" in rest or _CONTROL.search(rest) or "%00" in rest:
        raise ConfigError(
            f"{shown} contains #, NUL or another control character; write %23 for # and "
            "percent-encode the others"
        )
    place, _, query = rest.partition("?")
    authority, slash, path = place.partition("/")
    scheme = scheme.lower()
    login, at, hosts = authority.rpartition("@")
    engine = scheme.partition("+")[0]
    if engine == "sqlite" and authority:
        raise ConfigError(
            "a sqlite:// URL names a host; write sqlite:///relative or sqlite:////absolute"
        )
    if engine == "memory" and "@" in rest:
        raise ConfigError("a memory:// URL names a user; write memory://name")
    if engine in _FILES:
        return StoreUrl(scheme, place, query=_options(query, shown))
    if "@" in path or "@" in query:
        raise ConfigError(f"the password in {shown} can't be found without doubt: {_ENCODE}")
    if _BARE_PERCENT.search(rest):
        raise ConfigError(f"{shown} contains a % that begins no %XX: {_ENCODE}")
    if not all(map(_HOST.fullmatch, hosts.split(","))):
        raise ConfigError(
            f"{shown} must name host:port, with a number for the port; if a password stands "
            f"there: {_ENCODE}"
        )
    user, colon, password = login.partition(":")
    found = StoreUrl(
        scheme,
        hosts + slash + path,
        user=unquote(user) if at else None,
        password=unquote(password) if colon else None,
        query=_options(query, shown),
    )
    _remember(found, password or user)
    return found


def public(url: str) -> str:
    """A store's URL, or several as `split` takes them, without passwords and tokens.

    Of a URL that can't be taken apart only the scheme is shown.
    """
    try:
        main, parts = split(url)
    except ConfigError:
        return HIDDEN
    return " ".join([_public(main), *(f"{name}={_public(each)}" for name, each in parts)])


def has_secret(url: str) -> bool:
    """Whether it has a password or token; also if it can't be taken apart."""
    try:
        main, parts = split(url)
        places = [take_apart(each) for each in (main, *(each for _, each in parts))]
    except ConfigError:
        return True
    return any(each.public != each.whole for each in places)


def check_url(url: str) -> None:
    """Raises `ConfigError` if it is wrong, or one of several as `split` takes them."""
    if not isinstance(url, str):
        take_apart(url)
    main, parts = split(url)
    for each in (main, *(each for _, each in parts)):
        take_apart(each)


def split(url: str) -> tuple[str, list[tuple[str, str]]]:
    """Split a text that names several stores: the first URL, and the others by their names."""
    if len(url) > 3 * LONGEST_URL:
        raise ConfigError(f"a URL must have up to {LONGEST_URL} characters, got {len(url)}")
    main, *rest = re.split(r" (?=(?:coord|log)=)", url)
    if len(rest) > len(_PARTS):
        raise ConfigError("coord or log is given twice")
    named = [each.partition("=")[::2] for each in rest]
    return main.rstrip(" "), [(name, each.rstrip(" ")) for name, each in named]


def is_secret(name: str) -> bool:
    """Whether an option of this name has a secret, rather than a file or a setting."""
    return any(each in name.lower() for each in _SECRET_NAMES)


def about_options(url: str, said: str) -> str:
    """A driver's text about the options of this URL, unless they may be part of a password."""
    if any(map(_holds_secret, take_apart(url).query)):
        return "an option of the URL is not known or wrong; write %26 for an & in a password"
    return said


def _public(url: str) -> str:
    try:
        return take_apart(url).public
    except ConfigError:
        scheme, found, _ = url.partition("://")
        return f"{scheme.lower()}://{HIDDEN}" if found and _SCHEME.fullmatch(scheme) else HIDDEN


def _options(query: str, shown: str) -> tuple[str, ...]:
    found = tuple(filter(None, query.split("&")))
    if not all("=" in each[1:] for each in found):
        raise ConfigError(f"an option of {shown} is not name=value; write %26 for an & in a value")
    names = set(map(_name, found))
    if len(names) < len(found):
        raise ConfigError(f"an option is given twice in {shown}")
    return found


def _name(option: str) -> str:
    return unquote_plus(option.partition("=")[0])


def _holds_secret(option: str) -> bool:
    return is_secret(_name(option))


def _without_secrets(query: tuple[str, ...]) -> tuple[str, ...]:
    if not any(map(_holds_secret, query)):
        return query
    return tuple(each for each in query if _name(each) in _HARMLESS)


def _remember(url: StoreUrl, raw: str) -> None:
    shown = url.public
    secrets = [each.partition("=")[2] for each in url.query if _holds_secret(each)]
    secrets += [value for name, value in url.options.items() if is_secret(name)]
    if url.password is not None:
        secrets += [url.password, raw]
    elif url.user is not None and url._is_token:
        secrets += [url.user, raw]
    remember(*secrets, *map(unquote, secrets), shown=shown)


def _encoded(text: str) -> str:
    return quote(text, safe="", errors="surrogateescape")


def _shown(name: str, value: Any) -> Any:
    """A field of settings as it may be shown."""
    if not value:
        return value
    if is_secret(name) or name == "conninfo":
        return HIDDEN
    if name in _URLS:
        return public(value)
    if name == "user":
        # It may be a token.
        return HIDDEN
    if name == "query":
        return _without_secrets(value)
    if isinstance(value, Mapping) and any(map(is_secret, value)):
        return {key: each for key, each in value.items() if key in _HARMLESS}
    return value
