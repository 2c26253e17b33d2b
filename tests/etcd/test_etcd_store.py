"""What is particular to etcd: authentication, TLS, compaction, limits, its own lease."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

import engines
import pxrs
from pxrs.config import ServerSettings, etcd_settings, parse_url
from pxrs.errors import (
    Closed,
    ConfigError,
    InvalidRequest,
    SessionLost,
    StoreFull,
    StoreUnavailable,
)
from pxrs.stores.etcd.coord import EtcdCoord
from pxrs.stores.etcd.wire import grpc, rpc
from pxrs.types import Check, Committed, Put
from support.engine_fixtures import NewEngine
from support.proxy import Proxy

pytestmark = pytest.mark.engine("etcd")
PATIENCE = 30.0


@contextmanager
def opened(url: str) -> Iterator[EtcdCoord]:
    coord = EtcdCoord(etcd_settings(parse_url(url)))
    yield coord
    coord.close()


def raw(url: str) -> Any:
    """A channel of gRPC's own to the first node."""
    return grpc.insecure_channel(etcd_settings(parse_url(url)).hosts[0])


def test_prefixes_are_apart(etcd_url: str) -> None:
    with opened(f"{etcd_url}-a") as one, opened(f"{etcd_url}-a/b") as other:
        one.commit([], [Put("k", b"1")])
        other.commit([], [Put("k", b"2")])
        assert [record.value for record in one.list("")] == [b"1"]
        assert [record.value for record in other.list("")] == [b"2"]


def test_a_watch_goes_on_after_compaction(new_engine: NewEngine) -> None:
    etcd = new_engine("etcd")
    with (
        Proxy(etcd.ports[0]) as proxy,
        opened(etcd.url) as near,
        opened(f"etcd://{proxy.address}") as far,
    ):
        near.commit([], [Put("k", b"0")])
        watch = far.watch("k")
        proxy.cut()
        revision = 0
        for number in range(5):
            outcome = near.commit([], [Put("k", b"%d" % number)])
            assert isinstance(outcome, Committed)
            revision = outcome.versions["k"]
        with raw(etcd.url) as channel:
            rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision, physical=True))
        proxy.reset()
        proxy.heal()
        assert watch.wait(PATIENCE)
        while watch.wait(0):
            pass
        near.commit([], [Put("k", b"after")])
        assert watch.wait(PATIENCE)
        watch.close()


def test_the_server_ends_a_lease_that_nobody_keeps_alive(etcd_url: str) -> None:
    with opened(etcd_url) as near, opened(etcd_url) as far:
        watch = near.watch("mine")
        session = far.session(1.0)
        far.commit([], [Put("mine", b"1", session.id)])
        while near.get("mine") is not None:
            assert watch.wait(PATIENCE)
        with pytest.raises(SessionLost):
            session.renew()
        assert session.remaining() == 0.0
        watch.close()


def test_a_slot_that_an_operator_removed_is_made_anew(etcd_url: str) -> None:
    with opened(etcd_url) as coord, raw(etcd_url) as channel:
        coord.commit([], [Put("k", b"1")])
        prefix = etcd_settings(parse_url(etcd_url)).prefix
        rpc.KVStub(channel).DeleteRange(
            rpc.DeleteRangeRequest(
                key=f"{prefix}/commits/".encode(), range_end=f"{prefix}/commits0".encode()
            )
        )
        assert isinstance(coord.commit([], [Put("k", b"2")]), Committed)
        leases = rpc.LeaseStub(channel)
        for status in leases.LeaseLeases(rpc.LeaseLeasesRequest()).leases:
            found = leases.LeaseTimeToLive(rpc.LeaseTimeToLiveRequest(ID=status.ID, keys=True))
            if any(key.startswith(f"{prefix}/commits/".encode()) for key in found.keys):
                leases.LeaseRevoke(rpc.LeaseRevokeRequest(ID=status.ID))
        assert isinstance(coord.commit([], [Put("k", b"3")]), Committed)


