"""The groups API of DMQ, walked from top to bottom with a plain HTTP client."""

from __future__ import annotations

from base64 import b64decode
from contextlib import closing
from time import monotonic

import pytest

from support.java_member import JavaMember
from support.node import Client, LocalNode, Reply, looks

METADATA = "/api/v1/metadata/consumer-groups"
GROUP = "/api/v1/consumer-group"
GROUP_ID = "G_orders_order-processor"
# Longer than a client of these tests waits for an answer: each must have been woken.
WAIT = 50


class Member:
    """A consumer that does what the document's does."""

    def __init__(self, client: Client, consumer: str, group: str = GROUP_ID) -> None:
        self._client = client
        self._group = group
        joined = client.post(f"{GROUP}/join", {"groupId": group, "consumerId": consumer})
        assert joined.status == 200, joined.body
        self.id = joined.json["memberId"]
        self.generation = 0
        self.partitions: list[int] = []
        self.offsets: dict[str, int] = {}

    def fetch_assignment(self, query: str = "") -> None:
        answer = self._client.get(f"{GROUP}/assignment/{self.id}{query}")
        assert answer.status == 200, answer.body
        self.generation = answer.json["generation"]
        self.partitions = answer.json["partitions"]
        self.offsets = answer.json["offsets"]

    def beat(self) -> int:
        """A heartbeat; after a rebalance the assignment is fetched, as the document wants it."""
        generation = self.heartbeat()
        if generation > self.generation:
            # Does not wait for the others, which are asked by this very thread.
            self.fetch_assignment("?wait=0")
        return generation

    def heartbeat(self, **named: int) -> int:
        """A heartbeat, and nothing after it."""
        body = {"groupId": self._group, "memberId": self.id, **named}
        answer = self._client.post(f"{GROUP}/heartbeat", body)
        assert answer.status == 200, answer.body
        generation: int = answer.json["generation"]
        return generation

    def commit(self, offsets: dict[str, int], generation: int | None = None) -> int:
        return self.committed(offsets, generation).status

    def committed(self, offsets: dict[str, int], generation: int | None = None) -> Reply:
        body = {"groupId": self._group, "memberId": self.id, "offsets": offsets}
        if generation is not None:
            body["generation"] = generation
        return self._client.post(f"{GROUP}/commit-offsets", body)

    def poll(self) -> dict[int, list[str]]:
        """What is in its partitions, from its offsets on."""
        found = {}
        for number in self.partitions:
            at = self.offsets[str(number)]
            body = {"topic": "orders", "partition": number, "offset": at, "maxMessages": 500}
            answer = self._client.post("/api/v1/storage/consume", body)
            assert answer.json["success"], answer.body
            messages = answer.json["messages"]
            assert [each["offset"] for each in messages] == list(range(at, at + len(messages)))
            found[number] = [b64decode(each["value"]).decode() for each in messages]
            self.offsets[str(number)] = at + len(messages)
        return found

    def leave(self) -> int:
        body = {"groupId": self._group, "memberId": self.id}
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


def test_an_old_generation_sends_a_member_to_its_assignment(client: Client) -> None:
    client.post("/v1/topics", {"name": "one", "partitions": 1})
    client.post("/v1/topics/one/messages", {"messages": [{"value": "a"}] * 5})
    client.post(f"{METADATA}/find-or-create", {"topic": "one", "appId": "app"})
    first = Member(client, "consumer-1", "G_one_app")
    first.fetch_assignment()
    assert first.partitions == [0]
    old = first.generation
    assert first.commit({"0": 1}, old) == 200
    # It keeps its only partition when another joins, and has not fetched that.
    Member(client, "consumer-2", "G_one_app")
    for _ in looks():
        if first.heartbeat() > old:
            break
    refused = first.committed({"0": 4}, old)
    assert (refused.status, refused.json["code"]) == (409, "old_generation")
    first.fetch_assignment()
    assert first.generation > old
    assert first.offsets == {"0": 4}  # what it owns was committed all the same
    assert first.commit({"0": 5}, first.generation) == 200


