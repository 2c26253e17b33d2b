"""Sessions of `pxrs://` clients outlive the node that opened them: nodes are killed and frozen.

Who owns a partition or holds an item goes on through another node, and nobody else is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import Pxrs
from pxrs.config import parse_url, remote_settings
from pxrs.groups.info import GroupInfo
from pxrs.stores.remote.stores import RemoteStores
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Put
from support.child import PATIENCE, Child
from support.inside import say
from support.node import NodeProcess

pytestmark = pytest.mark.long


def engines(*names: str) -> list[Any]:
    rarely = {"mariadb": [pytest.mark.thorough], "etcd": [pytest.mark.thorough]}
    return [
        pytest.param(name, marks=[pytest.mark.engine(name), *rarely.get(name, ())])
        for name in names
    ]


# What nodes do with sessions is the same on each engine, and what an engine does with one that
# goes from one process to another is in its conformance tests: here the other two show that both
# work together, with nodes that freeze and that die.
EVERY_ENGINE = pytest.mark.parametrize(
    "site", engines("sqlite", "postgres", "mariadb", "etcd"), indirect=True
)
TOPIC, GROUP, QUEUE = "orders", "app", "inbox"
PARTITIONS = 4
# Longer than any test waits: a session that is over here was ended.
LONG = 120.0


class Site:
    """Two nodes of one store, and a way to the store beside them."""

    def __init__(self, store: str) -> None:
        self.nodes = [NodeProcess(store) for _ in range(2)]
        self.ports = [node.endpoint.port for node in self.nodes]
        self._store = store
        self.px = pxrs.connect(store)

    def url(self, first: int) -> str:
        """For a client that goes to this node first."""
        ports = self.ports[first:] + self.ports[:first]
        return "pxrs://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    def start_again(self, number: int) -> None:
        """A killed node, where it was."""
        where = f"127.0.0.1:{self.ports[number]}"
        self.nodes[number] = NodeProcess(self._store, listen=where)

    def client(self, first: int) -> Pxrs:
        """One that goes to this node first, and holds items for long."""
        return Pxrs(RemoteStores(remote_settings(parse_url(self.url(first)))), session_ttl=LONG)

    def freeze(self, number: int) -> None:
        """Stop a node, but not inside a write to an SQLite file, which would stop everybody."""
        stores = self.px.stores
        if isinstance(stores, SqliteStores):
            stores.database.write(lambda turn: self.nodes[number].freeze())
        else:
            self.nodes[number].freeze()

    def let_settle(self, number: int) -> None:
        """Return when the node has ended the session of a client that went after all the others.

        Those of clients that went before it has dealt with by then.
        """
        probe = RemoteStores(remote_settings(parse_url(f"pxrs://127.0.0.1:{self.ports[number]}")))
        session = probe.coord.session(LONG)
        probe.coord.commit((), (Put("probe", b"", session.id),))
        with await_change(self.px, "probe") as changed:
            probe.close()
            changed(lambda: self.px.stores.coord.get("probe") is None)

    def close(self) -> None:
        self.px.close()
        for node in self.nodes:
            node.wake()
            node.kill()


class await_change:  # noqa: N801 - used as a function
    """Look, wait, look again, at records under these prefixes."""

    def __init__(self, px: Pxrs, *where: str) -> None:
        self._watch = px.stores.coord.watch(*where)

    def __enter__(self) -> Callable[[Callable[[], object]], None]:
        def wait_until(seen: Callable[[], object]) -> None:
            while not seen():
                assert self._watch.wait(PATIENCE)

        return wait_until

    def __exit__(self, *_: object) -> None:
        self._watch.close()


@pytest.fixture(params=engines("sqlite", "postgres"))
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    store = f"sqlite:///{tmp_path}/nodes.db"
    if request.param == "postgres":
        store = request.getfixturevalue("postgres_url")
    elif request.param != "sqlite":
        store = f"{request.getfixturevalue(f'{request.param}_url')} log={store}"
    site = Site(store)
    yield site
    site.close()


class Handled:
    """What members were handed, in the order in which they were."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.places: list[tuple[int, int]] = []
        self.failures: list[BaseException] = []

    def wait_for(self, count: int) -> None:
        """Until so many were; each once, and those of a partition in order."""
        with self.changed:
            self.changed.wait_for(lambda: self.failures or len(self.places) >= count, PATIENCE)
        assert not self.failures, self.failures
        assert len(self.places) == len(set(self.places)) == count
        for number in range(PARTITIONS):
            offsets = [offset for partition, offset in self.places if partition == number]
            assert offsets == list(range(len(offsets)))


class Member:
    """A consumer behind nodes, in a thread."""

    def __init__(self, url: str, handled: Handled) -> None:
        self._px = pxrs.connect(url)
        self.consumer = self._px.consumer(
            TOPIC, GROUP, start="earliest", session_ttl=LONG, auto_commit_interval=0.1
        )
        self._handled = handled
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                messages = self.consumer.poll(timeout=0.2)
                with self._handled.changed:
                    self._handled.places += [(each.partition, each.offset) for each in messages]
                    self._handled.changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - told to who waits
            with self._handled.changed:
                self._handled.failures.append(error)
                self._handled.changed.notify_all()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.consumer.close()
        self._px.close()


def send(px: Pxrs, count: int) -> None:
    with px.producer() as producer:
        producer.send_many(TOPIC, [(str(n), "message") for n in range(count)])


def settled(px: Pxrs, members: int) -> GroupInfo:
    """The group once so many members own everything."""
    found: list[GroupInfo] = []

    def look() -> bool:
        found[:] = [px.groups.describe(GROUP)]
        return found[0].state == "STABLE" and len(found[0].members) == members

    with await_change(px, "") as changed:
        changed(look)
    return found[0]


