"""Messages on subjects of pxrs that pxrs did not write: stepped over and told, never believed."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
from base64 import b64encode
from collections.abc import Mapping
from contextlib import closing

import pytest

import nats
import pxrs
from pxrs.codec.batches import decode
from pxrs.stores.jetstream.entries import BATCH, INLINE, PRODUCERS, to_headers
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.stores.jetstream.topics import Part
from pxrs.testing.conformance.tools import append, batch, values_in
from pxrs.types import Append, Appended, Bounds, Fence, LogPartition
from support.engine_fixtures import NewEngine
from support.jetstream import opened

pytestmark = pytest.mark.engine("nats")

HERE = LogPartition("t-1", 0)
A_LOT = 1 << 30
FAR = 2**62
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"


def part_of(log: JetStreamLog) -> Part:
    return log._run(log._topics.find("t-1")).parts[0]


def publish(url: str, subject: str, data: bytes, headers: Mapping[str, str] | None) -> int:
    """Store a message as any program may that knows the subject; its sequence."""

    async def run() -> int:
        client = await nats.connect(url.rpartition("/")[0])
        try:
            headers_sent = dict(headers) if headers else None
            acked = await client.jetstream().publish(subject, data, headers=headers_sent)
            return acked.seq
        finally:
            await client.close()

    return asyncio.run(run())


def publish_raw(port: int, subject: str, head: bytes, data: bytes) -> None:
    """Store a message whose headers no client would write."""
    with socket.create_connection(("127.0.0.1", port)) as server:
        server.sendall(b'CONNECT {"headers": true, "verbose": false}\r\n')
        place = f"HPUB {subject} {len(head)} {len(head) + len(data)}\r\n"
        server.sendall(place.encode() + head + data + b"\r\nPING\r\n")
        heard = b""
        while b"PONG" not in heard:
            heard += server.recv(4096)


def last_seq(log: JetStreamLog) -> int:
    part = part_of(log)
    stored = log._run(log._reading._streams.last(part.stream, part.batches))
    return 0 if stored is None else stored.seq


def state_without_batches() -> str:
    """The state of producer 7, used lately, that has appended nothing."""
    return b64encode(struct.pack("<qqQBh", 7, FAR, 0, 2, 0)).decode()


def forged(log: JetStreamLog, kind: str) -> tuple[bytes, dict[str, str] | None]:
    """A message that is none of ours, better made from kind to kind; the last ones fit the place
    behind three batches of one message."""
    fine = bytes(batch(b"forged").data)
    size, expected = len(fine), {_EXPECTED: str(last_seq(log))}
    placed = FAR.to_bytes(8, "big") + fine[8:]
    moved = (3).to_bytes(8, "big") + fine[8:]
    far, long = (
        f"w {FAR} {FAR + 1} {size} {FAR} 1000 1000 0",
        f"w 3 {FAR} {size} {3 * size} 1000 1000 0",
    )
    here, total = f"w 3 4 {size}", log.size(HERE) + size
    fits = f"{here} {total} 1000 1000 0"
    return {
        "bare": (b"hello", None),
        # What answers of the server itself have.
        "refusal": (b"hello", {"Status": "503"}),
        "the end": (b"hello", {"Status": "204"}),
        "status": (b"hello", {"Status": "shipped"}),
        "sequence": (b"hello", {"Nats-Sequence": "one", "Nats-Num-Pending": "many"}),
        "words": (b"hello", {BATCH: "what is this", **expected}),
        "numbers": (b"hello", {BATCH: "w 1 2 3", **expected}),
        "headers": (b"hello", {BATCH: far, **expected}),
        "far": (placed, {BATCH: far, **expected}),
        "long": (moved, {BATCH: long, **expected}),
        "ours": (moved, {BATCH: fits, **expected}),
        # They go on where the last batch ends, and say what the bytes are not.
        "end": (moved, {BATCH: f"w 3 {FAR} {size} {total} 1000 1000 0", **expected}),
        "bytes": (b"hello", {BATCH: f"w 3 4 5 {total - size + 5} 1000 1000 0", **expected}),
        "producers": (moved, {BATCH: fits, PRODUCERS: "AAAA", **expected}),
        "no batches": (moved, {BATCH: fits, PRODUCERS: state_without_batches(), **expected}),
        "cut off": (moved, {BATCH: fits, PRODUCERS: "A" * 36, **expected}),
        "total": (moved, {BATCH: f"{here} {2**60} 1000 1000 0", **expected}),
        "less": (moved, {BATCH: f"{here} {size} 1000 1000 0", **expected}),
        "newest": (moved, {BATCH: f"{here} {total} 1000 {FAR} 0", **expected}),
        "older": (moved, {BATCH: f"{here} {total} {FAR} 1000 0", **expected}),
    }[kind]


PLAIN = ["bare", "refusal", "the end", "status", "sequence"]
FITTING = ["end", "bytes", "producers", "no batches", "cut off", "total", "less", "newest", "older"]


@pytest.mark.parametrize("kind", [*PLAIN, "words", "numbers", "headers", "far", "long", *FITTING])
def test_a_stray_message_is_stepped_over(
    log: JetStreamLog, url: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Handles that know the partition and handles that do not go on, and say what they saw."""
    append(log, HERE, batch(b"a"), batch(b"b"), batch(b"c"))
    assert len(values_in(log, HERE)) == 3
    with caplog.at_level(logging.WARNING, "pxrs.nats"):
        stray = publish(url, part_of(log).batches, *forged(log, kind))
        cold = opened(url)
        for each in (cold, log):
            assert each.bounds("t-1") == {0: Bounds(0, 3)}
            assert each.fetch(HERE, 3, A_LOT).batches == []
        assert append(cold, HERE, batch(b"d")) == [3]
        assert append(log, HERE, batch(b"e"), batch(b"f")) == [4, 5]
        cold.close()
    cold = opened(url)
    for each in (cold, log):
        assert [*values_in(each, HERE).values()] == [b"a", b"b", b"c", b"d", b"e", b"f"]
        assert each.fetch(HERE, 2, A_LOT).end == 6
        assert each.bounds("t-1") == {0: Bounds(0, 6)}
    told = [record for record in caplog.records if str(stray) in record.getMessage()]
    assert 1 <= len(told) <= 3  # once by each handle
    assert "not written by pxrs" in told[0].getMessage()
    assert cold.trim(HERE, 4) == 4
    assert values_in(log, HERE) == {4: b"e", 5: b"f"}
    cold.close()