def test_a_member_commits_before_it_fetches_what_a_rebalance_leaves_it(
    patient: None, group: Client, node: LocalNode
) -> None:
    """As the document has it: a heartbeat shows the generation, it commits, then it fetches."""
    messages = [{"partition": number, "value": "x"} for number in range(10) for _ in range(5)]
    assert group.post("/v1/topics/orders/messages", {"messages": messages}).status == 200
    first = Member(group, "consumer-1")
    first.fetch_assignment()

    def owners() -> set[str | None]:
        return {each.owner for each in node.px.groups.describe(GROUP_ID).partitions}

    def committed(offset: int) -> bool:
        """Whether it could commit that in each partition that it had."""
        done = first.commit(dict.fromkeys(map(str, range(10)), offset))
        shown = node.px.groups.describe(GROUP_ID).partitions
        return done == 200 and {each.checkpoint for each in shown} == {offset}

    with closing(node.client()) as other:
        second = Member(other, "consumer-2")
        for _ in looks():
            if first.heartbeat() > first.generation:
                break
        other.send("GET", f"{GROUP}/assignment/{second.id}?wait={WAIT}")
        # It has seen a generation and no partitions, however often it asks.
        for _ in range(20):
            first.heartbeat()
            assert owners() == {"consumer-1"}
        assert committed(3)
        old = first.generation
        # Told at once, not when another has what it gives up.
        first.fetch_assignment(f"?wait={WAIT}")
        assert len(first.partitions) == 5
        assert first.generation > old
        # The answer may be lost, or on its way while another thread of the client commits.
        for _ in range(20):
            first.heartbeat(generation=old)
            assert owners() == {"consumer-1"}
        assert committed(4)
        assert first.heartbeat(generation=first.generation) == first.generation
        taken = other.receive().json
    assert sorted(first.partitions + taken["partitions"]) == [*range(10)]
    assert set(taken["offsets"].values()) == {4}
    assert first.commit({str(taken["partitions"][0]): 5}) == 409


def test_a_member_that_has_not_all_its_partitions_yet_is_sent_to_fetch_them(
    patient: None, group: Client, node: LocalNode
) -> None:
    """Heartbeats tell it a generation and no more, and what comes later has none of its own."""
    first = Member(group, "consumer-1")
    first.fetch_assignment()
    second = Member(group, "consumer-2")
    for _ in looks():
        if first.heartbeat() > first.generation:
            break
    # The other one has all of them still: there is nothing new to fetch.
    for _ in range(20):
        second.fetch_assignment("?wait=0")
        assert second.partitions == []
        assert second.heartbeat() == second.generation < first.heartbeat()
    first.beat()
    first.heartbeat()
    for _ in looks():
        if second.heartbeat() > second.generation:
            break
    second.fetch_assignment("?wait=0")
    assert sorted(first.partitions + second.partitions) == [*range(10)]
    assert second.heartbeat() == second.generation == first.generation