def standing(info: GroupInfo) -> object:
    """What a rebalance would change, and a member that joins anew."""
    owners = [(part.partition, part.owner, part.epoch) for part in info.partitions]
    return info.state, info.generation, info.members, owners


@pytest.fixture
def handled(site: Site) -> Handled:
    site.px.topics.create(TOPIC, partitions=PARTITIONS)
    return Handled()


@pytest.fixture
def members(site: Site, handled: Handled) -> Iterator[list[Member]]:
    """Two members, each behind another node, that have handled 200 messages."""
    with ExitStack() as stack:
        members = [Member(site.url(number), handled) for number in range(2)]
        for member in members:
            stack.callback(member.close)
        settled(site.px, 2)
        send(site.px, 200)
        handled.wait_for(200)
        yield members


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.usefixtures("members")
def test_a_member_outlives_its_node(site: Site, handled: Handled, how: str) -> None:
    before = standing(settled(site.px, 2))
    send(site.px, 100)
    site.nodes[0].kill() if how == "killed" else site.nodes[0].terminate()
    send(site.px, 200)
    handled.wait_for(500)
    with await_change(site.px, "claims/") as changed:
        changed(lambda: site.px.groups.describe(GROUP).lag == 0)
    assert standing(settled(site.px, 2)) == before


@EVERY_ENGINE
def test_nodes_die_while_members_come_and_go(
    site: Site, handled: Handled, members: list[Member]
) -> None:
    """In the middle of joins, rebalances, commits and goodbyes: no message is lost or repeated."""
    sent = 200
    for number in range(4):
        going = Member(site.url(number % 2), handled)
        sending = threading.Thread(target=send, args=(site.px, 200))
        sending.start()
        site.nodes[number % 2].kill()
        sending.join(PATIENCE)
        site.start_again(number % 2)
        going.close()
        sent += 200
        handled.wait_for(sent)
    info = settled(site.px, 2)
    assert {each.name for each in info.members} == {each.consumer.member for each in members}


@EVERY_ENGINE
@pytest.mark.usefixtures("members")
def test_a_frozen_node_does_no_harm_when_it_wakes(site: Site, handled: Handled) -> None:
    before = standing(settled(site.px, 2))
    site.freeze(0)
    send(site.px, 200)
    handled.wait_for(400)
    site.nodes[0].wake()
    site.let_settle(0)
    assert standing(settled(site.px, 2)) == before
    # And back again, through the node that was frozen.
    site.nodes[1].kill()
    send(site.px, 200)
    handled.wait_for(600)
    assert standing(settled(site.px, 2)) == before


def test_who_closes_leaves_at_once_though_its_node_is_gone(
    site: Site, members: list[Member]
) -> None:
    before = settled(site.px, 2)
    site.nodes[0].kill()
    members[0].close()
    after = settled(site.px, 1)
    assert after.generation == before.generation + 1
    assert after.members[0].name == members[1].consumer.member
    assert len(after.members[0].owned) == PARTITIONS


def test_a_killed_client_is_replaced_soon(site: Site, members: list[Member]) -> None:
    """Its node notices that its connection broke: nobody waits for the session's time."""
    with Child(consume, site.url(0)) as child:
        child.read()
        settled(site.px, 3)
        began = time.monotonic()
        child.kill()
        info = settled(site.px, 2)
    assert time.monotonic() - began < LONG / 4
    assert {each.name for each in info.members} == {each.consumer.member for each in members}


def consume(url: str) -> None:
    with pxrs.connect(url) as px, px.consumer(TOPIC, GROUP, session_ttl=LONG) as consumer:
        say(consumer.member)
        while True:
            consumer.poll(timeout=1.0)


@EVERY_ENGINE
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_items_in_hand_outlive_the_node(site: Site, how: str) -> None:
    """Nobody else gets them, and whoever has them commits."""
    site.px.queues.create(QUEUE, fifo=True)
    for number in range(2):
        site.px.put(QUEUE, str(number))
    with site.client(0) as px, pxrs.connect(site.url(1)) as other:
        with px.transaction() as tx:
            item = tx.take(QUEUE, timeout=PATIENCE)
            assert item is not None
            assert item.value == "0"
            site.nodes[0].kill() if how == "killed" else site.freeze(0)
            with other.transaction() as theirs:
                assert theirs.take(QUEUE, timeout=1.0) is None
            # Answered by the other node. A commit that went to the frozen one would be refused.
            assert px.queues.describe(QUEUE).held == 1
            tx.put("outbox", item.value)
        site.nodes[0].wake()
        with other.transaction() as theirs:
            item = theirs.take(QUEUE, timeout=PATIENCE)
            assert item is not None
            assert item.value == "1"
            assert item.deliveries == 1
    assert site.px.queues.describe("outbox").ready == 1


def test_a_take_that_was_given_up_holds_nothing_when_its_node_wakes(site: Site) -> None:
    """The client has asked through another node what it holds, and was told: nothing."""
    site.px.queues.create(QUEUE)
    with site.client(0) as px:
        with px.transaction() as tx:
            assert tx.take(QUEUE, timeout=0) is None
        site.freeze(0)
        taking = threading.Thread(target=take_nothing, args=(px,))
        taking.start()
        taking.join(PATIENCE)
        assert not taking.is_alive()
        site.px.put(QUEUE, "0")
        site.nodes[0].wake()
        site.let_settle(0)
        info = site.px.queues.describe(QUEUE)
        assert (info.ready, info.held) == (1, 0)


def take_nothing(px: Pxrs) -> None:
    with px.transaction() as tx:
        tx.take(QUEUE, timeout=0)
