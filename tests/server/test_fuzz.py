"""Anything at all at the doors of a node: HTTP, record batches, and names with something inside."""

from __future__ import annotations

import base64
import re
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.clock import SYSTEM_CLOCK
from pxrs.codec.batches import COMPRESSIONS, decode, encode, read_batch
from pxrs.errors import ConfigError, GroupNotFound, InvalidRequest
from pxrs.server.groups.fences import Fence
from pxrs.server.rest import dmq
from pxrs.server.rest import http as http_module
from pxrs.server.rest.v1 import NewMessage, Produce, ProduceText
from pxrs.server.tokens import Right, Tokens, parse_right
from pxrs.stores.open import open_stores
from pxrs.types import Fence as Owned
from pxrs.types import StoredBatch
from support.child import PATIENCE
from support.fuzzing import limits
from support.node import LocalNode

_STATUS = re.compile(rb"HTTP/\d\.\d (\d{3}) ")


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes with a few pieces replaced, removed or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 8)))
        data[at:end] = draw(st.binary(max_size=8))
    return bytes(data)


# Bodies

_FIELDS = ("key", "value", "key_base64", "headers", "partition", "timestamp", "other")
_CONTENTS = st.none() | st.text(max_size=5) | st.integers(-1, 2) | st.just([["a", "b"]])


def test_messages_that_are_decoded_as_text_have_nothing_else(pytestconfig: pytest.Config) -> None:
    message = st.dictionaries(st.sampled_from(_FIELDS), _CONTENTS, max_size=3)

    @limits(pytestconfig, 300)
    @given(st.lists(message, max_size=3))
    def check(messages: list[object]) -> None:
        body = msgspec.json.encode({"messages": messages})
        try:
            text = msgspec.json.decode(body, type=ProduceText)
        except msgspec.ValidationError:
            return
        whole = msgspec.json.decode(body, type=Produce)
        assert [NewMessage(it.value, it.key) for it in text.messages] == whole.messages

    check()


# HTTP

_TARGETS = (
    "/v1/topics", "/v1/topics/a", "/v1/topics/%00/messages", "/v1/topics/a/partitions/0/messages",
    "/v1/topics/a/partitions/0/batches", "/v1/groups/a/members", "/v1/queues/a/take",
    "/v1/leases/a.b/commit", "/v1/groups/a/commits", "/api/v1/auth/login", "/health/live", "*",
    "/api/v1/consumer-group/assignment/a~b", "/metrics", "http://a/v1/topics", "/..%2f/%ff?%00=%ff",
)  # fmt: skip
_HEADERS = (
    "Host: a", "Content-Length: 2", "Content-Length: 0", "Content-Length: 99999999999",
    "Transfer-Encoding: chunked", "Connection: close", "Connection: upgrade", "Upgrade: h2c",
    "Expect: 100-continue", "Content-Encoding: gzip", "Authorization: Bearer pxrs.a.b",
    "X-Pxrs-Forwarded: a", "X-Pxrs-Forwarded: \xff", "X-Pxrs-Signature: \xe9",
    "X-Pxrs-Token: a", "X-Pxrs-Follows: 1", "Content-Type: application/json", "X: \xff",
)  # fmt: skip
_BODIES = (b"", b"{}", b"[]", b"null", b"2\r\n{}\r\n0\r\n\r\n", b"\xff\xfe", b'{"a": 1e999}')


@st.composite
def http_requests(draw: st.DrawFn) -> bytes:
    method = draw(st.sampled_from(["GET", "POST", "DELETE", "HEAD", "PUT", "OPTIONS", "G\x00T"]))
    target = draw(st.sampled_from(_TARGETS))
    headers = draw(st.lists(st.sampled_from(_HEADERS), max_size=6))
    lines = [f"{method} {target} HTTP/1.1", "Host: a", *headers, "", ""]
    return draw(damaged("\r\n".join(lines).encode("latin-1") + draw(st.sampled_from(_BODIES))))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNode]:
    """A node that waits for nobody, so that every connection ends soon."""
    monkeypatch.setattr(http_module, "_KEEP_ALIVE", 0.05)
    monkeypatch.setattr(http_module, "_LINGER", 0.05)
    with LocalNode("memory://", request_timeout=0.05, max_wait=0.01) as node:
        yield node


def test_bytes_that_may_be_http(
    hasty: LocalNode, pytestconfig: pytest.Config, caplog: pytest.LogCaptureFixture
) -> None:
    @limits(pytestconfig, 40)
    @given(st.lists(http_requests(), min_size=1, max_size=3).map(b"".join))
    def attack(data: bytes) -> None:
        with socket.create_connection(hasty.endpoint, PATIENCE) as raw:
            raw.sendall(data)
            answer = b"".join(iter(lambda: _received(raw), b""))
        assert all(status < b"500" for status in _STATUS.findall(answer)), answer

    attack()
    hasty.wait_until(lambda: hasty.server.busy == 0 and hasty.server.held == 0)
    assert not caplog.records
    client = hasty.client()
    assert client.get("/health/live").status == 200
    client.close()


