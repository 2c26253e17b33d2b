"""What DMQ's existing client and command line send, step by step."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from time import monotonic
from typing import Any

import pytest

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import StoreUnavailable
from pxrs.groups.owned_claims import Applied, Mark, OwnedClaims
from pxrs.server.rest.dmq_wire import NOTICE
from pxrs.server.tokens import Tokens, all_rights
from pxrs.types import TopicPartition
from support.child import PATIENCE
from support.java_member import (
    CONSUMED_FIELDS,
    GROUP,
    GROUPS,
    SIX,
    STATES,
    JavaMember,
    consume,
    consumed,
    readable_group,
)
from support.node import Client, LocalNode, NodeProcess, looks, wait_for_slots

TOPICS = "/api/v1/metadata/topics"
# The fields of each answer: the client's reader knows no others, and refuses an answer with more.
TOPIC_FIELDS = {
    "topicName", "partitionCount", "replicationFactor", "createdAt", "config", "partitions",
}  # fmt: skip
CONFIG_FIELDS = {
    "retentionMs", "retentionBytes", "segmentBytes", "compressionType", "minInsyncReplicas",
}  # fmt: skip
PARTITION_FIELDS = {
    "topicName", "partitionId", "leader", "replicas", "isr", "startOffset", "endOffset",
}  # fmt: skip
NODE_FIELDS = {"brokerId", "host", "port", "status"}
PRODUCED_FIELDS = {
    "topic", "partition", "results", "throttleTimeMs", "errorMessage", "errorCode", "success",
}  # fmt: skip
RESULT_FIELDS = {"offset", "timestamp", "errorCode", "errorMessage"}


@pytest.fixture
def orders(client: Client) -> Client:
    create_topic(client, "orders")
    return client


def create_topic(client: Client, name: str, partitions: int = 4) -> None:
    wanted = {
        "topicName": name, "partitionCount": partitions, "replicationFactor": 1,
        "retentionMs": None, "retentionBytes": None, "segmentBytes": None,
        "compressionType": None, "minInsyncReplicas": None,
    }  # fmt: skip
    assert client.post(TOPICS, wanted).status in (200, 201)


def describe_topic(client: Client, name: str = "orders") -> dict[str, Any]:
    """The metadata of a topic, which the client can read."""
    answer = client.get(f"{TOPICS}/{name}")
    assert answer.status == 200, answer.body
    about: dict[str, Any] = answer.json
    assert about.keys() == TOPIC_FIELDS
    assert about["config"].keys() == CONFIG_FIELDS
    for partition in about["partitions"]:
        assert partition.keys() == PARTITION_FIELDS
        for node in (partition["leader"], *partition["replicas"], *partition["isr"]):
            assert node.keys() == NODE_FIELDS
            assert node["status"] == "ONLINE"
    assert [each["partitionId"] for each in about["partitions"]] == list(range(4))
    return about


def produce(client: Client, partition: int, *values: str) -> None:
    messages = [{"key": "k", "value": base64.b64encode(it.encode()).decode()} for it in values]
    body = {
        "topic": "orders", "partition": partition, "messages": messages,
        "producerId": "cli-producer", "producerEpoch": 0, "requiredAcks": -1, "timeoutMs": 30000,
    }  # fmt: skip
    answer = client.post("/api/v1/storage/messages", body).json
    assert answer["success"], answer
    assert answer.keys() == PRODUCED_FIELDS
    assert len(answer["results"]) == len(values)
    assert all(each.keys() == RESULT_FIELDS for each in answer["results"])


def settle(*members: JavaMember) -> None:
    for _ in looks():
        owned = sorted(number for each in members for number in each.partitions)
        if owned == [0, 1, 2, 3] and all(each.stable for each in members):
            return
        for each in members:
            each.beat()


def test_metadata(orders: Client, node: LocalNode) -> None:
    assert orders.get(TOPICS).json == ["orders"]
    leader = describe_topic(orders)["partitions"][0]["leader"]
    assert (leader["host"], leader["port"]) == tuple(node.endpoint)
    controller = orders.get("/api/v1/metadata/controller").json
    assert controller["controllerUrl"] == f"http://{node.endpoint}"
    assert orders.get("/api/v1/metadata/brokers").json[0]["port"] == node.endpoint.port
    assert orders.get("/api/v1/raft/status").json["leader"] is True
    login = orders.post("/api/v1/auth/login", {"username": "admin", "password": "x"})
    assert login.json.keys() == {"token", "expiresIn", "username"}
    assert orders.get(f"{TOPICS}/none").status == 404
    assert orders("DELETE", f"{TOPICS}/orders").status in (200, 204)


def test_produce_and_consume(orders: Client, caplog: pytest.LogCaptureFixture) -> None:
    produce(orders, 1, "a", "b")
    assert consume(orders, 1, 0) == ["a", "b"]
    assert consume(orders, 1, 2) == []
    assert caplog.records == []
    # Past the end the client takes only an empty answer. What that means is logged, once.
    assert consume(orders, 1, 99) == consume(orders, 1, 99) == []
    (record,) = caplog.records
    assert "partition 1, from offset 99, but it ends at 2" in record.getMessage()
    refused = orders.post(
        "/api/v1/storage/messages",
        {"topic": "none", "partition": 0, "messages": [{"key": None, "value": "YQ=="}]},
    )
    assert refused.status == 200
    assert refused.json.keys() == PRODUCED_FIELDS
    assert refused.json["errorCode"] == "UNKNOWN_TOPIC_OR_PARTITION"
    (result,) = refused.json["results"]
    assert result.keys() == RESULT_FIELDS
    asked = {"topic": "none", "partition": 0, "offset": 0, "maxMessages": 1}
    unread = orders.post("/api/v1/storage/consume", asked)
    assert unread.status == 200
    assert unread.json.keys() == CONSUMED_FIELDS
    assert (unread.json["success"], unread.json["messages"]) == (False, [])


def test_messages_of_others(orders: Client) -> None:
    """Headers stand in a field of their own, and what a message has not is null."""
    messages = [
        {"partition": 0, "value": "a", "key": "k", "headers": [["kind", "new"]]},
        {"partition": 0, "value": None},
    ]
    assert orders.post("/v1/topics/orders/messages", {"messages": messages}).status == 200
    first, second = consumed(orders, 0, 0)
    assert first["headers"] == {"headers": {"kind": "new"}}
    assert isinstance(first["timestamp"], int)
    assert {name: second[name] for name in ("key", "value", "headers")} == {
        "key": None, "value": None, "headers": None,
    }  # fmt: skip


def test_groups(orders: Client) -> None:
    group = JavaMember(orders, "dmq-consumer-1").group
    (listed,) = orders.get(GROUPS).json
    assert readable_group(listed) == readable_group(orders.get(f"{GROUPS}/{group}").json)
    assert listed["groupId"] == group == "G_orders_app"
    assert orders.get(f"{GROUPS}/G_orders_none").status == 404


def test_a_group_from_join_to_silence(url: str) -> None:
    with LocalNode(url, session_timeout=1.0) as node:
        client = node.client()
        client.post(TOPICS, {"topicName": "orders", "partitionCount": 4})
        for partition in range(4):
            produce(client, partition, "a", "b")
        first = JavaMember(client, "dmq-consumer-1")
        settle(first)
        assert sorted(first.poll()) == ["a"] * 4 + ["b"] * 4
        first.beat()  # reports what it fetched …
        first.beat()  # … and this one says that it was handled
        shown = node.px.groups.describe(first.group)
        assert [part.checkpoint for part in shown.partitions] == [2] * 4
        second = JavaMember(client, "dmq-consumer-2")
        settle(first, second)
        assert len(first.partitions) == len(second.partitions) == 2
        # It still reports offsets of partitions that it has lost: they change nothing.
        produce(client, second.partitions[0], "c")
        first.offsets[str(second.partitions[0])] = 3
        first.beat()
        first.beat()
        lost = node.px.groups.describe(first.group).partitions[second.partitions[0]]
        assert lost.checkpoint == 2
        settle(second)  # the first one is silent, and there is no leave
        assert second.partitions == [0, 1, 2, 3]
        client.close()


def test_a_heartbeat_of_a_stranger_joins(orders: Client, node: LocalNode) -> None:
    member = JavaMember(orders, "dmq-consumer-1")
    settle(member)
    member.name = "dmq-consumer-2"
    member.beat()
    names = {each.name for each in node.px.groups.describe(member.group).members}
    assert names == {"dmq-consumer-1", "dmq-consumer-2"}
    body = {"consumerId": "a", "groupId": "G_no_group", "offsets": {}}
    unknown = orders.post(f"{GROUP}/heartbeat", body)
    assert unknown.status == 200
    assert unknown.json.keys() == SIX
    assert unknown.json["rebalanceState"] in STATES
    assert (unknown.json["success"], unknown.json["errorCode"]) == (False, "REBALANCE_IN_PROGRESS")


def checkpoints(node: LocalNode, group: str) -> list[int | None]:
    return [part.checkpoint for part in node.px.groups.describe(group).partitions]


def prepare(member: JavaMember) -> None:
    """Heartbeats until one is told of a rebalance."""
    for _ in looks():
        if member.beat() == "PREPARING_REBALANCE":
            break


def test_an_offset_past_the_end_holds_back_nothing(
    orders: Client, node: LocalNode, caplog: pytest.LogCaptureFixture
) -> None:
    for partition in range(4):
        produce(orders, partition, "a", "b")
    first = JavaMember(orders, "first")
    settle(first)
    first.poll()
    first.offsets["1"] = 99
    first.beat()
    second = JavaMember(orders, "second")
    prepare(first)
    assert checkpoints(node, first.group) == [2, None, 2, 2]
    settle(first, second)
    assert len(first.partitions) == len(second.partitions) == 2
    (record,) = caplog.records
    assert "member 'first' of group 'G_orders_app'" in record.getMessage()
    assert "partition 1, from offset 99, but it ends at 2" in record.getMessage()


def test_a_heartbeat_that_can_not_commit_tells_of_the_rebalance(
    patient: None,
    orders: Client,
    node: LocalNode,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client looks at no state in an answer that is no success."""
    for partition in range(4):
        produce(orders, partition, "a", "b")
    first = JavaMember(orders, "first")
    settle(first)
    first.poll()
    first.beat()

    def fail(claims: OwnedClaims, marks: Mapping[TopicPartition, Mark]) -> Applied:
        raise StoreUnavailable("for a test")

    with monkeypatch.context() as failing:
        failing.setattr(OwnedClaims, "commit", fail)
        second = JavaMember(orders, "second")
        prepare(first)
        first.beat()
    assert set(checkpoints(node, first.group)) == {None}
    (record,) = caplog.records
    assert "what member 'first' has handled was not committed" in record.getMessage()
    settle(first, second)
    assert len(first.partitions) == len(second.partitions) == 2
    first.beat()
    assert [checkpoints(node, first.group)[number] for number in first.partitions] == [2, 2]


