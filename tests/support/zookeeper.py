"""What servers of ZooKeeper say of themselves."""

from __future__ import annotations

import socket


def leads(port: int) -> bool:
    """Whether the server at this port leads its ensemble."""
    said = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"srvr")
        while some := connection.recv(4096):
            said += some
    return b"Mode: leader" in said
