"""Over a slow link all goes on, as slowly as it has to."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from pxrs.config import nats_settings, parse_url
from pxrs.stores.jetstream import appending, streams, wire
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.testing.conformance.tools import batch, values_in
from pxrs.types import Append, Appended, LogPartition
from support.proxy import Proxy

pytestmark = pytest.mark.engine("nats")

PARTITIONS = 3
RATE = 200_000
SIZE = 140_000


@pytest.fixture
def slow(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[JetStreamLog]:
    """A log behind a link on which one batch takes longer than every time limit."""
    monkeypatch.setattr(appending, "_PUBLISH", 0.5)
    monkeypatch.setattr(streams, "TRY", 0.3)
    monkeypatch.setattr(wire, "_PING_EVERY", 0.1)
    monkeypatch.setattr(wire, "_PING_PATIENCE", 0.5)
    with Proxy(int(nats_url.rpartition(":")[2])) as proxy:
        proxy.slow(RATE)
        url = f"nats://{proxy.address}/t-{secrets.token_hex(6)}?timeout=2"
        log = JetStreamLog(nats_settings(parse_url(url)))
        log.create("t-1", PARTITIONS)
        yield log
        log.drop("t-1")
        log.close()


def test_batches_pass_a_slow_link(slow: JetStreamLog) -> None:
    """Those of several partitions at once, too, which stand in each other's way."""
    values = [secrets.token_bytes(SIZE) for _ in range(PARTITIONS)]
    places = [LogPartition("t-1", number) for number in range(PARTITIONS)]
    appends = [
        Append(where, batch(value, producer=(7, 0, 0)))
        for where, value in zip(places, values, strict=True)
    ]
    outcomes = slow.append(appends)
    while not all(isinstance(outcome, Appended) for outcome in outcomes):
        # A partition that is later than the others is told to be unknown: ask again.
        assert any(isinstance(outcome, Appended) for outcome in outcomes)
        outcomes = slow.append(appends)
    assert [values_in(slow, where)[0] for where in places] == values


def test_many_batches_are_read_over_a_slow_link(slow: JetStreamLog) -> None:
    value = secrets.token_bytes(SIZE // 4)
    where = LogPartition("t-1", 0)
    for _ in range(8):
        (outcome,) = slow.append([Append(where, batch(value))])
        assert isinstance(outcome, Appended)
    assert list(values_in(slow, where).values()) == [value] * 8
