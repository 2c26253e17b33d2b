"""How much one node holds for its clients; past that, they retry later or on another node."""

from __future__ import annotations

import logging
import resource

import msgspec

from pxrs.errors import BufferFull
from pxrs.server.settings import ServeSettings

# Each group that has members here, and each topic that a fetch waits for, has a thread.
MOST_GROUPS = 1000
MOST_WATCHED_TOPICS = 500
MOST_MEMBERS = 10_000
MOST_LEASES = 10_000
# For each the node keeps its queue and its number: about 300 bytes.
MOST_LEASED_ITEMS = 500_000
# Files that the store, the logs and the connections to other nodes need.
_OWN_FILES = 200
_LOG = logging.getLogger("pxrs.serve")


class NodeFull(BufferFull):
    """The node holds as much for its clients as it can: try again, or another node."""


def check_room(what: str, count: int, most: int) -> None:
    """Raises `NodeFull` if `count` has reached `most`."""
    if count >= most:
        raise NodeFull(f"this node has {count} {what}, its limit; try again later or another node")


def fit_open_files(settings: ServeSettings) -> ServeSettings:
    """The settings with no more connections than the process may have open files.

    Raises the soft limit as far as needed and allowed. Clients must not take all files: the store
    needs some.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ports = 2 if settings.grpc_listen else 1
    wanted = ports * settings.max_connections + _OWN_FILES
    if soft < wanted:
        soft = min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= wanted:
        return settings
    fitting = max(1, max(soft - _OWN_FILES, soft // 2) // ports)
    _LOG.warning(
        "max_connections is %d instead of %d: the process may have %d open files (ulimit -n)",
        fitting, settings.max_connections, soft,
    )  # fmt: skip
    return msgspec.structs.replace(settings, max_connections=fitting)
