"""Keys and values over HTTP: on the node that leads a key, through any other, with rights."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import aio
from pxrs.core.kv import shard_of
from pxrs.core.routing import SLOTS
from pxrs.errors import BufferFull
from pxrs.server.cluster import Cluster
from pxrs.server.keys import KeyService, Together
from pxrs.server.rest.problems import HttpError
from support.child import PATIENCE
from support.loops import elsewhere, run
from support.node import Client, LocalNode, looks
from support.shared_commits import SharedCommits, count_arrivals


def put(client: Client, key: str, value: str, **more: Any) -> Any:
    return client("PUT", f"/v1/kv/{key}", {"value": value, **more})


def test_put_get_delete(node: LocalNode, client: Client) -> None:
    assert client.get("/v1/kv/user:1").json["code"] == "key_not_found"
    first = put(client, "user:1", "Ada").json["version"]
    assert client.get("/v1/kv/user:1").json == {"value": "Ada", "version": first}
    exists = put(client, "user:1", "Eve", if_match={"term": 0, "index": 0})
    assert (exists.status, exists.json["code"]) == (409, "already_exists")
    second = put(client, "user:1", "Eve", if_match=first, ttl=60).json["version"]
    assert second["index"] == first["index"] + 1
    late = put(client, "user:1", "Bob", if_match=first)
    assert (late.status, late.json["code"]) == (412, "version_mismatch")
    once = put(client, "user:1", "Joe", idempotency_key="a").json
    assert put(client, "user:1", "Joe", idempotency_key="a").json == once
    assert put(client, "user:1", "Jim", idempotency_key="a").status == 400
    old = client("DELETE", f"/v1/kv/user:1?if_match={first['term']}.{first['index']}")
    assert old.status == 412
    assert client("DELETE", "/v1/kv/user:1").json["deleted"]
    assert not client("DELETE", "/v1/kv/user:1").json["deleted"]
    assert node.px.kv.get("user:1") is None


def test_keys_and_values_of_any_bytes(node: LocalNode, client: Client) -> None:
    key = b"\xff/\x00 %"
    path = "/v1/kv/" + base64.urlsafe_b64encode(key).decode() + "?encoding=base64url"
    value = base64.b64encode(b"\xfe\x00").decode()
    assert client("PUT", path, {"value_base64": value}).status == 200
    assert client.get(path).json["value_base64"] == value
    entry = node.px.kv.get(key)
    assert entry is not None
    assert entry.value == b"\xfe\x00"
    assert client("PUT", "/v1/kv/a%2Fb", {"value": ""}).status == 200
    slashed = node.px.kv.get("a/b")
    assert slashed is not None
    assert slashed.value == b""


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/v1/kv/k", {}),
        ("PUT", "/v1/kv/k", {"value": "x", "value_base64": "eA=="}),
        ("PUT", "/v1/kv/k", {"value": "x", "ttl": 0}),
        ("PUT", "/v1/kv/k", {"value": "x", "ttl": -1}),
        ("PUT", "/v1/kv/k", {"value": "x", "if_match": {"term": 1}}),
        ("PUT", "/v1/kv/k", {"value": "x", "if_match": {"term": -1, "index": 1}}),
        ("PUT", "/v1/kv/k", {"value": "x", "idempotency_key": "a\nb"}),
        ("PUT", "/v1/kv/k?encoding=hex", {"value": "x"}),
        ("PUT", "/v1/kv/!?encoding=base64url", {"value": "x"}),
        ("PUT", f"/v1/kv/{'k' * 1025}", {"value": "x"}),
        ("PUT", "/v1/kv/k", {"value": "x" * 1_048_577}),
        ("GET", "/v1/kv/k?consistency=none", None),
        ("DELETE", "/v1/kv/k?if_match=1", None),
    ],
)
def test_bad_input(node: LocalNode, client: Client, method: str, path: str, body: Any) -> None:
    assert client(method, path, body).status == 400
    assert list(node.px.kv.scan()) == []


@pytest.mark.parametrize(
    "engine", [pytest.param(it, marks=pytest.mark.engine(it)) for it in ("sqlite", "etcd")]
)
def test_slots_that_a_node_gets_while_it_starts_are_led(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes raise the term, and in a store without a clock values expire."""
    url = (
        f"sqlite:///{tmp_path}/node.db"
        if engine == "sqlite"
        else request.getfixturevalue("etcd_url")
    )
    with pxrs.connect(url) as px:
        before = px.kv.put("k", "x")

    class Slow(KeyService):
        def __init__(self, px: aio.Pxrs, cluster: Cluster) -> None:
            super().__init__(px, cluster)
            for _ in looks():
                if None not in cluster.view.slots:
                    break

    monkeypatch.setattr("pxrs.server.node.KeyService", Slow)
    with LocalNode(url) as node:
        client = node.client()
        assert put(client, "k", "x", ttl=0.001).json["version"]["term"] == before.term + 1
        for _ in looks():
            if client.get("/v1/kv/k").status == 404:
                break
        client.close()


