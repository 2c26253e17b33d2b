"""What is particular to ZooKeeper: names, counters that restart, sessions, its limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.client import KazooClient

from pxrs.config import parse_url, zookeeper_settings
from pxrs.errors import Closed, InvalidRequest, SessionLost, StoreUnavailable
from pxrs.stores.open import open_stores
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.stores.zookeeper.names import folder_of, folders_above, is_record, key_of, path_of
from pxrs.types import Check, Committed, Conflict, Delete, Holder, Put
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("zookeeper")
PATIENCE = 30.0


@contextmanager
def opened(url: str) -> Iterator[ZooKeeperCoord]:
    coord = ZooKeeperCoord(zookeeper_settings(parse_url(url)))
    yield coord
    coord.close()


@contextmanager
def raw(url: str, **options: Any) -> Iterator[Any]:
    client = KazooClient(hosts=",".join(zookeeper_settings(parse_url(url)).hosts), **options)
    client.start()
    yield client
    client.stop()
    client.close()


def expire(url: str, client: Any) -> None:
    """End another client's session behind its back, as its expiry does; it has noticed then.

    What was sent before it has would have no answer, and nobody could say what became of it.
    """
    noticed = threading.Event()

    def notice(_: object) -> bool:
        noticed.set()
        return True

    client.add_listener(notice)
    with raw(url, client_id=client.client_id):
        pass
    assert noticed.wait(PATIENCE)


def version_of(outcome: Committed | Conflict, key: str) -> int:
    assert isinstance(outcome, Committed)
    return outcome.versions[key]


def test_a_counter_that_started_again_does_not_pass_for_the_old_one(zookeeper_url: str) -> None:
    with opened(zookeeper_url) as near, opened(zookeeper_url) as far:
        for changes in range(3):
            first = version_of(near.commit([Check("a/k", 0)], [Put("a/k", b"1")]), "a/k")
            for _ in range(changes):
                first = version_of(near.commit([], [Put("a/k", b"1")]), "a/k")
            # The same znode counter, by another life of the znode.
            far.commit([], [Delete("a/k")])
            far.commit([Check("a/k", 0)], [Put("a/k", b"2")])
            for _ in range(changes):
                far.commit([], [Put("a/k", b"2")])
            for writes in ([Put("a/k", b"3")], [Delete("a/k")], [Put("b", b"3")]):
                assert isinstance(near.commit([Check("a/k", first)], writes), Conflict)
            record = far.get("a/k")
            assert record is not None
            assert record.value == b"2"
            far.commit([], [Delete("a/k")])


def test_a_delete_beside_it_is_no_conflict(zookeeper_url: str) -> None:
    with opened(zookeeper_url) as near, opened(zookeeper_url) as far:
        version = version_of(near.commit([], [Put("a/k", b"1"), Put("a/other", b"1")]), "a/k")
        far.commit([], [Delete("a/other")])
        assert isinstance(near.commit([Check("a/k", version)], [Put("a/k", b"2")]), Committed)


def test_what_must_be_absent_may_be_made_though_others_think_it_is_there(
    zookeeper_url: str,
) -> None:
    with opened(zookeeper_url) as near, opened(zookeeper_url) as far:
        near.commit([], [Put("k", b"1")])
        far.commit([], [Delete("k")])
        # What it remembers of the record is out of date in each of these.
        assert isinstance(near.commit([], [Delete("k"), Put("x", b"")]), Committed)
        assert isinstance(near.commit([Check("k", 0)], [Put("k", b"2")]), Committed)
        far.commit([], [Delete("k")])
        assert isinstance(near.commit([], [Put("k", b"3")]), Committed)


def test_a_session_that_was_expired_by_force_is_over(zookeeper_url: str) -> None:
    with opened(zookeeper_url) as near, opened(zookeeper_url) as far:
        session = far.session(5.0)
        far.commit([], [Put("mine", b"1", session.id)])
        watch = near.watch("mine")
        expire(zookeeper_url, session._link.client)
        while near.get("mine") is not None:
            assert watch.wait(PATIENCE)
        with pytest.raises(SessionLost):
            session.renew()
        with pytest.raises(SessionLost):
            far.commit([], [Put("mine", b"2", session.id)])
        assert session.remaining() == 0.0
        watch.close()


def test_a_store_whose_own_connection_was_expired_goes_on(zookeeper_url: str) -> None:
    with opened(zookeeper_url) as near, opened(zookeeper_url) as far:
        watch = far.watch("k")
        version = version_of(far.commit([], [Put("k", b"1")]), "k")
        session = far.session(5.0)
        expire(zookeeper_url, far._link.client)
        assert isinstance(far.commit([Check("k", version)], [Put("k", b"2")]), Committed)
        session.renew()
        while watch.wait(0):
            pass
        near.commit([], [Put("k", b"3")])
        assert watch.wait(PATIENCE)
        record = far.get("k")
        assert record is not None
        assert record.value == b"3"
        watch.close()


def test_a_session_that_is_longer_than_the_server_allows(zookeeper_url: str) -> None:
    """The server's patience bounds what remains, however long the TTL is."""
    with opened(zookeeper_url) as coord:
        session = coord.session(3600.0)
        assert session.ttl == 3600.0
        # 20 ticks of half a second.
        assert session._link.negotiated == 10.0
        assert 0 < session.remaining() <= 10.0
        session.close()


