"""etcd's messages. The only place that knows the generated code, which carries no types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from aetcd import rpc

__all__ = ["grpc", "rpc"]


def get_op(key: bytes) -> Any:
    """Read one key inside a transaction."""
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def put_op(key: bytes, value: bytes, lease: int = 0) -> Any:
    """Write one key inside a transaction."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def delete_op(key: bytes) -> Any:
    """Delete one key inside a transaction."""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


def unchanged(key: bytes, revision: int) -> Any:
    """Holds while the key was last written at this revision; with 0, while it does not exist."""
    return rpc.Compare(
        target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, key=key, mod_revision=revision
    )


def has_value(key: bytes, value: bytes) -> Any:
    """Holds while the key has this value."""
    return rpc.Compare(target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, key=key, value=value)


def exists(key: bytes) -> Any:
    """Holds while the key exists."""
    return rpc.Compare(
        target=rpc.Compare.CREATE, result=rpc.Compare.GREATER, key=key, create_revision=0
    )


def unbound(key: bytes) -> Any:
    """Holds while the key belongs to no lease."""
    return rpc.Compare(target=rpc.Compare.LEASE, result=rpc.Compare.EQUAL, key=key, lease=0)


def txn(compares: Iterable[Any], then: Iterable[Any], otherwise: Iterable[Any]) -> Any:
    """A transaction."""
    return rpc.TxnRequest(compare=list(compares), success=list(then), failure=list(otherwise))


def first_kv(response: Any) -> Any | None:
    """The key-value that a read inside a transaction found."""
    found = response.response_range.kvs
    return found[0] if found else None


def after_prefix(prefix: bytes) -> bytes:
    """The first key behind all that start with the prefix. UTF-8 has no byte 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
