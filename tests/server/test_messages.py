"""Topics and messages over HTTP."""

from __future__ import annotations

import base64
import threading
from contextlib import closing

import pytest

from pxrs.codec.batches import decode, encode, read_header
from pxrs.types import Fence, Header, StoredBatch
from support.node import Client, LocalNode

ORDERS = "/v1/topics/orders"
FIRST = f"{ORDERS}/partitions/0"


@pytest.fixture
def orders(client: Client) -> Client:
    made = client.post("/v1/topics", {"name": "orders", "partitions": 2})
    assert made.status == 201, made.body
    return client


def test_topics(orders: Client) -> None:
    again = orders.post("/v1/topics", {"name": "orders", "partitions": 2})
    assert again.status == 201
    other = orders.post("/v1/topics", {"name": "orders", "partitions": 3})
    assert (other.status, other.json["code"]) == (409, "topic_exists")
    assert [each["name"] for each in orders.get("/v1/topics").json["topics"]] == ["orders"]
    described = orders.get(ORDERS).json
    assert described["topic"]["partitions"] == 2
    assert [part["end"] for part in described["partitions"]] == [0, 0]
    assert orders("DELETE", ORDERS).status == 204
    gone = orders.get(ORDERS)
    assert (gone.status, gone.json["code"]) == (404, "topic_not_found")
    assert gone.json["detail"].endswith("does not exist; create it: POST /v1/topics")
    assert gone.json["request_id"] == gone.headers["x-request-id"]


@pytest.mark.long
def test_very_many_partitions(client: Client) -> None:
    many = {"name": "orders", "partitions": 20_000}
    assert client.post("/v1/topics", many).status == 201
    described = client.get(ORDERS).json["partitions"]
    assert [each["partition"] for each in described] == list(range(20_000))
    assert len(client.get(f"{ORDERS}/offsets?time=1").json["offsets"]) == 20_000
    assert client("DELETE", ORDERS).status == 204


def test_what_is_sent_is_fetched(orders: Client) -> None:
    coded = base64.b64encode(b"\xff\x00").decode()
    sent = orders.post(
        f"{ORDERS}/messages",
        {
            "messages": [
                {"partition": 0, "key": "a", "value": "hällo", "headers": [["trace", "1"]]},
                {"partition": 0, "value_base64": coded, "key_base64": coded, "timestamp": 17},
                {"partition": 0, "headers_base64": [["raw", coded], ["none", None]]},
            ]
        },
    )
    assert sent.status == 200, sent.body
    assert sent.json["positions"] == [{"partition": 0, "offset": at} for at in range(3)]
    page = orders.get(f"{FIRST}/messages?offset=0").json
    first, second, third = page["messages"]
    assert (first["key"], first["value"], first["headers"]) == ("a", "hällo", [["trace", "1"]])
    assert (second["key_base64"], second["value_base64"]) == (coded, coded)
    assert second["timestamp"] == 17
    assert third["headers_base64"] == [["raw", coded], ["none", None]]
    assert (page["next"], page["start"], page["end"]) == (3, 0, 3)
    assert orders.get(f"{FIRST}/messages?offset=1&max=1").json["next"] == 2
    assert orders.get(f"{FIRST}/messages?offset=3").json["messages"] == []


def test_a_key_decides_as_everywhere(orders: Client, node: LocalNode) -> None:
    keys = [f"account-{number}" for number in range(20)]
    body = {"messages": [{"key": key, "value": ""} for key in keys]}
    positions = orders.post(f"{ORDERS}/messages", body).json["positions"]
    from pxrs.core.routing import xxhash

    assert [each["partition"] for each in positions] == [xxhash(key.encode(), 2) for key in keys]


def test_one_bad_message_sends_none(orders: Client) -> None:
    for bad in ({"partition": 2}, {"value_base64": "/w"}, {"value": "a", "value_base64": "YQ=="}):
        body = {"messages": [{"partition": 0, "value": "good"}, bad]}
        refused = orders.post(f"{ORDERS}/messages", body)
        assert refused.status in (400, 404), refused.body
    assert orders.get(ORDERS).json["partitions"][0]["end"] == 0


def test_the_same_sequence_is_appended_once(orders: Client) -> None:
    body = {
        "messages": [{"value": "a"}, {"value": "b"}],
        "producer": {"id": 7, "epoch": 0, "sequence": 0},
    }
    first, again = (orders.post(f"{FIRST}/messages", body).json for _ in range(2))
    assert first == {"partition": 0, "offset": 0, "duplicate": False}
    assert again == {"partition": 0, "offset": 0, "duplicate": True}
    body["producer"] = {"id": 7, "epoch": 0, "sequence": 5}
    gap = orders.post(f"{FIRST}/messages", body)
    assert (gap.status, gap.json["code"]) == (409, "sequence_gap")
    assert orders.get(ORDERS).json["partitions"][0]["end"] == 2


