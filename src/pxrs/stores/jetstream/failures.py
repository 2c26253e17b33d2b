"""Translates JetStream's refusals: whether they are temporary, and which error callers get."""

from __future__ import annotations

from pxrs.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from pxrs.stores.jetstream.wire import ApiError

NO_STREAM = 10059
NO_MESSAGE = 10037
# Another message came first, or is just being stored.
WRONG_SEQUENCE = {10071, 10164}
NAME_IN_USE = 10058
_FULL = {10002, 10023, 10028, 10047, 10077, 10122}
_PLACEMENT = {10005, 10052, 10074}
# Temporary: no leader, no quorum, shutting down, too busy.
_PASSING = {10004, 10008, 10009, 10075, 10118, 10163, 10167}
# Temporary reasons why a stream can't be placed: a server was just restarted.
_AWAY = "peer offline"
_OFF = {10035, 10039, 10076}


class Stale(Exception):  # noqa: N818 - the caller looks the topic up again
    """The stream is gone, or another one has its name now."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the stream of {name} is gone, or another one has its name now")


def full(error: ApiError) -> bool:
    """Whether there is no room for another message."""
    return error.err_code in _FULL


def passing(error: ApiError) -> bool:
    """Whether the same request may succeed soon."""
    return error.err_code in _PASSING or _AWAY in str(error)


def translated(error: ApiError) -> StoreError | ConfigError:
    """The pxrs error for a refusal of JetStream."""
    if full(error):
        return StoreFull(f"JetStream has no room left: {error}")
    if passing(error):
        return StoreUnavailable(f"JetStream: {error}")
    if error.err_code in _PLACEMENT:
        return ConfigError(f"JetStream can't place the stream: {error}; fewer replicas= may do")
    if error.err_code in _OFF:
        return ConfigError(f"{error}; start the servers with -js, or enable the account")
    return StoreError(f"JetStream: {error}")
