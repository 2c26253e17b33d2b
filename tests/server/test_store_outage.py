"""A node whose store is away, and comes back."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

import pxrs
from support import rpc
from support.node import LocalNode, looks
from support.proxy import Proxy

pytestmark = pytest.mark.engine("postgres")


@pytest.mark.parametrize("how", ["refuses", "says nothing"])
def test_a_node_says_that_its_store_is_away(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("pxrs.server.node._CHECK_STORE", 1.0)
    with pxrs.connect(postgres_url) as px:
        px.topics.create("orders", 1)
    database = postgres_url.rpartition("/")[2]
    port = int(postgres_url.rpartition("/")[0].rpartition(":")[2])
    with Proxy(port) as proxy:
        url = f"postgresql://postgres@{proxy.address}/{database}"
        with (
            LocalNode(url, grpc_listen="127.0.0.1:0") as node,
            closing(node.client()) as client,
            rpc.RpcClient(node.rpc) as rpc_client,
        ):

            def wait_for(status: int) -> str:
                for _ in looks():
                    answer = client.get("/health/ready")
                    if answer.status == status:
                        break
                return str(answer.json["reason"])

            assert wait_for(200) == ""
            health = rpc_client.watch(path=f"{rpc.HEALTH}Watch")
            assert next(health) == rpc.SERVING
            proxy.refuse() if how == "refuses" else proxy.cut()
            reason = wait_for(503)
            assert "the store" in reason
            assert proxy.address not in reason  # who may not read the store's URL can read this
            assert client.get("/health/live").json["alive"] is True
            assert rpc_client.raw(f"{rpc.HEALTH}Check", b"") == rpc.NOT_SERVING
            assert next(health) == rpc.NOT_SERVING
            proxy.heal()
            assert wait_for(200) == ""
            assert next(health) == rpc.SERVING
            text = client.get("/metrics").body.decode()
            (line,) = re.findall(r"^pxrs_store_outages_total (.*)$", text, re.MULTILINE)
            assert float(line) >= 1
