"""Requests that mean harm or make no sense: each is refused with a reason, and the node goes on."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pxrs.codec.batches import encode
from pxrs.errors import DeliveryFailed, InvalidRequest, StoreUnavailable
from pxrs.server.rest import http as http_module
from pxrs.server.rest.problems import problem_of, told
from support.child import PATIENCE
from support.node import Client, LocalNode, NodeProcess, Reply

HOST = b"Host: a\r\n"
SECRET = b"pxrs.admin.SECRET"
TOPIC = "/v1/topics/orders"
MESSAGES = f"{TOPIC}/partitions/0/messages"


@pytest.fixture
def url() -> str:
    return "memory://"


@pytest.fixture
def orders(client: Client) -> Client:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    return client


def exchange(node: LocalNode, request: bytes) -> tuple[int, Any]:
    """Send bytes and read the first answer: its status, and its body as JSON."""
    with socket.create_connection(node.endpoint, PATIENCE) as raw:
        raw.sendall(request)
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        assert answer.headers["Content-Type"].startswith("application/problem+json")
        assert answer.headers["Server"] == "pxrs"  # not which library, and of which version
        return answer.status, json.loads(answer.read())


def post(path: bytes, head: bytes, body: bytes = b"") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + head + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (post(b"/v1/topics", b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
         400, "malformed_request"),
        (post(b"/v1/topics", b"Content-Length: 5\r\nContent-Length: 6", b"123456"),
         400, "malformed_request"),
        (post(b"/v1/topics", b"Content-Length: -1"), 400, "malformed_request"),
        (post(b"/v1/topics", b"Transfer-Encoding: chunked, identity"), 400, "malformed_request"),
        (post(b"/v1/topics", b"Transfer-Encoding: chunked", b"F" * 19 + b"\r\n"),
         400, "malformed_request"),
        (post(b"/v1/topics", b"Authorization: Bearer " + SECRET + b"\x01"),
         400, "malformed_request"),
        (post(b"/v1/topics", b"Authorization : Bearer " + SECRET), 400, "malformed_request"),
        (post(b"/v1/topics/\xff?" + SECRET, b""), 400, "malformed_request"),
        (b"GET http://[/" + SECRET + b" HTTP/1.1\r\n" + HOST + b"\r\n", 400, "malformed_request"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/9.9\r\n" + HOST + b"\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
        (post(b"/v1/topics", b"X: " + SECRET * 1000), 431, "headers_too_large"),
        (post(b"/" + SECRET * 1000, b""), 431, "headers_too_large"),
        (post(b"/v1/topics", b"\r\n".join(b"X-%d: a" % n for n in range(500))),
         431, "headers_too_large"),
        (b"CONNECT evil:443 HTTP/1.1\r\n" + HOST + b"\r\n", 404, "no_such_path"),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 404, "no_such_path"),
        (b"GET //evil HTTP/1.1\r\n" + HOST + b"\r\n", 404, "no_such_path"),
        (b"GET /%ff%00 HTTP/1.1\r\n" + HOST + b"\r\n", 404, "no_such_path"),
        (post(b"/v1/topics", b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2", b"{}"),
         400, "invalid_body"),
    ],
)  # fmt: skip
def test_what_is_not_http(
    node: LocalNode,
    client: Client,
    request_: bytes,
    status: int,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, problem = exchange(node, request_)
    assert (found, problem["code"]) == (status, code)
    # Not even to those who could not be understood is anything told that may be secret.
    assert "SECRET" not in problem["detail"]
    assert not caplog.records
    assert client.get("/health/live").status == 200


def test_requests_that_follow_without_an_answer_are_answered_in_order(node: LocalNode) -> None:
    with socket.create_connection(node.endpoint, PATIENCE) as raw:
        request = b"GET /v1/topics HTTP/1.1\r\n" + HOST + b"X-Request-Id: %d\r\n"
        count = 2000
        sent = b"".join(request % number + b"\r\n" for number in range(count))
        threading.Thread(target=raw.sendall, args=(sent,), daemon=True).start()
        reader = raw.makefile("rb")
        for number in range(count):
            head = {}
            assert reader.readline().startswith(b"HTTP/1.1 200")
            while (line := reader.readline().strip()) != b"":
                name, _, value = line.partition(b": ")
                head[name] = value
            assert head[b"X-Request-Id"] == b"%d" % number
            reader.read(int(head[b"Content-Length"]))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("path", ["/v1/topics", "/api/v1/auth/login", "/v1/queues/q/take"])
def test_json_that_is_nested_deeply(client: Client, path: str, opening: str) -> None:
    refused = client("POST", path, f'{{"a":{opening * 10_000}'.encode())
    assert (refused.status, refused.json["code"]) == (400, "invalid_body")


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": "a", "partitions": %s}' % (b"9" * 6000),
        b'{"name": "a", "partitions": 1, "retention": 1e999}',
        b'{"name": "a", "partitions": 1, "retention": NaN}',
        b'{"name": "a", "partitions": 1, "retention": -1}',
        b'{"name": "a", "partitions": 1, "retention_bytes": %s}' % (b"9" * 6000),
        b'{"name": "a", "partitions": 1, "partitioner": "\\u0000"}',
        b'{"name": "\\ud800", "partitions": 1}',
        b'{"name": "a\\u0000", "partitions": 1}',
        b'{"name": "\xff", "partitions": 1}',
    ],
)
def test_json_values_that_nothing_can_hold(client: Client, body: bytes) -> None:
    assert client("POST", "/v1/topics", body).status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/storage/consume", {"topic": "orders", "partition": 0, "offset": 0,
                                     "maxWaitMs": 10**400}),
        ("/api/v1/storage/consume", {"topic": "orders", "partition": 0, "offset": -1}),
        ("/api/v1/metadata/topics", {"topicName": "a", "partitionCount": 1,
                                     "retentionMs": 10**400}),
        (f"{TOPIC}/messages", {"messages": [{"value_base64": "é"}]}),
        (f"{TOPIC}/messages", {"messages": [{"value_base64": "a"}]}),
        (f"{TOPIC}/messages", {"messages": [{"value": "a", "value_base64": "YQ=="}]}),
        (f"{TOPIC}/messages", {"messages": [{"headers_base64": [["a", "*"]]}]}),
        ("/v1/queues/%00/take", {}),
        ("/v1/queues/a%2Fb/take", {}),
        ("/v1/queues/q/items", {"items": [{"value": "a", "key": "\0"}]}),
        ("/v1/queues/q/take", {"attempts": 0}),
    ],
)  # fmt: skip
def test_values_that_are_refused(orders: Client, path: str, body: Any) -> None:
    refused = orders.post(path, body)
    assert refused.status == 400, refused.body
    assert refused.json["detail"]


@pytest.mark.parametrize("path", ["queues/%00", "queues/a%0Ab/items", "groups/%7F", "topics/%1b"])
def test_names_that_are_not_printable(client: Client, path: str) -> None:
    """PostgreSQL takes no NUL in text: it would be an error of the store."""
    refused = client.get(f"/v1/{path}")
    assert (refused.status, refused.json["code"]) == (400, "invalid_request")


def test_what_a_store_says_is_not_told() -> None:
    said = StoreUnavailable("postgresql://app@10.0.0.5/db: no password for user app")
    failed = DeliveryFailed("not in time")
    failed.__cause__ = said
    for error in (said, failed):
        problem = problem_of(error, "1")
        assert problem.retryable
        assert "app" not in problem.detail
    assert told(InvalidRequest("a name")) == "a name"


def test_numbers_that_are_none(orders: Client) -> None:
    orders.post(
        "/api/v1/metadata/consumer-groups/find-or-create", {"topic": "orders", "appId": "a"}
    )
    who = {"consumerId": "x", "groupId": "G_orders_a"}
    orders.post("/api/v1/consumer-groups/join", who)
    for text in ("²", "9" * 5000, "-1", "", "٣", "0x1"):
        beat = orders.post("/api/v1/consumer-groups/heartbeat", {**who, "offsets": {text: 1}})
        assert (beat.status, beat.json["success"]) == (200, True), text
    for query in ("wait=nan", "wait=inf", "wait=1e999"):
        assert orders.get(f"{MESSAGES}?offset=0&{query}").status == 400
    assert orders.get(f"{MESSAGES}?offset={2**63 - 1}").status == 416
    assert orders.get(f"{MESSAGES}?offset={2**63}").status == 400


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("..%2F..%2Ftokens", 400),
        ("%2e%2e", 400),
        ("%00", 400),
        ("%ff", 400),
        ("orders%2Fpartitions%2F0%2Fmessages", 400),
        ("orders%252F", 400),
        ("a" * 5000, 400),
    ],
)
def test_names_in_paths(orders: Client, name: str, status: int) -> None:
    assert orders.get(f"/v1/topics/{name}").status == status


def test_a_name_with_a_percent_sign_is_found(client: Client) -> None:
    name = "50% off?"
    client.post("/v1/queues", {"name": name})
    assert client.get("/v1/queues/50%25%20off%3F").json["name"] == name


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_compressed_bodies_are_not_unpacked(client: Client, coding: str) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    refused = client("POST", "/v1/topics", bomb, {"Content-Encoding": coding})
    assert (refused.status, refused.json["code"]) == (415, "content_encoding")


def test_a_hundred_megabytes(node: LocalNode) -> None:
    """The refusal comes before the body, and the connection is not read to its end for ever."""
    with socket.create_connection(node.endpoint, PATIENCE) as raw:
        raw.sendall(post(b"/v1/topics", b"Content-Length: 100000000"))
        assert b" 413 " in raw.recv(100)
        chunk = bytes(2**20)
        with pytest.raises(ConnectionError):
            while True:
                raw.sendall(chunk)


@pytest.mark.parametrize("path", [b"/api/v1/auth/login", b"/api/v1/auth/refresh"])
def test_bodies_without_a_token_are_small(node: LocalNode, path: bytes) -> None:
    status, problem = exchange(node, post(path, b"Content-Length: 100000"))
    assert (status, problem["code"]) == (413, "body_too_large")


def test_a_client_asks_whether_to_send_its_body(node: LocalNode) -> None:
    with socket.create_connection(node.endpoint, PATIENCE) as raw:
        raw.sendall(post(b"/v1/topics", b"Expect: 100-continue\r\nContent-Length: 2"))
        assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(b"{}")
        assert raw.recv(100).startswith(b"HTTP/1.1 400 ")


def test_web_pages_are_not_answered_without_tokens(client: Client) -> None:
    """Any page in a browser on this host can send a POST, and its Origin comes with it."""
    body = {"name": "orders", "partitions": 1}
    refused = client("POST", "/v1/topics", body, {"Origin": "http://evil.example"})
    assert (refused.status, refused.json["code"]) == (403, "browser_refused")
    assert client.get("/v1/topics").json == {"topics": []}


# Fences


def fence(*fields: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")


def test_made_up_fences(orders: Client) -> None:
    for wrong in (
        "", "=", "é", "\0", "a" * 2000, fence(), fence("g"),
        fence("g", "orders", "../a", 0, "o", 1),
        fence("g", "a/b", "i", 0, "o", 1), fence("g", "orders", "i", -1, "o", 1),
        fence("g", "orders", "i", 2**70, "o", 1), fence("g", "orders", "i", 0, "o", -1),
        fence("g", "\0", "\0", 0, "\0", 1), fence("h", "orders", "i", 0, "o", 1),
        base64.urlsafe_b64encode(b"[" * 1400).decode(),
    ):  # fmt: skip
        commit = {"commits": [{"fence": wrong, "offset": 1}]}
        assert orders.post("/v1/groups/g/commits", commit).status == 400, wrong
    unknown = {"commits": [{"fence": fence("g", "orders", "i", 0, "o", 1), "offset": 10**9}]}
    assert orders.post("/v1/groups/g/commits", unknown).json["commits"][0]["fenced"]


def test_a_fence_is_of_its_own_topic_only(orders: Client) -> None:
    """Under another topic's name it would tell how much that one holds, or pass over messages."""
    orders.post("/v1/topics", {"name": "private", "partitions": 1})
    orders.post("/v1/topics/private/messages", {"messages": [{"value": "a"}] * 9})
    orders.post("/v1/groups/g/members", {"member": "m", "topics": ["orders"]})
    owned = orders.get("/v1/groups/g/members/m?wait=10").json["partitions"][0]
    group, _, *rest = json.loads(base64.urlsafe_b64decode(owned["fence"] + "=="))
    for offset in (5, 10**9):
        forged = {"fence": fence(group, "private", *rest), "offset": offset}
        answer = orders.post("/v1/groups/g/commits", {"commits": [forged]})
        assert answer.json["commits"][0]["fenced"], answer.body
    good = {"commits": [{"fence": owned["fence"], "offset": 0}]}
    assert not orders.post("/v1/groups/g/commits", good).json["commits"][0]["fenced"]
    past = {"commits": [{"fence": owned["fence"], "offset": 1}]}
    assert orders.post("/v1/groups/g/commits", past).status == 416


