"""Bearer tokens: who may do what with which topics, groups, queues and keys.

A token is a name and a secret. The store keeps a hash of the secret (32 random bytes, so a plain
SHA-256 is enough), never the secret. Rights are given by prefix: `orders*` is every name that
begins with "orders", `orders` is that name alone.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import msgspec

from pxrs.clock import Clock
from pxrs.errors import ConfigError, InvalidRequest, PermissionDenied, quoted
from pxrs.stores.api import CoordStore
from pxrs.types import Check, Committed, Delete, Put

Kind = Literal["topic", "group", "queue", "key", "cluster"]
Action = Literal["read", "write", "admin"]

_FOLDER = "tokens/"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MARK = "pxrs"
_LONGEST_SHOWN = 250
# How long the former secret of a token that was rotated is still valid.
ROTATION_GRACE = 3600.0


class Right(msgspec.Struct, frozen=True):
    """The actions allowed on names of one kind: on one name, or on all with a prefix."""

    kind: Kind
    names: str
    actions: tuple[Action, ...]

    def allows(self, kind: str, name: str, action: str) -> bool:
        if kind != self.kind or action not in self.actions:
            return False
        if self.names.endswith("*"):
            return name.startswith(self.names[:-1])
        return name == self.names

    def __str__(self) -> str:
        return f"{self.kind}:{self.names}:{','.join(self.actions)}"


class _Secret(msgspec.Struct, frozen=True):
    hash: str
    until_ms: int | None = None


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    secrets: tuple[_Secret, ...]
    rights: tuple[Right, ...]
    created_ms: int
    expires_ms: int | None = None
    schema: int = 1


class TokenInfo(NamedTuple):
    """A token without its secret."""

    name: str
    rights: tuple[Right, ...]
    created_ms: int
    expires_ms: int | None


class Identity(NamedTuple):
    """The sender of a request. `expired`: the token is genuine, but its time is over.

    `expires_ms`: when its time is over; None if never.
    """

    name: str
    rights: tuple[Right, ...]
    expired: bool = False
    expires_ms: int | None = None

    def may(self, kind: Kind, name: str, action: Action) -> bool:
        return any(right.allows(kind, name, action) for right in self.rights)

    def require(self, kind: Kind, name: str, action: Action) -> None:
        """Raises `PermissionDenied` unless it may do this."""
        if not self.may(kind, name, action):
            raise self.denied(f"{action} {kind} {quoted(name)}", kind, name, action)

    def denied(self, what: str, kind: Kind, name: str, action: Action) -> PermissionDenied:
        """The refusal to do `what`, which needs this right."""
        # The name is a stranger's: it may be long, and no text at all.
        shown = name[:_LONGEST_SHOWN].encode(errors="backslashreplace").decode()
        right = f"{kind}:{shown}:{action}"
        return PermissionDenied(
            f"token {self.name!r} may not {what}; it lacks the right {right}", right
        )


class Tokens:
    """Makes, lists, checks and revokes tokens. Thread-safe."""

    def __init__(self, coord: CoordStore, clock: Clock) -> None:
        self._coord = coord
        self._clock = clock

    def create(self, name: str, rights: Iterable[Right], expires_in: float | None = None) -> str:
        """Make a token; returns what clients send, which can't be read again later."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"a token's name must be 1 to 64 letters, digits, '_' or '-', got {quoted(name)}"
            )
        rights = tuple(rights)
        if not rights:
            raise InvalidRequest("a token needs at least one right, such as topic:orders*:read")
        now = self._clock.wall_ms()
        secret = secrets.token_urlsafe(32)
        record = _Record(
            secrets=(_Secret(_hash(secret)),),
            rights=rights,
            created_ms=now,
            expires_ms=None if expires_in is None else now + round(expires_in * 1000),
        )
        key = _FOLDER + name
        put = Put(key, msgspec.json.encode(record))
        if not isinstance(self._coord.commit([Check(key, 0)], [put]), Committed):
            raise InvalidRequest(f"token {name!r} exists; revoke it first, or rotate its secret")
        return f"{_MARK}.{name}.{secret}"

    def rotate(self, name: str) -> str:
        """Give a token a new secret; the former one is valid for another hour."""
        secret = secrets.token_urlsafe(32)
        key = _FOLDER + name
        while True:
            found = self._coord.get(key)
            if found is None:
                raise InvalidRequest(f"there is no token {name!r}")
            record = msgspec.json.decode(found.value, type=_Record)
            until = self._clock.wall_ms() + round(ROTATION_GRACE * 1000)
            former = _Secret(record.secrets[0].hash, until)
            after = msgspec.structs.replace(record, secrets=(_Secret(_hash(secret)), former))
            put = Put(key, msgspec.json.encode(after))
            if isinstance(self._coord.commit([Check(key, found.version)], [put]), Committed):
                return f"{_MARK}.{name}.{secret}"

    def revoke(self, name: str) -> None:
        """Remove a token; nodes notice within seconds."""
        if self._coord.get(_FOLDER + name) is None:
            raise InvalidRequest(f"there is no token {name!r}")
        self._coord.commit([], [Delete(_FOLDER + name)])

    def list(self) -> list[TokenInfo]:
        """All tokens, by name."""
        found = []
        for each in self._coord.list(_FOLDER):
            record = msgspec.json.decode(each.value, type=_Record)
            found.append(
                TokenInfo(
                    each.key.removeprefix(_FOLDER),
                    record.rights,
                    record.created_ms,
                    record.expires_ms,
                )
            )
        return found

    def identify(self, bearer: str) -> Identity | None:
        """The identity of a token, or None. Takes the same time for any wrong secret."""
        mark, _, rest = bearer.partition(".")
        name, _, secret = rest.partition(".")
        known = mark == _MARK and _NAME.fullmatch(name)
        if not known or len(secret) > 100 or not secret.isascii():
            return None
        record = self._find(name)
        if record is None:
            return None
        now, given = self._clock.wall_ms(), _hash(secret)
        genuine = False
        for each in record.secrets:
            good = each.until_ms is None or now < each.until_ms
            genuine |= hmac.compare_digest(each.hash, given) and good
        return self._identity(name, record) if genuine else None

    def named(self, name: str) -> Identity | None:
        """The identity of a token by name, when another node has checked its secret."""
        record = self._find(name) if _NAME.fullmatch(name) else None
        return None if record is None else self._identity(name, record)

    def _find(self, name: str) -> _Record | None:
        found = self._coord.get(_FOLDER + name)
        return None if found is None else msgspec.json.decode(found.value, type=_Record)

    def _identity(self, name: str, record: _Record) -> Identity:
        expired = record.expires_ms is not None and self._clock.wall_ms() >= record.expires_ms
        return Identity(name, record.rights, expired, record.expires_ms)


def parse_right(text: str) -> Right:
    """`topic:orders*:read,write` → a right; `admin` alone is everything."""
    kind, _, rest = text.partition(":")
    names, _, actions = rest.rpartition(":")
    wanted = tuple(actions.split(","))
    if kind not in get_args(Kind) or not names or not set(wanted) <= set(get_args(Action)):
        raise ConfigError(
            f"a right must be KIND:NAME:ACTIONS such as topic:orders*:read,write, got {text!r}; "
            f"kinds are {', '.join(get_args(Kind))}, actions {', '.join(get_args(Action))}"
        )
    return msgspec.convert({"kind": kind, "names": names, "actions": wanted}, Right)


def all_rights() -> tuple[Right, ...]:
    """All rights, for an administrator."""
    actions: tuple[Action, ...] = get_args(Action)
    return tuple(Right(kind, "*", actions) for kind in get_args(Kind))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