def test_a_timestamp_of_0_is_kept_in_a_sequence_too(orders: Client) -> None:
    where = "/v1/topics/orders/partitions/0/messages"
    body = {
        "messages": [{"value": "a", "timestamp": 0}],
        "producer": {"id": 7, "epoch": 0, "sequence": 0},
    }
    assert orders.post(where, body).status == 200
    assert orders.get(f"{where}?offset=0").json["messages"][0]["timestamp"] == 0


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_raw_batches(orders: Client, compression: str) -> None:
    records: list[tuple[bytes, bytes, list[Header], int]] = [
        (b"k", f"value-{number}".encode() * 9, [], 1000 + number) for number in range(50)
    ]
    batch = encode(records, compression=compression)
    for base in (0, 50):
        done = orders("POST", f"{FIRST}/batches", bytes(batch.data))
        assert done.json == {"partition": 0, "offset": base, "duplicate": False}, done.body
    raw = orders.get(f"{FIRST}/batches?offset=60")
    assert raw.headers["content-type"] == "application/vnd.pxrs.batch"
    assert (raw.headers["x-pxrs-next"], raw.headers["x-pxrs-end"]) == ("100", "100")
    assert read_header(raw.body).base_offset == 50
    messages = decode(StoredBatch(50, 100, raw.body), Fence("orders", 0, 0))
    assert [message.value for message in messages] == [value for _, value, _, _ in records]
    found = orders.get(f"{ORDERS}/offsets?time=1049").json["offsets"]
    assert found == [{"partition": 0, "offset": 49}, {"partition": 1, "offset": None}]


def test_a_poll_is_woken_by_a_message(orders: Client, node: LocalNode) -> None:
    polling = node.client()
    found: list[list[dict[str, str]]] = []

    def poll() -> None:
        found.append(polling.get(f"{FIRST}/messages?offset=0&wait=30").json["messages"])

    thread = threading.Thread(target=poll)
    thread.start()
    orders.post(f"{ORDERS}/messages", {"messages": [{"partition": 0, "value": "now"}]})
    thread.join()
    assert [each["value"] for each in found[0]] == ["now"]
    polling.close()


def test_a_poll_for_raw_batches_is_woken_by_an_append(orders: Client, node: LocalNode) -> None:
    batch = bytes(encode([(b"k", b"now", [], 1000)]).data)
    with closing(node.client()) as polling:
        # Longer than the client waits for an answer.
        polling.send("GET", f"{FIRST}/batches?offset=0&wait=60")
        node.wait_for_polls(1)
        # Of another partition: it does not end the wait.
        assert orders("POST", f"{ORDERS}/partitions/1/batches", batch).status == 200
        assert orders("POST", f"{FIRST}/batches", batch).json["offset"] == 0
        raw = polling.receive()
    assert (raw.status, raw.headers["content-type"]) == (200, "application/vnd.pxrs.batch")
    assert (raw.headers["x-pxrs-next"], raw.headers["x-pxrs-end"]) == ("1", "1")
    messages = decode(StoredBatch(0, 1, raw.body), Fence("orders", 0, 0))
    assert [(message.value, message.timestamp) for message in messages] == [(b"now", 1000)]


def test_a_stop_answers_polls(orders: Client, node: LocalNode) -> None:
    answers: list[int] = []
    clients = [node.client() for _ in range(5)]

    def poll(client: Client) -> None:
        answers.append(client.get(f"{FIRST}/messages?offset=0&wait=60").status)

    threads = [threading.Thread(target=poll, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    node.wait_for_polls(5)
    node.stop()
    for thread in threads:
        thread.join()
    assert answers == [200] * 5
    for client in clients:
        client.close()


def test_a_topic_made_again_is_another_one(orders: Client) -> None:
    body = {"messages": [{"partition": 0, "value": "old"}]}
    orders.post(f"{ORDERS}/messages", body)
    assert orders.get(f"{FIRST}/messages?offset=0").json["end"] == 1
    orders("DELETE", ORDERS)
    orders.post("/v1/topics", {"name": "orders", "partitions": 2})
    assert orders.get(f"{FIRST}/messages?offset=0").json["end"] == 0
    assert orders.post(f"{ORDERS}/messages", body).json["positions"][0]["offset"] == 0