# Batches that unpack to much more


def bombs(compression: str, value: bytes) -> bytes:
    return bytes(encode([(None, value, [], 1)], compression=compression).data)


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_batches_that_unpack_to_too_much(compression: str) -> None:
    with LocalNode("memory://", max_body=100_000) as node:
        client = node.client()
        client.post("/v1/topics", {"name": "orders", "partitions": 1})
        bomb = bombs(compression, bytes(1_000_000))
        assert len(bomb) < 100_000
        refused = client("POST", f"{TOPIC}/partitions/0/batches", bomb)
        assert refused.status == 400
        assert "at most 100000 bytes" in refused.json["detail"]
        client.close()


def test_a_page_has_so_many_bytes_at_most(orders: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 messages of a megabyte each would be ten gigabytes, and few bytes in the log."""
    monkeypatch.setattr("pxrs.server.messages._PAGE_BYTES", 100_000)
    batch = bombs("zstd", bytes(40_000))
    for _ in range(10):
        orders("POST", f"{TOPIC}/partitions/0/batches", batch)
    at, seen = 0, []
    while at < 10:
        page = orders.get(f"{MESSAGES}?offset={at}&max=10000").json
        seen.append(len(page["messages"]))
        at = page["next"]
    assert seen == [3, 3, 3, 1]


def test_kept_batches_count_as_they_are_unpacked() -> None:
    from pxrs.server.messages import _DecodedBatches
    from pxrs.types import Fence, LogPartition, StoredBatch

    kept = _DecodedBatches(100_000)
    data = bombs("zstd", bytes(40_000))
    for base in range(10):
        moved = base.to_bytes(8, "big") + data[8:]
        kept.get(LogPartition("a", 0), StoredBatch(base, base + 1, moved), Fence("a", 0, 0))
    assert len(kept._batches) == 2
    kept = _DecodedBatches(300_000)
    small = bytes(encode([(None, None, [], 0)] * 1000).data)
    for base in range(0, 10_000, 1000):
        moved = base.to_bytes(8, "big") + small[8:]
        kept.get(LogPartition("a", 0), StoredBatch(base, base + 1000, moved), Fence("a", 0, 0))
    assert len(kept._batches) == 2, "of 8 KB each, and of 130 KB as messages"


# Clients that are slow, or gone


def test_slow_clients_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room that is taken by bodies that do not come is given to those that do."""
    monkeypatch.setattr("pxrs.server.rest.room.FAIR_SECONDS", 0.05)
    with LocalNode("memory://", max_body=1000, max_inflight=1000) as node:
        raw = socket.create_connection(node.endpoint, PATIENCE)
        raw.sendall(post(b"/v1/topics", b"Content-Length: 1000", b"{"))
        node.wait_until(lambda: node.server.held > 0)
        client = node.client()
        assert client.get("/health/live").status == 200
        assert client.post("/v1/topics", {"name": "orders", "partitions": 1}).status == 201
        assert raw.recv(100).startswith(b"HTTP/1.1 408 ")
        raw.close()
        client.close()


def test_a_client_that_does_not_take_its_answer() -> None:
    with LocalNode("memory://", request_timeout=0.5) as node, socket.socket() as raw:
        node.px.topics.create("orders", 1)
        with node.px.producer() as producer:
            for _ in range(30):
                producer.send("orders", bytes(2**20))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(node.endpoint)
        path = f"{TOPIC}/partitions/0/batches?offset=0&max_bytes={30 * 2**20}"
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        node.wait_until(lambda: node.server.held > 0)
        node.wait_until(lambda: node.server.held == 0 and node.server.connections == 0)


def test_headers_that_come_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "_KEEP_ALIVE", 0.3)
    with LocalNode("memory://") as node, socket.create_connection(node.endpoint, PATIENCE) as raw:
        raw.settimeout(0.01)
        raw.sendall(b"GET / HTTP/1.1\r\nX: ")
        with pytest.raises(ConnectionError):
            for _ in range(100_000):
                raw.sendall(b"G")
                try:
                    assert raw.recv(1) == b""
                    raise ConnectionError
                except TimeoutError:
                    pass


