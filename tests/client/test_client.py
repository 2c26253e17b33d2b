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
from pxrs.core.kv import shard_of, slot_of_shard
from pxrs.errors import RetryExhausted
from pxrs.kv.group_commit import Waiting
from pxrs.kv.led import LedKeys
from support.child import PATIENCE
from support.node import LocalNode

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


def test_threads_share_batches(three: ThreeNodes, px: Pxrs) -> None:
    def work(name: int) -> None:
        for number in range(10):
            px.kv.put(f"{name}-{number}", "x")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(px.kv.scan())) == 80
    assert sum(asked["write"] for asked in three.asked.values()) <= 80


def test_reads_that_wait_travel_together(three: ThreeNodes, px: Pxrs) -> None:
    """As many as an answer holds: large values need several."""
    keys = px.kv
    assert isinstance(keys, LedKeys)
    mine = [key.encode() for key in KEYS if three.leader_of(key) == "b"]
    for key in mine[1:]:
        keys.put(key, key * 20_000)
    waiting: list[Waiting[bytes, Any]] = [Waiting(key) for key in mine]
    reading = keys._reading_to(keys._client._node_for(mine[0]))
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
    px.client._topology.learn(slot_of_shard(shard_of(key.encode())), wrong)
    px.kv.put(key, "2")
    assert px.client.stats().router.hints == 1
    assert (three.asked["b"]["write"], three.asked["c"]["write"]) == (2, 1)
    px.kv.put(key, "3")
    assert (three.asked["b"]["write"], three.asked["c"]["write"]) == (3, 1)
    entry = px.kv.get(key)
    assert entry is not None
    assert (entry.value, entry.version.index) == (b"3", 3)


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


def test_views_are_data() -> None:
    assert NodesView().slots == ()
