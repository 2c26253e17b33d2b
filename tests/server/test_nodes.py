"""Several nodes on one store: slots, forwarding, and a node that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.node import Client, NodeProcess, looks, wait_for_slots

METADATA = "/api/v1/metadata/consumer-groups"
GROUP = "/api/v1/consumer-group"

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    store = f"sqlite:///{tmp_path}/shared.db"
    nodes = [NodeProcess(store, "--node-id", f"node-{number}") for number in range(3)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def test_slots_are_shared_and_move(nodes: list[NodeProcess]) -> None:
    clients = [node.client() for node in nodes]
    views = [wait_for_slots(client, {"node-0", "node-1", "node-2"}) for client in clients]
    assert clients[0].get("/v1/groups").json == {"groups": []}
    assert clients[0].get("/v1/groups/_pxrs.nodes").status == 400
    for view in views:
        counts = [view["slots"].count(f"node-{n}") for n in range(3)]  # type: ignore[attr-defined]
        assert sorted(counts) == [21, 21, 22]
    nodes[0].kill()
    after = wait_for_slots(clients[1], {"node-1", "node-2"})
    assert after["epoch"] > max(view["epoch"] for view in views)  # type: ignore[operator, type-var]
    assert [node["name"] for node in after["nodes"]] == ["node-1", "node-2"]  # type: ignore[attr-defined]
    nodes[1].terminate()
    wait_for_slots(clients[2], {"node-2"})
    for client in clients:
        client.close()


def test_members_are_served_by_any_node_and_outlive_theirs(nodes: list[NodeProcess]) -> None:
    clients = {str(node.endpoint): node.client() for node in nodes}
    any_client = next(iter(clients.values()))
    wait_for_slots(any_client, {"node-0", "node-1", "node-2"})
    any_client.post("/v1/topics", {"name": "orders", "partitions": 6})
    group = any_client.post(f"{METADATA}/find-or-create", {"topic": "orders", "appId": "a"}).json
    leader = group["groupLeaderUrl"]
    others = [client for address, client in clients.items() if address != leader]
    # Each joins through another node; one that follows hints is sent to the leader.
    members = []
    for number, client in enumerate(clients.values()):
        body = {"groupId": group["groupId"], "consumerId": f"c{number}"}
        joined = client.post(f"{GROUP}/join", body)
        assert joined.status == 200, joined.body
        members.append(joined.json["memberId"])
    hint = others[0](
        "GET", f"{GROUP}/assignment/{members[0]}?wait=0", headers={"X-Pxrs-Follows": "1"}
    )
    assert (hint.status, hint.headers["x-pxrs-leader"]) == (421, leader)
    before = assignments(others[0], members)
    assert sorted(number for owned in before.values() for number in owned) == list(range(6))
    generation = beat(others[0], group["groupId"], members[0]).json["generation"]
    (dead,) = [node for node in nodes if str(node.endpoint) == leader]
    dead.kill()
    # In flight they see errors that may be tried again, at most.
    for member in members:
        while (answer := beat(others[1], group["groupId"], member)).status != 200:
            assert answer.status == 503, answer.body
            assert answer.json["retryable"]
        assert answer.json["generation"] == generation
    assert assignments(others[1], members) == before
    for client in clients.values():
        client.close()


def beat(client: Client, group: str, member: str):  # type: ignore[no-untyped-def]
    return client.post(f"{GROUP}/heartbeat", {"groupId": group, "memberId": member})


def assignments(client: Client, members: list[str]) -> dict[str, list[int]]:
    """What each member owns, once everything is owned."""
    for _ in looks():
        found = {
            member: client.get(f"{GROUP}/assignment/{member}?wait=0").json for member in members
        }
        owned = {member: answer.get("partitions", []) for member, answer in found.items()}
        if sorted(len(each) for each in owned.values()) == [2, 2, 2]:
            break
        for member in members:
            beat(client, member.partition("~")[2], member)
    return owned
