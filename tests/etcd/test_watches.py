"""Watches whose node freezes, whose login has run out, or whose user may not read any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import engines
from pxrs.config import etcd_settings, parse_url
from pxrs.errors import ConfigError
from pxrs.stores.etcd.coord import EtcdCoord
from pxrs.stores.etcd.wire import grpc, rpc
from pxrs.types import Committed, Put
from support.engine_fixtures import NewEngine
from support.proxy import Proxy

pytestmark = pytest.mark.engine("etcd")
PATIENCE = 20.0
_PASSWORD = "secret"


@contextmanager
def opened(url: str) -> Iterator[EtcdCoord]:
    coord = EtcdCoord(etcd_settings(parse_url(url)))
    try:
        yield coord
    finally:
        coord.close()


class Guarded:
    """An etcd of which the user `app` may use the prefix x/, and what its operator does to it."""

    def __init__(self, etcd: engines.Engine, channel: Any) -> None:
        self.port = etcd.ports[0]
        self._auth = rpc.AuthStub(channel)
        for name in ("root", "app"):
            self._auth.UserAdd(rpc.AuthUserAddRequest(name=name, password=_PASSWORD))
            self._auth.RoleAdd(rpc.AuthRoleAddRequest(name=name))
            self._auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=name))
        self._auth.RoleGrantPermission(
            rpc.AuthRoleGrantPermissionRequest(
                name="app",
                perm=rpc.Permission(permType=rpc.Permission.READWRITE, key=b"x/", range_end=b"x0"),
            )
        )
        self._auth.AuthEnable(rpc.AuthEnableRequest())

    def url(self, port: int, timeout: float = 10.0) -> str:
        return f"etcd://app:{_PASSWORD}@127.0.0.1:{port}/x?timeout={timeout}"

    def end_tokens(self) -> None:
        """The tokens of `app` are worth nothing any more, as when their time is up."""
        request = rpc.AuthUserChangePasswordRequest(name="app", password=_PASSWORD)
        self._auth.UserChangePassword(request, metadata=self._root())

    def forbid(self) -> None:
        """The user `app` may not do anything any more."""
        request = rpc.AuthUserRevokeRoleRequest(name="app", role="app")
        self._auth.UserRevokeRole(request, metadata=self._root())

    def _root(self) -> list[tuple[str, str]]:
        request = rpc.AuthenticateRequest(name="root", password=_PASSWORD)
        return [("token", self._auth.Authenticate(request).token)]


@pytest.fixture
def guarded(new_engine: NewEngine) -> Iterator[Guarded]:
    etcd = new_engine("etcd", flags=["--bcrypt-cost=4"])
    with grpc.insecure_channel(f"127.0.0.1:{etcd.ports[0]}") as channel:
        yield Guarded(etcd, channel)


def test_a_new_watch_logs_in_again_when_the_token_has_expired(guarded: Guarded) -> None:
    with opened(guarded.url(guarded.port)) as coord:
        first = coord.watch("k")
        for _ in range(3):
            guarded.end_tokens()
            second = coord.watch("k")
            while first.wait(0):
                pass
            coord.commit([], [Put("k", b"")])
            assert first.wait(PATIENCE)
            assert second.wait(PATIENCE)


def test_a_watch_that_is_refused_says_so_and_does_not_ask_without_a_pause(guarded: Guarded) -> None:
    with Proxy(guarded.port) as proxy, opened(guarded.url(proxy.port, 2.0)) as coord:
        coord.watch("k")
        guarded.forbid()
        asked = proxy.requests
        with pytest.raises(ConfigError, match="permission denied"):
            coord.watch("k")
        # Now and then it is tried again, for the watch that was there before.
        with pytest.raises(ConfigError, match="permission denied"):
            coord.watch("k")
        assert proxy.requests - asked < 100


def test_requests_and_watches_move_when_their_node_freezes(new_engine: NewEngine) -> None:
    """A watch also does while its handle asks for nothing else."""
    etcd = new_engine("etcd", nodes=3)
    others = ",".join(f"127.0.0.1:{port}" for port in etcd.ports[3::3])
    with (
        opened(f"{etcd.url}/x?timeout=8") as coord,
        opened(f"etcd://{others}/x?timeout=8") as other,
    ):
        watch = coord.watch("k")
        etcd.nodes[0].freeze()
        try:
            assert isinstance(other.commit([], [Put("k", b"1")]), Committed)
            assert watch.wait(PATIENCE)
            assert isinstance(coord.commit([], [Put("k", b"2")]), Committed)
            assert watch.wait(PATIENCE)
        finally:
            etcd.nodes[0].thaw()
