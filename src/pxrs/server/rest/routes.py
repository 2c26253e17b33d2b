"""Routes as values: what a path takes and answers, for the server and for the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from typing import Any, NamedTuple

import msgspec

from pxrs.errors import InvalidRequest
from pxrs.server.tokens import Action, Identity, Kind

RAW_BATCH = "application/vnd.pxrs.batch"
JSON = "application/json"


class Answer(NamedTuple):
    """The answer of a handler for which a struct with status 200 is not enough."""

    body: Any
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = {}


class Call(NamedTuple):
    """One request, checked: the path's parameters, the query and the body as the route has them."""

    path: Mapping[str, str]
    query: Any
    body: Any
    headers: Mapping[str, str]
    identity: Identity | None = None

    def may(self, kind: Kind, name: str, action: Action) -> bool:
        """Whether the caller may do this; every caller may where no tokens are required."""
        return self.identity is None or self.identity.may(kind, name, action)


class Need(NamedTuple):
    """A right that a request needs."""

    kind: Kind
    name: str
    action: Action


def of_key(key: bytes, action: Action) -> Need:
    """The right on a key of `px.kv`, which may be any bytes."""
    return Need("key", key.decode(errors="surrogateescape"), action)


def in_path(kind: Kind, action: Action) -> Callable[[Call], list[Need]]:
    """The right on what the path names `{topic}`, `{group}` or `{queue}`."""
    return lambda call: [Need(kind, call.path[kind], action)]


Handler = Callable[[Call], Awaitable[Any]]
# Identifies the caller again; raises `HttpError` once the token is not valid any more.
Identify = Callable[[], Awaitable[Identity | None]]
# Takes the frames of a client, and what identifies it; yields the frames for the client.
Talk = Callable[[AsyncIterator[bytes], Identify], AsyncGenerator[bytes, None]]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one path.

    `query` and `body` are structs that the request must fit; `body` may be `bytes` for a raw one.
    `usual`: a narrower struct that most bodies fit and that is decoded faster; the handler gets
    one of it, or of `body`.
    `answer` is the body of a success. `open`: needs no token. `late`: an expired token will do.
    `waits`: it may wait for long, and ends when its client has gone. `once`: a client that does
    not know whether it was done must not repeat it. `needs`: the rights that a request needs; None
    if any token will do.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    query: type | None = None
    body: type | None = None
    usual: type | None = None
    answer: Any = None
    status: int = 200
    content_type: str = JSON
    open: bool = False
    late: bool = False
    waits: bool = False
    once: bool = False
    needs: Callable[[Call], Iterable[Need]] | None = None

    def parse_query(self, given: Mapping[str, str]) -> Any:
        """The query as the route's struct; raises `InvalidRequest` if it does not fit."""
        if self.query is None:
            if given:
                raise InvalidRequest(f"{self.path} takes no query parameters, got {sorted(given)}")
            return None
        try:
            return msgspec.convert(dict(given), self.query, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the query is wrong: {error}") from None


class Match(NamedTuple):
    """The methods of a path, and its parameters."""

    methods: Mapping[str, Route]
    parameters: Mapping[str, str]


class Router:
    """Finds routes by path: literal paths first, then those with parameters."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._literal: dict[str, dict[str, Route]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Route]]] = {}
        for route in self.routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        if "{" not in route.path:
            methods = self._literal.setdefault(route.path, {})
        else:
            pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", route.path))
            methods = self._patterns.setdefault(route.path, (pattern, {}))[1]
        if route.method in methods:
            raise ValueError(f"{route.method} {route.path} is declared twice")
        methods[route.method] = route

    def find(self, path: str) -> Match | None:
        """The routes of a path; None if there are none.

        The path is decoded except for slashes and percent signs that are part of names.
        """
        if (methods := self._literal.get(path)) is not None:
            return Match(methods, {})
        for pattern, methods in self._patterns.values():
            if (match := pattern.fullmatch(path)) is not None:
                found = match.groupdict()
                if "%" in path:
                    found = {name: _unquoted(text) for name, text in found.items()}
                return Match(methods, found)
        return None


def _unquoted(text: str) -> str:
    return text.replace("%2F", "/").replace("%25", "%")