@pytest.mark.long
def test_three_members_and_one_is_killed(url: str) -> None:
    with LocalNode(url, session_timeout=3.0) as node, closing(node.client()) as client:
        client.post("/v1/topics", {"name": "orders", "partitions": 10})
        client.post(f"{METADATA}/find-or-create", {"topic": "orders", "appId": "order-processor"})
        first, second = Member(client, "consumer-1"), Member(client, "consumer-2")
        connection = node.client()
        killed = Member(connection, "consumer-3")
        settle(first, second, killed)
        generation = first.beat()
        sent = [
            {"partition": number, "value": f"{number}-{at}"}
            for number in range(10)
            for at in range(5)
        ]
        assert client.post("/v1/topics/orders/messages", {"messages": sent}).status == 200
        handled: list[str] = []
        for member in (first, second):
            handled += [it for values in member.poll().values() for it in values]
            assert member.commit(member.offsets, generation) == 200
        # It has read everything, and is killed after it has handled two of each.
        read = killed.poll()
        handled += [it for values in read.values() for it in values[:2]]
        assert killed.commit(dict.fromkeys(map(str, read), 2), generation) == 200
        connection.close()
        settle(first, second)
        assert first.beat() > generation
        assert second.beat() == first.generation
        taken = {number: each for each in (first, second) for number in each.partitions}
        assert all(taken[number].offsets[str(number)] == 2 for number in read)

        def checkpoints() -> dict[int, int | None]:
            shown = node.px.groups.describe(GROUP_ID).partitions
            return {each.partition: each.checkpoint for each in shown}

        before = checkpoints()
        assert set(before.values()) == {2, 5}
        # What it sent before it was killed arrives late.
        killed._client = client
        assert killed.commit(dict.fromkeys(map(str, read), 5), generation) == 404
        stale = {str(number): 5 for number in second.partitions}
        assert first.commit(stale) == 409
        assert checkpoints() == before
        for member in (first, second):
            handled += [it for values in member.poll().values() for it in values]
            assert member.commit(member.offsets, member.generation) == 200
        assert sorted(handled) == sorted(str(each["value"]) for each in sent)
        assert node.px.groups.describe(GROUP_ID).lag == 0


def test_an_offset_past_the_end_does_not_hold_back_the_others(
    group: Client, node: LocalNode
) -> None:
    messages = [{"partition": number, "value": "x"} for number in range(10) for _ in range(5)]
    assert group.post("/v1/topics/orders/messages", {"messages": messages}).status == 200
    member = Member(group, "consumer-1")
    member.fetch_assignment()
    offsets = {str(number): 4 for number in range(10)}
    assert member.commit(offsets | {"3": 99}) == 416
    shown = node.px.groups.describe(GROUP_ID).partitions
    assert [each.checkpoint for each in shown] == [4, 4, 4, None, 4, 4, 4, 4, 4, 4]
    assert member.commit({"3": 99}) == 416
    assert member.commit({"3": 5}) == 200


def test_a_deleted_group_takes_no_commits(group: Client) -> None:
    member = Member(group, "consumer-1")
    member.fetch_assignment()
    assert group("DELETE", f"{METADATA}/{GROUP_ID}").status == 409
    assert member.leave() == 200
    assert group("DELETE", f"{METADATA}/{GROUP_ID}").status == 204
    assert member.commit({"0": 0}) == 404
    body = {"groupId": GROUP_ID, "consumerId": "consumer-1"}
    assert group.post(f"{GROUP}/join", body).status == 404


def test_members_keep_what_they_can(group: Client) -> None:
    """Sets have the sizes of ranges, and only what has to move moves."""
    members: list[Member] = []
    shares: list[set[int]] = []
    for name in ("consumer-1", "consumer-2", "consumer-3"):
        members.append(Member(group, name))
        settle(*members)
        before, shares = shares, [set(member.partitions) for member in members]
        assert all(now < then for now, then in zip(shares, before, strict=False))
    assert sorted(map(len, shares)) == [3, 3, 4]
    assert members.pop(1).leave() == 200
    settle(*members)
    del shares[1]
    after = [set(member.partitions) for member in members]
    assert all(now > then for now, then in zip(after, shares, strict=True))
    assert [len(share) for share in after] == [5, 5]


