"""A prefix of its own for each test, on a server that all share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from pxrs.stores.jetstream.log import JetStreamLog
from support.jetstream import opened


@pytest.fixture
def url(nats_url: str) -> str:
    return f"{nats_url}/t-{secrets.token_hex(6)}"


@pytest.fixture
def log(url: str) -> Iterator[JetStreamLog]:
    """A topic of one partition."""
    log = opened(url)
    log.create("t-1", 1)
    yield log
    log.drop("t-1")
    log.close()
