"""Signatures between nodes: a request that one passes on is answered by another only if signed.

The secret is kept in the store; a process that can read the store needs no token anyway. A
signature is valid for one request to one node. The client's token is not passed on: the node that
checked it sends its name, so a stranger at a dead node's address learns no token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

from pxrs.stores.api import CoordStore
from pxrs.types import Check, Put

_KEY = "node-secret"


class PassedOn(NamedTuple):
    """A request that a node passes on. `token` is the name of the client's token, "" without one.

    `body` is the body's digest.
    """

    target: str
    node: str
    method: str
    path: str
    token: str
    body: str


def shared_secret(coord: CoordStore) -> bytes:
    """The secret of all nodes of a store; the first one makes it."""
    while (found := coord.get(_KEY)) is None:
        coord.commit([Check(_KEY, 0)], [Put(_KEY, secrets.token_bytes(32))])
    return found.value


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def sign(secret: bytes, request: PassedOn) -> str:
    """The signature. No part can have a line feed: all are from the head of an HTTP request."""
    text = "\n".join(request).encode("utf-8", "surrogateescape")  # a stranger's need not be UTF-8
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def is_signed(secret: bytes, request: PassedOn, signature: str) -> bool:
    """Whether a node of this store has signed it. Takes the same time for any wrong signature."""
    return hmac.compare_digest(sign(secret, request), signature.encode("ascii", "replace").decode())
