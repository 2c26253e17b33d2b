"""Work queues under /v1: put, take with a lease, commit, release, dead letters."""

from __future__ import annotations

import threading

import pytest

from support.node import Client, LocalNode, Reply

MAIL = "/v1/queues/mail"


def put(client: Client, *values: str) -> list[int]:
    answer = client.post(f"{MAIL}/items", {"items": [{"value": value} for value in values]})
    assert answer.status == 200, answer.body
    ids: list[int] = answer.json["ids"]
    return ids


def take(client: Client, **options: object) -> Reply:
    answer = client.post(f"{MAIL}/take", options)
    assert answer.status == 200, answer.body
    return answer


def test_a_commit_removes_puts_and_sends(client: Client) -> None:
    client.post("/v1/topics", {"name": "sent", "partitions": 1})
    ids = put(client, "ada", "bob")
    taken = take(client, max=2).json
    assert [(item["id"], item["value"]) for item in taken["items"]] == [
        (ids[0], "ada"),
        (ids[1], "bob"),
    ]
    assert take(client).json == {"lease": None, "items": []}
    body = {
        "put": [{"queue": "archive", "value": "both", "key": "k"}],
        "send": [{"topic": "sent", "key": "a", "value": "done", "timestamp": 1700000000000}],
    }
    done = client.post(f"/v1/leases/{taken['lease']}/commit", body)
    assert done.status == 200, done.body
    assert len(done.json["ids"]) == 1
    assert client.get(MAIL).json["depth"] == 0
    assert client.get("/v1/queues/archive").json["depth"] == 1
    messages = client.get("/v1/topics/sent/partitions/0/messages?offset=0").json["messages"]
    assert [(it["value"], it["timestamp"]) for it in messages] == [("done", 1700000000000)]
    again = client.post(f"/v1/leases/{taken['lease']}/commit", {})
    assert (again.status, again.json["code"]) == (409, "lease_lost")


def test_release_counts_and_ends_dead(client: Client) -> None:
    put(client, "bad")
    for delivery in (1, 2):
        taken = take(client, attempts=2, first_delay=0).json
        assert taken["items"][0]["deliveries"] == delivery
        path = f"/v1/leases/{taken['lease']}/release"
        assert client.post(path, {"error": "no address"}).status == 204
    dead = client.get(f"{MAIL}/dead").json["items"]
    assert [(item["value"], item["error"]) for item in dead] == [("bad", "no address")]
    assert client.post(f"{MAIL}/redrive", {}).json == {"count": 1}
    assert client.get(MAIL).json["ready"] == 1


def test_a_lease_that_runs_out_gives_back(client: Client) -> None:
    put(client, "slow")
    taken = take(client, lease=0.2).json
    again = take(client, wait=20).json
    assert again["items"][0]["deliveries"] == 2
    late = client.post(f"/v1/leases/{taken['lease']}/commit", {})
    assert late.status == 409, late.body
    assert client.post(f"/v1/leases/{again['lease']}/extend", {"lease": 60}).status == 204
    assert client.post(f"/v1/leases/{again['lease']}/commit", {}).status == 200
    assert client.get(MAIL).json["depth"] == 0


def test_a_take_waits_for_an_item(client: Client, node: LocalNode) -> None:
    waiting = node.client()
    found: list[Reply] = []
    thread = threading.Thread(target=lambda: found.append(take(waiting, wait=30)))
    thread.start()
    put(client, "now")
    thread.join()
    assert [item["value"] for item in found[0].json["items"]] == ["now"]
    waiting.close()


def test_one_bad_put_changes_nothing(client: Client) -> None:
    put(client, "first")
    lease = take(client).json["lease"]
    for wrong in (
        {"put": [{"queue": "mail"}]},
        {"put": [{"queue": "mail", "value_base64": "x"}]},
        {"send": [{"topic": "none", "value": "a"}]},
        {"put": [{"queue": "other", "value": "a"}], "send": [{"topic": "none", "value": "a"}]},
        {"put": [{"queue": "other", "value": "a"}, {"queue": "a/b", "value": "a"}]},
    ):
        refused = client.post(f"/v1/leases/{lease}/commit", wrong)
        assert refused.status in (400, 404), refused.body
    assert client.get(MAIL).json["held"] == 1
    assert client.post(f"/v1/leases/{lease}/commit", {}).status == 200
    assert client.get("/v1/queues/other").status == 404


@pytest.mark.parametrize("lease", ["x", "x.y", f"x.{b'127.0.0.1:1'.hex()}", "x.00ff", "%00"])
def test_strange_leases(client: Client, lease: str) -> None:
    """No lease that there is, whatever it looks like: as one that is over."""
    refused = client.post(f"/v1/leases/{lease}/commit", {})
    assert (refused.status, refused.json["code"]) == (409, "lease_lost")
