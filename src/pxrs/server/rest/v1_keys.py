"""Keys and values under `/v1/kv`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from pxrs.errors import InvalidRequest, quoted
from pxrs.server.cluster import Cluster
from pxrs.server.keys import KeyService
from pxrs.server.rest.problems import HttpError
from pxrs.server.rest.routes import Answer, Call, Need, Route, of_key
from pxrs.server.rest.values import bytes_of, text_of
from pxrs.server.tokens import Action
from pxrs.types import ABSENT, Version

_KEY = "/v1/kv/{key}"

Number = Annotated[int, Meta(ge=0, le=2**53)]
Once = Annotated[str, Meta(min_length=1, max_length=256)]


class KeyVersion(Struct, frozen=True, forbid_unknown_fields=True):
    """The version of a value. 0 and 0 stand for a key that does not exist."""

    term: Number
    index: Number


class KeyQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`encoding`: `base64url` if the key in the path is not text."""

    encoding: str = "text"


class GetQuery(KeyQuery, frozen=True, forbid_unknown_fields=True):
    consistency: str = "lease"


class DeleteQuery(KeyQuery, frozen=True, forbid_unknown_fields=True):
    """`if_match`: only this version, written as `term.index`."""

    if_match: Annotated[str, Meta(pattern=r"^[0-9]{1,16}\.[0-9]{1,16}$")] | None = None
    idempotency_key: Once | None = None


class PutValue(Struct, frozen=True, forbid_unknown_fields=True):
    """A value, text or in base64. `if_match`: only over this version; 0 and 0 create.

    `ttl` in seconds. A write with the same idempotency key is answered as the first.
    """

    value: str | None = None
    value_base64: str | None = None
    if_match: KeyVersion | None = None
    ttl: Annotated[float, Meta(ge=0.001, le=1e11)] | None = None
    idempotency_key: Once | None = None


class PutAnswer(Struct, frozen=True):
    version: KeyVersion


class DeleteAnswer(Struct, frozen=True):
    """Whether there was something to delete, and the version of the deletion."""

    deleted: bool
    version: KeyVersion


class Found(Struct, frozen=True, omit_defaults=True):
    """A value: text where it is UTF-8, else in base64."""

    version: KeyVersion
    value: str | None = None
    value_base64: str | None = None


class V1Keys:
    """The handlers, and the routes that lead to them."""

    def __init__(self, keys: KeyService, cluster: Cluster) -> None:
        self._keys = keys
        self._cluster = cluster

    def routes(self) -> list[Route]:
        return [
            Route(
                method="GET", path=_KEY, handler=self.get, needs=_needs("read"),
                summary="Get a value and its version", query=GetQuery, answer=Found,
            ),
            Route(
                method="PUT", path=_KEY, handler=self.put, needs=_needs("write"),
                summary="Put a value", query=KeyQuery, body=PutValue, answer=PutAnswer, once=True,
            ),
            Route(
                method="DELETE", path=_KEY, handler=self.delete, needs=_needs("write"),
                summary="Delete a key", query=DeleteQuery, answer=DeleteAnswer, once=True,
            ),
        ]  # fmt: skip

    async def get(self, call: Call) -> Found | Answer:
        key = _key(call)
        self._cluster.refuse_led_elsewhere(key)
        entry = await self._keys.get(key, call.query.consistency)
        if entry is None:
            raise HttpError(404, "key_not_found", f"key {quoted(key)} does not exist")
        return Found(_shown(entry.version), *text_of(entry.value))

    async def put(self, call: Call) -> PutAnswer:
        asked: PutValue = call.body
        key = _key(call)
        self._cluster.refuse_led_elsewhere(key)
        value = bytes_of("value", asked.value, asked.value_base64)
        if value is None:
            raise InvalidRequest("a value or a value_base64 must be given")
        if_match = None
        if asked.if_match is not None:
            if_match = Version(asked.if_match.term, asked.if_match.index)
        version = await self._keys.put(key, value, if_match, asked.ttl, asked.idempotency_key)
        return PutAnswer(_shown(version))

    async def delete(self, call: Call) -> DeleteAnswer:
        asked: DeleteQuery = call.query
        key = _key(call)
        self._cluster.refuse_led_elsewhere(key)
        if_match = None
        if asked.if_match is not None:
            term, _, index = asked.if_match.partition(".")
            if_match = Version(int(term), int(index))
        done = await self._keys.delete(key, if_match, asked.idempotency_key)
        return DeleteAnswer(done.existed, _shown(done.version if done.existed else ABSENT))


def _needs(action: Action) -> Callable[[Call], list[Need]]:
    return lambda call: [of_key(_key(call), action)]


def _key(call: Call) -> bytes:
    """The key, which may be any bytes."""
    text, encoding = call.path["key"], call.query.encoding
    if encoding == "text":
        return text.encode()
    if encoding != "base64url":
        raise InvalidRequest(f"encoding must be text or base64url, got {quoted(encoding)}")
    try:
        return base64.b64decode(text.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the key in the path must be base64url, padded") from None


def _shown(version: Version) -> KeyVersion:
    return KeyVersion(version.term, version.index)
