"""The HTTP layer: limits, refusals, and what is told of them."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path

import pytest

from pxrs.errors import ConfigError
from pxrs.server.settings import Endpoint, load_settings, misspelled, open_to_others, parse_endpoint
from pxrs.topics import Topics
from support.node import Client, LocalNode, NodeProcess, looks


@pytest.fixture
def url() -> str:
    return "memory://"


def test_health_and_the_document(client: Client) -> None:
    assert client.get("/health/live").json["alive"] is True
    document = client.get("/openapi.json").json
    assert "/v1/topics/{topic}/messages" in document["paths"]
    assert document["openapi"] == "3.1.0"


def test_a_bug_in_a_look_at_the_store_does_not_end_the_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pxrs.server.node._CHECK_SOON", 0.01)
    looked: list[None] = []
    look = Topics.list

    def fail_once(topics: Topics) -> object:
        looked.append(None)
        if len(looked) == 1:
            raise RuntimeError("a bug")
        return look(topics)

    monkeypatch.setattr(Topics, "list", fail_once)
    with LocalNode("memory://") as node:
        client = node.client()
        for _ in looks():
            if client.get("/health/ready").status == 200:
                break
        client.close()


def test_paths_and_methods(client: Client) -> None:
    missing = client.get("/v2/nothing")
    assert (missing.status, missing.json["code"]) == (404, "no_such_path")
    assert missing.headers["content-type"].startswith("application/problem+json")
    wrong = client("PUT", "/v1/topics")
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, POST")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"name": 1, "partitions": 1}',
        b'{"name": "a"}',
        b'{"name": "a", "partitions": 0}',
        b'{"name": "a", "partitions": 1, "unknown": 1}',
        b'{"name": "../a", "partitions": 1}',
        b'{"name": "", "partitions": 1}',
    ],
)
def test_bad_bodies(client: Client, body: bytes) -> None:
    refused = client("POST", "/v1/topics", body)
    assert refused.status == 400, refused.body
    assert refused.json["detail"]
    assert client.get("/v1/topics").json == {"topics": []}


@pytest.mark.parametrize(
    "query", ["", "offset=-1", "offset=x", "offset=0&max=0", "offset=0&wait=-1", "offset=0&who=me"]
)
def test_bad_queries(client: Client, query: str) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    assert client.get(f"/v1/topics/orders/partitions/0/messages?{query}").status == 400


@pytest.mark.parametrize(
    ("partition", "status"), [("1", 404), ("-1", 400), ("x", 400), ("1e3", 400)]
)
def test_bad_partitions(client: Client, partition: str, status: int) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    path = f"/v1/topics/orders/partitions/{partition}/messages"
    assert client.get(f"{path}?offset=0").status == status
    assert client.post(path, {"messages": [{"value": "a"}]}).status == status


@pytest.mark.parametrize("data", [b"", b"x" * 60, b"x" * 61, bytes(200)])
def test_bad_batches(client: Client, data: bytes) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    refused = client("POST", "/v1/topics/orders/partitions/0/batches", data)
    assert refused.status == 400, refused.body


def test_a_body_that_is_too_large() -> None:
    with LocalNode("memory://", max_body=1000) as node:
        client = node.client()
        refused = client("POST", "/v1/topics", b"x" * 1001)
        assert (refused.status, refused.json["code"]) == (413, "body_too_large")
        client.close()
        chunked = http.client.HTTPConnection(*node.endpoint)
        chunked.request("POST", "/v1/topics", iter([b"x" * 600] * 5), encode_chunked=True)
        assert chunked.getresponse().status == 413
        chunked.close()


def test_compressed_bodies_are_refused(client: Client) -> None:
    refused = client("POST", "/v1/topics", b"x", {"Content-Encoding": "gzip"})
    assert refused.status == 415


def test_a_body_that_does_not_come() -> None:
    request = b"POST /v1/topics HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
    with (
        LocalNode("memory://", request_timeout=0.2) as node,
        socket.create_connection(node.endpoint) as raw,
    ):
        raw.sendall(request)
        assert raw.recv(1000).startswith(b"HTTP/1.1 408")


def test_connections_over_the_limit() -> None:
    with LocalNode("memory://", max_connections=2) as node:
        clients = [node.client() for _ in range(3)]
        statuses = [each.get("/health/live").status for each in clients]
        assert statuses == [200, 200, 503]
        for each in clients:
            each.close()


def test_settings_come_from_three_places(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('listen = "127.0.0.1:1"\nmax_body = 5\nnode_id = "file"\n')
    variables = {"PXRS_SERVE_LISTEN": "127.0.0.1:2", "PXRS_SERVE_NODE_ID": "variable"}
    found = load_settings({"node_id": "flag", "listen": None}, file, variables)
    assert (found.node_id, found.listen, found.max_body) == ("flag", "127.0.0.1:2", 5)
    for wrong in ('liste = "a"', "max_body = 0", 'max_body = "x"', "= 3", 'node_id = "a b"'):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            load_settings({}, file, {})


def test_a_misspelled_variable_is_told() -> None:
    """Those that Kubernetes makes for a service named pxrs-serve are none of ours."""
    others = {"PXRS_SERVE_PORT": "tcp://10.0.0.1", "PXRS_SERVE_SERVICE_HOST": "h", "PXRS_URL": ""}
    assert misspelled({"PXRS_SERVE_TLS_CERT": "c", **others}) == []
    [told] = misspelled({"PXRS_SERVE_TLS_CERTS": "c", **others})
    assert "PXRS_SERVE_TLS_CERTS is no setting" in told
    assert "did you mean PXRS_SERVE_TLS_CERT?" in told


def test_a_wrong_setting_is_named_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('drain = "soon"\n')
    with pytest.raises(ConfigError, match=r"drain in .*serve\.toml must be a number, got 'soon'"):
        load_settings({}, file, {})
    with pytest.raises(ConfigError, match="PXRS_SERVE_INSECURE must be true or false, got 'what'"):
        load_settings({}, None, {"PXRS_SERVE_INSECURE": "what"})
    with pytest.raises(ConfigError, match="--auth must be one of auto, tokens, off, got 'maybe'"):
        load_settings({"auth": "maybe"}, None, {})
    assert load_settings({"drain": 1.0}, file, {"PXRS_SERVE_DRAIN": "later"}).drain == 1.0
    file.write_text('listn = "127.0.0.1:1"\n')
    with pytest.raises(ConfigError, match=r"listn in .*; did you mean listen\?"):
        load_settings({}, file, {})
    file.write_text("colour = 1\n")
    with pytest.raises(
        ConfigError, match=r"is not a setting of pxrs serve; there are store, listen"
    ):
        load_settings({}, file, {})


def test_files_that_every_user_can_read_are_told(tmp_path: Path) -> None:
    file, key = tmp_path / "serve.toml", tmp_path / "key.pem"
    file.write_text(f'store = "postgresql://a:secret@db/b"\ntls_cert = "c"\ntls_key = "{key}"\n')
    key.write_text("")
    settings = load_settings({}, file, {})
    file.chmod(0o646)
    key.chmod(0o644)
    found = open_to_others(settings, file)
    assert [each.partition(" can be ")[2][:7] for each in found] == [
        "changed",
        "read by",
        "read by",
    ]
    assert "secret" not in str(found)
    assert "secret" not in repr(settings)
    file.chmod(0o640)
    key.chmod(0o600)
    assert open_to_others(settings, file) == []
    # Nothing secret is in it.
    file.chmod(0o644)
    assert open_to_others(load_settings({"store": "postgresql://db/b"}, file, {}), file) == []


def test_other_hosts_are_refused_unless_forced() -> None:
    for listen in ("0.0.0.0:6080", ":6080", "[::]:6080", "example.org:6080"):
        with pytest.raises(ConfigError, match="--insecure"):
            load_settings({"listen": listen}, None, {})
        load_settings({"listen": listen, "insecure": True}, None, {})
    assert parse_endpoint("listen", "[::1]:80") == Endpoint("::1", 80)
    for wrong in ("a", "a:b", "a:99999", "a:1:2", "http://a:1"):
        with pytest.raises(ConfigError, match="host:port"):
            parse_endpoint("listen", wrong)


@pytest.mark.long
@pytest.mark.engine("sqlite")
def test_the_command(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/served.db"
    node = NodeProcess(store, "--log-format", "json")
    try:
        client = node.client()
        assert client.post("/v1/topics", {"name": "orders", "partitions": 1}).status == 201
        sent = client.post("/v1/topics/orders/messages", {"messages": [{"value": "kept"}]})
        assert sent.status == 200
        with pytest.raises(AssertionError, match="choose another --listen"):
            NodeProcess(store, listen=str(node.endpoint))
        lines = [json.loads(line) for line in node.terminate().splitlines()]
        assert node.process.returncode == 0
        assert {line["level"] for line in lines} == {"info"}
        client.close()
    finally:
        node.kill()
    import pxrs

    with pxrs.connect(store) as px:
        assert [message.value for message in px.reader("orders").read(0, 0)] == [b"kept"]
