"""Groups under /v1: join, assignment, commits that are fenced, leave."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pxrs.clock import SYSTEM_CLOCK
from pxrs.core.records import Head
from pxrs.groups.membership import Membership
from pxrs.server.groups import fences
from pxrs.server.groups.fences import Fence
from pxrs.types import Write
from support.child import PATIENCE
from support.java_member import JavaMember
from support.node import Client, LocalNode, Reply, looks

GROUP = "/v1/groups/billing"


@pytest.fixture
def orders(client: Client) -> Client:
    client.post("/v1/topics", {"name": "orders", "partitions": 4})
    messages = [{"partition": number, "value": "x"} for number in range(4) for _ in range(3)]
    client.post("/v1/topics/orders/messages", {"messages": messages})
    return client


def join(client: Client, member: str) -> None:
    joined = client.post(f"{GROUP}/members", {"member": member, "topics": ["orders"]})
    assert joined.status == 201, joined.body


def owned(client: Client, *members: str) -> dict[str, list[Any]]:
    """What the members own, once each has its share."""
    for _ in looks():
        answers = {each: client.get(f"{GROUP}/members/{each}").json for each in members}
        counts = [len(answer["partitions"]) for answer in answers.values()]
        if all(answer["settled"] for answer in answers.values()) and sum(counts) == 4:
            break
    return {name: answer["partitions"] for name, answer in answers.items()}


def test_commits_are_fenced_by_partition(orders: Client) -> None:
    join(orders, "a")
    mine = owned(orders, "a")["a"]
    done = orders.post(
        f"{GROUP}/commits", {"commits": [{"fence": part["fence"], "offset": 2} for part in mine]}
    )
    assert [each["checkpoint"] for each in done.json["commits"]] == [2] * 4
    back = orders.post(f"{GROUP}/commits", {"commits": [{"fence": mine[0]["fence"], "offset": 1}]})
    assert back.json["commits"][0]["checkpoint"] == 2
    join(orders, "b")
    shared = owned(orders, "a", "b")
    moved = [part["partition"] for part in shared["b"]]
    assert [part["checkpoint"] for part in shared["b"]] == [2, 2]
    stale = orders.post(
        f"{GROUP}/commits", {"commits": [{"fence": part["fence"], "offset": 3} for part in mine]}
    )
    refused = {each["partition"] for each in stale.json["commits"] if each["fenced"]}
    assert refused == set(moved)
    checkpoints = [part["checkpoint"] for part in orders.get(GROUP).json["partitions"]]
    assert [checkpoints[number] for number in moved] == [2, 2]
    assert sorted(checkpoints) == [2, 2, 3, 3]
    assert orders("DELETE", f"{GROUP}/members/b").status == 204
    assert len(owned(orders, "a")["a"]) == 4
    assert orders.get(f"{GROUP}/members/b").status == 404
    assert "b left" in str(orders.get(f"{GROUP}/history").json)
    assert orders("DELETE", GROUP).status == 409
    orders("DELETE", f"{GROUP}/members/a")
    assert orders("DELETE", GROUP).status == 204


def test_a_client_that_starts_anew_continues_from_its_last_commit(
    orders: Client, node: LocalNode
) -> None:
    join(orders, "a")
    fence_of = {it["partition"]: it["fence"] for it in owned(orders, "a")["a"]}

    def checkpoints(answer: Reply) -> list[int | None]:
        return [part["checkpoint"] for part in answer.json["partitions"]]

    commits = [{"fence": fence, "offset": 1} for fence in fence_of.values()]
    assert orders.post(f"{GROUP}/commits", {"commits": commits}).status == 200
    assert checkpoints(orders.get(f"{GROUP}/members/a")) == [1] * 4
    # Through another node: this one reads it when the client joins again.
    fence = Fence.decode(fence_of[2])
    coord = node.px.stores.coord
    assert fences.commit(coord, SYSTEM_CLOCK, {fence: 3}, lambda _: None) == {fence: 3}
    again = orders.post(f"{GROUP}/members", {"member": "a", "topics": ["orders"]})
    assert checkpoints(again) == [1, 1, 3, 1]


def test_bad_fences(orders: Client, node: LocalNode) -> None:
    join(orders, "a")
    fence = owned(orders, "a")["a"][0]["fence"]
    for wrong in ("", "x", fence[:-4], "A" * 2000, "é", "W10"):
        refused = orders.post(f"{GROUP}/commits", {"commits": [{"fence": wrong, "offset": 1}]})
        assert refused.status == 400, (wrong, refused.body)
    past = orders.post(f"{GROUP}/commits", {"commits": [{"fence": fence, "offset": 99}]})
    assert past.status == 416
    other = orders.post("/v1/groups/other/commits", {"commits": [{"fence": fence, "offset": 1}]})
    assert (other.status, other.json["code"]) == (400, "foreign_fence")
    missing = orders.post(f"{GROUP}/members", {"member": "b", "topics": ["none"]})
    assert missing.status == 404
    for wrong in ({"member": "a b", "topics": ["orders"]}, {"member": "a", "topics": []}, {}):
        assert orders.post(f"{GROUP}/members", wrong).status == 400


# Longer than a client of these tests waits for an answer: each must have been woken.
WAIT = 50


def test_polls_for_an_assignment_are_woken_by_a_rebalance(
    patient: None, orders: Client, node: LocalNode
) -> None:
    join(orders, "a")
    assert len(owned(orders, "a")["a"]) == 4
    other = node.client()
    join(other, "b")
    other.send("GET", f"{GROUP}/members/b?wait={WAIT}")
    # It is told what it has to give up when that is decided, and it has that until it asks again.
    told = orders.get(f"{GROUP}/members/a?wait={WAIT}").json
    assert (told["settled"], len(told["partitions"])) == (False, 2)
    owners = [part.owner for part in node.px.groups.describe("billing").partitions]
    assert owners == ["a"] * 4
    after = [orders.get(f"{GROUP}/members/a?wait={WAIT}").json, other.receive().json]
    assert [answer["settled"] for answer in after] == [True, True]
    assert after[0]["partitions"] == told["partitions"]
    parts = sorted(part["partition"] for answer in after for part in answer["partitions"])
    assert parts == [0, 1, 2, 3]
    other.close()


def test_a_member_that_waits_for_its_assignment_is_not_silent(
    patient: None, orders: Client
) -> None:
    """A dead member has all partitions for longer than the session of the one that waits."""
    for name, timeout in (("dead", 2), ("b", 1)):
        body = {"member": name, "topics": ["orders"], "session_timeout": timeout}
        assert orders.post(f"{GROUP}/members", body).status == 201
        if name == "dead":
            assert len(owned(orders, "dead")["dead"]) == 4
    for _ in looks():
        told = orders.get(f"{GROUP}/members/b?wait={WAIT}")
        assert told.status == 200
        if told.json["settled"]:
            break
    assert len(told.json["partitions"]) == 4


def test_a_poll_that_ends_is_one_request(patient: None, orders: Client, node: LocalNode) -> None:
    """What its answer leaves out is the member's until it has sent another one."""
    documented = "/api/v1/consumer-group"
    body = {"topic": "orders", "appId": "app"}
    found = orders.post("/api/v1/metadata/consumer-groups/find-or-create", body).json["groupId"]
    ids = {}
    for name in ("a", "b"):
        asked = {"groupId": found, "consumerId": name}
        ids[name] = orders.post(f"{documented}/join", asked).json["memberId"]
        if name == "a":
            path = f"{documented}/assignment/{ids['a']}?wait="
            before = orders.get(f"{path}{WAIT}").json
            assert before["partitions"] == [0, 1, 2, 3]
    for _ in looks():
        if node.px.groups.describe(found).generation > before["generation"]:
            break
    for _ in looks():
        told = orders.get(f"{path}0.2").json
        if told["generation"] > before["generation"]:
            break
    assert len(told["partitions"]) == 2
    for _ in range(20):
        orders.get(f"{documented}/assignment/{ids['b']}?wait=0")
        assert [it.owner for it in node.px.groups.describe(found).partitions] == ["a"] * 4
    settled = orders.get(f"{path}{WAIT}").json
    assert settled["partitions"] == told["partitions"]