BODY = b"Content-Length: 100"
WHOLE = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/top", b""),
        (b"POST /v1/topics HTTP/1.1\r\n" + HOST, b""),
        (post(b"/v1/topics", BODY), b"HTTP/1.1 408 "),
        (post(b"/v1/topics", BODY, b'{"name": "or'), b"HTTP/1.1 408 "),
        (post(b"/v1/topics", b"Transfer-Encoding: chunked"), b"HTTP/1.1 408 "),
        (post(b"/v1/topics", b"Transfer-Encoding: chunked", b"5\r\n{"), b"HTTP/1.1 408 "),
        (WHOLE, b"HTTP/1.1 200 "),
        (WHOLE + b"POST /v1/topics HTTP/1.1\r\n" + HOST, b"HTTP/1.1 200 "),
    ],
    ids=["nothing", "line", "head", "no body", "body", "no chunk", "chunk", "idle", "second head"],
)
def test_a_client_that_does_not_go_on_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes
) -> None:
    """It keeps its connection open and says nothing more: it is not the one that closes."""
    monkeypatch.setattr(http_module, "_KEEP_ALIVE", 0.2)
    monkeypatch.setattr(http_module, "_LINGER", 0.1)
    with (
        LocalNode("memory://", request_timeout=0.2) as node,
        socket.create_connection(node.endpoint, PATIENCE) as raw,
    ):
        raw.sendall(sent)
        received = b""
        while data := raw.recv(1000):
            received += data
        assert received.startswith(answer)
        assert bool(received) == bool(answer)
        node.wait_until(lambda: node.server.held == 0 and node.server.connections == 0)


