"""What DMQ's existing client and command line send, step by step."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from support.node import Client, LocalNode, looks

TOPICS = "/api/v1/metadata/topics"
GROUP = "/api/v1/consumer-groups"
GROUPS = "/api/v1/metadata/consumer-groups"
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
GROUP_FIELDS = {
    "groupId", "topic", "appId", "groupLeaderBrokerId", "groupLeaderUrl", "createdAt",
    "lastModifiedAt",
}  # fmt: skip
PRODUCED_FIELDS = {
    "topic", "partition", "results", "throttleTimeMs", "errorMessage", "errorCode", "success",
}  # fmt: skip
RESULT_FIELDS = {"offset", "timestamp", "errorCode", "errorMessage"}
CONSUMED_FIELDS = {"messages", "highWaterMark", "errorMessage", "success"}
MESSAGE_FIELDS = {"key", "value", "topic", "partition", "offset", "timestamp", "headers"}
SIX = {
    "success", "errorCode", "errorMessage", "assignedPartitions", "rebalanceState", "generation",
}  # fmt: skip
STATES = {"STABLE", "PREPARING_REBALANCE", "IN_REBALANCE", "AWAITING_SYNC"}


@pytest.fixture
def orders(client: Client) -> Client:
    create_topic(client, "orders")
    return client


def create_topic(client: Client, name: str) -> None:
    wanted = {
        "topicName": name, "partitionCount": 4, "replicationFactor": 1, "retentionMs": None,
        "retentionBytes": None, "segmentBytes": None, "compressionType": None,
        "minInsyncReplicas": None,
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


def readable_group(found: dict[str, Any]) -> dict[str, Any]:
    """The group, once it is sure that the client can read it."""
    assert found.keys() == GROUP_FIELDS
    assert "://" not in found["groupLeaderUrl"]
    return found


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


def consume(client: Client, partition: int, offset: int) -> list[str]:
    return [base64.b64decode(it["value"]).decode() for it in consumed(client, partition, offset)]


def consumed(client: Client, partition: int, offset: int) -> list[dict[str, Any]]:
    """The messages of a partition as the client gets them."""
    body = {
        "topic": "orders", "partition": partition, "offset": offset, "maxMessages": 100,
        "consumerGroup": None, "maxWaitMs": None, "minBytes": None, "maxBytes": None,
    }  # fmt: skip
    answer = client.post("/api/v1/storage/consume", body).json
    assert answer.keys() == CONSUMED_FIELDS
    assert answer["success"]
    messages: list[dict[str, Any]] = answer["messages"]
    assert all(each.keys() == MESSAGE_FIELDS for each in messages)
    return messages


class JavaMember:
    """A group consumer: joins, sends heartbeats, follows the states as the client does."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = name
        found = client.post(f"{GROUPS}/find-or-create", {"topic": "orders", "appId": "app"})
        assert found.status == 200, found.body
        self.group = readable_group(found.json)["groupId"]
        body = {"topic": "orders", "appId": "app", "offsetState": {}}
        joined = client.post(f"{GROUP}/join", body | self._who).json
        assert joined.keys() == SIX
        assert joined["success"], joined
        self.stable = False
        self.generation = 0
        self.partitions: list[int] = []
        self.offsets: dict[str, int] = {}

    @property
    def _who(self) -> dict[str, str]:
        return {"consumerId": self.name, "groupId": self.group}

    def beat(self) -> str:
        told = self._client.post(f"{GROUP}/heartbeat", self._who | {"offsets": self.offsets})
        if told.status == 503:
            # The client logs it, and goes on with what it had.
            assert told.json["retryable"]
            return ""
        assert told.status == 200, told.body
        answer = told.json
        assert answer.keys() == SIX
        assert answer["success"], answer
        state: str = answer["rebalanceState"]
        assert state in STATES
        self.generation = answer["generation"]
        if state != "STABLE":
            self.stable = False
        elif not self.stable and answer["assignedPartitions"]:
            self.stable, self.partitions = True, answer["assignedPartitions"]
        return state

    def poll(self) -> list[str]:
        found = []
        for partition in self.partitions if self.stable else ():
            at = self.offsets.get(str(partition), 0)
            values = consume(self._client, partition, at)
            self.offsets[str(partition)] = at + len(values)
            found += values
        return found


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