def test_the_states_of_a_group_from_its_first_member_to_its_last(
    patient: None, orders: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert orders.get(GROUP).status == 404
    propose, may_propose = Membership._head_writes, threading.Event()

    def wait_to_propose(member: Membership, before: Head, after: Head) -> list[Write]:
        assert may_propose.wait(PATIENCE)
        return propose(member, before, after)

    monkeypatch.setattr(Membership, "_head_writes", wait_to_propose)

    def state() -> str:
        """As the group itself says; the list says so too, unless it changes in between."""
        before = listed()
        described = str(orders.get(GROUP).json["state"])
        assert described == before or listed() != before
        return described

    def listed() -> str:
        (line,) = orders.get("/v1/groups").json["groups"]
        return str(line["state"])

    join(orders, "a")
    assert state() == "PREPARING_REBALANCE"
    may_propose.set()
    owned(orders, "a")
    assert state() == "STABLE"
    may_propose.clear()
    join(orders, "b")
    assert state() == "PREPARING_REBALANCE"
    may_propose.set()
    for _ in looks():
        if (seen := state()) != "PREPARING_REBALANCE":
            break
    # The first one has what the other is to have, until it asks.
    assert seen == "REBALANCING"
    owned(orders, "a", "b")
    assert state() == "STABLE"
    for member in ("a", "b"):
        assert orders("DELETE", f"{GROUP}/members/{member}").status == 204
    assert state() == "EMPTY"
    assert orders("DELETE", GROUP).status == 204
    assert orders.get(GROUP).status == 404


def test_a_group_has_so_many_members_on_a_node(
    orders: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.server.groups.host.MOST_MEMBERS", 2)
    orders.post("/v1/topics", {"name": "more", "partitions": 1})
    for name in ("a", "b"):
        join(orders, name)
    third = {"member": "c", "topics": ["orders"]}
    refused = orders.post(f"{GROUP}/members", third)
    assert (refused.status, refused.json["code"]) == (400, "invalid_request")
    assert "2 members" in refused.json["detail"]
    assert orders.get(f"{GROUP}/members/c").status == 404
    # The others go on; they may join again, with other topics too; and so do other groups.
    assert len(owned(orders, "a", "b")) == 2
    join(orders, "a")
    changed = {"member": "b", "topics": ["orders", "more"]}
    assert orders.post(f"{GROUP}/members", changed).status == 201
    for name in ("java-1", "java-2"):
        java = JavaMember(orders, name)
    body = {"consumerId": "java-3", "groupId": java.group}
    for request in ("join", "heartbeat"):
        answer = orders.post(f"/api/v1/consumer-groups/{request}", body)
        assert (answer.status, answer.json["errorCode"]) == (200, "INVALID_REQUEST")
    assert java.beat()
    # One that leaves makes room.
    assert orders("DELETE", f"{GROUP}/members/a").status == 204
    assert orders.post(f"{GROUP}/members", third).status == 201
