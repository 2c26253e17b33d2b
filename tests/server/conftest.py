"""A node on each embedded engine, and connections to it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pxrs.server.groups.service import GroupRules
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


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that take no partition from a client for having waited, only for having asked."""
    rules = partial(GroupRules, revoke_timeout=3600.0)
    monkeypatch.setattr("pxrs.server.groups.service.GroupRules", rules)


@pytest.fixture(
    params=[pytest.param(it, marks=pytest.mark.engine(it)) for it in ("sqlite", "postgres")]
)
def hosts_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store for the processes of one host, which sees at once that one of them has died."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path}/shared.db"
