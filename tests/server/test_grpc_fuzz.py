"""Anything at all at the gRPC port of a node: it answers or refuses, and nobody else notices."""

from __future__ import annotations

import enum
import logging
import math
import queue
import socket
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import grpc
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.client import frames as protocol
from pxrs.config import parse_url, remote_settings
from pxrs.errors import InvalidRequest, PxrsError
from pxrs.server.rpc import server as server_module
from pxrs.server.rpc import stores as stores_module
from pxrs.stores.remote import wire
from pxrs.stores.remote.stores import RemoteStores
from pxrs.types import Put
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

pytestmark = pytest.mark.engine("memory")


class Watchman:
    """A node and a good client of each protocol; what the node logs is looked at."""

    def __init__(self, node: LocalNode, caplog: pytest.LogCaptureFixture) -> None:
        self.node = node
        self._caplog = caplog
        self._stores = RemoteStores(remote_settings(parse_url(f"pxrs://{node.rpc}?timeout=20")))
        self._client = RpcClient(node.rpc)

    def check(self) -> None:
        """The node serves others, has no thread or call left over, and saw no bug of its own."""
        self._stores.coord.commit((), (Put("good", b"x"),))
        assert self._stores.coord.get("good") is not None
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
        self._client.__exit__(None, None, None)


@pytest.fixture(params=["memory", "sqlite"])
def watchman(
    request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Watchman]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/node.db"
    with LocalNode(url, grpc_listen="127.0.0.1:0") as node:
        watchman = Watchman(node, caplog)
        watchman.check()
        yield watchman
        watchman.check()
        watchman.close()


# Calls of pxrs.v1

_TEXTS = st.sampled_from(
    [
        "", "a", "b", "a/", "\0", "a\0b", "\n", "../a", "s1", "s2", "é" * 9, "\U0001f600",
        "x" * 3000, "%", "'", "_pxrs.a",
    ]
) | st.text(max_size=5)  # fmt: skip
_INTS = st.sampled_from(
    [
        -(2**63), -1, 0, 1, 7, 100, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63,
        2**64 - 1,
    ]
)  # fmt: skip
_FLOATS = st.sampled_from(
    [math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 5e-324, 0.001, 0.5, 30.0, 1e10, 1e300]
)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | _INTS | _TEXTS | _FLOATS | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=9,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type as they are sent, most of them odd ones."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return values(inside[0])
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, inside))
    if origin in (list, Sequence) or (origin is tuple and inside[1:] == (...,)):
        return st.lists(values(inside[0]), max_size=4)
    if origin is tuple:
        return st.tuples(*map(values, inside)).map(list)
    if hint in (bytes, bytearray):
        return st.binary(max_size=20) | st.builds(bytes, st.sampled_from([61, 100, 5000]))
    if hint is type(None):
        return st.none()
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from([it.value for it in hint])
    simple = {str: _TEXTS, int: _INTS, float: _FLOATS, bool: st.booleans()}
    if hint in simple:
        return simple[hint]
    parts = {name: values(kind) for name, kind in get_type_hints(hint).items()}
    if issubclass(hint, tuple):
        return st.tuples(*parts.values()).map(list)
    return st.fixed_dictionaries(parts)


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, str, msgspec.Raw]:
    """A call of any method: most fit the types, some do not, some are of no method at all."""
    name = draw(st.sampled_from(sorted(wire.METHODS)))
    arguments = draw(values(wire.METHODS[name].arguments.type) | _ANYTHING)
    if not draw(st.integers(0, 19)):
        name = draw(_TEXTS)
    encoded = msgspec.msgpack.encode(arguments)
    return (
        draw(st.sampled_from([protocol.HELLO, 1, 1, 2, 3, -1, 2**63])),
        name,
        msgspec.Raw(encoded),
    )