def test_more_than_etcd_takes_is_refused_whole(etcd_url: str) -> None:
    with opened(etcd_url) as coord:
        # etcd's own limit, and gRPC's above it.
        for size in (2, 3, 20):
            with pytest.raises(InvalidRequest, match="max-request-bytes"):
                coord.commit([], [Put(f"k{number}", b"x" * 900_000) for number in range(size)])
        assert coord.list("") == []
        many = [Put(f"k{number}", b"") for number in range(coord.limits.operations // 2)]
        made = coord.commit([Check(put.key, 0) for put in many], many)
        assert isinstance(made, Committed)
        checks = [Check(key, version) for key, version in made.versions.items()]
        assert isinstance(coord.commit(checks, many), Committed)


def test_limits_that_an_operator_has_set_lower_are_told(new_engine: NewEngine) -> None:
    etcd = new_engine("etcd", flags=["--max-txn-ops=16", "--max-request-bytes=100000"])
    with opened(etcd.url) as coord:
        many = [Put(f"k{number}", b"") for number in range(20)]
        for checks, writes in (([], many), ([Check(put.key, 1) for put in many], [])):
            with pytest.raises(InvalidRequest, match="max-txn-ops"):
                coord.commit(checks, writes)
        for size in (200_000, 1_000_000):
            with pytest.raises(InvalidRequest, match="max-request-bytes"):
                coord.commit([], [Put("k", bytes(size))])
        assert coord.list("") == []
        assert isinstance(coord.commit([], many[:10]), Committed)
    with pxrs.connect(etcd.url) as px:
        with pytest.raises(InvalidRequest, match="max-request-bytes"):
            px.put("q", "x" * 900_000)
        with pytest.raises(InvalidRequest, match="max-txn-ops"), px.transaction() as tx:
            for _ in range(20):
                tx.put("q", "x")


def test_what_was_not_written_for_want_of_space_is_not_there(new_engine: NewEngine) -> None:
    """etcd does a transaction that crosses its quota, and answers that there is no space."""
    etcd = new_engine("etcd", flags=[f"--quota-backend-bytes={8 * 2**20}"])
    told: dict[str, object] = {}

    def fill(worker: int) -> None:
        with opened(etcd.url) as coord:
            for number in range(1000):
                key = f"{worker}/{number:04}"
                try:
                    told[key] = coord.commit([Check(key, 0)], [Put(key, bytes(50_000))])
                except StoreFull as error:
                    told[key] = error
                    return

    with ThreadPoolExecutor(16) as pool:
        for filled in [pool.submit(fill, worker) for worker in range(16)]:
            filled.result(4 * PATIENCE)
    with opened(etcd.url) as coord:
        there = {record.key for record in coord.list("")}
    assert there == {key for key, answer in told.items() if isinstance(answer, Committed)}
    assert len(told) - len(there) == 16


def test_a_closed_store_says_so(etcd_url: str) -> None:
    with opened(etcd_url) as coord:
        watch = coord.watch("k")
    assert watch.wait(None)
    for call in (lambda: coord.get("k"), lambda: coord.session(1.0), lambda: coord.watch("k")):
        with pytest.raises(Closed):
            call()


def test_no_node_there(new_engine: NewEngine) -> None:
    etcd = new_engine("etcd")
    url = f"{etcd.url}/x?timeout=0.5"
    etcd.stop()
    with pytest.raises(StoreUnavailable, match="no etcd node"):
        EtcdCoord(etcd_settings(parse_url(url)))


def test_another_node_is_used_when_the_first_is_down(new_engine: NewEngine) -> None:
    etcd = new_engine("etcd", nodes=3)
    etcd.kill(0)
    with opened(etcd.url) as coord:
        assert isinstance(coord.commit([], [Put("k", b"1")]), Committed)


class Secured:
    """An etcd that asks for a certificate's authority to be known and for a password."""

    def __init__(self, engine: engines.Engine, ca: Path) -> None:
        self.hosts = engine.url.removeprefix("etcd://")
        self.ca = ca

    def url(self, login: str = "") -> str:
        return f"etcd://{login}{self.hosts}/x?ca={self.ca}"


@pytest.fixture
def secured(new_engine: NewEngine, tmp_path: Path) -> Secured:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    flags = [f"--cert-file={tmp_path / 'cert.pem'}", f"--key-file={tmp_path / 'key.pem'}"]
    return Secured(new_engine("etcd", flags=flags, scheme="https"), tmp_path / "ca.pem")


def enable_passwords(secured: Secured) -> None:
    credentials = grpc.ssl_channel_credentials(secured.ca.read_bytes())
    with grpc.secure_channel(secured.hosts, credentials) as channel:
        auth = rpc.AuthStub(channel)
        for name in ("root", "app"):
            auth.UserAdd(rpc.AuthUserAddRequest(name=name, password="p@ss:word"))
            auth.RoleAdd(rpc.AuthRoleAddRequest(name=name))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=name))
        auth.RoleGrantPermission(
            rpc.AuthRoleGrantPermissionRequest(
                name="app",
                perm=rpc.Permission(permType=rpc.Permission.READWRITE, key=b"x/", range_end=b"x0"),
            )
        )
        auth.AuthEnable(rpc.AuthEnableRequest())


def test_tls(secured: Secured, tmp_path: Path) -> None:
    with opened(secured.url()) as coord:
        assert isinstance(coord.commit([], [Put("k", b"1")]), Committed)
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    wrong = secured.url().replace("ca.pem", "other.pem") + "&timeout=0.5"
    with pytest.raises(StoreUnavailable):
        EtcdCoord(etcd_settings(parse_url(wrong)))


def test_a_user_needs_no_more_than_the_prefix(secured: Secured) -> None:
    enable_passwords(secured)
    with opened(secured.url("app:p%40ss%3Aword@")) as coord:
        watch = coord.watch("k")
        session = coord.session(5.0)
        assert isinstance(coord.commit([], [Put("k", b"1", session.id)]), Committed)
        session.renew()
        assert watch.wait(PATIENCE)
        # As when a token has expired.
        coord._nodes._token = "of long ago"
        assert isinstance(coord.commit([], [Put("k", b"2")]), Committed)
        watch.close()


@pytest.mark.parametrize("login", ["", "app:wrong@", "nobody:x@"])
def test_a_wrong_login_is_told(secured: Secured, login: str) -> None:
    enable_passwords(secured)
    with pytest.raises(ConfigError, match="user"):
        EtcdCoord(etcd_settings(parse_url(secured.url(login))))


def test_settings() -> None:
    assert etcd_settings(parse_url("etcd://a,b:99,[::1]/x/y?timeout=3")) == ServerSettings(
        hosts=("a:2379", "b:99", "[::1]:2379"), prefix="x/y", timeout=3.0
    )
    for wrong in (
        "etcd://",
        "etcd://a:x",
        "etcd://a?timeout=0",
        "etcd://a?timeout=x",
        "etcd://a?tls=maybe",
        "etcd://a?tls=false&ca=x",
        "etcd://a?cert=x",
        "etcd://a?nonsense=1",
    ):
        with pytest.raises(ConfigError):
            etcd_settings(parse_url(wrong))
    with pytest.raises(ConfigError, match="can't be read"):
        EtcdCoord(etcd_settings(parse_url("etcd://a?ca=/no/such/file")))
