"""A node on each embedded engine, and connections to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.node import Client, LocalNode


@pytest.fixture
def node(url: str) -> Iterator[LocalNode]:
    with LocalNode(url) as node:
        yield node


@pytest.fixture
def client(node: LocalNode) -> Iterator[Client]:
    client = node.client()
    yield client
    client.close()
