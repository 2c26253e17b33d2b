"""A member of DMQ's existing client that comes to another node, and back."""

from __future__ import annotations

import asyncio

import pytest

from pxrs import aio
from pxrs.clock import SYSTEM_CLOCK
from pxrs.server.rest.dmq_wire import NOTICE, WireMember
from support.child import PATIENCE
from support.wire_node import GROUP, LONG, SteppedNode, WireNode

pytestmark = pytest.mark.engine("memory")

# The client that subscribes sends a heartbeat each second, and gives up after ten.
MOST_HEARTBEATS = 9


@pytest.mark.parametrize("others_join", [False, True], ids=["alone", "while others join"])
@pytest.mark.parametrize("beats_at", [None, *range(0, 30, 5), 29], ids=lambda at: f"at {at}")
def test_one_that_joins_has_its_set_within_the_patience_of_the_client(
    monkeypatch: pytest.MonkeyPatch, beats_at: int | None, others_join: bool
) -> None:
    """Whenever the one beside it has its heartbeats of three seconds, and if it is dead.

    `beats_at`: tenths of a second after the join.
    """

    async def walk() -> None:
        async with aio.connect("memory://") as px:
            await px.topics.create("orders", partitions=64)
            node = SteppedNode(px, monkeypatch)
            await node.groups.find_or_create("orders", "app")
            await node.join("first")
            for at in range(1, 5):
                node.pass_time(float(at))
                first = await node.beat("first")
            assert len(first.assigned_partitions) == 64
            await node.join("joiner")
            heartbeats = 0
            for tenth in range(1, 101):
                node.pass_time(4.0 + tenth / 10)
                if beats_at is not None and tenth % 30 == beats_at:
                    await node.beat("first")
                if tenth % 10 == 0:
                    if others_join:
                        await node.join(f"other-{tenth}")
                    heartbeats += 1
                    told = await node.beat("joiner")
                    if told.rebalance_state == "STABLE" and told.assigned_partitions:
                        break
            assert told.assigned_partitions
            assert heartbeats <= MOST_HEARTBEATS
            owners = (await px.groups.describe(GROUP)).partitions
            assert {owners[number].owner for number in told.assigned_partitions} == {"joiner"}
            await node.die()

    asyncio.run(asyncio.wait_for(walk(), PATIENCE))


def test_a_member_that_comes_back_to_a_node_is_given_notice_again() -> None:
    async def walk() -> None:
        async with aio.connect("memory://") as px:
            await px.topics.create("orders", partitions=2)
            first, second = WireNode(px, "node:1", LONG), WireNode(px, "node:2", 0.0)
            await first.groups.find_or_create("orders", "app")
            await first.join("a")
            while (await first.beat("a")).assigned_partitions != [0, 1]:
                await asyncio.sleep(0)
            # It goes to the other node while this one is frozen, and comes back when that dies.
            joining = second.groups._host(GROUP).join("a", ("orders",), "dmq:a", LONG)
            await asyncio.wrap_future(joining)
            while first.groups.holds(GROUP, "a"):
                await asyncio.sleep(0)
            await second.die()
            back = await first.beat("a")
            assert back.rebalance_state == "PREPARING_REBALANCE"
            held = first.groups._hosts[GROUP]._members["a"]
            assert held.client == "dmq:a"
            while not held.standing.settled:
                await asyncio.sleep(0)
            # Another joins. The partition stays until the notice is over, whatever it asks.
            await first.join("b")
            while not held.held.is_leaving:
                await asyncio.sleep(0)
            for _ in range(3):
                assert (await first.beat("a")).rebalance_state == "PREPARING_REBALANCE"
            due = held.held.release_due()
            assert due is not None
            assert due > SYSTEM_CLOCK.monotonic() + LONG / 2
            assert len(held.held.parts) == 2
            await first.die()

    asyncio.run(asyncio.wait_for(walk(), PATIENCE))


def test_a_heartbeat_commits_before_what_was_left_out_is_released() -> None:
    """Its commit is no request of its own, and comes before what the heartbeat confirms."""

    async def walk() -> None:
        async with aio.connect("memory://") as px:
            await px.topics.create("orders", partitions=2)
            async with px.producer() as producer:
                for number in range(10):
                    await producer.send("orders", b"x", partition=number % 2)
            node = WireNode(px, "node:1", 0.0)
            await node.groups.find_or_create("orders", "app")
            await node.join("a")
            assert (await node.until_stable("a")).assigned_partitions == [0, 1]
            held = node.groups._hosts[GROUP]._members["a"].held
            await node.beat("a", {"0": 3, "1": 3})
            await node.join("b")
            while not held.is_leaving:
                await asyncio.sleep(0)
            told = await node.beat("a", {"0": 4, "1": 4})
            assert told.rebalance_state == "PREPARING_REBALANCE"

            async def checkpoints() -> list[int | None]:
                shown = await px.groups.describe(GROUP)
                return [each.checkpoint for each in shown.partitions]

            for _ in range(20):
                assert await checkpoints() == [3, 3]
                assert len(held.parts) == 2
            await node.beat("a", {"0": 4, "1": 4})
            while len(held.parts) == 2:
                await asyncio.sleep(0)
            assert await checkpoints() == [4, 4]
            await node.die()

    asyncio.run(asyncio.wait_for(walk(), PATIENCE))


