"""Anything at all at the gRPC port of a node: it answers or refuses, and nobody else notices."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.server.rpc import server as server_module
from support import rpc
from support.child import PATIENCE
from support.fuzzing import limits
from support.http2 import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RESET,
    SETTINGS,
    WINDOW,
    Http2,
    frame,
    message,
)
from support.node import LocalNode
from support.rpc import RpcClient, field, varint
from support.watchman import Watchman

pytestmark = pytest.mark.engine("memory")

_PUT = "/norikv.v1.Kv/Put"


@pytest.fixture
def watchman(caplog: pytest.LogCaptureFixture) -> Iterator[Watchman]:
    with LocalNode("memory://", grpc_listen="127.0.0.1:0") as node:
        watchman = Watchman(node, caplog)
        watchman.check()
        yield watchman
        watchman.check()
        watchman.close()


# gRPC itself

_TEXTS = st.sampled_from(["", "a", "\0", "é" * 9, "x" * 3000]) | st.text(max_size=5)
_NUMBERS = st.sampled_from([0, 1, 7, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1])


_KINDS = (DATA, HEADERS, 2, RESET, SETTINGS, 5, PING, GOAWAY, WINDOW, CONTINUATION, 77)


@st.composite
def http2_frames(draw: st.DrawFn) -> bytes:
    return frame(
        draw(st.sampled_from(_KINDS)), draw(st.binary(max_size=20)),
        draw(st.sampled_from([0, 1, 2, 3, 2**31 - 1])), draw(st.integers(0, 255)),
    )  # fmt: skip


def test_bytes_that_may_be_http2(watchman: Watchman, pytestconfig: pytest.Config) -> None:
    host, _, port = watchman.node.rpc.rpartition(":")
    begun = PREFACE + frame(SETTINGS)

    @limits(pytestconfig, 60)
    @given(st.binary(max_size=50) | st.lists(http2_frames(), max_size=9).map(
        lambda some: begun + b"".join(some)))  # fmt: skip
    def attack(data: bytes) -> None:
        with socket.create_connection((host, int(port)), PATIENCE) as raw:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while raw.recv(2**16):
                    pass

    attack()


def test_calls_that_break(watchman: Watchman) -> None:
    """In the middle of a request, and of an answer."""
    whole = message(rpc.put(b"k", bytes(5000)))
    for cut in (0, 1, 4, 5, 6, len(whole) // 2, len(whole) - 1, len(whole)):
        for ending in ("close", "reset", "half", "goaway"):
            with Http2(watchman.node.rpc) as client:
                call = client.open(_PUT)
                client.send(call, whole[:cut], end=ending == "half")
                if ending == "reset":
                    client.socket.sendall(frame(RESET, (8).to_bytes(4), call))
                elif ending == "goaway":
                    client.socket.sendall(frame(GOAWAY, bytes(8)))


@pytest.mark.parametrize(
    ("path", "metadata"),
    [
        (_PUT, [(b"a" * 100, b"b" * 10**6)]),
        (_PUT, [(b"%d" % number, b"x" * 100) for number in range(5000)]),
        (_PUT, [(b"authorization", b"Bearer \xff\x00")]),
        (_PUT, [(b"grpc-timeout", b"99999999999999H")]),
        (_PUT, [(b"grpc-encoding", b"\xff")]),
        (_PUT, [(b"user-agent", b"grpc-" + b"a" * 8000)]),
        ("/norikv.v1.Kv/None", []),
        ("/" + "x" * 5000, []),
        ("", []),
        ("\xff", []),
    ],
)
def test_odd_headers(watchman: Watchman, path: str, metadata: list[tuple[bytes, bytes]]) -> None:
    with Http2(watchman.node.rpc) as client, suppress(ConnectionError):
        call = client.open(path, *metadata)
        client.send(call, message(b""), end=True)
        while True:
            kind, number, _ = client.read_frame()
            if (kind in (HEADERS, RESET) and number == call) or kind == GOAWAY:
                break


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(server_module._OPTIONS) | {
        "grpc.server_handshake_timeout_ms": 300, "grpc.max_connection_idle_ms": 300,
    }  # fmt: skip
    monkeypatch.setattr(server_module, "_OPTIONS", tuple(options.items()))
    with LocalNode("memory://", grpc_listen="127.0.0.1:0") as node:
        host, _, port = node.rpc.rpartition(":")
        for sent in (b"", b"PRI * HT", PREFACE, PREFACE + frame(SETTINGS)):
            with socket.create_connection((host, int(port)), PATIENCE) as raw:
                raw.sendall(sent)
                while raw.recv(1000):
                    pass


def test_connections_are_bounded() -> None:
    with LocalNode("memory://", grpc_listen="127.0.0.1:0", max_connections=5) as node:
        with ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(Http2(node.rpc)).read_frame()
            with pytest.raises(ConnectionError), Http2(node.rpc) as refused:
                refused.read_frame()
        with RpcClient(node.rpc) as client:
            assert isinstance(client.raw(_PUT, rpc.put(b"k", b"v")), bytes)


def test_strangers_are_refused_before_their_request_is_read() -> None:
    with LocalNode("memory://", grpc_listen="127.0.0.1:0", auth="tokens") as node:
        for path in (_PUT, "/norikv.v1.Meta/WatchCluster"):
            with Http2(node.rpc) as client:
                call = client.open(path)
                kind, number = -1, -1
                while (kind, number) != (HEADERS, call):
                    kind, number, _ = client.read_frame()
        assert node.server.held == 0


# norikv.v1

_PATHS = (
    "Kv/Put", "Kv/Get", "Kv/Delete", "Meta/WatchCluster", "Admin/SnapshotShard",
    "Admin/TransferShard",
)  # fmt: skip


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Fields of numbers that are known and of others, with values that fit or do not."""
    number = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 15, 16, 2**29 - 1]))
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return field(number, draw(_NUMBERS))
    if kind == 2:
        return field(
            number, draw(st.binary(max_size=9) | st.sampled_from([b"k", b"\xff\xfe", b"lease"]))
        )
    return varint(number << 3 | kind) + draw(st.binary(max_size=12))


