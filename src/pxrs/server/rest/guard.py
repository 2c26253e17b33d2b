"""Who may send which request: identifies the token, and checks that it has the route's rights."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from pxrs.clock import Clock
from pxrs.server.node_auth import PassedOn
from pxrs.server.rest.problems import HttpError
from pxrs.server.rest.routes import Call, Need, Route
from pxrs.server.tokens import Identity, Tokens

# How long a valid token is not looked up again: this late is a revoked one noticed.
_REMEMBERED = 3.0
_MOST_REMEMBERED = 10_000
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="pxrs"'}


class Guard:
    """Checks requests against tokens. Used by one event loop.

    `asks`: whether clients need a token. It never goes back to false while the node runs: after
    the last token was revoked, no client is let in.
    """

    def __init__(
        self,
        tokens: Tokens,
        clock: Clock,
        call: Callable[[Callable[[], Any]], Awaitable[Any]],
        asks: bool,
    ) -> None:
        self.asks = asks
        self._tokens = tokens
        self._clock = clock
        self._call = call
        self._known: dict[bytes, tuple[Identity, float]] = {}

    async def ask_if_there_are_tokens(self) -> None:
        """Require tokens from now on if the store has any."""
        # Not in one expression: if `asks` became true during the call, it must stay so.
        if await self._call(self._tokens.list):
            self.asks = True

    async def identify(
        self, headers: Mapping[str, str], route: Route | None, passed_on: PassedOn | None = None
    ) -> Identity | None:
        """The sender of a request; None if it needs no token. 401 if it needs one and lacks it.

        A node that requires no tokens is on loopback, where any web page can send requests too. A
        node that has passed the request on has checked the token, and names it.
        """
        if not self.asks:
            if "Origin" in headers:
                raise HttpError(
                    403,
                    "browser_refused",
                    "a node without tokens does not answer web pages; make a token and send it",
                )
            return None
        if passed_on is not None:
            bearer = passed_on.token
            identity = await self._remembered(self._tokens.named, bearer)
        else:
            bearer = _bearer(headers)
            identity = await self.look_up(bearer) if bearer and bearer.isascii() else None
        if identity is None:
            if route is not None and route.open:
                return None
            detail = (
                "send a token: Authorization: Bearer …" if not bearer else "this token is wrong"
            )
            raise HttpError(401, "unauthorized", detail, _CHALLENGE)
        if identity.expired and not (route is not None and (route.late or route.open)):
            raise HttpError(401, "token_expired", "this token has expired", _CHALLENGE)
        return identity

    async def look_up(self, bearer: str) -> Identity | None:
        return await self._remembered(self._tokens.identify, bearer)

    async def _remembered(
        self, find: Callable[[str], Identity | None], given: str
    ) -> Identity | None:
        # A name alone is no token: the cache keeps the two apart.
        key = hashlib.sha256(f"{find.__name__} {given}".encode()).digest()
        now = self._clock.monotonic()
        known = self._known.get(key)
        if known is not None and now < known[1]:
            return known[0]
        self._known.pop(key, None)
        identity: Identity | None = await self._call(partial(find, given))
        if identity is not None:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[key] = identity, now + _REMEMBERED
        return identity


def refuse(identity: Identity | None, needs: Iterable[Need]) -> None:
    """Raises `PermissionDenied` unless the identity may do all of it."""
    if identity is not None:
        for need in needs:
            identity.require(*need)


def check(route: Route, call: Call) -> None:
    """Raises `PermissionDenied` unless the caller may do what the route does."""
    if call.identity is not None and route.needs is not None:
        refuse(call.identity, route.needs(call))


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