def answered(address: str, frames: Sequence[bytes]) -> list[tuple[int, int, msgspec.Raw]]:
    """Everything that a stream of these frames is answered, until it ends."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        told = channel.stream_stream(protocol.METHOD)(iter(frames), timeout=10)
        found, refused = [], None
        try:
            for each in told:
                found += protocol.decode_answers(each)
        except grpc.RpcError as error:
            refused = error.code()
        assert refused in (
            None, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED,
        )  # fmt: skip
        return found


@pytest.mark.long
def test_calls_with_odd_arguments(watchman: Watchman, pytestconfig: pytest.Config) -> None:
    """Each is answered once, by an answer that fits or by an error of ours."""

    @limits(pytestconfig, 150)
    @given(st.lists(calls(), min_size=1, max_size=8))
    def attack(sent: list[tuple[int, str, msgspec.Raw]]) -> None:
        told = answered(watchman.node.rpc, list(protocol.encode_calls(sent)))
        if sent[0][1] == protocol.PIECE:
            return
        replies = [(number, kind, body) for number, kind, body in told if kind != protocol.WOKEN]
        assert sorted(number for number, _, _ in replies) == sorted(it[0] for it in sent)
        for number, kind, body in replies:
            if kind == protocol.ERROR:
                error = protocol.decode_error(body)
                assert isinstance(error, PxrsError)
                assert "its log has the details" not in str(error)
            else:
                names = {it[1] for it in sent if it[0] == number}
                assert number == protocol.HELLO or names & wire.METHODS.keys()

    attack()


@st.composite
def damaged_frames(draw: st.DrawFn) -> list[bytes]:
    frames = list(protocol.encode_calls(draw(st.lists(calls(), max_size=4))))
    frames += [draw(st.binary(max_size=30) | _ANYTHING.map(msgspec.msgpack.encode))]
    data = bytearray(draw(st.sampled_from(frames)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 8)))
        data[at:end] = draw(st.binary(max_size=8) | st.just(b"\xdd\xff\xff\xff\xff"))
    frames.insert(draw(st.integers(0, len(frames))), bytes(data))
    return frames


def test_frames_of_any_bytes(watchman: Watchman, pytestconfig: pytest.Config) -> None:
    @limits(pytestconfig, 100)
    @given(damaged_frames())
    def attack(frames: list[bytes]) -> None:
        for _, kind, body in answered(watchman.node.rpc, frames):
            if kind == protocol.ERROR:
                assert isinstance(protocol.decode_error(body), PxrsError)

    attack()


_GET = wire.METHODS["coord.get"].encode(["a"])
_WATCH = wire.METHODS["node.watch_records"].encode([1, ["a"]])
_PIECE = msgspec.Raw(msgspec.msgpack.encode(b"x"))


@pytest.mark.parametrize(
    "frames",
    [
        [[(0, "", _GET)] * 2],
        [[(0, "hello", _GET)], [(0, "hello", _GET)]],
        [[(1, "node.watch_records", _WATCH)] * 2, [(2, "node.unwatch", b"\x91\x01")] * 3],
        [[(5, protocol.PIECE, _PIECE)], [(6, "coord.get", _PIECE)]],
        [[(5, protocol.PIECE, _PIECE)], [(5, protocol.PIECE, _GET)]],
        [[(5, protocol.PIECE, _PIECE)], []],
        [[(5, protocol.PIECE, _PIECE)]],
        [[(5, protocol.PIECE, _PIECE)], [(5, "coord.get", _PIECE)]],
        [[(5, protocol.PIECE, _PIECE), (6, "coord.get", _GET)]],
        [[(5, protocol.PIECE, msgspec.Raw(msgspec.msgpack.encode(bytes(2**20))))]] * 10,
        [[(1, "coord.get", _GET)] * 1001],
        [[(1, "coord.get", b"\x91" * 100_000 + b"\xc0")]],
        [[(1, "x" * 10**6, _GET)]],
    ],
)
def test_frames_in_an_odd_order(watchman: Watchman, frames: list[list[Any]]) -> None:
    sent = [
        msgspec.msgpack.encode([(n, name, msgspec.Raw(body)) for n, name, body in entries])
        for entries in frames
    ]
    answered(watchman.node.rpc, sent)


def test_a_large_call_comes_in_pieces(watchman: Watchman) -> None:
    method = wire.METHODS["coord.commit"]
    writes = [Put(f"large/{number}", bytes(10**6)) for number in range(7)]
    frames = list(protocol.encode_calls([(7, method.name, method.encode([[], writes]))] * 2))
    assert len(frames) == 14
    assert all(len(each) <= protocol.MOST_FRAME_BYTES for each in frames)
    told = answered(watchman.node.rpc, frames)
    assert [(number, kind) for number, kind, _ in told] == [(7, protocol.ANSWER)] * 2


def test_streams_that_break(watchman: Watchman) -> None:
    """In the middle of a frame, of a call, of an answer, and with watches and sessions held."""
    sent = [
        message(each)
        for each in protocol.encode_calls(
            [
                (1, "node.watch_records", _WATCH),
                (2, "node.open_session", msgspec.Raw(b"\x91\xcb@$\x00\x00\x00\x00\x00\x00")),
                *((number, "coord.list", msgspec.Raw(b"\x93\xa0\xc0\xc0")) for number in range(99)),
            ]
        )
    ]
    whole = b"".join(sent)
    for cut in (0, 1, 4, 5, 6, len(whole) // 2, len(whole) - 1, len(whole)):
        for ending in ("close", "reset", "half", "goaway"):
            with Http2(watchman.node.rpc) as client:
                call = client.open(protocol.METHOD)
                client.send(call, whole[:cut], end=ending == "half")
                if ending == "reset":
                    client.socket.sendall(frame(RESET, (8).to_bytes(4), call))
                elif ending == "goaway":
                    client.socket.sendall(frame(GOAWAY, bytes(8)))


# gRPC itself

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


@pytest.mark.parametrize(
    ("path", "metadata"),
    [
        (protocol.METHOD, [(b"a" * 100, b"b" * 10**6)]),
        (protocol.METHOD, [(b"%d" % number, b"x" * 100) for number in range(5000)]),
        (protocol.METHOD, [(b"authorization", b"Bearer \xff\x00")]),
        (protocol.METHOD, [(b"grpc-timeout", b"99999999999999H")]),
        (protocol.METHOD, [(b"grpc-encoding", b"\xff")]),
        ("/norikv.v1.Kv/Put", [(b"user-agent", b"grpc-" + b"a" * 8000)]),
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
            assert isinstance(client.raw("/norikv.v1.Kv/Put", rpc.put(b"k", b"v")), bytes)


def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_module, "_MOST_STREAMS", 2)
    hello = msgspec.msgpack.encode([(0, "hello", None)])
    with LocalNode("memory://", grpc_listen="127.0.0.1:0") as node:
        over = threading.Event()

        def hold() -> Iterator[bytes]:
            yield hello
            over.wait(PATIENCE)

        with grpc.insecure_channel(node.rpc) as channel:
            call = channel.stream_stream(protocol.METHOD)
            held = [call(hold()) for _ in range(2)]
            for each in held:
                next(each)
            with pytest.raises(grpc.RpcError) as refused:
                next(call(iter([hello])))
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            over.set()


def test_strangers_are_refused_before_their_request_is_read() -> None:
    with LocalNode("memory://", grpc_listen="127.0.0.1:0", auth="tokens") as node:
        for path in (protocol.METHOD, "/norikv.v1.Kv/Put", "/norikv.v1.Meta/WatchCluster"):
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
        return field(number, draw(_INTS.filter(lambda it: it >= 0)))
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
    versions = st.builds(rpc.version, *[_INTS.filter(lambda it: it >= 0)] * 2)
    puts = st.builds(
        rpc.put, st.binary(max_size=3), st.binary(max_size=3),
        _INTS.filter(lambda it: it >= 0), _TEXTS, versions,
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


# Watches


def test_wakes_are_not_lost_and_not_kept(watchman: Watchman) -> None:
    """A client that is slow to read is told of each watch again, but not of each wake."""
    ready: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    coord = watchman.node.px.stores.coord
    with grpc.insecure_channel(watchman.node.rpc) as channel:
        told = channel.stream_stream(protocol.METHOD)(iter(ready.get, None))
        ready.put(protocol.encode_frame([(1, "node.watch_records", _WATCH)]))
        heard = protocol.decode_answers(next(told))
        for number in range(50):
            for _ in range(20):
                coord.commit((), (Put("a", b"%d" % number),))
            # The last of them was told, or comes.
            while not any(kind == protocol.WOKEN for _, kind, _ in heard):
                heard = protocol.decode_answers(next(told))
            assert all(count == 1 for _, count in _counts(heard).items())
            heard = []
        ready.put(None)
        for _ in told:
            pass


def _counts(heard: list[tuple[int, int, msgspec.Raw]]) -> dict[int, int]:
    return {number: sum(it[0] == number for it in heard) for number, _, _ in heard}


def test_watches_share_one_thread(watchman: Watchman) -> None:
    before = threading.active_count()
    with grpc.insecure_channel(watchman.node.rpc) as channel:
        arm = wire.METHODS["node.watch_records"]
        sent = [(n, arm.name, arm.encode([n, [f"{n}/"]])) for n in range(1, 1001)]
        over = threading.Event()

        def frames() -> Iterator[bytes]:
            yield from protocol.encode_calls(sent)
            over.wait(PATIENCE)

        told = channel.stream_stream(protocol.METHOD)(frames())
        answers: list[Any] = []
        while len(answers) < 1000:
            answers += [
                it for it in protocol.decode_answers(next(told)) if it[1] == protocol.ANSWER
            ]
        assert threading.active_count() <= before + stores_module._THREADS + 5
        watchman.node.px.stores.coord.commit((), (Put("77/a", b"x"),))
        woken: set[int] = set()
        while 77 not in woken:
            woken |= {
                it[0] for it in protocol.decode_answers(next(told)) if it[1] == protocol.WOKEN
            }
        over.set()


def test_pages_are_cut_and_put_together(watchman: Watchman) -> None:
    stores = RemoteStores(remote_settings(parse_url(f"pxrs://{watchman.node.rpc}")))
    names = [f"p/{number:04}" for number in range(300)]
    for number, name in enumerate(names):
        stores.coord.commit((), (Put(name, bytes(10**6 if number % 25 == 20 else 10)),))
    assert [it.key for it in stores.coord.list("p/")] == names
    assert [it.key for it in stores.coord.list("p/", names[3], 200)] == names[4:204]
    assert [it.key for it in stores.coord.list("p/", limit=1)] == names[:1]
    with pytest.raises(InvalidRequest):
        stores.coord.list("p/", limit=0)
    stores.close()
