"""Logins and TLS, on a server that asks for them."""

from __future__ import annotations

import gc
from contextlib import closing
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
from pxrs.errors import ConfigError, StoreUnavailable
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
    for name in ("server", "client"):
        certificate = authority.issue_cert("127.0.0.1")
        (tmp_path / f"{name}.pem").write_bytes(
            _pkcs8(certificate) + certificate.cert_chain_pems[0].bytes()
        )
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}-key.pem")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}-cert.pem")
    return new_engine(
        "zookeeper",
        settings={
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.location": str(tmp_path / "server.pem"),
            "ssl.keyStore.type": "PEM",
            "ssl.trustStore.location": str(tmp_path / "ca.pem"),
            "ssl.trustStore.type": "PEM",
            "ssl.clientAuth": "need",
        },
    )


# kazoo leaves the socket of a handshake that failed to the collector.
@pytest.mark.filterwarnings("ignore:unclosed <ssl:ResourceWarning")
def test_tls(secured: engines.Engine, tmp_path: Path) -> None:
    place = f"zookeeper://127.0.0.1:{secured.ports[3]}/x"
    files = f"ca={tmp_path}/ca.pem&cert={tmp_path}/client-cert.pem&key={tmp_path}/client-key.pem"
    with closing(open_coord(f"{place}?{files}")) as coord:
        use(coord)
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    wrong = files.replace("ca.pem", "other.pem")
    for refused in (f"{wrong}&timeout=1", f"ca={tmp_path}/ca.pem&timeout=1", "timeout=1"):
        with pytest.raises(StoreUnavailable):
            open_coord(f"{place}?{refused}").close()
    gc.collect()