def test_more_requests_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were taken before are answered, and then there is room again."""
    monkeypatch.setattr("pxrs.server.keys._MOST_WAITING", 2)
    began, go_on = threading.Event(), threading.Event()
    rounds: list[list[int]] = []

    def double(works: Sequence[int]) -> list[int]:
        rounds.append([*works])
        began.set()
        assert go_on.wait(PATIENCE)
        return [2 * work for work in works]

    async def play() -> None:
        async with aio.connect("memory://") as px:
            together: Together[int, int] = Together(px, double)
            tasks = [asyncio.create_task(together(1))]
            await elsewhere(began.wait)
            tasks += [asyncio.create_task(together(work)) for work in (2, 3, 4)]
            await asyncio.sleep(0)
            go_on.set()
            *answered, refused = await asyncio.gather(*tasks, return_exceptions=True)
            assert answered == [2, 4, 6]
            assert isinstance(refused, BufferFull)
            assert await together(5) == 10
            assert rounds == [[1], [2, 3], [5]]

    run(play())


def test_an_error_is_told_to_all_who_share_the_call() -> None:
    failure = RuntimeError("a bug")

    def fail(works: Sequence[int]) -> list[int]:
        raise failure

    async def play() -> None:
        async with aio.connect("memory://") as px:
            together: Together[int, int] = Together(px, fail)
            for _ in range(2):
                told = await asyncio.gather(*map(together, range(3)), return_exceptions=True)
                assert told == [failure] * 3

    run(play())


@pytest.mark.long
def test_any_node_answers_and_one_writes(tmp_path: Path) -> None:
    """A key's term rises when another node leads it; nothing is lost between them."""
    url = f"sqlite:///{tmp_path}/node.db"
    with LocalNode(url, node_id="a") as first:
        clients = [first.client()]
        versions = {f"k{n}": put(clients[0], f"k{n}", "1").json["version"] for n in range(64)}
        with LocalNode(url, node_id="b") as second:
            first.wait_until(lambda: shared(first))
            second.wait_until(lambda: shared(second))
            clients.append(second.client())
            for number, key in enumerate(versions):
                answer = put(clients[number % 2], key, "2")
                assert answer.status == 200, answer
                assert answer.json["version"]["index"] > versions[key]["index"]
                assert clients[(number + 1) % 2].get(f"/v1/kv/{key}").json["value"] == "2"
            led = {shard_of(key.encode()) % SLOTS for key in versions}
            view = second._node.cluster.view
            assert {view.slots[slot] for slot in led} == {"a", "b"}
            (elsewhere, *_) = [
                key for key in versions if view.slots[shard_of(key.encode()) % SLOTS] == "b"
            ]
            told = clients[0]("GET", f"/v1/kv/{elsewhere}", headers={"X-Pxrs-Follows": "1"})
            assert (told.status, told.headers["x-pxrs-leader"]) == (421, str(second.endpoint))
            raised = [
                key
                for key in versions
                if clients[1].get(f"/v1/kv/{key}").json["version"]["term"] > 1
            ]
            assert elsewhere in raised
            for client in clients:
                client.close()


@pytest.mark.parametrize(
    ("method", "status", "code"),
    [
        ("GET", 503, "leader_lost"),
        ("PUT", 504, "outcome_unknown"),
        ("DELETE", 504, "outcome_unknown"),
    ],
)
def test_a_write_whose_answer_is_lost_between_nodes_is_not_to_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, status: int, code: str
) -> None:
    async def lose(*given: Any) -> Any:
        raise HttpError(503, "leader_lost", "the node is gone")

    url = f"sqlite:///{tmp_path}/node.db"
    with LocalNode(url, node_id="a") as first, LocalNode(url, node_id="b") as second:
        first.wait_until(lambda: shared(first))
        second.wait_until(lambda: shared(second))
        slots = first._node.cluster.view.slots
        key = next(f"k{n}" for n in range(999) if slots[shard_of(b"k%d" % n) % SLOTS] == "b")
        monkeypatch.setattr(first.server._forwarding, "_request", lose)
        client = first.client()
        told = client(method, f"/v1/kv/{key}", {"value": "x"} if method == "PUT" else None)
        assert (told.status, told.json["code"]) == (status, code)
        assert told.json.get("retryable", False) == (status == 503)
        client.close()


def shared(node: LocalNode) -> bool:
    slots = node._node.cluster.view.slots
    return set(slots) == {"a", "b"} and None not in slots


def test_concurrent_requests_share_commits(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = count_arrivals(monkeypatch)
    coord = node.px.kv._coord
    commits = SharedCommits(monkeypatch, coord, lambda: len(arrived) == 8)
    answers: list[int] = []

    def write(name: int) -> None:
        client = node.client()
        answers.extend(put(client, f"{name}-{n}", "x").status for n in range(20))
        client.close()

    threads = [threading.Thread(target=write, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 160
    assert len(list(node.px.kv.scan())) == 160
    assert sum(commits.sizes) == 160
    assert sum(commits.sizes[:2]) >= 8