def test_a_body_that_breaks_off_is_not_an_error_of_the_node(
    node: LocalNode, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(node.endpoint, PATIENCE) as raw:
        raw.sendall(post(b"/v1/topics", b"Content-Length: 100", b"{"))
        node.wait_until(lambda: node.server.held > 0)
    node.wait_until(lambda: node.server.held == 0)
    assert not caplog.records


def open_files(process: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


@pytest.fixture
def polled(node: LocalNode) -> LocalNode:
    client = node.client()
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    client.post("/v1/queues", {"name": "mail"})
    client.close()
    return node


@pytest.mark.parametrize(
    "request_",
    [
        f"GET {MESSAGES}?offset=0&wait=60 HTTP/1.1\r\nHost: a\r\n\r\n",
        f"GET {TOPIC}/partitions/0/batches?offset=0&wait=60 HTTP/1.1\r\nHost: a\r\n\r\n",
        'POST /v1/queues/mail/take HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n{"wait": 60}',
        (
            "POST /api/v1/storage/consume HTTP/1.1\r\nHost: a\r\nContent-Length: 71\r\n\r\n"
            '{"topic": "orders", "partition": 0, "offset": 0, "maxWaitMs": 60000}   '
        ),
    ],
    ids=["fetch", "batches", "take", "consume"],
)
def test_polls_whose_clients_have_gone_are_over(polled: LocalNode, request_: str) -> None:
    files, tasks, threads = open_files(), polled.tasks, threading.active_count()
    for _ in range(3):
        clients = [socket.create_connection(polled.endpoint, PATIENCE) for _ in range(30)]
        for each in clients:
            each.sendall(request_.encode())
        polled.wait_until(lambda: polled.server.busy == 30)
        for each in clients:
            each.close()
        polled.wait_until(lambda: polled.server.busy == 0)
    polled.wait_until(lambda: polled.tasks <= tasks + 1)  # and the one that waits here
    assert polled.polls == 0
    assert open_files() <= files + 2  # the topic's watch may have its own
    assert threading.active_count() <= threads + 10  # the pool of store calls, a watch


def test_what_was_taken_for_a_client_that_has_gone_is_given_back(polled: LocalNode) -> None:
    with socket.create_connection(polled.endpoint, PATIENCE) as raw:
        raw.sendall(
            b"POST /v1/queues/mail/take HTTP/1.1\r\nHost: a\r\nContent-Length: 25\r\n\r\n"
            b'{"wait": 60, "lease": 60}'
        )
        polled.wait_until(lambda: polled.server.busy == 1)
    polled.wait_until(lambda: polled.server.busy == 0)
    client = polled.client()
    client.post("/v1/queues/mail/items", {"items": [{"value": "a"}]})
    assert client.post("/v1/queues/mail/take", {"wait": 10}).json["items"][0]["value"] == "a"
    client.close()


def test_a_wait_is_bounded_by_the_node() -> None:
    with LocalNode("memory://", max_wait=0.01) as node:
        client = node.client()
        client.post("/v1/queues", {"name": "mail"})
        assert client.post("/v1/queues/mail/take", {"wait": 60}).json["items"] == []
        client.close()


# Very many of everything


def full(answer: Reply) -> None:
    assert (answer.status, answer.json["code"]) == (503, "node_full"), answer.body
    assert answer.json["retryable"]
    assert answer.headers["retry-after"] == "1"


def test_a_node_holds_so_many_groups_members_and_leases(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.server.groups.service.MOST_GROUPS", 2)
    monkeypatch.setattr("pxrs.server.groups.service.MOST_MEMBERS", 3)
    monkeypatch.setattr("pxrs.server.leases.MOST_LEASES", 2)
    client.post("/v1/topics", {"name": "orders", "partitions": 1})

    def join(group: str, member: str) -> Reply:
        return client.post(f"/v1/groups/{group}/members", {"member": member, "topics": ["orders"]})

    assert [join("a", "1").status, join("b", "1").status] == [201, 201]
    full(join("c", "1"))
    assert join("a", "2").status == 201
    full(join("a", "3"))
    # Who is a member already may say so again.
    assert join("a", "2").status == 201
    client.post("/v1/queues/mail/items", {"items": [{"value": "a"}] * 3})
    leases = [client.post("/v1/queues/mail/take", {}).json["lease"] for _ in range(2)]
    full(client.post("/v1/queues/mail/take", {}))
    client.post(f"/v1/leases/{leases[0]}/commit", {})
    assert client.post("/v1/queues/mail/take", {}).json["lease"]


def test_a_node_holds_so_many_items(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.server.leases.MOST_LEASED_ITEMS", 3)
    client.post("/v1/queues/mail/items", {"items": [{"value": "a"}] * 9})
    first = client.post("/v1/queues/mail/take", {"max": 2}).json["lease"]
    assert client.post("/v1/queues/mail/take", {"max": 2}).json["lease"]
    full(client.post("/v1/queues/mail/take", {}))
    client.post(f"/v1/leases/{first}/release", {})
    assert client.post("/v1/queues/mail/take", {}).json["lease"]


def test_a_lease_has_so_many_bytes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand items of a megabyte each would be a gigabyte in one answer."""
    monkeypatch.setattr("pxrs.server.leases._MOST_BYTES", 20_000)
    for value in ("a" * 1000, "b"):
        client.post("/v1/queues/mail/items", {"items": [{"value": value}] * 100})
    seen = []
    while items := client.post("/v1/queues/mail/take", {"max": 1000}).json["items"]:
        assert sum(len(item["value"]) for item in items) <= 21_000
        seen += [item["id"] for item in items]
    assert len(set(seen)) == len(seen) == 200


def test_polls_wait_for_so_many_topics(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.server.arrivals.MOST_WATCHED_TOPICS", 1)
    client = node.client()
    for name in ("a", "b"):
        client.post("/v1/topics", {"name": name, "partitions": 1})
    with socket.create_connection(node.endpoint, PATIENCE) as raw:
        path = "/v1/topics/a/partitions/0/messages?offset=0&wait=60"
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        node.wait_for_polls(1)
        full(client.get("/v1/topics/b/partitions/0/messages?offset=0&wait=60"))
        assert client.get("/v1/topics/b/partitions/0/messages?offset=0").status == 200
    client.close()


@pytest.fixture
def many_files() -> Iterator[int]:
    """As many open files as this process may have, until the test has ended."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**16 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    yield max(soft, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
def test_ten_thousand_connections(many_files: int) -> None:
    """Those over the limit are told so, those that are there are served, and all is well after."""
    most = min(10_000, many_files - 500)
    node = NodeProcess("memory://", "--max-connections", str(most))
    try:
        client = node.client()
        assert client.get("/health/live").status == 200
        before = open_files(node.process.pid)
        crowd = [socket.create_connection(node.endpoint, PATIENCE) for _ in range(most - 1)]
        for each in crowd:
            each.sendall(b"GET /health/live HTTP/1.1\r\nHost")
        assert client.get("/health/live").status == 200
        refused = node.client()
        answer = refused.get("/health/live")
        assert (answer.status, answer.json["code"]) == (503, "too_many_connections")
        refused.close()
        for each in crowd[::2]:
            each.sendall(b": a\r\n\r\n")
        for each in crowd[::2]:
            assert each.recv(1000).startswith(b"HTTP/1.1 200")
        for each in crowd:
            each.close()
        while open_files(node.process.pid) > before:
            assert client.get("/health/live").status == 200
        client.close()
        assert "Traceback" not in node.terminate()
    finally:
        node.kill()


@pytest.mark.long
def test_few_open_files() -> None:
    """Connections leave the store some of the process's files."""
    node = NodeProcess("memory://", open_files=100)
    try:
        crowd = []
        for _ in range(120):
            each = socket.create_connection(node.endpoint, PATIENCE)
            crowd.append(each)
        assert crowd[60].recv(20).startswith(b"HTTP/1.1 503")
        for each in crowd:
            each.close()
        assert "max_connections is 50 instead of 10000" in node.terminate()
    finally:
        node.kill()
