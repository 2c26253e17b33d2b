"""Over a slow link all goes on, as slowly as it has to."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs.codec.batches import decode
from pxrs.config import nats_settings, parse_url
from pxrs.stores.jetstream import appending, streams, wire
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.testing.conformance.tools import batch, values_in
from pxrs.types import Append, Appended, Fence, LogPartition
from support.copying import copied
from support.proxy import Proxy
from support.reading import read_all

pytestmark = pytest.mark.engine("nats")

PARTITIONS = 3
RATE = 200_000
SIZE = 140_000
BATCHES = 16


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits that are shorter than a large batch takes on the links of these tests."""
    monkeypatch.setattr(appending, "_PUBLISH", 0.5)
    monkeypatch.setattr(streams, "TRY", 0.3)
    monkeypatch.setattr(wire, "_PING_EVERY", 0.1)
    monkeypatch.setattr(wire, "_PING_PATIENCE", 0.5)


@pytest.fixture
def slow(nats_url: str, impatient: None) -> Iterator[JetStreamLog]:
    """A log behind a link on which one batch takes longer than every time limit."""
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
    """All that are asked for at once take longer than the time of a request."""
    value = secrets.token_bytes(SIZE // 4)
    where = LogPartition("t-1", 0)
    for _ in range(BATCHES):
        (outcome,) = slow.append([Append(where, batch(value))])
        assert isinstance(outcome, Appended)
    found: list[bytes] = []
    while len(found) < BATCHES:
        fetched = slow.fetch(where, len(found), BATCHES * SIZE)
        for stored in fetched.batches:
            found += [message.value for message in decode(stored, Fence(*where, 0))]
    assert found == [value] * BATCHES


@pytest.mark.thorough
def test_a_store_is_copied_over_a_slow_link(nats_url: str, tmp_path: Path, impatient: None) -> None:
    """12 Mbit/s, and batches as large as a server takes."""
    source, prefix = f"sqlite:///{tmp_path}/from.db", f"t-{secrets.token_hex(6)}"
    values = [secrets.token_bytes(900_000) for _ in range(PARTITIONS)]
    with pxrs.connect(source) as px:
        px.topics.create("t", partitions=PARTITIONS)
        with px.producer() as producer:
            for number, value in enumerate(values):
                producer.send("t", value, partition=number)
    target = f"sqlite:///{tmp_path}/to.db log="
    with Proxy(int(nats_url.rpartition(":")[2])) as proxy:
        proxy.slow(1_500_000)
        report = copied(source, f"{target}nats://{proxy.address}/{prefix}")
        assert (report.complete, report.differences) == (True, ())
    with closing(pxrs.connect(f"{target}{nats_url}/{prefix}")) as px:
        assert [message.value for message in read_all(px, "t")] == values
        px.topics.delete("t")
