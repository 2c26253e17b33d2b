"""Tokens, rights and TLS: what a secured node gives to whom."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import ssl
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import trustme

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.core.records import MemberRecord, member_key
from pxrs.core.records import encode as encode_record
from pxrs.errors import ConfigError, InvalidRequest
from pxrs.server.rest.guard import Guard
from pxrs.server.settings import load_settings
from pxrs.server.tokens import Right, Tokens, all_rights, parse_right
from pxrs.stores.open import open_stores
from pxrs.types import Put
from support.child import PATIENCE
from support.node import Client, LocalNode, looks

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


def fill(client: Client, admin: str) -> set[str]:
    """Make something of everything; the names that no answer may have."""

    def make(path: str, body: Any, method: str = "POST") -> None:
        answer = client(method, path, body, bearer(admin))
        assert answer.status in (200, 201), (path, answer.body)

    make("/v1/topics", {"name": "hidden-topic", "partitions": 2})
    make("/v1/topics/hidden-topic/messages", {"messages": [{"value": "hidden-value"}]})
    make("/v1/groups/hidden-group/members", {"member": "hidden-member", "topics": ["hidden-topic"]})
    make(
        "/api/v1/metadata/consumer-groups/find-or-create",
        {"topic": "hidden-topic", "appId": "hidden-app"},
    )
    make("/v1/queues/hidden-queue/items", {"items": [{"value": "hidden-item"}]})
    make("/v1/queues/hidden-queue/take", {"lease": 1000})
    make("/v1/kv/hidden-key", {"value": "hidden-entry"}, "PUT")
    return {"hidden", "secured.db", *admin.split(".")[2:]}


def test_without_a_token_there_is_nothing_to_be_seen(url: str, admin: str) -> None:
    with LocalNode(url) as node:
        client = node.client()
        hidden = fill(client, admin)
        document = client("GET", "/openapi.json", headers=bearer(admin)).json
        tried, opened = 0, set()
        for path, methods in [*document["paths"].items(), ("/openapi.json", ("get",))]:
            for method in methods:
                filled = re.sub(r"\{\w+\}", "0", path)
                for headers in ({}, bearer("x"), bearer("pxrs.admin.wrong"), bearer(admin + "x")):
                    answer = client(method.upper(), filled, b"{}", headers)
                    told = f"{answer.headers} {answer.body.decode()}"
                    assert not [name for name in hidden if name in told], (method, path, told)
                    if path in OPEN:
                        opened.add(path)
                        continue
                    assert answer.status == 401, (method, path, answer.body)
                    assert set(answer.json) <= {
                        "title", "status", "code", "detail", "request_id",
                    }  # fmt: skip
                    tried += 1
        assert tried > 150
        assert client.get("/nowhere").status == 401
        # What is open gives away neither what there is nor which names of tokens are right.
        assert opened == OPEN
        login = "/api/v1/auth/login"
        wrong = [
            client.post(login, {"username": name, "password": "x"}) for name in ("admin", "none")
        ]
        assert {answer.status for answer in wrong} == {401}
        assert len({answer.json["detail"] for answer in wrong}) == 1
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


def test_a_client_that_begins_no_tls(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.server.rest.http._HANDSHAKE", 0.2)
    server = trustme.CA().issue_cert("127.0.0.1")
    server.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    server.private_key_pem.write_to_path(tmp_path / "key.pem")
    files: dict[str, Any] = {
        "tls_cert": f"{tmp_path}/cert.pem", "tls_key": f"{tmp_path}/key.pem",
    }  # fmt: skip
    with (
        LocalNode(url, **files) as node,
        socket.create_connection(node.endpoint, PATIENCE) as raw,
    ):
        raw.sendall(b"\x16\x03\x01")
        with suppress(ConnectionResetError):
            assert raw.recv(1000) == b""


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
        answer = friend.getresponse()
        assert (answer.status, answer.read() != b"") == (200, True)
        friend.request("GET", "/api/v1/metadata/controller")
        controller = json.loads(friend.getresponse().read())
        assert controller["controllerUrl"] == f"https://{node.endpoint}"
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


# What a token with rights to other names gets from each route: 403, except for these.
_LISTS = {
    "/v1/topics", "/v1/groups", "/v1/queues", "/api/v1/metadata/consumer-groups",
    "/api/v1/metadata/topics",
}  # fmt: skip
_ANY_TOKEN = {"/v1/cluster"}
_QUERIES = {"messages": "?offset=0", "batches": "?offset=0", "offsets": "?time=0"}
_MESSAGE = {"messages": [{"value": "a"}]}
_BODIES: dict[str, Any] = {
    "/v1/topics": {"name": "orders", "partitions": 1},
    "/v1/topics/{topic}/messages": _MESSAGE,
    "/v1/topics/{topic}/partitions/{partition}/messages": _MESSAGE,
    "/v1/topics/{topic}/partitions/{partition}/batches": {},
    "/v1/groups/{group}/members": {"member": "m", "topics": ["orders"]},
    "/v1/groups/{group}/commits": {"commits": [{"fence": "a", "offset": 0}]},
    "/v1/queues": {"name": "mail"},
    "/v1/queues/{queue}/items": {"items": [{"value": "a"}]},
    "/v1/queues/{queue}/take": {},
    "/v1/queues/{queue}/redrive": {},
    "/v1/queues/{queue}/drop": {},
    "/v1/kv/{key}": {"value": "a"},
    "/v1/leases/{lease}/extend": {"lease": 10},
    "/v1/leases/{lease}/commit": {"put": [{"queue": "mail", "value": "a"}]},
    "/v1/leases/{lease}/release": {},
    "/api/v1/metadata/consumer-groups/find-or-create": {"topic": "orders", "appId": "a"},
    "/api/v1/consumer-group/join": {"groupId": "G_orders_a", "consumerId": "m"},
    "/api/v1/consumer-group/heartbeat": {"groupId": "G_orders_a", "memberId": "m~G_orders_a"},
    "/api/v1/consumer-group/commit-offsets": {
        "groupId": "G_orders_a", "memberId": "m~G_orders_a", "offsets": {"0": 0},
    },
    "/api/v1/consumer-group/leave": {"groupId": "G_orders_a", "memberId": "m~G_orders_a"},
    "/api/v1/metadata/topics": {"topicName": "orders", "partitionCount": 1},
    "/api/v1/storage/messages": {"topic": "orders", "partition": 0, "messages": [{"key": "a"}]},
    "/api/v1/storage/consume": {"topic": "orders", "partition": 0, "offset": 0},
    "/api/v1/consumer-groups/join": {"groupId": "G_orders_a", "consumerId": "m"},
    "/api/v1/consumer-groups/heartbeat": {"groupId": "G_orders_a", "consumerId": "m"},
}  # fmt: skip
_NAMES = {
    "topic": "orders", "partition": "0", "group": "G_orders_a", "queue": "mail",
    "member": "m~G_orders_a", "key": "orders",
}  # fmt: skip


def test_rights_to_something_else_open_no_route(url: str, admin: str) -> None:
    """Route by route from the document: one that is added must say here what it needs."""
    rights = [
        f"{kind}:{name}:read,write,admin"
        for kind in ("topic", "group", "queue", "key", "cluster")
        # Neither a longer name nor a shorter one is the one that they are for.
        for name in ("other*", "order", "orders2*", "mai", "mail2", "G_orders", "G_orders_ab*")
    ]
    token = reader_of(url, *rights)
    with LocalNode(url) as node:
        client = node.client()
        found = client(
            "POST", "/api/v1/metadata/consumer-groups/find-or-create",
            _BODIES["/api/v1/metadata/consumer-groups/find-or-create"], bearer(admin),
        )  # fmt: skip
        assert found.status == 200
        lease = client("POST", "/v1/queues/mail/take", {"lease": 60}, bearer(admin)).json["lease"]
        names = {**_NAMES, "lease": lease}
        before = node.px.topics.describe("orders")
        document = client("GET", "/openapi.json", headers=bearer(admin)).json
        for path, methods in document["paths"].items():
            if path in OPEN:
                continue
            for method in methods:
                filled = re.sub(r"\{(\w+)\}", lambda match: names[match[1]], path)
                query = _QUERIES.get(path.rpartition("/")[2], "") if method == "get" else ""
                body = _BODIES[path] if method in ("post", "put") else None
                answer = client(method.upper(), filled + query, body, bearer(token))
                told = (method, path, answer.status, answer.body)
                if method == "get" and path in _LISTS | _ANY_TOKEN:
                    assert answer.status == 200, told
                    assert b"orders" not in answer.body, told
                    assert b"mail" not in answer.body, told
                elif path in ("/v1/leases/{lease}/extend", "/v1/leases/{lease}/release"):
                    # A lease is its taker's alone: to others it is not there.
                    assert (answer.status, answer.json["code"]) == (409, "lease_lost"), told
                else:
                    assert (answer.status, answer.json["code"]) == (403, "forbidden"), told
        assert node.px.topics.describe("orders") == before
        assert client("POST", f"/v1/leases/{lease}/commit", {}, bearer(admin)).status == 200
        client.close()


def test_a_guard_that_asks_goes_on_asking(url: str) -> None:
    """Whatever the store had when it was asked: it may be about to be told otherwise."""

    async def ask() -> bool:
        async def none_yet(_: object) -> list[object]:
            guard.asks = True
            return []

        guard = Guard(Tokens(px.stores.coord, SYSTEM_CLOCK), SYSTEM_CLOCK, none_yet, asks=False)
        await guard.ask_if_there_are_tokens()
        return guard.asks

    with pxrs.connect(url) as px:
        assert asyncio.run(ask())


def test_the_first_token_is_noticed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.server.node._CHECK_STORE", 0.05)
    with LocalNode(url) as node:
        client = node.client()
        assert client.get("/v1/topics").status == 200
        login = {"username": "first", "password": "x"}
        assert client.post("/api/v1/auth/login", login).json["token"] == "none-needed"
        tokens = Tokens(node.px.stores.coord, SYSTEM_CLOCK)
        token = tokens.create("first", all_rights())
        node.wait_until(lambda: node.guard.asks)
        assert client.get("/v1/topics").status == 401
        assert client.post("/api/v1/auth/login", login).status == 401
        assert client("GET", "/v1/topics", headers=bearer(token)).status == 200
        # Without any token nobody is let in: it is not open again.
        tokens.revoke("first")
        assert client.get("/v1/topics").status == 401
        client.close()


def test_a_login_ends_with_its_token(url: str, admin: str) -> None:
    with pxrs.connect(url) as px:
        short = Tokens(px.stores.coord, SYSTEM_CLOCK).create("short", all_rights(), expires_in=600)
    with LocalNode(url) as node, closing(node.client()) as client:
        for token, least, most in ((admin, 86_400, 86_400), (short, 1, 600)):
            _, name, secret = token.split(".")
            login = {"username": name, "password": secret}
            for answer in (
                client.post("/api/v1/auth/login", login),
                client("POST", "/api/v1/auth/refresh", headers=bearer(token)),
            ):
                assert least <= answer.json["expiresIn"] <= most


def expire(node: LocalNode, name: str) -> None:
    """End the time of a token in the store."""
    coord = node.px.stores.coord
    found = coord.get(f"tokens/{name}")
    assert found is not None
    record = msgspec.json.decode(found.value)
    put = Put(f"tokens/{name}", msgspec.json.encode({**record, "expires_ms": 1}))
    coord.commit([], [put])


def test_an_expired_token_keeps_its_own_membership_alive_and_no_more(
    url: str, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.server.rest.guard._REMEMBERED", 0.0)
    token = reader_of(url, "topic:orders:read,write", "group:G_orders_a:read,write")
    with LocalNode(url) as node:
        client = node.client()

        def ask(path: str, body: Any, who: str = token) -> Any:
            return client("POST", path, body, bearer(who))

        group = {"topic": "orders", "appId": "a"}
        assert ask("/api/v1/metadata/consumer-groups/find-or-create", group).status == 200
        ask(f"{ORDERS}/messages", {"messages": [{"value": "a"}] * 3})
        mine = {"groupId": "G_orders_a", "consumerId": "mine"}
        theirs = {"groupId": "G_orders_a", "consumerId": "theirs"}
        beat = "/api/v1/consumer-groups/heartbeat"
        assert ask("/api/v1/consumer-groups/join", mine).json["success"]
        assert ask("/api/v1/consumer-groups/join", theirs, admin).json["success"]
        # Until the group's target has both.
        for _ in looks():
            ask(beat, theirs, admin)
            if ask(beat, mine).json["rebalanceState"] == "STABLE":
                break
        expire(node, "reader")
        for _ in range(3):
            assert ask(beat, {**mine, "offsets": {"0": 3}}).json["success"]
        assert node.px.groups.describe("G_orders_a").partitions[0].checkpoint is None
        assert ask(beat, theirs).status == 401
        assert ask(beat, {**mine, "consumerId": "new"}).status == 401
        for path in ("/api/v1/consumer-groups/join", "/api/v1/auth/refresh"):
            assert ask(path, mine).status == 401
        assert ask(f"{ORDERS}/messages", {"messages": [{"value": "a"}]}).status == 401
        assert client("GET", "/v1/topics", headers=bearer(token)).status == 401
        node_token = bearer("pxrs.reader.wrong")
        assert client("POST", beat, mine, node_token).status == 401
        client.close()
    # The node restarts, or another takes over: the membership is still its own.
    with LocalNode(url) as node, closing(node.client()) as client:
        assert client("POST", beat, theirs, bearer(token)).status == 401
        assert client("POST", beat, {**mine, "consumerId": "new"}, bearer(token)).status == 401
        answer = client("POST", beat, mine, bearer(token))
        assert (answer.status, answer.json["success"]) == (200, True), answer.body
        shown = node.px.groups.describe("G_orders_a")
        assert "mine" in {member.name for member in shown.members}


@pytest.mark.parametrize("token", ["\xff", "pxrs.admin.\xe9", "pxrs.admin.", "pxrs..", ".", "pxrs"])
def test_tokens_that_are_none(url: str, admin: str, token: str) -> None:
    with LocalNode(url) as node:
        client = node.client()
        assert client("GET", "/v1/topics", headers=bearer(token)).status == 401
        secret = {"username": "admin", "password": token}
        assert client.post("/api/v1/auth/login", secret).status == 401
        client.close()


@pytest.mark.parametrize("value", ["a", "\xff", "0" * 64])
def test_who_is_no_node_signs_nothing(url: str, admin: str, value: str) -> None:
    names = ("X-Pxrs-Forwarded", "X-Pxrs-Token", "X-Pxrs-Body", "X-Pxrs-Signature")
    with LocalNode(url) as node:
        client = node.client()
        for more in ({}, {"X-Pxrs-Token": "admin"}, bearer(admin)):
            refused = client("GET", "/v1/topics", headers=dict.fromkeys(names, value) | more)
            assert (refused.status, refused.json["code"]) == (401, "bad_signature")
        client.close()


def test_requests_go_only_to_nodes(url: str) -> None:
    """A member whose record names an address that is no node's: nothing is sent there."""
    with LocalNode(url) as node, socket.create_server(("127.0.0.1", 0)) as stranger:
        client = node.client()
        client.post("/v1/topics", {"name": "orders", "partitions": 1})
        address = "{}:{}".format(*stranger.getsockname())
        record = MemberRecord(id="m.1", topics=("orders",), node=address)
        coord = node.px.stores.coord
        coord.commit([], [Put(member_key("g", "m"), encode_record(record))])
        for headers in ({}, {"X-Pxrs-Follows": "1"}):
            answer = client("GET", "/v1/groups/g/members/m", headers=headers)
            assert (answer.status, answer.json["code"]) == (503, "leader_moving")
            assert address not in str(answer)
        place = address.encode().hex()  # as the leases of a node at that address would name it
        for lease in (f"a.{place}", "a.é", "a.", "a.====", "a.%00", "a.00ff"):
            answer = client("POST", f"/v1/leases/{quote(lease)}/extend", {"lease": 1})
            assert (answer.status, answer.json["code"]) == (409, "lease_lost")
        stranger.settimeout(0)
        with pytest.raises(BlockingIOError):
            stranger.accept()
        client.close()
