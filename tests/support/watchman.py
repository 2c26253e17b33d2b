"""A node under attack, and good clients that look whether it still serves everybody."""

from __future__ import annotations

import logging
import threading

import pytest

from pxrs.config import parse_url, remote_settings
from pxrs.server.remote import stores as stores_module
from pxrs.stores.remote.stores import RemoteStores
from pxrs.types import Put
from support import rpc
from support.node import LocalNode
from support.rpc import RpcClient


class Watchman:
    """A node and a good client of each protocol; what the node logs is looked at."""

    def __init__(self, node: LocalNode, caplog: pytest.LogCaptureFixture) -> None:
        self.node = node
        self._caplog = caplog
        url = f"pxrs://{node.address}?timeout=20"
        self._stores = RemoteStores(remote_settings(parse_url(url)))
        self._client = RpcClient(node.rpc) if node.settings.grpc_listen else None

    def check(self) -> None:
        """The node serves others, has no thread or call left over, and saw no bug of its own."""
        self._stores.coord.commit((), (Put("good", b"x"),))
        assert self._stores.coord.get("good") is not None
        if self._client is not None:
            assert isinstance(self._client.raw("/norikv.v1.Kv/Put", rpc.put(b"k", b"v")), bytes)
        errors = [it for it in self._caplog.records if it.levelno >= logging.ERROR]
        assert not errors, [(it.getMessage(), it.exc_info) for it in errors]
        service = self.node.remote
        self.node.wait_until(lambda: len(service._streams) == 1)
        self.node.wait_until(lambda: service.turns._value == stores_module._MOST_CALLS)
        self.node.wait_until(lambda: self.node.server.held == 0)
        self.node.wait_until(lambda: not service.watches._all)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("pxrs-v1-watch") == 0
        assert names.count("pxrs-v1-watches") <= 1

    def close(self) -> None:
        self._stores.close()
        if self._client is not None:
            self._client.close()
