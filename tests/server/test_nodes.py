"""Several nodes on one store: slots, forwarding, and a node that is killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs.core.records import Move, decode, history_prefix
from support.node import Client, NodeProcess, looks, wait_for_slots

METADATA = "/api/v1/metadata/consumer-groups"
GROUP = "/api/v1/consumer-group"

pytestmark = pytest.mark.long

ON_SQLITE = pytest.mark.engine("sqlite")
# How long others would wait for a node whose death they can't see, and a time far below it.
LONG = 120
SOON = 20.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    store = f"sqlite:///{tmp_path}/shared.db"
    nodes = [NodeProcess(store, "--node-id", f"node-{number}") for number in range(3)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()


@ON_SQLITE
def test_slots_are_shared_and_move(nodes: list[NodeProcess], tmp_path: Path) -> None:
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
    assert nodes[1].process.returncode == 0
    # It handed its slots over itself, in the generation that says that it left.
    assert wait_for_slots(clients[2], {"node-2"})["epoch"] > after["epoch"]  # type: ignore[operator]
    with pxrs.connect(f"sqlite:///{tmp_path}/shared.db") as px:
        moves = [decode(it, Move) for it in px.stores.coord.list(history_prefix("_pxrs.nodes"))]
    last, before = moves[-1], moves[-2]
    assert (last.reason, last.coordinator) == ("node-1 left", "node-1")
    assert before.reason == "node-0 is gone"
    for client in clients:
        client.close()


def test_the_death_of_a_node_is_seen_long_before_its_session_would_end(hosts_store: str) -> None:
    nodes = [NodeProcess(hosts_store, "--node-id", f"node-{n}", session_ttl=LONG) for n in range(3)]
    try:
        with closing(nodes[2].client()) as client:
            wait_for_slots(client, {"node-0", "node-1", "node-2"})
            for number in range(2):
                left = {f"node-{n}" for n in range(number + 1, 3)}
                nodes[number].kill()
                view = wait_for_slots(client, left, patience=SOON)
                assert {node["name"] for node in view["nodes"]} == left  # type: ignore[attr-defined]
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.engine("etcd")
def test_on_etcd_it_is_seen_when_its_session_is_over(etcd_url: str) -> None:
    """An hour of another one's session does not matter."""
    ttls = {"node-0": 2, "node-1": 3600}
    nodes = [
        NodeProcess(f"{etcd_url} log=memory://", "--node-id", name, session_ttl=ttl)
        for name, ttl in ttls.items()
    ]
    try:
        with closing(nodes[1].client()) as client:
            wait_for_slots(client, set(ttls))
            nodes[0].kill()
            wait_for_slots(client, {"node-1"}, patience=SOON)
    finally:
        for node in nodes:
            node.kill()


@ON_SQLITE
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
        for _ in looks():
            answer = beat(others[1], group["groupId"], member)
            if answer.status == 200:
                break
            assert answer.status == 503, answer.body
            assert answer.json["retryable"]
        assert answer.json["generation"] == generation
    assert assignments(others[1], members) == before
    for client in clients.values():
        client.close()


@ON_SQLITE
def test_requests_in_flight_are_answered_when_a_node_is_told_to_stop(tmp_path: Path) -> None:
    """A poll that waits and a request whose body is still to come, over SIGTERM."""
    node = NodeProcess(f"sqlite:///{tmp_path}/served.db")
    try:
        client, polling, sending = node.client(), node.client(), node.client()
        client.post("/v1/topics", {"name": "orders", "partitions": 1})
        body = b'{"messages": [{"value": "in flight"}]}'
        path = "/v1/topics/orders/messages"
        raw = sending._connection
        raw.putrequest("POST", path)
        raw.putheader("Content-Length", str(len(body)))
        raw.endheaders(body[:10])
        polling.send("GET", "/v1/topics/orders/partitions/0/messages?offset=0&wait=50")
        for _ in looks():
            if "pxrs_waiting_fetches 1.0" in client.get("/metrics").body.decode():
                break
        node.process.signal(signal.SIGTERM)
        page = polling.receive()  # ended by the signal, long before its time
        raw.send(body[10:])
        sent = sending.receive()
        assert (page.status, page.json["messages"]) == (200, [])
        assert sent.status == 200, sent.body
        node.terminate()
        assert node.process.returncode == 0
        for each in (client, polling, sending):
            each.close()
    finally:
        node.kill()
    with pxrs.connect(f"sqlite:///{tmp_path}/served.db") as px:
        assert [message.value for message in px.reader("orders").read(0, 0)] == [b"in flight"]


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
