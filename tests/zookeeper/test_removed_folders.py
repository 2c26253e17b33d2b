"""Folders that are empty are removed by the servers, and made again when they are needed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest
from engines.zookeeper import REMOVE_EMPTY
from kazoo.client import KazooClient

import engines
import pxrs
from pxrs.config import parse_url, zookeeper_settings
from pxrs.stores.open import open_stores
from pxrs.stores.zookeeper import link
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.stores.zookeeper.names import folders_above, guard_of, is_guard, is_record
from pxrs.testing.conformance.queue_tools import Worker
from pxrs.testing.conformance.tools import committed
from pxrs.types import Check, Conflict, Delete, NewItem, Outcome, Put, QueueChange
from support.child import PATIENCE
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("zookeeper")
PROGRAMS = 20


@pytest.fixture
def hasty(new_engine: NewEngine) -> engines.Engine:
    """A server that removes empty folders in no time, instead of once a minute."""
    return new_engine("zookeeper", java=REMOVE_EMPTY)


@contextmanager
def opened(url: str) -> Iterator[ZooKeeperCoord]:
    with closing(ZooKeeperCoord(zookeeper_settings(parse_url(url)))) as coord:
        yield coord


class Tree:
    """The znodes of a store, for a bare client."""

    def __init__(self, url: str) -> None:
        settings = zookeeper_settings(parse_url(url))
        self.root = f"/{settings.prefix}/records"
        self.client = KazooClient(hosts=",".join(settings.hosts))
        self.client.start()

    def paths(self) -> set[str]:
        return set(self._below(self.root))

    def await_removal(self, path: str) -> None:
        gone = threading.Event()
        if self.client.exists(path, watch=lambda _: gone.set()):
            assert gone.wait(PATIENCE), f"{path} stays"
            self.await_removal(path)

    def close(self) -> None:
        self.client.stop()
        self.client.close()

    def _below(self, path: str) -> Iterator[str]:
        yield path
        for name in self.client.get_children(path) if self.client.exists(path) else ():
            yield from self._below(f"{path}/{name}")


def program(url: str, keys: range) -> None:
    """Put two items of each key, of which one waits for the other, and consume them."""
    with pxrs.connect(url) as px:
        for first in range(keys.start, keys.stop, 10):
            with px.transaction() as tx:
                for key in [str(key) for key in keys[first : first + 10]] * 2:
                    tx.put("q", key, key=key)
        left = 2 * len(keys)
        while left:
            with px.transaction() as tx:
                left -= len(tx.take_many("q", 20))


def test_no_znodes_stay_of_keys_and_programs(hasty: engines.Engine) -> None:
    url = f"{hasty.url}/x"
    program(url, range(1))
    with closing(Tree(url)) as tree:
        program(url, range(1000))
        for _ in range(PROGRAMS):
            program(url, range(1))
        for path in tree.paths():
            within = path.removeprefix(tree.root)
            goes = within.startswith(("/queues/q/", "/queue-commits/")) and "/!" not in within
            if goes and not is_record(path.rpartition("/")[2]):
                tree.await_removal(path)
        left = tree.paths()
        assert len([path for path in left if "/queue-holders/=" in path]) == 1
        guards = {path for path in left if is_guard(path)}
        assert len(left - guards) < 20
        # One of each program's own folder, if no two have the same; at most 256.
        assert len(guards) < 30 + PROGRAMS


def test_an_old_version_does_not_pass_when_its_folder_was_made_again(
    hasty: engines.Engine,
) -> None:
    """Everything counts from zero again, but for the guard, which is elsewhere."""
    url = f"{hasty.url}/x"
    with opened(url) as near, opened(url) as far, closing(Tree(url)) as tree:
        for changes in range(3):
            first = committed(near.commit([Check("a/b/k", 0)], [Put("a/b/k", b"1")])).versions[
                "a/b/k"
            ]
            for _ in range(changes):
                first = committed(near.commit([], [Put("a/b/k", b"1")])).versions["a/b/k"]
            far.commit([], [Delete("a/b/k")])
            tree.await_removal(f"{tree.root}/a/b")
            far.commit([Check("a/b/k", 0)], [Put("a/b/k", b"2")])
            for _ in range(changes):
                far.commit([], [Put("a/b/k", b"2")])
            for writes in ([Put("a/b/k", b"3")], [Delete("a/b/k")], [Put("b", b"3")]):
                late = near.commit([Check("a/b/k", first)], writes)
                assert isinstance(late, Conflict)
            far.commit([], [Delete("a/b/k")])


def test_a_folder_comes_and_goes_under_commits_lists_and_watches(hasty: engines.Engine) -> None:
    rng = random.Random(1)
    url = f"{hasty.url}/x"
    keys = [f"a/{folder}/{leaf}" for folder in ("b", "b/c", "d/e/f") for leaf in "xy"]
    records: dict[str, bytes] = {}
    with ExitStack() as stack:
        handles = [stack.enter_context(opened(url)) for _ in range(3)]
        watches = [stack.enter_context(closing(each.watch("a/d/e/"))) for each in handles]
        for step in range(300):
            writer, reader = rng.choice(handles), rng.choice(handles)
            key = rng.choice(keys)
            if key in records:
                del records[key]
                write: Put | Delete = Delete(key)
            else:
                records[key] = b"%d" % step
                write = Put(key, records[key])
            check = [Check(key, 0)] if isinstance(write, Put) else []
            committed(writer.commit(check, [write]))
            assert {each.key: each.value for each in reader.list("a/")} == records
            if key.startswith("a/d/"):
                assert all(watch.wait(PATIENCE) for watch in watches)


def test_handles_that_empty_a_folder_at_once_do_not_lose_it(hasty: engines.Engine) -> None:
    """Each makes it and empties it; the server removes it in between, or its parent."""
    url = f"{hasty.url}/x"
    failures: list[BaseException] = []

    def come_and_go(coord: ZooKeeperCoord, leaf: str) -> None:
        try:
            for number in range(100):
                key = f"a/{number % 3}/b/{leaf}"
                version = committed(coord.commit([Check(key, 0)], [Put(key, b"")])).versions[key]
                committed(coord.commit([Check(key, version)], [Delete(key)]))
        except BaseException as error:  # noqa: BLE001 - the test judges it
            failures.append(error)

    with ExitStack() as stack:
        threads = [
            threading.Thread(
                target=come_and_go, args=(stack.enter_context(opened(url)), str(number))
            )
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_a_commit_that_is_refused_leaves_no_folder(zookeeper_url: str) -> None:
    with opened(zookeeper_url) as near, opened(zookeeper_url) as far:
        version = committed(near.commit([], [Put("k", b"")])).versions["k"]
        far.commit([], [Put("k", b"")])
        # It learns from the servers that its version is an old one: when the folder is there.
        late = near.commit([Check("k", version)], [Put("a/b/c/new", b"")])
        assert isinstance(late, Conflict)
        with closing(Tree(zookeeper_url)) as tree:
            near.get("k")
            assert f"{tree.root}/a/b" not in tree.paths()
        committed(near.commit([], [Put("a/b/c/new", b"")]))


def test_what_processes_before_have_left_is_removed(zookeeper_url: str) -> None:
    with closing(Tree(zookeeper_url)) as tree:
        for _ in range(5):
            with opened(zookeeper_url) as coord:
                session = coord.session(5.0)
                coord.commit([], [Put(f"holders/{session.id}", b"", session.id)])
        assert len([path for path in tree.paths() if "/holders/=" in path]) == 1


def test_servers_that_know_no_containers_keep_the_folders(
    zookeeper_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link._CreateContainer, "type", 99)
    with opened(zookeeper_url) as coord:
        committed(coord.commit([], [Put("a/b/c", b"1")]))
        committed(coord.commit([], [Delete("a/b/c")]))
        committed(coord.commit([], [Put("a/b/c", b"2")]))
        assert [each.value for each in coord.list("a/")] == [b"2"]


def as_an_earlier_release(url: str, place: str) -> str:
    """Copy a store as it was once: folders that stay, each with its own guard in it."""
    with closing(Tree(url)) as tree:
        top, there = tree.root.removesuffix("/records"), f"/{place}"
        client: Any = tree.client
        for name in ("id", "sessions", "commits"):
            client.create(f"{there}/{name}", client.get(f"{top}/{name}")[0], makepath=True)
        for path in sorted(tree.paths()):
            goal = there + path.removeprefix(top)
            if is_record(path.rpartition("/")[2]):
                client.create(goal, client.get(path)[0], makepath=True)
            elif not is_guard(path) and not path.endswith("/!"):
                client.create(f"{goal}/!", makepath=True)
    return f"{url.rpartition('/')[0]}/{place}"


def test_a_store_of_an_earlier_release_goes_on(zookeeper_url: str) -> None:
    stores = open_stores(zookeeper_url)
    worker = Worker(stores)
    items = [NewItem(queue="q", body=b"%d" % number, key="k") for number in range(4)]
    worker.apply(put=items)
    done = QueueChange(worker.holder, put=(NewItem(queue="q", body=b"4", key="k"),))
    stores.queues.apply(done)
    worker.release(worker.take_one("q"), dead=True)
    worker.take_one("q")
    url = as_an_earlier_release(zookeeper_url, f"{zookeeper_url.rpartition('/')[2]}-then")
    with closing(open_stores(url)) as later:
        # Its session is not in the copy: as if its process had been killed.
        assert later.queues.outcome(worker.session.id, done.unit) is Outcome.DONE
        assert later.queues.stats("q").dead == 1
        anew = Worker(later)
        assert [each.body for each in anew.drain("q")] == [b"1", b"2", b"3", b"4"]
        anew.apply(put=items)
        assert [each.body for each in anew.drain("q")] == [b"0", b"1", b"2", b"3"]
    stores.close()


def test_guards_are_few_and_stay_where_no_folder_is_removed() -> None:
    orders = [f"/r/queues/q/waiting/key-{number}" for number in range(1000)]
    assert {guard_of("/r", each) for each in orders} == {guard_of("/r", "/r/queues/q/waiting")}
    sessions = [f"/r/queue-commits/{number}" for number in range(5000)]
    guards = {guard_of("/r", each) for each in sessions}
    assert len(guards) == 256
    assert {each.rpartition("/")[0] for each in guards} == {"/r/queue-commits/!"}
    assert guard_of("/r", "/r").startswith("/r/!/")
    assert folders_above("/r", "/r/a/=b") == ["/r", "/r/a"]


def test_threads_of_one_handle_that_both_find_a_folder_missing(zookeeper_url: str) -> None:
    """One makes it before the other does: what is new for both of them was not removed."""
    with opened(zookeeper_url) as coord:
        reading = coord._folders._reading
        look, both = reading.folders, threading.Barrier(2)

        def together(folders: Sequence[str]) -> Any:
            there = look(folders)
            with suppress(threading.BrokenBarrierError):
                # Only the first look of each waits for the other.
                both.wait(PATIENCE)
                both.abort()
            return there

        reading.folders = together  # type: ignore[method-assign]
        made = threading.Event()
        make = coord._folders._make

        def make_one_first(*given: Any) -> list[str]:
            if threading.current_thread() is not threading.main_thread():
                assert made.wait(PATIENCE)
            return make(*given)

        coord._folders._make = make_one_first  # type: ignore[method-assign, assignment]
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(coord.commit, (), (Put("new/b", b"2"),))
            committed(coord.commit((), (Put("new/a", b"1"),)))
            made.set()
            committed(later.result())
