"""Transfers of messages from gRPC clients and to them: one that stalls is ended.

gRPC keeps the part of a message that has come and the part of an answer that is left, and has no
way to end a call meanwhile. So the connection of a client that stalls is shut: gRPC learns of it
from the kernel.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pxrs.server.rest.room import FAIR_BYTES_PER_SECOND, FAIR_SECONDS, Room

_LOG = logging.getLogger("pxrs.serve")
_LOOK = 0.25


class _Transfer(NamedTuple):
    """`at_last`: when it is ended in any case; `fair`: when it is ended if others wait for room."""

    peer: str
    at_last: float
    fair: float


class Transfers:
    """The transfers between the node and its gRPC clients. Used by one event loop."""

    def __init__(self, room: Room, seconds: float) -> None:
        self.room = room
        self.seconds = seconds
        self._moving: dict[object, _Transfer] = {}
        self._next_look: asyncio.TimerHandle | None = None

    @contextmanager
    def moving(self, peer: str, size: int) -> Iterator[None]:
        """The block transfers `size` bytes; a client that is too slow is cut off."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        fair = now + FAIR_SECONDS + size / FAIR_BYTES_PER_SECOND
        this = object()
        self._moving[this] = _Transfer(peer, now + self.seconds, fair)
        if self._next_look is None:
            self._next_look = loop.call_later(_LOOK, self._look)
        try:
            yield
        finally:
            del self._moving[this]

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now, others_wait = loop.time(), self.room.is_full
        for peer in {
            it.peer for it in self._moving.values()
            if now >= (min(it.fair, it.at_last) if others_wait else it.at_last)
        }:  # fmt: skip
            _LOG.info("%s is cut off: it does not send, or does not read", peer)
            cut_off(peer)
        self._next_look = loop.call_later(_LOOK, self._look) if self._moving else None


def cut_off(peer: str) -> None:
    """Shut this process's connections to a peer, as gRPC names it: `ipv4:127.0.0.1:1234`."""
    host, _, port = peer.partition(":")[2].rpartition(":")
    wanted = _address(host.strip("[]").replace("%5B", "").replace("%5D", "")), port
    for name in os.listdir("/dev/fd"):
        try:
            # A copy: another thread may close the file, and open another, while we look at it.
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with found:
            try:
                there = found.getpeername()
                if isinstance(there, tuple) and (_address(there[0]), str(there[1])) == wanted:
                    found.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _address(text: str) -> str:
    """One text for each address: one of IPv4 may be written as one of IPv6."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
