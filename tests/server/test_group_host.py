"""A node's members of one group, when another node takes them over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.core.assign import assignor
from pxrs.core.group import Rules
from pxrs.core.records import claims_prefix, head_key
from pxrs.errors import StoreUnavailable
from pxrs.groups.snapshot import Snapshot
from pxrs.server.groups import host as host_module
from pxrs.server.groups.host import Context, GroupHost, MemberNotHere
from pxrs.server.node_session import NodeSession
from pxrs.stores.api import CoordStore, Session, Watch
from pxrs.types import Put, Versioned
from support.child import PATIENCE
from support.node import looks

pytestmark = pytest.mark.engine("memory")

RULES = Rules(0.01, 5.0, assignor("sticky"))


@pytest.fixture
def px() -> Iterator[pxrs.Pxrs]:
    with pxrs.connect("memory://") as px:
        px.topics.create("orders", partitions=2)
        yield px


@pytest.fixture
def rules() -> Rules:
    return RULES


@pytest.fixture
def hosts(px: pxrs.Pxrs, rules: Rules) -> Iterator[list[GroupHost]]:
    """One on each of two nodes."""
    sessions = [NodeSession(px.stores.coord, 10.0) for _ in range(2)]
    hosts = [
        GroupHost(
            "g", Context(px.stores.coord, px.topics, SYSTEM_CLOCK, session, f"node:{number}"),
            rules, 5.0,
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
    wait_until(lambda: not first.holds("a"))
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


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds."""
    for _ in looks():
        if condition():
            return


def settled(host: GroupHost, name: str) -> threading.Event:
    """Set once the member owns its target."""
    event = threading.Event()
    host.when_settled(name, event.set)
    return event


@pytest.mark.parametrize("rules", [Rules(0.01, None, assignor("sticky"))])
def test_the_release_of_a_claim_wakes_a_member_that_has_just_begun_to_wait_for_it(
    hosts: list[GroupHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No deadline wakes the host: only the claim does.
    monkeypatch.setattr(host_module, "_CAREFUL_WAIT", 3600.0)
    first, second = hosts
    first.join("a", ("orders",), "test", 3600.0).result(PATIENCE)
    assert settled(first, "a").wait(PATIENCE)
    assert len(first.ask("a").owned) == 2
    second.join("b", ("orders",), "test", 3600.0).result(PATIENCE)
    # It has read the claim that another member owns. Nothing is written but this claim now.
    wait_until(lambda: bool(second._members["b"].membership.waiting_for))
    wait_until(lambda: len(first.ask("a").owned) == 1)
    first.ask("a")
    assert settled(second, "b").wait(PATIENCE)
    assert len(second.ask("b").owned) == 1


@pytest.mark.parametrize("rules", [Rules(0.01, None, assignor("sticky"))])
def test_a_look_that_failed_is_made_again(
    hosts: list[GroupHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "_CAREFUL_WAIT", 3600.0)
    first, second = hosts
    first.join("a", ("orders",), "test", 3600.0).result(PATIENCE)
    assert settled(first, "a").wait(PATIENCE)
    held = first._members["a"]
    look_at, failed = held.membership.look_at, threading.Event()

    def fail_once(seen: Snapshot) -> float | None:
        if seen.view.head.target_of("b") and not failed.is_set():
            failed.set()
            raise StoreUnavailable("for a test")
        return look_at(seen)

    held.membership.look_at = fail_once  # type: ignore[method-assign]
    second.join("b", ("orders",), "test", 3600.0).result(PATIENCE)
    assert failed.wait(PATIENCE)
    wait_until(lambda: len(first.ask("a").owned) == 1)
    first.ask("a")
    assert settled(second, "b").wait(PATIENCE)


class CountedWatch:
    """A watch that counts how often its host has come back to wait."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.wake, self.close = watch.wake, watch.close
        self.waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return self._watch.wait(timeout)


class CountedCoord:
    """A store that notes its sessions, its watches and which records are read."""

    def __init__(self, coord: CoordStore) -> None:
        self._coord = coord
        self.limits = coord.limits
        self.commit, self.close = coord.commit, coord.close
        self.sessions = 0
        self.watches: list[CountedWatch] = []
        self.reads: list[str] = []

    def get(self, key: str) -> Versioned | None:
        self.reads.append(key)
        return self._coord.get(key)

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        self.reads.append(prefix)
        return self._coord.list(prefix, after, limit)

    def watch(self, *where: str) -> Watch:
        self.watches.append(CountedWatch(self._coord.watch(*where)))
        return self.watches[-1]

    def session(self, ttl: float) -> Session:
        self.sessions += 1
        return self._coord.session(ttl)


def test_many_members_are_one_session_and_one_look(
    px: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A host looks when something has changed, and never to be careful.
    monkeypatch.setattr(host_module, "_CAREFUL_WAIT", 3600.0)
    px.topics.create("many", partitions=20)
    coord = CountedCoord(px.stores.coord)
    context = Context(coord, px.topics, SYSTEM_CLOCK, NodeSession(coord, 3600.0), "node:1")
    hosts = [GroupHost(f"g{number}", context, RULES, 5.0) for number in range(10)]
    names = [f"m{number}" for number in range(20)]
    members = [(host, name) for host in hosts for name in names]
    for done in [host.join(name, ("many",), "test", 3600.0) for host, name in members]:
        done.result(PATIENCE)
    for event in [settled(host, name) for host, name in members]:
        assert event.wait(PATIENCE)
    assert coord.sessions == 1
    # Heartbeats read nothing. A host may be about to look at what it has written itself.
    coord.reads.clear()
    for host, name in members * 10:
        assert len(host.ask(name).owned) == 1
    assert len(coord.reads) < len(members)
    # A change of a group's record is looked at once for all members, whatever each has to check.
    coord.reads.clear()
    waits = sum(watch.waits for watch in coord.watches)
    for host in hosts:
        head = px.stores.coord.get(head_key(host._group))
        assert head is not None
        px.stores.coord.commit([], [Put(head.key, head.value)])
    wait_until(lambda: set(coord.reads) >= {claims_prefix(host._group) for host in hosts})
    wait_until(lambda: sum(watch.waits for watch in coord.watches) >= waits + len(hosts))
    assert len(coord.reads) < len(members)
    for host in hosts:
        host.close()
    context.session.close()
    assert coord.sessions == 1
