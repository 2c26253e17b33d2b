"""A client of several nodes: each key goes to its leader, and what changes is noticed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

import pxrs
from pxrs import ABSENT, AlreadyExists, ConfigError, OutcomeUnknown, Pxrs
from pxrs.client.topology import NodeAddress, NodesView, TopologyChange
from pxrs.core.kv import Change, shard_of, slot_of_shard
from pxrs.errors import NotLeader, RetryExhausted, StoreBusy, StoreUnavailable
from pxrs.kv.group_commit import Waiting
from pxrs.kv.led import LedKeys, Timed
from support.child import PATIENCE
from support.node import LocalNode, looks
from support.shared_commits import SharedCommits

pytestmark = pytest.mark.engine("sqlite")


class ThreeNodes:
    """Nodes a, b and c of one file, and how often each was asked."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._store = f"sqlite:///{folder}/node.db"
        self._stack = stack
        self.asked: dict[str, Counter[str]] = {}
        self.nodes = {name: self.start(name) for name in "abc"}
        self.wait_for(set("abc"))

    def start(self, name: str) -> LocalNode:
        node = self._stack.enter_context(LocalNode(self._store, node_id=name))
        asked = self.asked[name] = Counter()
        assert node._node.remote is not None
        keys = node._node.remote.keys
        for method in ("write", "read"):
            setattr(keys, method, counted(asked, method, getattr(keys, method)))
        return node

    def wait_for(self, names: set[str]) -> None:
        """Until these nodes, and nobody else, lead all slots."""
        for name in names:
            cluster = self.nodes[name]._node.cluster
            self.nodes[name].wait_until(lambda it=cluster: set(it.view.slots) == names)  # type: ignore[misc]

    def leader_of(self, key: str) -> str:
        slots = self.nodes["a"]._node.cluster.view.slots
        leader = slots[slot_of_shard(shard_of(key.encode()))]
        assert leader is not None
        return leader

    @property
    def url(self) -> str:
        return "pxrs://" + ",".join(node.address for node in self.nodes.values())


def counted(asked: Counter[str], method: str, call: Any) -> Any:
    def count(*given: Any, **named: Any) -> Any:
        asked[method] += 1
        return call(*given, **named)

    return count


@pytest.fixture
def three(tmp_path: Path) -> Iterator[ThreeNodes]:
    with ExitStack() as stack:
        yield ThreeNodes(tmp_path, stack)


@pytest.fixture
def px(three: ThreeNodes) -> Iterator[Pxrs]:
    with pxrs.connect(three.url) as px:
        yield px


KEYS = [f"user:{number}" for number in range(60)]


def test_no_request_makes_a_detour(three: ThreeNodes, px: Pxrs) -> None:
    for key in KEYS:
        px.kv.put(key, key)
    for key in KEYS:
        assert px.kv.get(key) is not None
    led = Counter(three.leader_of(key) for key in KEYS)
    assert set(led) == set("abc")
    for name in "abc":
        assert three.asked[name] == {"write": led[name], "read": led[name]}
    stats = px.client.stats()
    assert stats.router[2:] == (2 * len(KEYS), 0, 0)
    assert stats.retries == (0, 0)
    assert stats.pool == (3, 3, 0)
    assert stats.latencies["kv.write"].calls == len(KEYS)


def test_threads_share_batches(
    three: ThreeNodes, px: Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = px.kv
    assert isinstance(keys, LedKeys)
    mine = [key for key in (f"{number}" for number in range(999)) if three.leader_of(key) == "b"]
    writer = keys._writer_to(keys._client._node_for(mine[0].encode(), keys._client._begin()))
    store = three.nodes["b"].px.kv._coord
    commits = SharedCommits(monkeypatch, store, lambda: len(writer.group._waiting) == 8)

    def work(name: int) -> None:
        for number in range(10):
            keys.put(mine[name * 10 + number], "x")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(px.kv.scan())) == 80
    assert sum(asked["write"] for asked in three.asked.values()) == len(commits.sizes)
    assert sum(commits.sizes) == 80
    assert sum(commits.sizes[:2]) >= 8


