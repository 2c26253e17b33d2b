"""Nodes that are set up wrong: a clock an hour off, a name that another node has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pxrs.errors import ConfigError
from support.node import Client, LocalNode, NodeProcess, looks, wait_for_slots

pytestmark = pytest.mark.thorough

GROUP = "/v1/groups/g"
HOUR = 3600


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def settled(client: Client, *members: str) -> dict[str, Any]:
    """What each member is told, once all of them are settled."""
    for _ in looks():
        told = {name: client.get(f"{GROUP}/members/{name}").json for name in members}
        if all(each.get("settled") for each in told.values()):
            break
    return told


@pytest.mark.long
@pytest.mark.parametrize("off", [HOUR, -HOUR])
def test_a_clock_that_is_an_hour_off(nodes_url: str, off: int, stack: ExitStack) -> None:
    right = NodeProcess(nodes_url, "--node-id", "right", session_ttl=2)
    stack.callback(right.kill)
    wrong = NodeProcess(nodes_url, "--node-id", "wrong", clock_off=off, session_ttl=2)
    stack.callback(wrong.kill)
    clients = [right.client(), wrong.client()]
    for client in clients:
        stack.callback(client.close)
        wait_for_slots(client, {"right", "wrong"})
    here, there = clients
    there.post("/v1/topics", {"name": "orders", "partitions": 4})
    for number, client in enumerate(clients):
        body = {"member": f"m{number}", "topics": ["orders"]}
        assert client.post(f"{GROUP}/members", body).status == 201
        sent = client.post(
            "/v1/topics/orders/messages", {"messages": [{"partition": 0, "value": "x"}] * 2}
        )
        assert sent.status == 200
    before = settled(there, "m0", "m1")
    # Neither node takes the other's lease for over.
    for client in clients:
        assert client.post("/v1/queues/mail/items", {"items": [{"value": "x"}]}).status == 200
    leases = [
        client.post("/v1/queues/mail/take", {"lease": 60}).json["lease"] for client in clients
    ]
    assert None not in leases
    for client in clients:
        assert client.post("/v1/queues/mail/take", {}).json["lease"] is None
    for client, lease in zip(clients, leases, strict=True):
        assert client.post(f"/v1/leases/{lease}/commit", {}).status == 200
    (first,) = [
        part for told in before.values() for part in told["partitions"] if part["partition"] == 0
    ]
    done = there.post(f"{GROUP}/commits", {"commits": [{"fence": first["fence"], "offset": 3}]})
    assert done.json["commits"][0]["checkpoint"] == 3
    wrong.kill()
    wait_for_slots(here, {"right"})
    after = settled(here, "m0", "m1")
    assert {told["generation"] for told in after.values()} == {before["m0"]["generation"]}
    assert [
        part["checkpoint"]
        for told in after.values()
        for part in told["partitions"]
        if part["partition"] == 0
    ] == [3]


@pytest.mark.engine("sqlite")
def test_a_name_that_another_node_has_is_refused(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/shared.db"
    with LocalNode(store, node_id="one") as first:
        with pytest.raises(ConfigError, match=r"is the name of the node at .*--node-id"):
            LocalNode(store, node_id="one", session_ttl=0.5).__enter__()
        client = first.client()
        assert client.get("/health/ready").json["ready"]
        client.close()


@pytest.mark.long
@pytest.mark.engine("postgres")
def test_a_node_that_has_lost_its_name_stops_and_says_so(postgres_url: str) -> None:
    first = NodeProcess(postgres_url, "--node-id", "one", session_ttl=1)
    try:
        first.freeze()
        with LocalNode(postgres_url, node_id="one", session_ttl=1) as second:
            first.wake()
            assert first.process.wait() not in (0, -signal.SIGKILL)
            assert "another node took the name 'one'" in first.kill()
            client = second.client()
            wait_for_slots(client, {"one"})
            client.close()
    finally:
        first.kill()
