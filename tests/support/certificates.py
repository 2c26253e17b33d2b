"""Certificates for servers on loopback, and TLS in front of a server that has none."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import trustme


class Certificates(NamedTuple):
    """Files. The certificate is for 127.0.0.1 only; `other_ca` has signed nothing here."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path
    other_ca: Path


def make_certificates(folder: Path, owner: str | None = None) -> Certificates:
    """Make them in this folder; `owner` is who has to read the server's key."""
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    for name, place in (("server", "127.0.0.1"), ("client", "client")):
        made = authority.issue_cert(place)
        made.cert_chain_pems[0].write_to_path(folder / f"{name}-cert.pem")
        key = folder / f"{name}-key.pem"
        made.private_key_pem.write_to_path(key)
        key.chmod(0o600)
    if owner is not None and os.getuid() == 0:
        shutil.chown(folder / "server-key.pem", owner)
    return Certificates(
        folder / "ca.pem",
        folder / "server-cert.pem",
        folder / "server-key.pem",
        folder / "client-cert.pem",
        folder / "client-key.pem",
        folder / "other.pem",
    )


class TlsFront:
    """Takes connections over TLS and passes them on to a server in the clear."""

    def __init__(self, files: Certificates, port: int) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(files.cert, files.key)
        self._server = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with suppress(OSError), plain:
            secure = self._context.wrap_socket(plain, server_side=True)
            with secure, socket.create_connection(self._server) as server:
                back = threading.Thread(target=_copy, args=(server, secure), daemon=True)
                back.start()
                _copy(secure, server)
                back.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while more := source.recv(4096):
            target.sendall(more)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
