"""Translates kazoo's errors: may the request have happened, and which error callers get."""

from __future__ import annotations

from kazoo import exceptions as zk
from kazoo.handlers.threading import KazooTimeoutError

from pxrs.errors import (
    ConfigError,
    InvalidRequest,
    PxrsError,
    StoreDamaged,
    StoreError,
    StoreUnavailable,
)

__all__ = ["DOUBTFUL", "came_back_empty", "translated", "zk"]

# After these the request may have happened: the connection broke, or no answer came.
DOUBTFUL = (
    zk.ConnectionLoss,
    zk.ConnectionClosedError,
    zk.OperationTimeoutError,
    zk.SessionExpiredError,
    zk.SessionMovedError,
    KazooTimeoutError,
)


def translated(error: Exception) -> PxrsError:
    """The pxrs error for an error of kazoo."""
    if isinstance(error, zk.AuthFailedError | zk.NoAuthError):
        return ConfigError(
            "ZooKeeper refuses this user; the URL names it: "
            "zookeeper://user:password@host:2181/root"
        )
    if isinstance(error, DOUBTFUL):
        return StoreUnavailable(f"ZooKeeper does not answer ({type(error).__name__})")
    if isinstance(error, zk.NoNodeError):
        return came_back_empty()
    if isinstance(error, zk.BadArgumentsError):
        return InvalidRequest(f"ZooKeeper refused this request: {error}")
    return StoreError(f"ZooKeeper: {type(error).__name__} {error}")


def came_back_empty() -> StoreDamaged:
    """The error for a store that is gone, or is not the one that was opened."""
    return StoreDamaged(
        "the data of pxrs in ZooKeeper is gone: the servers came back without their data, or its "
        "folder was removed; restore the data, or open the store again to begin with an empty one"
    )