@pytest.mark.long
@pytest.mark.engine("memory")
def test_the_defaults() -> None:
    """A rebalance comes half a second after a join, and who is silent for ten seconds is gone.

    None of it comes earlier; a busy machine may be late.
    """
    with LocalNode("memory://") as node, closing(node.client()) as client:
        client.post("/v1/topics", {"name": "orders", "partitions": 10})
        client.post(f"{METADATA}/find-or-create", {"topic": "orders", "appId": "order-processor"})
        living, heard_at = Member(client, "living"), monotonic()
        silent = Member(client, "silent")
        ours = {"member": "ours", "topics": ["orders"]}
        assert client.post(f"/v1/groups/{GROUP_ID}/members", ours).status == 201
        beats_at = monotonic()
        joined = [each.joined_ms for each in node.px.groups.describe(GROUP_ID).members]
        assert len(joined) == 3
        for _ in looks():
            told = node.px.groups.explain(GROUP_ID).rebalances
            if told and {"living", "silent", "ours"} <= {*told[-1].members}:
                break
        # Clocks of milliseconds are cut off.
        assert told[0].at_ms - min(joined) >= 490
        # It beats as often as the document's client does; that is enough.
        for _ in looks():
            if monotonic() >= beats_at:
                living.beat()
                beats_at = monotonic() + 3.0
            names = {each.name for each in node.px.groups.describe(GROUP_ID).members}
            if names == {"living"}:
                break
            assert "living" in names
            assert monotonic() - heard_at >= 10.0 or names == {"living", "silent", "ours"}
        assert silent.commit({"0": 0}) == 404
        assert client.get(f"/v1/groups/{GROUP_ID}/members/ours").status == 404
        assert living.beat() > 0


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


def test_members_of_all_three_kinds_share_a_group(group: Client, node: LocalNode) -> None:
    """One in a process, one of the documented API and one of the existing client look alike."""
    messages = [{"partition": number, "value": "x"} for number in range(10)]
    assert group.post("/v1/topics/orders/messages", {"messages": messages}).status == 200
    px, documented = node.px, Member(group, "documented")
    java = JavaMember(group, "java", "order-processor")
    with px.consumer("orders", GROUP_ID, start="earliest", debounce=0.05) as consumer:
        embedded = consumer.member

        def owned() -> dict[str, set[int]]:
            """What each of them believes to own."""
            return {
                embedded: {number for _, number in consumer.assignment},
                "documented": set(documented.partitions),
                "java": set(java.partitions if java.stable else ()),
            }

        for _ in looks():
            consumer.poll(timeout=0.01)
            documented.beat()
            java.beat()
            if sorted(map(len, owned().values())) == [3, 3, 4]:
                break
        shares = owned()
        assert sorted(number for share in shares.values() for number in share) == [*range(10)]
        shown = px.groups.describe(GROUP_ID)
        assert {it.name: {part.partition for part in it.owned} for it in shown.members} == shares
        assert {it.topics for it in shown.members} == {("orders",)}
        assert {it.client.partition(":")[0] for it in shown.members} > {"http", "dmq"}
        assert {part.partition: part.owner for part in shown.partitions} == {
            number: name for name, share in shares.items() for number in share
        }
        told = px.groups.explain(GROUP_ID).rebalances
        joined = [it.reason for it in told if it.reason.endswith(" joined")]
        assert all(any(name in reason for reason in joined) for name in shares)
        assert told[-1].members == tuple(sorted(shares))
        given = {move.partition: move.after for each in told for move in each.moves}
        assert given == {part.partition: part.owner for part in shown.partitions}
        # Each commits what it owns, in its own way.
        documented.fetch_assignment()
        documented.poll()
        assert documented.commit(documented.offsets, documented.generation) == 200
        java.poll()
        for _ in range(2):
            java.beat()
        for _ in looks():
            consumer.poll(timeout=0.01)
            consumer.commit()
            if px.groups.describe(GROUP_ID).lag == 0:
                break
    assert documented.leave() == 200
    for _ in looks():
        if java.beat() == "STABLE" and java.partitions == [*range(10)]:
            break
    left = px.groups.explain(GROUP_ID).rebalances[len(told) :]
    assert [it.reason for it in left] == [f"{embedded} left", "documented left"]
    assert {move.after for it in left for move in it.moves} <= {"java", "documented"}
    assert [member.name for member in px.groups.describe(GROUP_ID).members] == ["java"]


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
