"""Tokens, rights and TLS: what a secured node gives to whom."""

from __future__ import annotations

import http.client
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import ConfigError, InvalidRequest
from pxrs.server.settings import load_settings
from pxrs.server.tokens import Right, Tokens, all_rights, parse_right
from pxrs.stores.open import open_stores
from support.node import Client, LocalNode

ORDERS = "/v1/topics/orders"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/secured.db"


@pytest.fixture
def admin(url: str) -> str:
    with pxrs.connect(url) as px:
        px.topics.create("orders", 1)
        px.topics.create("private", 1)
        px.put("mail", "a")
        return Tokens(px.stores.coord, SYSTEM_CLOCK).create("admin", all_rights())


def reader_of(url: str, *rights: str) -> str:
    with pxrs.connect(url) as px:
        tokens = Tokens(px.stores.coord, SYSTEM_CLOCK)
        return tokens.create("reader", [parse_right(right) for right in rights])


def test_without_a_token_there_is_nothing_to_be_seen(url: str, admin: str) -> None:
    with LocalNode(url) as node:
        client = node.client()
        document = client("GET", "/openapi.json", headers=bearer(admin)).json
        tried = 0
        for path, methods in document["paths"].items():
            for method in methods:
                filled = re.sub(r"\{\w+\}", "0", path)
                for headers in ({}, bearer("x"), bearer("pxrs.admin.wrong"), bearer(admin + "x")):
                    answer = client(method.upper(), filled, b"{}", headers)
                    if path in OPEN:
                        continue
                    assert answer.status == 401, (method, path, answer.body)
                    assert set(answer.json) <= {
                        "title", "status", "code", "detail", "request_id",
                    }  # fmt: skip
                    tried += 1
        assert tried > 150
        assert client.get("/nowhere").status == 401
        assert client("GET", ORDERS, headers=bearer(admin)).status == 200
        client.close()


OPEN = {
    "/health/live", "/health/ready", "/openapi.json", "/api/v1/metadata/brokers",
    "/api/v1/metadata/controller", "/api/v1/raft/status", "/api/v1/auth/login",
    "/api/v1/auth/refresh",
}  # fmt: skip


def test_rights_go_by_name_and_action(url: str, admin: str) -> None:
    token = reader_of(url, "topic:ord*:read", "queue:mail:read,write")
    with LocalNode(url) as node:
        client = node.client()

        def ask(method: str, path: str, body: object = None) -> int:
            return client(method, path, body, bearer(token)).status

        assert ask("GET", ORDERS) == 200
        assert ask("GET", f"{ORDERS}/partitions/0/messages?offset=0") == 200
        assert ask("POST", f"{ORDERS}/messages", {"messages": [{"value": "a"}]}) == 403
        assert ask("DELETE", ORDERS) == 403
        assert ask("GET", "/v1/topics/private") == 403
        assert ask("POST", "/v1/topics", {"name": "ordnance", "partitions": 1}) == 403
        seen = client("GET", "/v1/topics", headers=bearer(token)).json["topics"]
        assert [topic["name"] for topic in seen] == ["orders"]
        assert ask("POST", "/v1/groups/g/members", {"member": "a", "topics": ["orders"]}) == 403
        taken = client("POST", "/v1/queues/mail/take", {}, bearer(token)).json
        # A lease is its taker's alone, and rights count for what a commit puts and sends.
        commit = f"/v1/leases/{taken['lease']}/commit"
        assert client("POST", commit, {}, bearer(admin)).status == 409
        assert ask("POST", commit, {"put": [{"queue": "other", "value": "a"}]}) == 403
        assert ask("POST", commit, {"send": [{"topic": "orders", "value": "a"}]}) == 403
        assert ask("POST", commit, {}) == 200
        client.close()


def test_logging_in_as_the_existing_client_does(url: str, admin: str) -> None:
    _, name, secret = admin.split(".")
    with LocalNode(url) as node:
        client = node.client()
        good = client.post("/api/v1/auth/login", {"username": name, "password": secret})
        assert good.json["token"] == admin
        wrong = client.post("/api/v1/auth/login", {"username": name, "password": "x"})
        assert wrong.status == 401
        again = client("POST", "/api/v1/auth/refresh", headers=bearer(admin))
        assert again.json["token"] == admin
        client.close()


class MovableClock:
    """Wall-clock time that a test moves."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_ms / 1000


def test_tokens_expire_rotate_and_end() -> None:
    clock = MovableClock()
    tokens = Tokens(open_stores("memory://").coord, clock)
    right = Right("topic", "a", ("read",))
    first = tokens.create("app", [right], expires_in=60)
    identity = tokens.identify(first)
    assert identity is not None
    assert identity.may("topic", "a", "read")
    assert not identity.may("topic", "ab", "read")
    second = tokens.rotate("app")
    assert tokens.identify(first) is not None
    assert tokens.identify(second) is not None
    clock.now_ms += 60_000
    late = tokens.identify(second)
    assert late is not None
    assert late.expired
    clock.now_ms += 3_600_000
    assert tokens.identify(first) is None
    tokens.revoke("app")
    assert tokens.identify(second) is None
    assert first.split(".")[2] not in str(tokens.list())
    for wrong in ("a b", "", "x" * 65):
        with pytest.raises(InvalidRequest):
            tokens.create(wrong, [right])
    with pytest.raises(InvalidRequest):
        tokens.create("none", [])
    for text in ("topic:a", "topic:a:fly", "thing:a:read", "", "topic::read"):
        with pytest.raises(ConfigError):
            parse_right(text)


def test_tls_and_client_certificates(url: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    server, mine = authority.issue_cert("127.0.0.1"), authority.issue_cert("client")
    server.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    server.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    files: dict[str, Any] = {
        "tls_cert": f"{tmp_path}/cert.pem",
        "tls_key": f"{tmp_path}/key.pem",
        "tls_client_ca": f"{tmp_path}/ca.pem",
    }
    with LocalNode(url, **files) as node:
        trusting = ssl.create_default_context(cafile=f"{tmp_path}/ca.pem")
        stranger = http.client.HTTPSConnection(*node.endpoint, context=trusting, timeout=10)
        with pytest.raises((ssl.SSLError, OSError)):
            stranger.request("GET", "/health/live")
            stranger.getresponse()
        stranger.close()
        known = ssl.create_default_context(cafile=f"{tmp_path}/ca.pem")
        mine.configure_cert(known)
        friend = http.client.HTTPSConnection(*node.endpoint, context=known, timeout=10)
        friend.request("GET", "/health/live")
        assert friend.getresponse().status == 200
        friend.close()


def test_other_hosts_need_protection() -> None:
    both = {"tls_cert": "c", "tls_key": "k"}
    for missing in ({}, {"auth": "tokens"}, both, {"tls_cert": "c"}, {"tls_client_ca": "c"}):
        with pytest.raises(ConfigError):
            load_settings({"listen": "0.0.0.0:1", **missing}, None, {})
    load_settings({"listen": "0.0.0.0:1", "auth": "tokens", **both}, None, {})
    load_settings({"listen": "0.0.0.0:1", "tls_client_ca": "c", **both}, None, {})


def test_no_secret_is_logged(url: str, admin: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="pxrs")
    with LocalNode(url) as node:
        client: Client = node.client()
        client("GET", ORDERS, headers=bearer(admin))
        client("GET", ORDERS, headers=bearer(admin + "x"))
        client.close()
    assert admin.split(".")[2] not in caplog.text