def _received(raw: socket.socket) -> bytes:
    try:
        return raw.recv(2**16)
    except ConnectionError:
        return b""


# Record batches

_MOST = 10_000
_VALUES = st.binary(max_size=30) | st.builds(bytes, st.integers(0, 20_000)) | st.none()
_RECORDS = st.lists(
    st.tuples(
        st.binary(max_size=5) | st.none(),
        _VALUES,
        st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3) | st.none()), max_size=2),
        st.integers(0, 2**63 - 1),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def record_batches(draw: st.DrawFn) -> bytes:
    """A batch, whole or damaged; its checksum and its length may be made good again."""
    compression = draw(st.sampled_from(sorted(COMPRESSIONS)))
    data = bytearray(draw(damaged(bytes(encode(draw(_RECORDS), compression=compression).data))))
    if draw(st.booleans()) and len(data) >= 61:
        struct.pack_into(">i", data, 8, len(data) - 12)
    if draw(st.booleans()) and len(data) >= 61:
        from aiokafka.record._crecords import crc32c_cython  # type: ignore[import-untyped]

        struct.pack_into(">I", data, 17, crc32c_cython(bytes(data[21:])))
    return bytes(data)


def test_bytes_that_may_be_a_batch(pytestconfig: pytest.Config) -> None:
    """What is taken can be read by everybody, and is not larger than it may be."""

    @limits(pytestconfig, 100)
    @given(record_batches() | st.binary(max_size=100))
    def attack(data: bytes) -> None:
        try:
            batch = read_batch(data, _MOST)
        except InvalidRequest:
            return
        (base,) = struct.unpack_from(">q", data)
        stored = StoredBatch(base, base + batch.count, data)
        messages = decode(stored, Owned("a", 0, 0))
        assert len(messages) == batch.count >= 1
        assert max(each.timestamp for each in messages) == batch.max_timestamp
        if data[22] & 7:
            assert sum(len(each.value or b"") for each in messages) <= _MOST

    attack()


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_frames_one_after_the_other_are_counted_together(compression: str) -> None:
    """Readers unpack all frames: each may be small enough, and all of them a bomb."""
    from aiokafka.record._crecords import crc32c_cython

    data = bytearray(encode([(None, bytes(9000), [], 1)], compression=compression).data)
    data += bytes(data[61:]) * 50
    struct.pack_into(">i", data, 8, len(data) - 12)
    struct.pack_into(">I", data, 17, crc32c_cython(bytes(data[21:])))
    with pytest.raises(InvalidRequest):
        read_batch(bytes(data), _MOST)


# Fences, members and tokens

_FENCE = Fence("billing", "orders", "0f2b64550a3d3a05", 3, "worker.fa29aedb31fa", 7)


def test_text_that_may_be_a_fence(pytestconfig: pytest.Config) -> None:
    good = _FENCE.encode()
    inside = base64.urlsafe_b64decode(good + "=" * (-len(good) % 4))
    recoded = damaged(inside).map(lambda data: base64.urlsafe_b64encode(data).decode().rstrip("="))

    @limits(pytestconfig, 100)
    @given(st.text(max_size=50) | recoded | damaged(good.encode()).map(lambda it: it.decode("l1")))
    def attack(text: str) -> None:
        try:
            fence = Fence.decode(text)
        except InvalidRequest:
            return
        assert Fence.decode(fence.encode()) == fence
        # It names one claim, and nothing else that the store has.
        claims, group, topic_id, partition = fence.key.split("/")
        assert (claims, group, topic_id) == ("claims", fence.group, fence.topic_id)
        assert int(partition) >= 0
        assert fence.key.isascii()
        assert fence.key.isprintable()

    attack()


def test_text_that_may_be_a_member(pytestconfig: pytest.Config) -> None:
    @limits(pytestconfig, 100)
    @given(st.text(max_size=20), st.text(alphabet="ab~/\0", max_size=8))
    def attack(group: str, member: str) -> None:
        try:
            found, name = dmq._member(group, member)
        except (InvalidRequest, GroupNotFound):
            return
        assert (found, f"{name}~{found}") == (group, member)

    attack()


def test_text_that_may_be_a_token(pytestconfig: pytest.Config) -> None:
    tokens = Tokens(open_stores("memory://").coord, SYSTEM_CLOCK)
    good = tokens.create("app", [Right("topic", "a", ("read",))])
    anything = st.text(st.characters(codec=None), max_size=60)

    @limits(pytestconfig, 100)
    @given(anything | anything.map("pxrs.app.{}".format) | damaged(good.encode()).map(
        lambda it: it.decode("utf-8", "surrogateescape")))  # fmt: skip
    def attack(text: str) -> None:
        assert (tokens.identify(text) is not None) == (text == good)

    attack()


def test_text_that_may_be_a_right(pytestconfig: pytest.Config) -> None:
    @limits(pytestconfig, 100)
    @given(st.text(max_size=20) | damaged(b"topic:orders*:read,write").map(
        lambda it: it.decode("l1")))  # fmt: skip
    def attack(text: str) -> None:
        try:
            right = parse_right(text)
        except ConfigError:
            return
        assert parse_right(str(right)) == right

    attack()