def test_a_heartbeat_does_not_wait_long_for_its_commit(
    orders: Client, node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits for five seconds, and does not know the state of an answer after that."""
    monkeypatch.setattr("pxrs.server.rest.dmq_wire._COMMIT_WAIT", 0.01)
    for partition in range(4):
        produce(orders, partition, "a", "b")
    first = JavaMember(orders, "first")
    settle(first)
    first.poll()
    first.beat()
    commit, commits, go_on = OwnedClaims.commit, 0, threading.Event()

    def hang(claims: OwnedClaims, marks: Mapping[TopicPartition, Mark]) -> Applied:
        nonlocal commits
        commits += 1
        assert go_on.wait(2 * PATIENCE)
        return commit(claims, marks)

    monkeypatch.setattr(OwnedClaims, "commit", hang)
    JavaMember(orders, "second")
    prepare(first)
    for _ in range(3):
        first.beat()
    assert commits == 1
    go_on.set()
    for _ in looks():
        if 2 in checkpoints(node, first.group):
            break


# How long a member may be silent, and others would wait for a node: longer than the test takes.
LONG = 120
# How often the client sends a heartbeat, how often while it joins, and how long a partition stays
# with one that is silent.
HEARTBEATS = 3.0
JOINING = 1.0
REVOKED = 5.0


@pytest.mark.long
@pytest.mark.engine("memory")
def test_one_that_joins_beside_a_dead_one_has_its_set_though_others_keep_joining() -> None:
    """The client gives up ten seconds after its join, and never tries again."""
    rules = {"notice": NOTICE, "session_timeout": LONG}
    with LocalNode("memory://", **rules) as node, closing(node.client()) as client:
        create_topic(client, "orders", 64)
        dead = JavaMember(client, "dead")
        for _ in looks():
            if dead.beat() == "STABLE":
                break
        assert len(dead.partitions) == 64
        first, others, beats_at = JavaMember(client, "first"), 0, monotonic()
        for _ in looks(patience=4 * REVOKED):
            if monotonic() < beats_at:
                continue
            # Another one before each heartbeat: the group has not settled after it.
            JavaMember(client, f"other-{others}")
            if first.beat() == "STABLE":
                break
            others, beats_at = others + 1, monotonic() + JOINING
        assert first.partitions
        owner = {it.partition: it.owner for it in node.px.groups.describe(first.group).partitions}
        assert {owner[number] for number in first.partitions} == {"first"}


@pytest.mark.long
@pytest.mark.engine("memory")
def test_no_partition_has_two_members_that_read_it_with_the_heartbeats_of_the_client() -> None:
    rules = {"notice": NOTICE, "session_timeout": LONG}
    with LocalNode("memory://", **rules) as node, closing(node.client()) as client:
        create_topic(client, "orders")
        first = JavaMember(client, "first")
        settle(first)
        beaten, longest = {"first": monotonic()}, 0.0
        second = JavaMember(client, "second")
        beaten["second"] = monotonic()
        for _ in looks():
            if node.px.groups.describe(first.group).generation > first.generation:
                break
        # It does not see in the answers to these that it has to stop.
        for _ in range(3):
            assert first.commit().json["rebalanceState"] == "PREPARING_REBALANCE"
        for _ in looks():
            for member in (first, second):
                waited = monotonic() - beaten[member.name]
                longest = max(longest, waited)
                if waited >= HEARTBEATS:
                    beaten[member.name] += waited
                    member.beat()
            owned = node.px.groups.describe(first.group).partitions
            reads = set(first.partitions) if first.stable else set()
            taken = {it.partition for it in owned if it.owner == "second"} & reads
            # Who is silent for so long loses its partitions all the same.
            assert not taken or longest >= REVOKED - 0.5
            if first.stable and second.stable and len(first.partitions) == 2:
                break
        assert sorted(first.partitions + second.partitions) == [0, 1, 2, 3]


@pytest.fixture
def nodes(hosts_store: str) -> Iterator[list[NodeProcess]]:
    nodes = [
        NodeProcess(
            hosts_store, "--node-id", f"node-{number}", session_ttl=LONG, session_timeout=LONG
        )
        for number in range(3)
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()


@pytest.fixture
def clients(nodes: list[NodeProcess]) -> Iterator[dict[str, Client]]:
    """A connection to each node by its address, once the nodes share the slots."""
    clients = {str(node.endpoint): node.client() for node in nodes}
    for client in clients.values():
        wait_for_slots(client, {"node-0", "node-1", "node-2"})
    yield clients
    for client in clients.values():
        client.close()


@pytest.mark.long
def test_the_commands_through_any_of_three_nodes(clients: dict[str, Client]) -> None:
    for number, client in enumerate(clients.values()):
        create_topic(client, f"topic-{number}")
    first = next(iter(clients.values()))
    create_topic(first, "orders")
    names = ["orders", *(f"topic-{number}" for number in range(3))]
    abouts = [describe_topic(client) for client in clients.values()]
    assert all(about == abouts[0] for about in abouts)
    controllers = set()
    for at, (address, client) in enumerate(clients.items()):
        assert client.get(TOPICS).json == names
        brokers = client.get("/api/v1/metadata/brokers").json
        assert {f"{each['host']}:{each['port']}" for each in brokers} == clients.keys()
        assert len({each["id"] for each in brokers}) == 3
        assert (
            client.get("/api/v1/metadata/controller").json["controllerUrl"] == f"http://{address}"
        )
        status = client.get("/api/v1/raft/status").json
        assert status["leader"] is True
        controllers.add(status["nodeId"])
        # Sent to the partition's leader as the metadata names it, and read through each node.
        for each in describe_topic(client)["partitions"]:
            leader = clients[f"{each['leader']['host']}:{each['leader']['port']}"]
            produce(leader, each["partitionId"], f"{at}")
            sent = [f"{number}" for number in range(at + 1)]
            assert [consume(it, each["partitionId"], 0) for it in clients.values()] == [sent] * 3
        produced = describe_topic(client)["partitions"]
        assert [each["endOffset"] for each in produced] == [at + 1] * 4
    assert len(controllers) == 3
    for number, client in enumerate(clients.values()):
        assert client("DELETE", f"{TOPICS}/topic-{number}").status in (200, 204)
        assert {it.get(f"{TOPICS}/topic-{number}").status for it in clients.values()} == {404}


class LoggedIn(Client):
    """A connection of a client that has logged in."""

    def __init__(self, node: NodeProcess, token: str) -> None:
        super().__init__(node.endpoint)
        self._token = token

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        bearer = {"Authorization": f"Bearer {self._token}"}
        super().send(method, path, body, (headers or {}) | bearer)


@pytest.fixture
def token(hosts_store: str) -> str:
    """One that all nodes know that start after it was made."""
    with pxrs.connect(hosts_store) as px:
        return Tokens(px.stores.coord, SYSTEM_CLOCK).create("admin", all_rights())


@pytest.mark.long
def test_a_login_at_one_of_three_nodes_holds_at_all_of_them(
    token: str, nodes: list[NodeProcess]
) -> None:
    auth = "/api/v1/auth"
    _, name, secret = token.split(".")
    answers = []
    for node in nodes:
        with closing(node.client()) as stranger:
            good = stranger.post(f"{auth}/login", {"username": name, "password": secret})
            assert (good.status, good.json["expiresIn"]) == (200, 86_400)
            answers.append(good.json)
            # Headers of a leader elsewhere would send the client round without end.
            for refused in (
                stranger.post(f"{auth}/login", {"username": name, "password": "x"}),
                stranger("POST", f"{auth}/refresh"),
                stranger.get(TOPICS),
            ):
                assert refused.status == 401
                assert not refused.headers.keys() & {"x-leader-id", "x-controller-leader"}
    # Each client has logged in at another node than the one that it talks to.
    logins = answers[1:] + answers[:1]
    clients = [LoggedIn(node, it["token"]) for node, it in zip(nodes, logins, strict=True)]
    for client in clients:
        wait_for_slots(client, {"node-0", "node-1", "node-2"})
        again = client("POST", f"{auth}/refresh")
        assert (again.status, again.json) == (200, answers[0])
    create_topic(clients[0], "orders")
    for client, partition in zip(clients, range(3), strict=True):
        produce(client, partition, "a")
        assert client.get(TOPICS).json == ["orders"]
    # At least one of them is not with the node that coordinates the group.
    members = [JavaMember(client, f"member-{at}") for at, client in enumerate(clients)]
    settle(*members)
    assert sorted(value for member in members for value in member.poll()) == ["a"] * 3
    for client in clients:
        client.close()


@pytest.mark.long
def test_a_group_goes_on_when_its_coordinating_node_is_killed(
    nodes: list[NodeProcess], clients: dict[str, Client], hosts_store: str
) -> None:
    any_client = next(iter(clients.values()))
    create_topic(any_client, "orders")
    for partition in range(4):
        produce(any_client, partition, "a", "b")
    asked = {"topic": "orders", "appId": "app"}
    found = [it.post(f"{GROUPS}/find-or-create", asked).json for it in clients.values()]
    assert all(each == found[0] for each in found)
    coordinator = readable_group(found[0])["groupLeaderUrl"]
    near = clients[coordinator]
    left = {address: client for address, client in clients.items() if client is not near}
    alive, names = list(left.values()), {"node-0", "node-1", "node-2"}
    # One talks to the coordinator, as it was told to; the other to an address before all nodes.
    members = first, second = JavaMember(near, "one"), JavaMember(alive[1], "two")
    settle(*members)
    assert len(first.partitions) == len(second.partitions) == 2
    with pxrs.connect(hosts_store) as px:

        def handle(*members: JavaMember) -> list[list[str]]:
            """Poll, report what was fetched, and with the next heartbeat that it was handled."""
            polled = [member.poll(alive[1]) for member in members]
            for member in members * 2:
                assert member.beat() == "STABLE"
            return polled

        def checkpoints() -> list[int | None]:
            return [part.checkpoint for part in px.groups.describe(first.group).partitions]

        assert handle(*members) == [["a", "b"] * 2] * 2
        assert checkpoints() == [2] * 4
        generation, before = first.generation, [member.partitions for member in members]
        (dying,) = [number for number, it in enumerate(nodes) if str(it.endpoint) == coordinator]
        nodes[dying].kill()
        first.client = alive[0]
        # Either is told to prepare, though nothing has changed, and then that it has what it had.
        states: dict[str, set[str]] = {member.name: set() for member in members}
        for _ in looks():
            for member in members:
                states[member.name].add(member.beat())
            if all({"PREPARING_REBALANCE", "STABLE"} <= each for each in states.values()):
                break
        settle(*members)
        assert [member.partitions for member in members] == before
        for client in alive:
            wait_for_slots(client, names - {f"node-{dying}"})
            assert len(client.get("/api/v1/metadata/brokers").json) == 2
            for each in describe_topic(client)["partitions"]:
                leader = left[f"{each['leader']['host']}:{each['leader']['port']}"]
                if client is alive[0]:
                    produce(leader, each["partitionId"], "c")
            shown = readable_group(client.get(f"{GROUPS}/{first.group}").json)
            assert shown["groupLeaderUrl"] in left
        assert handle(*members) == [["c"] * 2] * 2
        assert checkpoints() == [3] * 4
        # The client never looks for another coordinator: it goes on when its address is back.
        nodes[dying] = NodeProcess(
            hosts_store, "--node-id", f"node-{dying}", listen=coordinator, session_timeout=LONG
        )
        with closing(nodes[dying].client()) as first.client:
            produce(alive[0], first.partitions[0], "d")
            assert handle(first) == [["d"]]
        assert sorted(checkpoints()) == [3, 3, 3, 4]  # type: ignore[type-var]
        assert {member.generation for member in members} == {generation}
        assert px.groups.describe(first.group).generation == generation
