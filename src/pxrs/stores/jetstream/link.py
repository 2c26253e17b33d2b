"""Distinguishes a slow connection from a dead one, by the progress of its bytes.

A large batch on a slow link takes longer than any time limit that would notice a dead server soon.
So time limits count from the last byte. A ping is answered after everything that was sent before
it, in both directions: when its answer arrives, all that the server had sent by then has arrived.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any, NamedTuple

import nats.errors
from nats.aio.client import Client

try:
    import fcntl
    import termios
except ImportError:  # Windows
    fcntl = termios = None  # type: ignore[assignment]

# In Linux's tcp_info: the sent bytes that were acknowledged, and the received bytes.
_COUNTS = struct.Struct("=120xQQ")
_INT = struct.Struct("=i")


class _Moved(NamedTuple):
    """Bytes since the connection was made."""

    acked: int
    received: int


async def answers(
    client: Client, patience: float, instead: asyncio.Future[Any] | None = None
) -> bool:
    """Ping; false if no byte has moved for `patience` seconds before the server answers.

    Also ends, with true, when `instead` is done. Raises errors of the connection.
    """
    if client.is_closed:
        raise nats.errors.ConnectionClosedError
    goal = _moved(client).acked + _queued(client)
    # Not `flush`: nats-py stops reading when the answer arrives to a ping that was given up.
    pong: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    await client._send_ping(pong)
    waiting = {pong} if instead is None else {pong, instead}
    while True:
        before = _moved(client)
        done, _ = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return True
        now = _moved(client)
        # Bytes sent after the ping do not count: the kernel of a frozen server may accept them.
        is_sending = now.acked > before.acked and before.acked < goal
        if now.received == before.received and not is_sending:
            return False


def _moved(client: Client) -> _Moved:
    """Bytes moved so far. Elsewhere than on Linux, only received bytes of whole messages count."""
    connection = _socket(client)
    if connection is not None and hasattr(socket, "TCP_INFO"):
        with suppress(OSError, struct.error):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
            return _Moved(*_COUNTS.unpack(info))
    return _Moved(0, client.stats["in_bytes"])


def _queued(client: Client) -> int:
    """Bytes that were sent and not acknowledged, in this process and in the system."""
    queued = int(getattr(client, "_pending_data_size", 0))
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if writer is not None:
        queued += int(writer.transport.get_write_buffer_size())
    connection = _socket(client)
    if connection is not None and fcntl is not None:
        with suppress(OSError, ValueError):
            answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * _INT.size)
            queued += _INT.unpack(answer)[0]
    return queued


def _socket(client: Client) -> socket.socket | None:
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    found: socket.socket | None = None if writer is None else writer.get_extra_info("socket")
    return found
