"""A node's members of one group, when another node takes them over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.core.assign import assignor
from pxrs.core.group import Rules
from pxrs.server.groups.host import Context, GroupHost, MemberNotHere
from pxrs.server.node_session import NodeSession
from pxrs.types import Put
from support.child import PATIENCE

pytestmark = pytest.mark.engine("memory")

RULES = Rules(0.01, 5.0, assignor("sticky"))


@pytest.fixture
def px() -> Iterator[pxrs.Pxrs]:
    with pxrs.connect("memory://") as px:
        px.topics.create("orders", partitions=2)
        yield px


@pytest.fixture
def hosts(px: pxrs.Pxrs) -> Iterator[list[GroupHost]]:
    """One on each of two nodes."""
    sessions = [NodeSession(px.stores.coord, 10.0) for _ in range(2)]
    hosts = [
        GroupHost(
            "g", Context(px.stores.coord, px.topics, SYSTEM_CLOCK, session, f"node:{number}"),
            RULES, 5.0,
        )
        for number, session in enumerate(sessions)
    ]  # fmt: skip
    yield hosts
    for host in hosts:
        host.close()
    for session in sessions:
        session.close()


def join(host: GroupHost, name: str) -> None:
    host.join(name, ("orders",), "test", 30.0).result(PATIENCE)


def test_a_host_goes_on_when_all_its_members_went_elsewhere(
    hosts: list[GroupHost], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = hosts
    join(first, "a")
    join(second, "a")
    while first.holds("a"):
        first.wake()
    with pytest.raises(MemberNotHere):
        first.ask("a")
    join(first, "b")
    assert first.ask("b").owner.startswith("b.")
    assert caplog.records == []


def test_a_session_of_the_node_that_is_over_is_replaced(px: pxrs.Pxrs) -> None:
    node = NodeSession(px.stores.coord, 10.0)
    first = node.lend(10.0)
    assert node.lend(10.0).id == first.id
    px.stores.coord.commit([], [Put("here", b"", first.id)])
    first._session.close()  # type: ignore[attr-defined]
    second = node.lend(10.0)
    assert second.id != first.id
    assert px.stores.coord.get("here") is None
    node.close()


def test_a_client_that_asks_to_join_again_before_it_was_answered_joins_once(
    hosts: list[GroupHost], px: pxrs.Pxrs
) -> None:
    asked = [hosts[0].join("a", ("orders",), "test", 30.0) for _ in range(20)]
    for done in asked:
        done.result(PATIENCE)
    assert [member.name for member in px.groups.describe("g").members] == ["a"]