def test_reads_that_wait_travel_together(three: ThreeNodes, px: Pxrs) -> None:
    """As many as an answer holds: large values need several."""
    keys = px.kv
    assert isinstance(keys, LedKeys)
    mine = [key.encode() for key in KEYS if three.leader_of(key) == "b"]
    for key in mine[1:]:
        keys.put(key, key * 20_000)
    tries = keys._client._begin()
    waiting: list[Waiting[Timed[bytes], Any]] = [Waiting(Timed(key, tries.ends)) for key in mine]
    reading = keys._reading_to(keys._client._node_for(mine[0], tries))
    while left := [each for each in waiting if not each.is_settled]:
        reading._read(left)
    answers: list[Any] = [each.answer for each in waiting]
    assert answers[0] is None
    assert [answer.value for answer in answers[1:]] == [key * 20_000 for key in mine[1:]]
    assert 1 < three.asked["b"]["read"] < len(mine)


def test_one_who_is_not_the_leader_names_it(three: ThreeNodes, px: Pxrs) -> None:
    (key, *_) = [key for key in KEYS if three.leader_of(key) == "b"]
    px.kv.put(key, "1")
    wrong = NodeAddress("c", three.nodes["c"].address)
    topology = px.client._topology
    topology.learn(slot_of_shard(shard_of(key.encode())), wrong, topology.view.epoch)
    px.kv.put(key, "2")
    assert px.client.stats().router.hints == 1
    assert (three.asked["b"]["write"], three.asked["c"]["write"]) == (2, 1)
    px.kv.put(key, "3")
    assert (three.asked["b"]["write"], three.asked["c"]["write"]) == (3, 1)
    entry = px.kv.get(key)
    assert entry is not None
    assert (entry.value, entry.version.index) == (b"3", 3)


def test_a_leader_that_is_named_too_late_is_not_believed(three: ThreeNodes, px: Pxrs) -> None:
    """The view has changed while the answer was on its way."""
    (key, *_) = [key for key in KEYS if three.leader_of(key) == "b"]
    topology = px.client._topology
    view = px.client.view()
    keys = three.nodes["b"].remote.keys

    def name_another(*given: Any, **named: Any) -> Any:
        topology.update(NodesView(view.epoch + 1, view.nodes, view.slots))
        raise NotLeader(key.encode(), "c", three.nodes["c"].address)

    keys.write = name_another  # type: ignore[method-assign]
    # One that is sent again is written by any node.
    px.kv.put(key, "1")
    assert three.asked["c"]["write"] == 1
    leader = px.client._router.node_for(key.encode())
    assert leader is not None
    assert leader.name == "b"


def test_nodes_that_come_and_go_are_noticed(three: ThreeNodes, px: Pxrs) -> None:
    """Also when the client was connected to the one that goes."""
    changes: list[TopologyChange] = []
    gone = threading.Event()

    def note(change: TopologyChange) -> None:
        changes.append(change)
        if any(node.name == "a" for each in changes for node in each.removed):
            gone.set()

    assert {node.name for node in px.client.view().nodes} == set("abc")
    px.client.on_change(note)
    px.kv.put("before", "x")
    three.nodes["a"].stop()
    three.nodes["a"].join()
    assert gone.wait(PATIENCE)
    three.wait_for(set("bc"))
    for key in KEYS:
        px.kv.put(key, "after")
    assert {entry.value for entry in px.kv.scan("user:")} == {b"after"}
    assert {node.name for node in px.client.view().nodes} == set("bc")
    assert px.client.stats().topology.epoch == px.client.view().epoch
    epochs = [change.epoch for change in changes]
    assert epochs == sorted(set(epochs))


