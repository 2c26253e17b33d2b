"""The JetStream log passes the log's suite, each handle with a connection of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from pxrs.stores.api import KeepsOwners, LogStore, Session, Stores
from pxrs.stores.open import open_stores
from pxrs.testing.conformance import FailingAppend, Rule, doubt_checks, log_checks
from support.engine_fixtures import started
from support.failing_appends import CutAppends, Fate
from support.proxy import Proxy

pytestmark = pytest.mark.engine("nats")


class JetStreamLab:
    """Streams under a prefix of their own on a real server; coordination is not looked at."""

    ttl = 1.0
    patience = 20.0

    def __init__(self, url: str, options: str) -> None:
        self._url = f"{url}/lab-{secrets.token_hex(6)}{options}"
        self._opened: list[Stores] = []
        self._proxy: Proxy | None = None

    def open(self) -> Stores:
        stores = open_stores("memory://", log=self._url)
        assert isinstance(stores.log, KeepsOwners)
        # Each has a coordination of its own, but they stand for handles of one store.
        stores.log.owned_by(lambda: "the lab's")
        self._opened.append(stores)
        return stores

    @property
    def failing_appends(self) -> list[FailingAppend]:
        address, _, rest = self._url.removeprefix("nats://").partition("/")
        self._proxy = Proxy(int(address.partition(",")[0].rpartition(":")[2]))
        name, mark, options = rest.partition("?")
        cut_off = f"nats://{self._proxy.address}/{name}?timeout=1{mark and '&'}{options}"

        def opened() -> LogStore:
            self._opened.append(open_stores("memory://", log=cut_off))
            return self._opened[-1].log

        return CutAppends(self._proxy, opened).ways(
            (Fate.ARRIVES, 2), (Fate.LOST, 0), (Fate.SWALLOWED, 0), (Fate.SWALLOWED, 2)
        )

    def let_expire(self, session: Session) -> None:
        raise AssertionError("no check of a log lets a session end")

    def close(self) -> None:
        for topic in ("t-0", "t-1", "t-2", "t-3"):
            self._opened[0].log.drop(topic)
        for stores in self._opened:
            stores.close()
        if self._proxy is not None:
            self._proxy.close()


@pytest.fixture
def lab(nats_url: str) -> Iterator[JetStreamLab]:
    lab = JetStreamLab(nats_url, "")
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Three nodes for the whole module."""
    with started("nats", nodes=3) as engine:
        yield engine.url


@pytest.fixture
def replicated_lab(cluster: str) -> Iterator[JetStreamLab]:
    lab = JetStreamLab(cluster, "?replicas=3")
    yield lab
    lab.close()


@pytest.mark.parametrize("check", log_checks() + doubt_checks(), ids=lambda check: check.__name__)
def test_conforms(check: Rule, lab: JetStreamLab) -> None:
    check(lab)


@pytest.mark.thorough
@pytest.mark.parametrize("check", log_checks(), ids=lambda check: check.__name__)
def test_conforms_with_three_replicas(check: Rule, replicated_lab: JetStreamLab) -> None:
    """Each handle may be connected to another node, and reads may come from a follower."""
    check(replicated_lab)
