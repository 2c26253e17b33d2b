"""The parts of a client by themselves: retries, topology, router, statistics."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.client.retry import RetryPolicy
from pxrs.client.router import Router
from pxrs.client.stats import Latencies
from pxrs.client.topology import NodeAddress, NodesView, Topology, TopologyChange
from pxrs.core.kv import shard_of, slot_of_shard
from pxrs.core.retry import Backoff
from pxrs.errors import NotLeader, RetryExhausted, StoreUnavailable, VersionMismatch
from pxrs.testing import VirtualClock
from pxrs.types import Version

A, B, C = (NodeAddress(name, f"{name}:6000") for name in "abc")


def view(epoch: int, *nodes: NodeAddress) -> NodesView:
    """All slots are shared by these nodes, in turns."""
    slots = tuple(nodes[slot % len(nodes)].name for slot in range(64))
    return NodesView(epoch, nodes, slots)


# Retries


def test_attempts_end_with_the_last_error() -> None:
    policy = RetryPolicy(Backoff(0.0, 0.0, attempts=3), 10.0, VirtualClock())
    tries = policy.begin()
    errors = [StoreUnavailable(str(number)) for number in range(3)]
    for error in errors[:2]:
        tries.again(error)
    with pytest.raises(RetryExhausted, match="tried 3 times without success: 2") as raised:
        tries.again(errors[2])
    error = raised.value
    assert (error.code, error.attempts, error.cause) == ("retry_exhausted", 3, errors[2])
    assert error.retryable
    assert error.context == {"attempts": 3}
    assert policy.stats == (2, 1)


def test_one_deadline_is_over_all_attempts() -> None:
    clock = VirtualClock()
    policy = RetryPolicy(Backoff(0.001, 0.001, jitter=0.0), 10.0, clock)
    tries = policy.begin()
    tries.again(StoreUnavailable("x"))
    clock.advance(9.9995)
    # There is no time left for the pause before another one.
    with pytest.raises(RetryExhausted):
        tries.again(StoreUnavailable("x"))


def test_pauses_are_counted_by_the_same_clock() -> None:
    clock = VirtualClock()
    policy = RetryPolicy(Backoff(1.0, 1.0, jitter=0.0), 10.0, clock, clock.advance)
    tries = policy.begin()
    with pytest.raises(RetryExhausted) as raised:
        for _ in range(100):
            tries.again(StoreUnavailable("x"))
    assert raised.value.attempts == 10
    assert (clock.monotonic(), tries.left) == (9.0, 1.0)


# Topology


def test_a_view_that_is_not_newer_is_dropped() -> None:
    topology, told = Topology(), list[TopologyChange]()
    topology.on_change(told.append)
    topology.update(view(5, A, B))
    topology.update(view(5, C))
    topology.update(view(4, C))
    assert topology.leader_of(0) == A
    assert [change.epoch for change in told] == [5]


def test_changes_are_told() -> None:
    topology, told = Topology(), list[TopologyChange]()
    topology.update(view(1, A, B))

    def fails(change: TopologyChange) -> None:
        raise RuntimeError("a bug of the program")

    topology.on_change(fails)
    end = topology.on_change(told.append)
    topology.update(view(2, A, C))
    (change,) = told
    assert (change.added, change.removed) == ((C,), (B,))
    assert change.leaders == dict.fromkeys(range(1, 64, 2), "c")
    end()
    topology.update(view(3, B))
    assert told == [change]
    assert topology.stats == (3, 64, 3)


def test_a_hint_counts_until_the_next_view() -> None:
    topology = Topology()
    topology.update(view(1, A))
    topology.learn(7, B, 1)
    assert (topology.leader_of(7), topology.leader_of(8)) == (B, A)
    topology.update(view(2, A, C))
    assert topology.leader_of(7) == C
    # The answer to a question of before comes late.
    topology.learn(7, B, 1)
    assert topology.leader_of(7) == C


def test_a_hint_to_a_node_that_does_not_answer_is_dropped() -> None:
    topology = Topology()
    topology.update(view(1, A))
    router = Router(topology, VirtualClock())
    for key in (b"k", b"other"):
        router.learn(key, B, 1)
    router.learn(b"third", C, 1)
    router.avoid(B)
    assert [router.node_for(key) for key in (b"k", b"other", b"third")] == [A, A, C]


def test_nobody_leads_what_is_not_known() -> None:
    topology = Topology()
    assert topology.leader_of(3) is None
    topology.update(NodesView(1, (A,), (None, "gone", "a")))
    assert [topology.leader_of(slot) for slot in range(4)] == [None, None, A, None]


# Routing


@given(st.binary(min_size=1, max_size=40))
def test_a_key_goes_to_the_leader_of_its_slot(key: bytes) -> None:
    topology = Topology()
    topology.update(view(1, A, B, C))
    slot = slot_of_shard(shard_of(key))
    assert Router(topology, VirtualClock()).node_for(key) == (A, B, C)[slot % 3]


def test_a_node_that_does_not_answer_is_avoided_for_a_while() -> None:
    clock, topology = VirtualClock(), Topology()
    topology.update(view(1, A))
    router = Router(topology, clock)
    assert router.node_for(b"k") == A
    router.avoid(A)
    assert router.node_for(b"k") is None
    clock.advance(3)
    assert router.node_for(b"k") == A
    router.learn(b"k", B, 1)
    assert router.node_for(b"k") == B
    assert router.stats == (1, 1024, 3, 1, 1)


# Statistics and errors


@given(st.lists(st.floats(0, 100), min_size=1))
def test_half_and_nearly_all_calls_were_faster(seconds: list[float]) -> None:
    latencies = Latencies()
    for each in seconds:
        latencies.add("kv.read", each)
    found = latencies.stats["kv.read"]
    assert found.calls == len(seconds)
    assert math.isclose(found.seconds, sum(seconds))
    for share, bound in ((0.5, found.p50), (0.99, found.p99)):
        assert sum(each <= bound for each in seconds) >= share * len(seconds)


def test_errors_say_what_a_program_wants_to_know() -> None:
    error = VersionMismatch(b"k", Version(1, 2), None)
    assert error.code == "version_mismatch"
    assert error.message == str(error)
    assert error.context == {"key": b"k", "expected": Version(1, 2), "current": None}
    assert (error.cause, error.retryable) == (None, False)
    assert NotLeader(b"k", "a", "host:1").retryable