@pytest.mark.parametrize(
    "head",
    [
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 204 EOB\r\n\r\n",
        b"NATS/1.0 \xff\xff\xff\r\n\r\n",
        b"NATS/1.0 \xff\xff\xff \xff\r\nPx-Batch: \xff\r\n\r\n",
        b"NATS/1.0\r\n\xff: \xff\r\nno colon\r\nPx-Batch\r\n: \r\n\r\n",
    ],
)
def test_headers_that_no_client_writes_are_stepped_over(
    log: JetStreamLog, url: str, head: bytes
) -> None:
    append(log, HERE, batch(b"a"))
    port = int(url.rpartition("/")[0].rpartition(":")[2])
    before = last_seq(log)
    publish_raw(port, part_of(log).batches, head, b"hello")
    assert last_seq(log) > before
    with closing(opened(url)) as cold:
        assert append(cold, HERE, batch(b"b")) == [1]
        for each in (cold, log):
            assert values_in(each, HERE) == {0: b"a", 1: b"b"}
            assert each.fetch(HERE, 1, 1).batches[0].base == 1
        assert cold.trim(HERE, 1) == 1


@pytest.mark.parametrize("kind", FITTING)
def test_one_that_fits_its_place_stands_among_ours(
    log: JetStreamLog, url: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading from any offset, appending once, and retention pass over it."""
    producer = 7
    for sequence, value in enumerate((b"a", b"b", b"c")):
        append(log, HERE, batch(value, producer=(producer, 0, sequence)))
    size = log.size(HERE) // 3
    stray = publish(url, part_of(log).batches, *forged(log, kind))
    cold = opened(url)
    again = Append(HERE, batch(b"d", producer=(producer, 0, 3)))
    assert cold.append([again]) == [Appended(3)]
    assert log.append([again]) == [Appended(3, duplicate=True)]
    assert append(log, HERE, batch(b"e", producer=(producer, 0, 4))) == [4]
    cold.close()
    whole = {0: b"a", 1: b"b", 2: b"c", 3: b"d", 4: b"e"}
    for offset in whole:
        for most in (1, A_LOT):
            cold = opened(url)
            (first, *_) = cold.fetch(HERE, offset, most).batches
            (message,) = decode(first, Fence("t", 0, 0))
            assert (message.offset, message.value) == (offset, whole[offset])
            cold.close()
    cold = opened(url)
    with caplog.at_level(logging.WARNING, "pxrs.nats"):
        assert values_in(cold, HERE) == whole
    assert any(str(stray) in record.getMessage() for record in caplog.records)
    assert cold.size(HERE) == 5 * size
    assert cold.expire(HERE, None, 5 * size) == 0
    assert cold.batch_at(HERE, FAR - 1) is None
    assert cold.expire(HERE, None, 2 * size) == 3
    assert cold.size(HERE) == 2 * size
    assert values_in(log, HERE) == {3: b"d", 4: b"e"}
    cold.close()


def test_one_that_pxrs_may_have_written_is_believed(log: JetStreamLog, url: str) -> None:
    """So what else is wrong with those above is why they are not."""
    append(log, HERE, batch(b"a"), batch(b"b"), batch(b"c"))
    publish(url, part_of(log).batches, *forged(log, "ours"))
    assert append(log, HERE, batch(b"d")) == [4]
    assert values_in(log, HERE)[3] == b"forged"


@pytest.mark.parametrize("total", [2**60, -(2**60)])
def test_a_stray_floor_with_a_wrong_sum(log: JetStreamLog, url: str, total: int) -> None:
    append(log, HERE, batch(b"a"), batch(b"b"))
    data = b'{"start": 0, "seq": 1, "total": %d}' % total
    publish(url, part_of(log).floor, data, None)
    cold = opened(url)
    size = cold.size(HERE)
    assert size > 0
    assert cold.expire(HERE, None, size) == 0
    assert values_in(cold, HERE) == {0: b"a", 1: b"b"}
    cold.close()


def test_a_stray_first_and_many_in_a_row(log: JetStreamLog, url: str) -> None:
    for _ in range(3):
        publish(url, part_of(log).batches, b"hello", None)
    assert log.bounds("t-1") == {0: Bounds(0, 0)}
    assert append(log, HERE, batch(b"a", producer=(7, 0, 0))) == [0]
    for _ in range(20):
        publish(url, part_of(log).batches, b"hello", None)
    cold = opened(url)
    again = Append(HERE, batch(b"a", producer=(7, 0, 0)))
    assert cold.append([again]) == [Appended(0, duplicate=True)]
    assert append(cold, HERE, batch(b"b", producer=(7, 0, 1))) == [1]
    assert values_in(log, HERE) == {0: b"a", 1: b"b"}
    assert log.batch_at(HERE, 0) == 0
    cold.close()


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        b'{"start": 4611686018427387904, "seq": 1, "total": 0}',
        pytest.param(b'{"x": ' + b"[" * 100_000, id="deep"),
    ],
)
def test_a_stray_floor_is_stepped_over(log: JetStreamLog, url: str, data: bytes) -> None:
    """It begins nowhere beyond the end, and the next trim replaces it."""
    append(log, HERE, batch(b"a"), batch(b"b"))
    publish(url, part_of(log).floor, data, None)
    cold = opened(url)
    for each in (cold, log):
        assert values_in(each, HERE) == {0: b"a", 1: b"b"}
    assert cold.trim(HERE, 1) == 1
    assert append(log, HERE, batch(b"c")) == [2]
    assert values_in(log, HERE) == {1: b"b", 2: b"c"}
    cold.close()


def test_a_stray_state_of_a_producer_is_none(log: JetStreamLog, url: str) -> None:
    """A producer whose state can't be read is a new one."""
    for producer in range(12):
        append(log, HERE, batch(b"x", producer=(producer, 0, 0)))
    publish(url, f"{part_of(log).aside}.0", b"hello", None)
    cold = opened(url)
    assert append(cold, HERE, batch(b"y", producer=(0, 0, 0))) == [12]
    for number in range(INLINE + 1):  # until it is put aside again
        assert append(cold, HERE, batch(b"z", producer=(99 + number, 0, 0))) == [13 + number]
    cold.close()


def test_a_consumer_goes_on_over_a_stray(nats_url: str) -> None:
    """A running consumer is woken by the stray's own announcement and must survive it."""
    prefix = f"t-{secrets.token_hex(6)}"
    with pxrs.connect("memory://", log=f"{nats_url}/{prefix}") as px:
        topic = px.topics.create("orders", partitions=1)
        with px.producer() as producer, px.consumer("orders", "g") as consumer:
            producer.send("orders", b"a").result()
            assert [m.value for m in consumer.poll(timeout=20)] == [b"a"]
            root = _root_of(nats_url, f"{prefix}_{topic.id}")
            publish(f"{nats_url}/x", f"{root}.b.0", b"hello", {BATCH: "w 1 2 3"})
            producer.send("orders", b"b").result()
            assert [m.value for m in consumer.poll(timeout=20)] == [b"b"]
        px.topics.delete("orders")


def _root_of(url: str, stream: str) -> str:
    async def ask() -> str:
        client = await nats.connect(url)
        try:
            info = await client.jetstream().stream_info(stream)
            assert info.config.metadata is not None
            return info.config.metadata["pxrs.root"]
        finally:
            await client.close()

    return asyncio.run(ask())


def store_too_late(log: JetStreamLog, port: int) -> None:
    """Store another batch in the place of the last one, behind it.

    As a leader does that has lost its last message and its majority: it believes that the one
    before is the last, and what it accepts so is stored by the next leader.
    """
    late = batch(b"x", b"y", b"z")
    last = log._run(log._reading._ends.tail(part_of(log)))
    size = len(late.data)
    entry = last._replace(
        writer="late",
        next=last.base + late.count,
        size=size,
        total=last.total_before + size,
        max_timestamp=late.max_timestamp,
    )
    data = entry.base.to_bytes(8, "big") + bytes(late.data[8:])
    # The server reads the first of equal headers, clients the last.
    headers = [(_EXPECTED, str(last.seq)), *to_headers(entry).items()]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    publish_raw(port, part_of(log).batches, f"NATS/1.0\r\n{lines}\r\n".encode(), data)


def test_a_batch_that_came_too_late_is_stepped_over(new_engine: NewEngine) -> None:
    engine = new_engine("nats", nodes=3)
    url = f"{engine.url}?replicas=3"
    with closing(opened(url)) as log:
        log.create("t-1", 1)
        append(log, HERE, batch(b"a"))
        append(log, HERE, batch(b"b"))
        store_too_late(log, engine.ports[0])
        with closing(opened(url)) as cold:
            assert cold.bounds("t-1") == {0: Bounds(0, 2)}
            assert append(cold, HERE, batch(b"c")) == [2]
        assert append(log, HERE, batch(b"d")) == [3]
        store_too_late(log, engine.ports[0])
        assert append(log, HERE, batch(b"e")) == [4]
        with closing(opened(url)) as cold:
            expected = dict(enumerate([b"a", b"b", b"c", b"d", b"e"]))
            assert values_in(log, HERE) == values_in(cold, HERE) == expected
            assert [cold.fetch(HERE, offset, 1).batches[0].base for offset in range(5)] == [
                *range(5)
            ]