def test_a_heartbeat_that_is_late_is_told_to_prepare() -> None:
    """The client does not look at answers to its commits: the first one may have gone there."""
    member = WireMember(NOTICE)
    assert member.reply((0, 1), True, 1, 0.0).rebalance_state == "STABLE"
    commit = member.reply((0,), True, 2, 10.0)
    late = member.reply((0,), True, 2, 10.0 + NOTICE + 0.1)
    assert (commit.rebalance_state, late.rebalance_state) == ("PREPARING_REBALANCE",) * 2
    after = member.reply((0,), True, 2, 10.0 + NOTICE + 3.1)
    assert (after.rebalance_state, after.assigned_partitions) == ("STABLE", [0])
    # Many requests in a short time do not end the wait either.
    early = [member.reply((0, 1), True, 3, 20.0 + at).rebalance_state for at in (0, 1, 2, 3)]
    assert set(early) == {"PREPARING_REBALANCE"}
    assert member.reply((0, 1), True, 3, 20.0 + NOTICE).rebalance_state == "STABLE"


@pytest.mark.parametrize("had", [(), (0,)], ids=["it had none", "it had one"])
def test_a_member_that_waits_for_partitions_takes_them_at_once(had: tuple[int, ...]) -> None:
    """A dead member has them until its session ends, and the client gives up ten seconds later."""
    member = WireMember(NOTICE)
    assert member.reply(had, True, 1, 0.0).rebalance_state == "STABLE"
    now = 0.0
    while (none := member.reply((), True, 2, now)).rebalance_state != "STABLE":
        now += 1.0
    assert none.assigned_partitions == []
    assert member.reply((), True, 2, now + 1.0).rebalance_state == "STABLE"
    assert member.reply((), False, 3, now + 2.0).rebalance_state == "PREPARING_REBALANCE"
    got = member.reply((0,), True, 3, now + 2.1)
    assert (got.rebalance_state, got.assigned_partitions) == ("STABLE", [0])
    # What it has now it gives up with notice again.
    assert member.reply((1,), True, 4, now + 3.0).rebalance_state == "PREPARING_REBALANCE"


def test_a_member_works_with_what_it_has_while_others_keep_joining() -> None:
    member = WireMember(NOTICE)
    # It has just joined, and gives up after ten seconds: it is told its set though more may come.
    early = [member.reply((0, 1), False, 1, float(at)).rebalance_state for at in range(6)]
    assert set(early) == {"PREPARING_REBALANCE"}
    late = member.reply((0, 1), False, 2, 6.0)
    assert (late.rebalance_state, late.assigned_partitions) == ("STABLE", [0, 1])
    assert member.reply((0, 1), False, 3, 9.0).rebalance_state == "STABLE"
    # What it gets or gives up next is announced as ever, settled or not.
    after = [member.reply((0,), False, 4, 12.0 + at) for at in (0, 3, 6)]
    assert [it.rebalance_state for it in after] == ["PREPARING_REBALANCE"] * 2 + ["STABLE"]
    assert after[-1].assigned_partitions == [0]
    # Once the group was settled, the next time that it is not is a rebalance again.
    assert member.reply((0,), True, 4, 21.0).rebalance_state == "STABLE"
    assert member.reply((0,), False, 5, 24.0).rebalance_state == "PREPARING_REBALANCE"


def state(member: WireMember, now: float, owned: tuple[int, ...], **offsets: int) -> str:
    """What a heartbeat with these offsets (of p0, p1 …) is told, in a settled group."""
    member.handled({int(name[1:]): at for name, at in offsets.items()})
    return member.reply(owned, True, 1, now).rebalance_state


def test_a_member_that_goes_on_reading_has_not_been_told_to_prepare() -> None:
    member = WireMember(NOTICE)
    assert state(member, 0.0, (0, 1)) == "STABLE"
    assert state(member, 3.0, (0, 1), p0=5, p1=5) == "STABLE"
    # These answers are lost.
    for at in (6, 9, 12, 15):
        assert state(member, float(at), (0,), p0=at, p1=at) == "PREPARING_REBALANCE"
    # It has stopped.
    assert state(member, 18.0, (0,), p0=15, p1=15) == "STABLE"
    assert state(member, 21.0, (0,), p0=18, p1=15) == "STABLE"


def test_a_member_that_reads_what_it_has_lost_is_told_to_prepare_again() -> None:
    """It had nothing to read while it was told, and all those answers were lost."""
    member = WireMember(NOTICE)
    for at in (0, 3):
        assert state(member, at, (0, 1), p0=5, p1=5) == "STABLE"
    for at in (6, 9):
        assert state(member, at, (), p0=5, p1=5) == "PREPARING_REBALANCE"
    assert state(member, 12, (), p0=5, p1=5) == "STABLE"
    assert state(member, 15, (), p0=5, p1=6) == "PREPARING_REBALANCE"
    assert state(member, 18, (), p0=5, p1=6) == "PREPARING_REBALANCE"
    assert state(member, 21, (), p0=5, p1=6) == "STABLE"


def test_a_member_without_partitions_waits() -> None:
    """To the client an empty set is not the end of a rebalance."""
    member = WireMember(NOTICE)
    assert member.reply((), False, 1, 0.0).rebalance_state == "PREPARING_REBALANCE"
    assert member.reply((), False, 1, 60.0).rebalance_state == "PREPARING_REBALANCE"
    assert member.reply((3,), False, 2, 61.0).assigned_partitions == [3]