def test_a_batch_whose_answer_is_lost_is_written_once(three: ThreeNodes, px: Pxrs) -> None:
    """The leader writes it and dies: whoever gets it then answers as the first did."""
    (key, *_) = [key for key in KEYS if three.leader_of(key) == "b"]
    node = three.nodes["b"]
    assert node._node.remote is not None
    keys, px_b = node._node.remote.keys, node.px
    write = keys.write

    def then_die(*given: Any, **named: Any) -> Any:
        keys.write = write  # type: ignore[method-assign]
        write(*given, **named)
        px_b.kv.put(key, "of another")
        assert node._node.remote is not None
        node._node.remote.end_streams()
        threading.Event().wait(0.2)
        raise OutcomeUnknown("nobody hears this")

    keys.write = then_die  # type: ignore[method-assign]
    version = px.kv.put(key, "once", if_match=ABSENT)
    assert version.index == 1
    entry = px.kv.get(key)
    assert entry is not None
    assert (entry.value, entry.version.index) == (b"of another", 2)
    with pytest.raises(AlreadyExists):
        px.kv.put(key, "again", if_match=ABSENT)


def test_without_nodes_it_gives_up(tmp_path: Path) -> None:
    with LocalNode(f"sqlite:///{tmp_path}/node.db") as node:
        px = pxrs.connect(f"pxrs://{node.address}?timeout=1&attempts=3&retry_first=0.01")
        px.kv.put("k", "x")
    with pytest.raises(RetryExhausted) as raised:
        px.kv.get("k")
    assert raised.value.attempts == 3
    with pytest.raises(RetryExhausted):
        px.kv.put("k", "y")
    px.close()


def test_statistics_for_prometheus(three: ThreeNodes, px: Pxrs) -> None:
    px.kv.put("k", "x")
    registry = prometheus_client.CollectorRegistry()
    registry.register(px.client)
    assert registry.get_sample_value("pxrs_client_routed_total", {"to": "leader"}) == 1
    assert registry.get_sample_value("pxrs_client_calls_total", {"method": "kv.write"}) == 1
    assert registry.get_sample_value("pxrs_client_nodes") == 3


def test_a_store_without_nodes_has_no_client() -> None:
    with pxrs.connect("memory://") as px, pytest.raises(ConfigError, match="used directly"):
        px.client.view()


# Deadlines


