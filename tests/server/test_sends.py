"""Produce requests that share commits: each is told of its own messages, and of nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from pxrs import TopicNotFound, aio
from pxrs.producing.handles import SentMany
from pxrs.server.sends import Record, Sends, _Company
from support.child import PATIENCE
from support.loops import run
from support.node import Client, LocalNode

ORDERS = "/v1/topics/orders"


def test_each_request_is_told_where_its_own_messages_are(node: LocalNode, client: Client) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 3})
    found: dict[tuple[int, int], str] = {}

    def produce(number: int) -> None:
        mine = node.client()
        for turn in range(10):
            values = [f"{number}-{turn}-{at}" for at in range(turn + 1)]
            # Some with a key, some without, and some with more than that.
            messages = [
                {"value": value, **({"key": value} if at % 2 else {}), **more}
                for at, value in enumerate(values)
                for more in [{"headers": [["h", "1"]]} if turn % 3 == 2 else {}]
            ]
            answer = mine.post(f"{ORDERS}/messages", {"messages": messages})
            assert answer.status == 200, answer.body
            for value, place in zip(values, answer.json["positions"], strict=True):
                found[place["partition"], place["offset"]] = value
        mine.close()

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 * sum(range(1, 11))
    for partition in range(3):
        page = client.get(f"{ORDERS}/partitions/{partition}/messages?offset=0&max=10000").json
        held = {(partition, it["offset"]): it["value"] for it in page["messages"]}
        assert held == {at: value for at, value in found.items() if at[0] == partition}


def test_a_topic_that_is_not_there_fails_its_own_requests_only(client: Client) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    body = {"messages": [{"value": "a"}] * 2000}
    assert client.post(f"{ORDERS}/messages", body).status == 200
    missing = client.post("/v1/topics/none/messages", body)
    assert (missing.status, missing.json["code"]) == (404, "topic_not_found")
    client("DELETE", ORDERS)
    assert client.post(f"{ORDERS}/messages", body).status == 404
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    again = client.post(f"{ORDERS}/messages", body).json["positions"]
    assert [each["offset"] for each in again] == list(range(2000))


def test_what_a_refused_request_had_put_before_is_no_failure_of_the_node() -> None:
    async def play() -> None:
        async with aio.connect("memory://") as px:
            await px.topics.create("orders", 1)
            producer = px.producer()
            sends = Sends(producer)
            await sends.records("orders", [Record(b"a")])
            await px.topics.delete("orders")

            def put(sent: SentMany) -> Iterator[None]:
                one = producer._blocking.send("orders", b"b")
                sent._batches.append(one._pending)
                sent._indexes.append(one._index)
                yield
                # The producer's thread commits whenever it likes, also in the middle of a request.
                producer._blocking._committer.drain()
                raise TopicNotFound("orders")

            with pytest.raises(TopicNotFound):
                await sends._join("orders", put, 1)
            await producer.close()

    run(play())


def test_a_request_of_no_messages_is_answered() -> None:
    async def play() -> None:
        async with aio.connect("memory://") as px:
            await px.topics.create("orders", 1)
            async with px.producer() as producer:
                sends = Sends(producer)
                # The first one finds that the topic is not known yet.
                for _ in range(2):
                    assert await asyncio.wait_for(sends.records("orders", []), PATIENCE) == []
                    assert await asyncio.wait_for(sends.pairs("orders", []), PATIENCE) == []

    run(play())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("again", [False, True])
def test_a_bug_in_the_thread_that_commits_is_survived(
    node: LocalNode, client: Client, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Its requests are answered, at once if another one comes, and the next ones are served."""
    monkeypatch.setattr("pxrs.server.node._CHECK_STORE", 600.0 if again else 0.01)
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    body = {"messages": [{"value": "a"}]}
    node.wait_until(lambda: not node._node._trouble)
    committer = node._node.messages._sends._blocking._committer
    commit = committer._one_round

    def fail_once() -> None:
        monkeypatch.setattr(committer, "_one_round", commit)
        raise RuntimeError("a bug")

    monkeypatch.setattr(committer, "_one_round", fail_once)
    client.send("POST", f"{ORDERS}/messages", body)
    if again:
        node.wait_until(lambda: committer.broken)
        other = node.client()
        assert other.post(f"{ORDERS}/messages", body).status == 200
        other.close()
    assert client.receive().status == 200
    places = client.post(f"{ORDERS}/messages", body).json["positions"]
    assert [it["offset"] for it in places] == [2 if again else 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_requests_that_a_bug_keeps_from_being_committed_are_in_doubt(
    node: LocalNode, client: Client
) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    body = {"messages": [{"value": "a"}]}
    committer = node._node.messages._sends._blocking._committer

    def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(committer, "_one_round", fail)
        client.send("POST", f"{ORDERS}/messages", body)
        node.wait_until(lambda: committer.broken)
        other = node.client()
        assert other.post(f"{ORDERS}/messages", body).status == 200
        other.close()
        lost = client.receive()
        assert (lost.status, lost.json["code"]) == (504, "outcome_unknown")
    assert client.post(f"{ORDERS}/messages", body).status == 200


class Commits:
    """Counts the commits that are asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.asked = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self.asked.set()


def test_one_client_never_waits_for_company() -> None:
    async def play() -> None:
        commits = Commits()
        company = _Company(commits)
        for turn in range(1, 4):
            company.join(1)
            assert commits.count == turn
            company.leave(1)

    run(play())


def test_those_who_came_the_last_time_share_a_commit() -> None:
    async def play() -> None:
        commits = Commits()
        company = _Company(commits)
        company.join(1)
        company.join(2)  # while the first commit runs
        company.leave(1)
        assert commits.count == 1
        company.join(1)
        assert commits.count == 2

    run(play())


def test_who_does_not_come_again_is_not_waited_for() -> None:
    async def play() -> None:
        commits = Commits()
        company = _Company(commits)
        company.join(3)
        company.join(1)
        commits.asked.clear()
        company.leave(3)
        await commits.asked.wait()
        company.leave(1)
        # One was there the last time, and one is there now.
        company.join(1)
        assert commits.count == 3

    run(play())
