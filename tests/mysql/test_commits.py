"""What a commit costs, and that one that is sent at once is as good as any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy

from pxrs.errors import SessionLost
from pxrs.stores.mysql.stores import SqlStores
from pxrs.testing.conformance.queue_tools import Worker
from pxrs.testing.conformance.tools import committed, put, value_of
from pxrs.types import Check, Committed, Conflict, Delete, Put
from support.child import PATIENCE
from support.proxy import Proxy
from support.sql import SqlPlace

pytestmark = pytest.mark.engine("mariadb")


class Counted:
    """Stores behind a proxy that counts how often they ask for something."""

    def __init__(self, place: SqlPlace, proxy: Proxy) -> None:
        url = sqlalchemy.make_url(place.url).set(host="127.0.0.1", port=proxy.port)
        self.stores: SqlStores = place.open(url.render_as_string(hide_password=False))
        self.proxy = proxy

    def cost(self, work: Callable[[], object]) -> int:
        """Round trips of the second time: the first one opens connections."""
        work()
        before = self.proxy.requests
        work()
        return self.proxy.requests - before


@pytest.fixture
def counted(place: SqlPlace) -> Iterator[Counted]:
    with Proxy(sqlalchemy.make_url(place.url).port or 0) as proxy:
        counted = Counted(place, proxy)
        yield counted
        counted.stores.close()


def test_a_commit_is_one_round_trip(counted: Counted) -> None:
    coord = counted.stores.coord
    session = coord.session(30.0)
    versions = {f"claims/{number}": put(coord, f"claims/{number}") for number in range(20)}

    def checkpoint() -> None:
        checks = [Check(key, version) for key, version in versions.items()]
        writes = [Put(key, b"next") for key in versions]
        versions.update(committed(coord.commit(checks, writes)).versions)

    assert counted.cost(checkpoint) == 1
    member = Put("members/me", b"1", session.id)
    assert counted.cost(lambda: coord.commit((), (member,))) == 1
    assert counted.cost(lambda: coord.commit((), (Delete("members/me"),))) == 1
    assert counted.cost(lambda: coord.get("claims/3")) == 1


def test_what_taking_and_applying_cost(counted: Counted) -> None:
    """The figures that docs/sql.md tells."""
    worker = Worker(counted.stores)
    assert counted.cost(lambda: worker.put(*[b"x"] * 50)) == 5
    # Every tenth of a second a take looks for what the dead have left behind: one more.
    assert counted.cost(lambda: worker.take(10)) in (4, 5)
    held = worker.take(20)
    assert counted.cost(lambda: worker.apply(held.pop(), held.pop())) == 4


def test_a_check_that_does_not_hold_is_told_and_changes_nothing(place: SqlPlace) -> None:
    coord = place.open().coord
    old = put(coord, "k", b"1")
    new = put(coord, "k", b"2")
    for checks in ([Check("k", old)], [Check("k", new), Check("other", 0)]):
        if len(checks) == 2:
            put(coord, "other", b"here")
        outcome = coord.commit(checks, [Put("k", b"never"), Put("other", b"never")])
        assert isinstance(outcome, Conflict)
        assert set(outcome.current) == {checks[-1].key}
    assert [value_of(coord, key) for key in ("k", "other")] == [b"2", b"here"]
    ended = coord.session(30.0)
    ended.close()
    with pytest.raises(SessionLost):
        coord.commit((), [Put("k", b"never"), Put("mine", b"", ended.id)])
    assert value_of(coord, "k") == b"2"


def test_one_of_many_makes_a_record(place: SqlPlace) -> None:
    """Nothing is locked where nothing is: of those who find nothing one wins, and nobody after."""
    coords = [place.open().coord for _ in range(3)]

    def make(number: int, key: str) -> bool:
        made = coords[number].commit([Check(key, 0)], [Put(key, b"%d" % number)])
        return isinstance(made, Committed)

    with ThreadPoolExecutor(3) as pool:
        for turn in range(20):
            jobs = [pool.submit(make, number, f"k/{turn}") for number in range(3)]
            won = [number for number in range(3) if jobs[number].result(PATIENCE)]
            assert [b"%d" % number for number in won] == [value_of(coords[0], f"k/{turn}")]


def test_a_connection_that_was_closed_meanwhile_carries_no_commit(counted: Counted) -> None:
    """Nobody could say what became of it."""
    coord = counted.stores.coord
    version = put(coord, "k", b"1")
    counted.proxy.reset()
    committed(coord.commit([Check("k", version)], [Put("k", b"2")]))
    assert value_of(coord, "k") == b"2"