def test_who_waits_for_the_view_waits_until_its_own_deadline(px: Pxrs) -> None:
    """Another thread asks for it, and may do so for longer."""
    keys = px.kv
    told: list[BaseException] = []

    def get() -> None:
        try:
            keys.get("k")
        except BaseException as error:  # noqa: BLE001 - looked at below
            told.append(error)

    px.client._link.retry.timeout = 0.1
    with px.client._following:
        waiting = threading.Thread(target=get, daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert isinstance(told[0], RetryExhausted)


def test_who_waits_to_connect_waits_until_its_own_deadline(three: ThreeNodes, px: Pxrs) -> None:
    told: list[BaseException] = []

    def get() -> None:
        try:
            px.stores.coord.get("k")
        except BaseException as error:  # noqa: BLE001 - looked at below
            told.append(error)

    link = px.client._link
    link.retry.timeout = 0.1
    with link._connecting:
        link._stream.close()  # type: ignore[union-attr]
        waiting = threading.Thread(target=get, daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert isinstance(told[0], RetryExhausted)


def test_a_put_whose_time_is_over_is_not_sent(three: ThreeNodes, px: Pxrs) -> None:
    """It waited for the batch before. Those that came later are sent."""
    keys = px.kv
    assert isinstance(keys, LedKeys)
    client = keys._client
    mine = [key.encode() for key in KEYS if three.leader_of(key) == "b"]
    writer = keys._writer_to(client._node_for(mine[0], client._begin()))
    late, timely = (
        Waiting[Timed[Change], Any](Timed(Change(key, b"x"), client._now() + left))
        for key, left in ((mine[0], 0.0), (mine[1], PATIENCE))
    )
    writer._commit([late, timely])
    assert isinstance(late.answer, StoreUnavailable)
    assert late.answer.retryable
    assert not isinstance(timely.answer, BaseException)
    assert keys.get(mine[0]) is None
    assert keys.get(mine[1]) is not None


def test_one_whose_time_is_over_does_not_end_that_of_others(tmp_path: Path) -> None:
    """A batch is tried until the first of its puts gives up; the others have another one."""
    with LocalNode(f"sqlite:///{tmp_path}/node.db") as node:
        px = pxrs.connect(f"pxrs://{node.address}")
        px.kv.put("k", "x")
    keys = px.kv
    assert isinstance(keys, LedKeys)
    writer = keys._writer_to(None)
    first, second = (
        Waiting[Timed[Change], Any](Timed(Change(b"k", b"x"), keys._client._now() + left))
        for left in (0.2, PATIENCE)
    )
    writer._commit([first, second])
    assert isinstance(first.answer, RetryExhausted)
    assert not second.is_settled
    px.close()


# The view


def test_no_watch_is_left_where_the_view_can_not_be_read(
    three: ThreeNodes, px: Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> NodesView:
        raise StoreBusy("for a test")

    assert three.nodes["a"]._node.remote is not None
    with monkeypatch.context() as patch:
        patch.setattr(three.nodes["a"]._node.remote, "view", fail)
        for _ in range(3):
            with pytest.raises(StoreBusy):
                px.client.view()
    assert px.client._link._watches == {}
    assert {node.name for node in px.client.view().nodes} == set("abc")


@pytest.mark.parametrize("who", ["a node", "the client"])
def test_a_change_is_noticed_although_the_view_could_not_be_read(
    three: ThreeNodes, px: Pxrs, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    monkeypatch.setattr("pxrs.client.client._LOOK", 10 * PATIENCE)
    monkeypatch.setattr("pxrs.client.client._PAUSE", 0.01)
    assert {node.name for node in px.client.view().nodes} == set("abc")
    failed = threading.Event()

    def fail(*_: object) -> NodesView:
        failed.set()
        raise StoreBusy("for a test") if who == "a node" else RuntimeError("a bug")

    with monkeypatch.context() as patch:
        if who == "a node":
            patch.setattr(three.nodes["a"].remote, "view", fail)
        else:
            patch.setattr(px.client._topology, "update", fail)
        three.nodes["c"].stop()
        three.nodes["c"].join()
        three.wait_for(set("ab"))
        assert failed.wait(PATIENCE)
    for _ in looks():
        if {node.name for node in px.client.view().nodes} == set("ab"):
            break


def test_threads_share_one_question_for_the_view(
    three: ThreeNodes, px: Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = three.nodes["a"]._node.remote
    assert remote is not None
    asked: Counter[str] = Counter()
    asking, go_on = threading.Event(), threading.Event()
    view = remote.view

    def slow() -> NodesView:
        asked["view"] += 1
        asking.set()
        assert go_on.wait(PATIENCE)
        return view()

    monkeypatch.setattr(remote, "view", slow)
    threads = [threading.Thread(target=px.kv.get, args=(key,)) for key in KEYS[:8]]
    for thread in threads:
        thread.start()
    assert asking.wait(PATIENCE)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert asked["view"] == 1
    assert sum(each["read"] for each in three.asked.values()) <= 8


def test_many_keys_take_one_call_of_each_leader(three: ThreeNodes, px: Pxrs) -> None:
    for key in KEYS[1:]:
        px.kv.put(key, key)
    found = px.kv.get_many([*KEYS, KEYS[5]])
    assert list(found) == [key.encode() for key in KEYS[1:]]
    assert all(entry.value == key for key, entry in found.items())
    assert [three.asked[name]["read"] for name in "abc"] == [1, 1, 1]
    assert px.kv.get_many(KEYS, consistency="stale_ok") == found
    assert px.kv.get_many([]) == {}


def test_views_are_data() -> None:
    assert NodesView().slots == ()
