"""Translates etcd's errors: may the request have happened, and which error callers get."""

from __future__ import annotations

from enum import Enum
from typing import Any

from pxrs.errors import (
    ConfigError,
    InvalidRequest,
    PxrsError,
    SessionLost,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from pxrs.stores.etcd.wire import grpc


class Remedy(Enum):
    """Whether a failed request may have happened, and what may help."""

    ANOTHER_NODE = "it may have happened; ask another node"
    NEW_TOKEN = "nothing happened; log in again"
    NONE = "nothing happened; it will not help to try again"


def remedy(error: Any) -> Remedy:
    """Judge an `RpcError`."""
    code, text = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Remedy.ANOTHER_NODE
    if code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
        # gRPC's internal error for a broken connection.
        return Remedy.ANOTHER_NODE
    if "invalid auth token" in text or "auth store is old" in text:
        return Remedy.NEW_TOKEN
    return Remedy.NONE


def translated(error: Any) -> PxrsError:
    """The pxrs error for an `RpcError`."""
    code, text = error.code(), error.details() or "no details"
    if code == grpc.StatusCode.NOT_FOUND and "lease" in text:
        return SessionLost("the session is over; open a new one and start again")
    if "too large" in text or "larger than max" in text:
        # The second is gRPC's: it does not even send what is far above the limit.
        return InvalidRequest(
            f"etcd: {text}; commit less at once, or raise etcd's --max-request-bytes "
            "(1572864 bytes if it is not set)"
        )
    if "too many operations" in text:
        return InvalidRequest(
            f"etcd: {text}; its --max-txn-ops must be 128, as it is if it is not set, or more"
        )
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        if "space" in text:
            return StoreFull(
                f"etcd: {text}; compact and defragment it, or raise --quota-backend-bytes, "
                "then disarm the alarm"
            )
        return StoreBusy(f"etcd: {text}")
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED) or (
        "user name is empty" in text or "authentication failed" in text
    ):
        return not_allowed(text)
    if remedy(error) is Remedy.ANOTHER_NODE:
        return StoreUnavailable(f"etcd can't be reached: {text}")
    return StoreError(f"etcd: {code.name}: {text}")


def not_allowed(text: str) -> ConfigError:
    """The error for a request that etcd does not permit this user."""
    return ConfigError(
        f"etcd: {text}; the URL names the user: etcd://user:password@host:2379/prefix, "
        "who needs a role that may read and write the prefix"
    )
