"""DMQ's existing client: what its group consumer sends, and the answers that it can read.

Its reader knows the fields of each answer and no others, and refuses an answer with more.
"""

from __future__ import annotations

import base64
from typing import Any

from support.node import Client, Reply

GROUP = "/api/v1/consumer-groups"
GROUPS = "/api/v1/metadata/consumer-groups"
GROUP_FIELDS = {
    "groupId", "topic", "appId", "groupLeaderBrokerId", "groupLeaderUrl", "createdAt",
    "lastModifiedAt",
}  # fmt: skip
CONSUMED_FIELDS = {"messages", "highWaterMark", "errorMessage", "success"}
MESSAGE_FIELDS = {"key", "value", "topic", "partition", "offset", "timestamp", "headers"}
SIX = {
    "success", "errorCode", "errorMessage", "assignedPartitions", "rebalanceState", "generation",
}  # fmt: skip
STATES = {"STABLE", "PREPARING_REBALANCE", "IN_REBALANCE", "AWAITING_SYNC"}


def readable_group(found: dict[str, Any]) -> dict[str, Any]:
    """The group, once it is sure that the client can read it."""
    assert found.keys() == GROUP_FIELDS
    assert "://" not in found["groupLeaderUrl"]
    return found


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

    def __init__(self, client: Client, name: str, app: str = "app") -> None:
        self.client = client
        self.name = name
        found = client.post(f"{GROUPS}/find-or-create", {"topic": "orders", "appId": app})
        assert found.status == 200, found.body
        self.group = readable_group(found.json)["groupId"]
        body = {"topic": "orders", "appId": app, "offsetState": {}}
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
        """A heartbeat whose answer counts."""
        told = self.commit()
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

    def commit(self) -> Reply:
        """A heartbeat to whose answer the client does not look."""
        return self.client.post(f"{GROUP}/heartbeat", self._who | {"offsets": self.offsets})

    def poll(self, through: Client | None = None) -> list[str]:
        """What is new in its partitions; any node has it."""
        found = []
        for partition in self.partitions if self.stable else ():
            at = self.offsets.get(str(partition), 0)
            values = consume(through or self.client, partition, at)
            self.offsets[str(partition)] = at + len(values)
            found += values
        return found
