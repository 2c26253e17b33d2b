"""The groups API of DMQ, walked from top to bottom with a plain HTTP client."""

from __future__ import annotations

from contextlib import closing

import pytest

from support.node import Client, LocalNode, looks

METADATA = "/api/v1/metadata/consumer-groups"
GROUP = "/api/v1/consumer-group"
GROUP_ID = "G_orders_order-processor"


class Member:
    """A consumer that does what the document's does."""

    def __init__(self, client: Client, consumer: str) -> None:
        self._client = client
        joined = client.post(f"{GROUP}/join", {"groupId": GROUP_ID, "consumerId": consumer})
        assert joined.status == 200, joined.body
        self.id = joined.json["memberId"]
        self.generation = 0
        self.unsettled = False
        self.partitions: list[int] = []
        self.offsets: dict[str, int] = {}

    def fetch_assignment(self, query: str = "") -> None:
        answer = self._client.get(f"{GROUP}/assignment/{self.id}{query}")
        assert answer.status == 200, answer.body
        self.generation = answer.json["generation"]
        self.partitions = answer.json["partitions"]
        self.offsets = answer.json["offsets"]
        self.unsettled = bool(query)

    def beat(self) -> int:
        """A heartbeat; after a rebalance the assignment is fetched, as the document wants it."""
        body = {"groupId": GROUP_ID, "memberId": self.id}
        answer = self._client.post(f"{GROUP}/heartbeat", body)
        assert answer.status == 200, answer.body
        if answer.json["generation"] > self.generation or self.unsettled:
            # Does not wait for the others, which are asked by this very thread.
            self.fetch_assignment("?wait=0")
        generation: int = answer.json["generation"]
        return generation

    def commit(self, offsets: dict[str, int], generation: int | None = None) -> int:
        body = {"groupId": GROUP_ID, "memberId": self.id, "offsets": offsets}
        if generation is not None:
            body["generation"] = generation
        return self._client.post(f"{GROUP}/commit-offsets", body).status

    def leave(self) -> int:
        body = {"groupId": GROUP_ID, "memberId": self.id}
        return self._client.post(f"{GROUP}/leave", body).status


@pytest.fixture
def group(client: Client) -> Client:
    client.post("/v1/topics", {"name": "orders", "partitions": 10})
    body = {"topic": "orders", "appId": "order-processor"}
    found = client.post(f"{METADATA}/find-or-create", body)
    assert found.status == 200, found.body
    assert found.json["groupId"] == GROUP_ID
    return client


def settle(*members: Member) -> None:
    """Heartbeats until everybody has its share and nobody has another's."""
    for _ in looks():
        owned = sorted(number for each in members for number in each.partitions)
        least = min(len(each.partitions) for each in members)
        if owned == list(range(10)) and least >= 10 // len(members):
            return
        for each in members:
            each.beat()


def test_the_registry(group: Client) -> None:
    again = group.post(
        f"{METADATA}/find-or-create", {"topic": "orders", "appId": "order-processor"}
    )
    described = group.get(f"{METADATA}/{GROUP_ID}")
    assert again.json == described.json
    assert [each["groupId"] for each in group.get(METADATA).json] == [GROUP_ID]
    assert group.get(f"{METADATA}/G_orders_other").status == 404
    missing = group.post(f"{METADATA}/find-or-create", {"topic": "none", "appId": "a"})
    assert missing.status == 404
    group.post("/v1/topics", {"name": "orders_order-processor", "partitions": 1})
    group.post("/v1/topics", {"name": "a_b", "partitions": 1})
    group.post("/v1/topics", {"name": "a", "partitions": 1})
    assert group.post(f"{METADATA}/find-or-create", {"topic": "a_b", "appId": "c"}).status == 200
    taken = group.post(f"{METADATA}/find-or-create", {"topic": "a", "appId": "b_c"})
    assert taken.status == 409
    assert group("DELETE", f"{METADATA}/{GROUP_ID}?brokerId=1").status == 204
    assert group.get(f"{METADATA}/{GROUP_ID}").status == 404


def test_from_the_first_member_to_the_last(group: Client) -> None:
    first = Member(group, "consumer-1")
    first.fetch_assignment()
    assert first.partitions == list(range(10))
    assert first.offsets == {str(number): 0 for number in range(10)}
    messages = [{"partition": number, "value": "x"} for number in range(10) for _ in range(5)]
    assert group.post("/v1/topics/orders/messages", {"messages": messages}).status == 200
    assert first.commit({"0": 3, "9": 5}, first.generation) == 200
    second, third = Member(group, "consumer-2"), Member(group, "consumer-3")
    settle(first, second, third)
    assert sorted(len(each.partitions) for each in (first, second, third)) == [3, 3, 4]
    generation = first.beat()
    assert second.beat() == third.beat() == generation
    owner = {number: each for each in (first, second, third) for number in each.partitions}
    assert owner[0].offsets["0"] == 3
    assert owner[9].offsets["9"] == 5
    moved = [number for number in range(10) if owner[number] is not first]
    assert first.commit({str(moved[0]): 5}) == 409
    kept = first.partitions[0]
    assert first.commit({str(moved[0]): 4, str(kept): 5}, generation) == 409
    assert first.commit({str(kept): 5}, generation - 1) == 409
    assert second.leave() == 200
    assert second.commit({str(second.partitions[0]): 1}) == 404
    settle(first, third)
    assert first.beat() > generation
    first.fetch_assignment()
    assert first.offsets[str(kept)] == 5


def test_one_that_is_silent_is_gone(url: str) -> None:
    # Both are to be there until they share: a busy machine may pause between two heartbeats.
    with LocalNode(url, session_timeout=1.5) as node, closing(node.client()) as client:
        client.post("/v1/topics", {"name": "orders", "partitions": 10})
        client.post(f"{METADATA}/find-or-create", {"topic": "orders", "appId": "order-processor"})
        first, killed = Member(client, "consumer-1"), Member(client, "consumer-2")
        settle(first, killed)
        generation = first.beat()
        lost = killed.partitions
        settle(first)
        assert first.beat() > generation
        assert killed.commit({str(lost[0]): 0}) == 404
        assert "consumer-2 is gone" in str(client.get(f"/v1/groups/{GROUP_ID}/history").json)


def test_embedded_members_share_with_remote_ones(group: Client, node: LocalNode) -> None:
    remote = Member(group, "remote")
    remote.fetch_assignment()
    px = node.px
    with px.consumer("orders", group=GROUP_ID, debounce=0.05) as consumer:
        while len(remote.partitions) != 5 or len(consumer.assignment) != 5:
            consumer.poll(timeout=0.01)
            remote.beat()
        shown = px.groups.describe(GROUP_ID)
        assert {member.name: len(member.owned) for member in shown.members}["remote"] == 5
    while len(remote.partitions) != 10:
        remote.beat()


def test_strangers(group: Client) -> None:
    body = {"groupId": GROUP_ID, "memberId": f"nobody~{GROUP_ID}"}
    assert group.post(f"{GROUP}/heartbeat", body).status == 404
    assert group.get(f"{GROUP}/assignment/nobody~{GROUP_ID}").status == 404
    assert group.get(f"{GROUP}/assignment/nobody").status == 404
    assert group.post(f"{GROUP}/join", {"groupId": "G_x_y", "consumerId": "a"}).status == 404
    member = Member(group, "consumer-1")
    assert member.commit({"0": 7}) == 416
    assert member.commit({"77": 0}) == 409
    assert member.commit({"x": 0}) == 400
    other = {"groupId": "G_other", "memberId": member.id}
    assert group.post(f"{GROUP}/heartbeat", other).status == 400
