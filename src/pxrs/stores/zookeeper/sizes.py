"""How large a request may be, and whether it was that which a server did not like.

A server closes the connection on which a request is larger than its `jute.maxbuffer`, without a
word; so do networks that fail, and servers that have lost their leader. But a server judges by the
length that a request begins with, also on a connection on which nothing was said yet. So it can be
asked with four bytes, whatever the link carries.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, closing

from kazoo.hosts import collect_hosts

from pxrs.errors import InvalidRequest
from pxrs.stores.zookeeper.commits import Operation
from pxrs.stores.zookeeper.link import Link

# The default of jute.maxbuffer.
MOST_BYTES = 2**20 - 1
# Bytes of one operation besides its path and value: numbers, lengths, and the znode's ACL.
_PER_OPERATION = 50
# Bytes of the slot and of the request itself.
_PER_COMMIT = 500
# Any server takes a request of this size, or no client could connect.
_SMALL = 44
_PATIENCE = 2.0
_A_MOMENT = 0.2


def size_of(operations: Sequence[Operation]) -> int:
    """The size of a commit's request in bytes, or a little more."""
    sizes = (len(each.path.encode()) + len(each.value) + _PER_OPERATION for each in operations)
    return _PER_COMMIT + sum(sizes)


def too_large(size: int) -> InvalidRequest:
    return InvalidRequest(
        f"commit is {size} bytes long; ZooKeeper takes 1 MB in all, or its setting of "
        "jute.maxbuffer: write less at once"
    )


def is_refused(link: Link, size: int) -> bool:
    """Whether every server that can be asked refuses a request of this size."""
    asked = [_ask(link, host, port, size) for host, port in collect_hosts(link.hosts)[0]]
    return True in asked and False not in asked


def _ask(link: Link, host: str, port: int, size: int) -> bool | None:
    """Whether this server refuses the size but not a small one; None if nobody knows."""
    with ExitStack() as stack:
        try:
            small, large = (
                stack.enter_context(closing(link.connect(host, port, _PATIENCE))) for _ in range(2)
            )
            for each, length in ((small, _SMALL), (large, size)):
                each.sendall(struct.pack(">i", length))
        except OSError:
            return None
        if not _is_closed(large, _PATIENCE):
            return False
        # If both are closed, it was for another reason.
        return None if _is_closed(small, _A_MOMENT) else True


def _is_closed(connection: socket.socket, patience: float) -> bool:
    """Whether the server closes it in this time. It says nothing before it has all of a request."""
    connection.settimeout(patience)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
