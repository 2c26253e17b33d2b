"""A leader that stood still while another was elected answers alone, and is not believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
from kazoo.client import KazooClient

import engines
from pxrs.config import parse_url, zookeeper_settings
from pxrs.errors import OutcomeUnknown, SessionLost, StoreUnavailable
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.types import Committed, Delete, Put
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.proxy import Proxy
from support.zookeeper import leads

pytestmark = [pytest.mark.engine("zookeeper"), pytest.mark.long]


class Ensemble:
    """Three nodes, of which one leads. Followers give a silent leader up after two seconds."""

    def __init__(self, new_engine: NewEngine) -> None:
        self._engine: engines.Engine = new_engine("zookeeper", nodes=3, settings={"syncLimit": "4"})
        self._ports = self._engine.ports[::4]
        self._leader = next(n for n, port in enumerate(self._ports) if leads(port))
        self.leader = self._engine.nodes[self._leader]
        self.leader_port = self._ports[self._leader]

    def others(self) -> str:
        return ",".join(
            f"127.0.0.1:{port}" for n, port in enumerate(self._ports) if n != self._leader
        )


def opened(hosts: str) -> ZooKeeperCoord:
    url = f"zookeeper://{hosts}/x?timeout={PATIENCE:g}"
    return ZooKeeperCoord(zookeeper_settings(parse_url(url)))


class Behind:
    """A handle that knows the leader only, and what it is asked for while that stands still."""

    def __init__(self, leader_port: int) -> None:
        self.proxy = Proxy(leader_port)
        self.coord = opened(self.proxy.address)

    def ask(self, words: bytes, call: Callable[[], Any], pool: ThreadPoolExecutor) -> Future[Any]:
        """Call it in a thread; returns when the request with these words is on its way."""
        self.proxy.hold_answers_from(words)
        asked = pool.submit(call)
        self.proxy.await_request()
        return asked

    def close(self) -> None:
        self.coord.close()
        self.proxy.close()


@pytest.fixture
def ensemble(new_engine: NewEngine) -> Iterator[Ensemble]:
    ensemble = Ensemble(new_engine)
    yield ensemble
    ensemble.leader.thaw()


def change(coord: ZooKeeperCoord) -> None:
    """Commit, as soon as a majority has another leader."""
    while True:
        try:
            done = coord.commit([], [Put("k", b"new"), Delete("gone/1"), Put("come/1", b"")])
        except (StoreUnavailable, OutcomeUnknown):
            continue
        assert isinstance(done, Committed)
        return


def test_what_a_deposed_leader_says_is_not_taken_for_now(ensemble: Ensemble) -> None:
    with ExitStack() as stack:
        far = stack.enter_context(closing(opened(ensemble.others())))
        getting, listing, living = (
            stack.enter_context(closing(Behind(ensemble.leader_port))) for _ in range(3)
        )
        getting.coord.commit([], [Put("k", b"old"), Put("gone/1", b""), Put("come/0", b"")])
        session = living.coord.session(10.0)
        living.coord.commit([], [Put("mine", b"", session.id)])
        for each in (getting, listing, living):
            assert len(each.coord.list("")) == 4
        pool = stack.enter_context(ThreadPoolExecutor(3))
        ensemble.leader.freeze()
        change(far)
        # The others count the session as over, too.
        taken_over = KazooClient(ensemble.others(), client_id=session._link.client.client_id)
        taken_over.start(PATIENCE)
        taken_over.stop()
        taken_over.close()
        assert far.get("mine") is None

        got = getting.ask(b"=k", lambda: getting.coord.get("k"), pool)
        listed = listing.ask(b"/x/records", lambda: listing.coord.list(""), pool)
        renewed = living.ask(b"/x/sessions/", session.renew, pool)
        ensemble.leader.thaw()
        for each in (getting, listing, living):
            each.proxy.heal()

        assert got.result(PATIENCE).value == b"new"
        keys = [record.key for record in listed.result(PATIENCE)]
        assert keys == ["come/0", "come/1", "k"]
        with pytest.raises(SessionLost):
            renewed.result(PATIENCE)
        assert session.remaining() == 0.0
