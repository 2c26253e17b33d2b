"""Signatures by which nodes know each other: what one passes on, another answers only if signed.

The secret is kept in the store, which only those can read who need no token anyway. A signature
is good for one request to one node. The client's token is not passed on: the node that checked it
names it, so a stranger at a dead node's address learns no token.
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
    """A request that a node has passed on. `token` is the name of the client's; "" if it has none.

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
    """The signature. A line feed can't be in any of the parts: all of them are in the head."""
    text = "\n".join(request).encode("utf-8", "surrogateescape")  # a stranger's need not be UTF-8
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def is_signed(secret: bytes, request: PassedOn, signature: str) -> bool:
    """Whether a node of this store has signed it. Takes the same time for any wrong one."""
    return hmac.compare_digest(sign(secret, request), signature.encode("ascii", "replace").decode())
