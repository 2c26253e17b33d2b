"""What a node tells a remote member, and when it gives its partitions away."""

from __future__ import annotations

from pxrs.core.claims import OwnedClaim
from pxrs.core.records import Claim, GroupTopic
from pxrs.server.groups.held_member import HeldMember
from pxrs.server.rest.dmq_wire import WireMember
from pxrs.types import TopicPartition

A, B = TopicPartition("orders", 0), TopicPartition("orders", 1)


def claims(*parts: TopicPartition) -> list[OwnedClaim]:
    return [OwnedClaim(part, "key", 1, Claim(epoch=7, checkpoint=3)) for part in parts]


def member(notice: float = 0.0) -> HeldMember:
    held = HeldMember(0.0, session_timeout=10.0, patience=5.0, notice=notice)
    held.claimed(claims(A, B), {"orders": GroupTopic("topic-1", 2)})
    return held


def test_a_partition_goes_when_the_client_asks_after_it_was_told() -> None:
    held = member()
    held.ask(1.0)
    assert held.tell().keys() == {A, B}
    held.tick(1.5)
    held.leaving(frozenset([B]))
    assert held.releasable() == {}
    held.ask(2.0)
    assert held.tell().keys() == {A}
    assert held.releasable() == {}
    assert held.release_due() == 6.5
    held.ask(2.5)
    held.tick(2.5)
    assert held.releasable() == {B: None}
    assert held.parts == {A, B}
    held.gone([B], lost=False)
    assert held.parts == {A}


def test_what_is_only_a_sign_of_life_releases_nothing_before_the_deadline() -> None:
    held = member()
    held.leaving(frozenset([B]))
    held.ask(1.0)
    held.ask(2.0)
    assert held.releasable() == {}  # not told yet
    assert held.has_news
    assert held.tell().keys() == held.shown == {A}
    held.heard(3.0)
    assert held.silent_until() == 13.0
    assert held.releasable() == {}  # told, but it may have sent this before
    held.tick(5.0)
    assert held.releasable() == {B: None}


def test_a_silent_client_loses_it_in_time() -> None:
    held = member()
    held.leaving(frozenset([B]))
    held.tick(4.9)
    assert held.releasable() == {}
    held.tick(5.0)
    assert held.releasable() == {B: None}
    assert held.silent_until() == 10.0


def test_one_that_stays_after_all_is_told_anew() -> None:
    held = member()
    held.leaving(frozenset([B]))
    held.ask(1.0)
    assert held.tell().keys() == {A}
    held.leaving(frozenset())
    assert held.tell().keys() == {A, B}
    held.tick(9.0)
    held.leaving(frozenset([B]))
    held.ask(9.5)
    assert held.releasable() == {}


def test_notice_is_given_for_a_while() -> None:
    held = member(notice=3.0)
    held.leaving(frozenset([B]))
    held.ask(1.0)
    held.tell()
    held.ask(2.0)
    held.tick(3.9)
    assert held.releasable() == {}
    assert held.release_due() == 4.0
    held.tick(4.0)
    assert held.releasable() == {B: None}


def test_commits_move_what_is_told() -> None:
    held = member()
    held.committed({A: 9, TopicPartition("gone", 0): 1})
    held.committed({A: 8})  # by a commit whose answer came late
    assert held.tell()[A].checkpoint == 9
    assert held.tell()[B].checkpoint == 3


def test_an_existing_client_is_told_to_prepare_before_its_set_changes() -> None:
    wire = WireMember(notice=3.0)
    assert wire.reply((), False, 0, 0.0).rebalance_state == "PREPARING_REBALANCE"
    first = wire.reply((0, 1), True, 1, 0.5)
    assert (first.rebalance_state, first.assigned_partitions) == ("STABLE", [0, 1])
    # The set has changed between two of its heartbeats: it must not learn that as STABLE.
    second = wire.reply((0,), True, 2, 3.5)
    assert (second.rebalance_state, second.assigned_partitions) == ("PREPARING_REBALANCE", [0, 1])
    assert wire.reply((0,), True, 2, 4.0).rebalance_state == "PREPARING_REBALANCE"
    third = wire.reply((0,), True, 2, 6.5)
    assert (third.rebalance_state, third.assigned_partitions) == ("STABLE", [0])
    assert wire.reply((0,), True, 2, 9.5).rebalance_state == "STABLE"


def test_an_existing_client_from_another_node_is_told_to_prepare_first() -> None:
    # It is stable with a set of that time; nobody here knows whether it is still that one.
    wire = WireMember(notice=3.0, has_set=True)
    assert wire.reply((0,), True, 2, 1.0).rebalance_state == "PREPARING_REBALANCE"
    assert wire.reply((0,), True, 2, 3.9).rebalance_state == "PREPARING_REBALANCE"
    last = wire.reply((0,), True, 2, 4.0)
    assert (last.rebalance_state, last.assigned_partitions) == ("STABLE", [0])


def test_what_an_existing_client_fetched_counts_one_heartbeat_later() -> None:
    wire = WireMember(notice=3.0)
    assert wire.handled({0: 5}) == {}
    assert wire.handled({0: 9}) == {0: 5}
    assert wire.handled({0: 9}) == {0: 9}
