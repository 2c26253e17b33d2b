"""Requests that another node has to answer."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.server.cluster import NodeInfo
from pxrs.server.node_auth import PassedOn, digest, shared_secret, sign
from pxrs.server.rest.forwarding import NOT_SENT, Forwarding
from pxrs.server.rest.problems import HttpError
from pxrs.server.tokens import Tokens, all_rights, parse_right
from support.child import PATIENCE
from support.node import Client, LocalNode, wait_for_slots


def test_nobody_waits_for_a_node_that_is_gone() -> None:
    async def forward() -> None:
        asked = asyncio.Event()

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            asked.set()
            await reader.read()
            writer.close()

        frozen = await asyncio.start_server(hang, "127.0.0.1", 0)
        address = "{}:{}".format(*frozen.sockets[0].getsockname())
        forwarding = Forwarding(NodeInfo("here", 1, "here:1"), tuple, b"secret", PATIENCE, None)
        answer = asyncio.ensure_future(forwarding.send(address, "GET", "/v1/topics", {}, b"", ""))
        await asked.wait()
        forwarding.give_up_on_others({address})
        await asyncio.sleep(0)
        assert not answer.done()
        forwarding.give_up_on_others({"127.0.0.1:1"})
        with pytest.raises(HttpError, match="is gone") as refused:
            await answer
        assert (refused.value.status, refused.value.code) == (503, "leader_gone")
        await forwarding.close()
        frozen.close()
        await frozen.wait_closed()

    asyncio.run(asyncio.wait_for(forward(), PATIENCE))


def test_a_failure_that_no_client_waits_for_is_not_logged_as_a_bug() -> None:
    """The client goes in the moment in which the other node fails."""

    async def forward() -> None:
        forwarding = Forwarding(NodeInfo("here", 1, "here:1"), tuple, b"secret", PATIENCE, None)
        answer = asyncio.ensure_future(forwarding.send("127.0.0.1:1", "GET", "/", {}, b"", ""))
        while not forwarding._waiting:
            await asyncio.sleep(0)
        (asked,) = forwarding._waiting
        asked.add_done_callback(lambda _: answer.cancel())
        with pytest.raises(asyncio.CancelledError):
            await answer
        # What asyncio asks when nobody refers to it any more.
        assert not asked._log_traceback
        await forwarding.close()

    asyncio.run(asyncio.wait_for(forward(), PATIENCE))


def test_a_write_is_sent_once_and_whether_it_was_is_told() -> None:
    async def forward() -> None:
        asked = 0

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            await reader.readuntil(b"\r\n\r\n")
            asked += 1
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        address = "{}:{}".format(*server.sockets[0].getsockname())
        forwarding = Forwarding(NodeInfo("here", 1, "here:1"), tuple, b"secret", PATIENCE, None)

        async def refusal(method: str) -> str:
            with pytest.raises(HttpError) as refused:
                await forwarding.send(address, method, "/v1/kv/k", {}, b"", "")
            assert refused.value.status == 503
            return refused.value.code

        for number, method in enumerate(("PUT", "DELETE", "POST"), 1):
            assert await refusal(method) == "leader_lost"
            assert asked == number
        server.close()
        await server.wait_closed()
        assert await refusal("PUT") == NOT_SENT
        await forwarding.close()

    asyncio.run(asyncio.wait_for(forward(), PATIENCE))


@pytest.mark.engine("sqlite")
def test_a_request_is_passed_on_under_the_name_of_its_token(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    with pxrs.connect(url) as px:
        px.topics.create("orders", 1)
        tokens = Tokens(px.stores.coord, SYSTEM_CLOCK)
        admin = {"Authorization": f"Bearer {tokens.create('admin', all_rights())}"}
        weak = {"Authorization": f"Bearer {tokens.create('weak', [parse_right('topic:*:read')])}"}
    with LocalNode(url, node_id="n0") as first, LocalNode(url, node_id="n1") as second:
        clients = [first.client(), second.client()]
        for client in clients:
            wait_for_slots(client, {"n0", "n1"}, admin)
        body = {"member": "a", "topics": ["orders"]}
        joined = clients[0]("POST", "/v1/groups/g/members", body, admin)
        assert joined.status == 201, joined.body
        for path in ("/v1/groups/g/members/a", "/v1/groups/g/members/%61?wait=0"):
            answers = [client("GET", path, None, admin) for client in clients]
            assert [answer.status for answer in answers] == [200, 200]
            # One of them has asked the other.
            assert sum("x-pxrs-leader" in answer.headers for answer in answers) == 1
            assert [client("GET", path, None, weak).status for client in clients] == [403, 403]
        for client in clients:
            client.close()


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("kind", ["tls_ca", "tls_client_ca"])
def test_nodes_with_certificates_of_one_authority_pass_on(tmp_path: Path, kind: str) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    trusting = ssl.create_default_context(cafile=f"{tmp_path}/ca.pem")
    authority.issue_cert("client").configure_cert(trusting)

    authorities: dict[str, Any] = {kind: f"{tmp_path}/ca.pem"}

    def node(name: str) -> LocalNode:
        own = authority.issue_cert("127.0.0.1")
        own.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        own.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        return LocalNode(
            f"sqlite:///{tmp_path}/shared.db", node_id=name, tls_cert=f"{tmp_path}/{name}.pem",
            tls_key=f"{tmp_path}/{name}.key", **authorities,
        )  # fmt: skip

    with node("n0") as first, node("n1") as second:
        first.px.topics.create("orders", 1)
        clients = [Client(each.endpoint, tls=trusting) for each in (first, second)]
        for client in clients:
            wait_for_slots(client, {"n0", "n1"})
        body = {"member": "a", "topics": ["orders"]}
        answers = [client.post("/v1/groups/g/members", body) for client in clients]
        assert [answer.status for answer in answers] == [201, 201]
        assert sum("x-pxrs-leader" in answer.headers for answer in answers) == 1
        for client in clients:
            client.close()


@pytest.mark.engine("sqlite")
def test_what_no_node_has_signed_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    with pxrs.connect(url) as px:
        px.topics.create("orders", 1)
        Tokens(px.stores.coord, SYSTEM_CLOCK).create("admin", all_rights())
        secret = shared_secret(px.stores.coord)
        assert secret == shared_secret(px.stores.coord)
    with LocalNode(url) as node:
        client, path = node.client(), "/v1/topics/orders/messages"
        body = b'{"messages": [{"value": "x"}]}'
        good = PassedOn(str(node.endpoint), "other", "POST", path, "admin", digest(body))

        def send(request: PassedOn, secret: bytes = secret) -> tuple[int, str]:
            headers = {
                "X-Pxrs-Forwarded": good.node, "X-Pxrs-Token": good.token,
                "X-Pxrs-Body": request.body, "X-Pxrs-Signature": sign(secret, request),
            }  # fmt: skip
            answer = client("POST", path, body, headers)
            return answer.status, "" if answer.status == 200 else answer.json["code"]

        assert send(good) == (200, "")
        refused = (401, "bad_signature")
        assert send(good, b"another") == refused
        for changed in (
            good._replace(target="127.0.0.1:1"),
            good._replace(node="x"),
            good._replace(method="GET"),
            good._replace(path="/v1/topics/private/messages"),
            good._replace(token="weak"),
            good._replace(body=digest(b"{}")),
        ):
            assert send(changed) == refused
        forged = {"X-Pxrs-Forwarded": "other", "X-Pxrs-Token": "admin", "X-Pxrs-Signature": "é"}
        assert client("POST", path, body, forged).status == 401
        client.close()
