"""Logins and TLS, on a server that asks for them."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

import engines
from pxrs.config import parse_url, zookeeper_settings
from pxrs.errors import ConfigError, InvalidRequest, StoreUnavailable
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.types import Check, Committed, Put
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("zookeeper")
PATIENCE = 30.0


def open_coord(url: str) -> ZooKeeperCoord:
    return ZooKeeperCoord(zookeeper_settings(parse_url(url)))


def with_login(url: str, login: str) -> str:
    return url.replace("://", f"://{login}@")


def use(coord: ZooKeeperCoord) -> None:
    """Everything that needs a right of its own."""
    watch, session = coord.watch("k"), coord.session(5.0)
    outcome = coord.commit([Check("k", 0)], [Put("k", b"1"), Put("mine", b"1", session.id)])
    assert isinstance(outcome, Committed)
    session.renew()
    assert watch.wait(PATIENCE)
    assert [each.key for each in coord.list("")] == ["k", "mine"]
    session.close()


@pytest.mark.parametrize("login", ["app:wrong", "other:p%40ss%3Aword", None])
def test_only_the_user_who_made_it_gets_in(zookeeper_url: str, login: str | None) -> None:
    with closing(open_coord(with_login(zookeeper_url, "app:p%40ss%3Aword"))) as coord:
        use(coord)
    with closing(open_coord(with_login(zookeeper_url, "app:p%40ss%3Aword"))) as again:
        assert again.get("k") is not None
    stranger = zookeeper_url if login is None else with_login(zookeeper_url, login)
    with (
        pytest.raises(ConfigError, match="ZooKeeper refuses this user"),
        closing(open_coord(stranger)) as coord,
    ):
        coord.get("k")


def _pkcs8(certificate: trustme.LeafCert) -> bytes:
    """The private key as Java's reader takes it."""
    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.fixture
def secured(new_engine: NewEngine, tmp_path: Path) -> engines.Engine:
    """A server that wants to know whom it talks to, and shows who it is itself."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, host in (("server", "127.0.0.1"), ("client", "app")):
        certificate = authority.issue_cert(host)
        (tmp_path / f"{name}.pem").write_bytes(
            _pkcs8(certificate) + certificate.cert_chain_pems[0].bytes()
        )
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}-key.pem")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}-cert.pem")
    return new_engine(
        "zookeeper",
        java=["-Djute.maxbuffer=200000"],
        settings={
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.location": str(tmp_path / "server.pem"),
            "ssl.keyStore.type": "PEM",
            "ssl.trustStore.location": str(tmp_path / "ca.pem"),
            "ssl.trustStore.type": "PEM",
            "ssl.clientAuth": "need",
            # Of clients it wants to see that the authority knows them, under whatever name.
            "ssl.clientHostnameVerification": "false",
        },
    )


def test_tls(secured: engines.Engine, tmp_path: Path) -> None:
    port = secured.ports[3]
    place = f"zookeeper://127.0.0.1:{port}/x"
    files = f"ca={tmp_path}/ca.pem&cert={tmp_path}/client-cert.pem&key={tmp_path}/client-key.pem"
    with closing(open_coord(f"{place}?{files}")) as coord:
        use(coord)
        with pytest.raises(InvalidRequest, match=r"jute\.maxbuffer"):
            coord.commit([], [Put("k", bytes(300_000))])
    for refused in (f"ca={tmp_path}/ca.pem&timeout=1", "timeout=1"):
        with pytest.raises(StoreUnavailable):
            open_coord(f"{place}?{refused}").close()
    # The certificate is for 127.0.0.1 alone.
    with pytest.raises(StoreUnavailable, match=r"certificate of localhost .*must name the host"):
        open_coord(f"zookeeper://localhost:{port}/x?{files}&timeout=1").close()
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    with pytest.raises(StoreUnavailable, match=r"certificate of 127\.0\.0\.1 .*signed by what ca="):
        open_coord(f"{place}?{files.replace('ca.pem', 'other.pem')}&timeout=1").close()
    (tmp_path / "not.pem").write_text("nothing")
    for name, why in (("none.pem", "can't be read"), ("not.pem", "can't be used")):
        with pytest.raises(ConfigError, match=why):
            open_coord(f"{place}?ca={tmp_path}/{name}").close()


def test_a_server_without_tls_is_refused(zookeeper_url: str) -> None:
    with pytest.raises(StoreUnavailable):
        open_coord(f"{zookeeper_url}?tls=true&timeout=1").close()


def test_a_server_without_tls_does_not_get_the_password() -> None:
    """Whatever it answers to the beginning of TLS, nothing follows in clear."""
    said: list[bytes] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            with suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client, suppress(OSError):
                        said.append(client.recv(65536))
                        # A server's answer to a client that has connected, without TLS.
                        client.sendall(struct.pack(">iiiqi16s?", 37, 0, 10_000, 1, 16, b"p", False))
                        while more := client.recv(65536):
                            said.append(more)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreUnavailable):
            open_coord(f"zookeeper://app:secret@127.0.0.1:{port}/x?tls=true&timeout=1").close()
        server.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)
    assert said
    # What a client says first in TLS: a handshake.
    assert said[0].startswith(b"\x16\x03")
    assert b"secret" not in b"".join(said)