def test_what_a_dead_session_left_is_removed(zookeeper_url: str) -> None:
    with opened(zookeeper_url) as coord, raw(zookeeper_url) as client:
        session = coord.session(5.0)
        coord.commit([], [Put("m/1", b"1", session.id), Put("m/2", b"1")])
        folder = folder_of(f"/{zookeeper_settings(parse_url(zookeeper_url)).prefix}/records", "m/")
        assert sorted(filter(is_record, client.get_children(folder))) == ["=1", "=2"]
        session.close()
        assert [record.key for record in coord.list("m/")] == ["m/2"]
        assert list(filter(is_record, client.get_children(folder))) == ["=2"]


def test_more_than_a_megabyte_is_refused(zookeeper_url: str) -> None:
    with opened(zookeeper_url) as coord:
        with pytest.raises(InvalidRequest, match="1 MB"):
            coord.commit([], [Put(f"k{number}", b"x" * 600_000) for number in range(2)])
        assert coord.list("") == []


def test_what_the_checks_and_the_folders_weigh_counts(zookeeper_url: str) -> None:
    """Not only the values: what the server would cut off is refused before it is sent."""
    with opened(zookeeper_url) as coord:
        deep = "/".join(["f" * 160] * 30)
        with pytest.raises(InvalidRequest, match=r"jute\.maxbuffer"):
            coord.commit([], [Put(f"{deep}/{number}", b"x" * 9_500) for number in range(85)])
        assert isinstance(coord.commit([], [Put("k", b"x" * coord.limits.value_bytes)]), Committed)


@pytest.mark.parametrize("name", ["😀", "𝐀", "𠀀𠀁", "a/𝒳/ü字", "\ufb01"])
def test_names_of_any_script(zookeeper_url: str, name: str) -> None:
    with opened(zookeeper_url) as coord:
        version = version_of(coord.commit([Check(name, 0)], [Put(name, b"1")]), name)
        assert [record.key for record in coord.list(name)] == [name]
        assert isinstance(coord.commit([Check(name, version)], [Delete(name)]), Committed)


def test_a_forked_child_closes_at_once_and_its_parent_goes_on(zookeeper_url: str) -> None:
    stores = open_stores(zookeeper_url)
    session = stores.coord.session(5.0)
    stores.queues.take("q", Holder(session.id, "tx"), 1, lock_for=5.0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            session.close()
            stores.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    session.renew()
    assert stores.coord.get("k") is None
    stores.close()


def test_a_closed_store_says_so(zookeeper_url: str) -> None:
    with opened(zookeeper_url) as coord:
        watch = coord.watch("k")
    assert watch.wait(None)
    for call in (lambda: coord.get("k"), lambda: coord.session(1.0), lambda: coord.watch("k")):
        with pytest.raises(Closed):
            call()


def test_no_server_there(new_engine: NewEngine) -> None:
    engine = new_engine("zookeeper")
    engine.stop()
    with pytest.raises(StoreUnavailable, match="can be reached"):
        ZooKeeperCoord(zookeeper_settings(parse_url(f"{engine.url}/x?timeout=0.5")))


KEYS = st.text(min_size=1, max_size=30).filter(str.isprintable)


@given(KEYS)
def test_every_key_has_a_path_of_its_own(key: str) -> None:
    path = path_of("/r", key)
    assert key_of("/r", path) == key
    parts = path.split("/")[1:]
    assert all(part and part not in (".", "..") for part in parts)
    assert is_record(parts[-1])
    assert not any(is_record(part) for part in parts[:-1])
    assert folders_above("/r", path)[-1] == path.rpartition("/")[0]


@given(KEYS, st.integers(0, 30))
def test_a_prefix_is_watched_in_a_folder_above_its_records(key: str, length: int) -> None:
    prefix = key[:length]
    assert folder_of("/r", prefix) in folders_above("/r", path_of("/r", key))