def test_messages_of_any_fields(watchman: Watchman, pytestconfig: pytest.Config) -> None:
    allowed = {
        "INVALID_ARGUMENT", "FAILED_PRECONDITION", "ALREADY_EXISTS", "NOT_FOUND", "UNIMPLEMENTED",
    }  # fmt: skip
    deep = b"\x0b" * 10_000 + b"\x0c" * 10_000
    nested = b""
    for _ in range(300):
        nested = field(5, nested)
    odd = st.sampled_from([deep, nested, b"\x80" * 50, b"\xff" * 9 + b"\x01", field(1, 2**64 - 1)])
    versions = st.builds(rpc.version, *[_NUMBERS] * 2)
    puts = st.builds(
        rpc.put, st.binary(max_size=3), st.binary(max_size=3),
        _NUMBERS, _TEXTS, versions,
    )  # fmt: skip
    with RpcClient(watchman.node.rpc) as client:

        @limits(pytestconfig, 150)
        @given(st.sampled_from(_PATHS[:3] + _PATHS[4:]),
               st.lists(messages(), max_size=4).map(b"".join) | odd | puts)  # fmt: skip
        def attack(path: str, request: bytes) -> None:
            answer = client.raw(f"/norikv.v1.{path}", request)
            assert isinstance(answer, bytes) or answer.code in allowed, answer

        attack()


def test_a_call_without_a_request(watchman: Watchman) -> None:
    with grpc.insecure_channel(watchman.node.rpc) as channel:
        for path in _PATHS:
            with pytest.raises(grpc.RpcError) as refused:
                list(channel.stream_stream(f"/norikv.v1.{path}")(iter(())))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
