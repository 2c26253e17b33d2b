"""Anything at all over the stream of a `pxrs://` client: a node answers or refuses."""

from __future__ import annotations

import enum
import math
import socket
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.client import frames as protocol
from pxrs.config import parse_url, remote_settings
from pxrs.errors import InvalidRequest, PxrsError
from pxrs.server.remote import stores as stores_module
from pxrs.stores.remote import wire
from pxrs.stores.remote.stores import RemoteStores
from pxrs.types import Put
from support.child import PATIENCE
from support.fuzzing import limits
from support.node import LocalNode
from support.watchman import Watchman
from support.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    NONSENSE,
    PING,
    TEXT,
    RawStream,
    message,
    request,
)

pytestmark = pytest.mark.engine("memory")


@pytest.fixture(params=["memory", pytest.param("sqlite", marks=pytest.mark.thorough)])
def watchman(
    request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Watchman]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/node.db"
    with LocalNode(url) as node:
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


def answered(
    address: str, frames: Sequence[bytes], count: int | None = None
) -> list[tuple[int, int, msgspec.Raw]]:
    """What a stream of these frames is answered: so many answers, or all until it is closed."""
    found = []
    with RawStream(address) as stream:
        assert stream.status == 101
        # One that may end it: a node that hangs up does not read the rest.
        with suppress(ConnectionError):
            stream.send(*frames, *([NONSENSE] if count is None else []))
        left = count
        with suppress(ConnectionError):
            for answer in stream.answers():
                found.append(answer)
                if left is not None and answer[1] != protocol.WOKEN:
                    left -= 1
                    if not left:
                        break
        assert left or stream.closed is None or left is None
        assert stream.closed in (None, 0, 1007, 1009), "a bug of ours"
    return found


@pytest.mark.long
def test_calls_with_odd_arguments(watchman: Watchman, pytestconfig: pytest.Config) -> None:
    """Each is answered once, by an answer that fits or by an error of ours."""

    @limits(pytestconfig, 150)
    @given(st.lists(calls(), min_size=1, max_size=8))
    def attack(sent: list[tuple[int, str, msgspec.Raw]]) -> None:
        is_piece = sent[0][1] == protocol.PIECE
        frames = list(protocol.encode_calls(sent))
        told = answered(watchman.node.address, frames, None if is_piece else len(sent))
        if is_piece:
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
        for _, kind, body in answered(watchman.node.address, frames):
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
    answered(watchman.node.address, sent)


def test_a_large_call_comes_in_pieces(watchman: Watchman) -> None:
    method = wire.METHODS["coord.commit"]
    writes = [Put(f"large/{number}", bytes(10**6)) for number in range(7)]
    frames = list(protocol.encode_calls([(7, method.name, method.encode([[], writes]))] * 2))
    assert len(frames) == 14
    assert all(len(each) <= protocol.MOST_FRAME_BYTES for each in frames)
    told = answered(watchman.node.address, frames, 2)
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
        for ending in ("close", "half", "said"):
            with RawStream(watchman.node.address) as client:
                client.socket.sendall(whole[:cut])
                if ending == "half":
                    client.socket.shutdown(socket.SHUT_WR)
                elif ending == "said":
                    client.socket.sendall(message((1000).to_bytes(2), CLOSE))


# The WebSocket itself


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    whole = message(
        draw(st.binary(max_size=130)), draw(st.integers(0, 15)),
        masked=draw(st.booleans()), first=draw(st.sampled_from([0, 0x80, 0x80, 0xC0, 0xF0])),
    )  # fmt: skip
    return whole[: draw(st.integers(0, len(whole)) | st.just(len(whole)))]


def test_bytes_that_may_be_messages(watchman: Watchman, pytestconfig: pytest.Config) -> None:
    @limits(pytestconfig, 60)
    @given(st.binary(max_size=50) | st.lists(messages(), max_size=9).map(b"".join))
    def attack(data: bytes) -> None:
        with RawStream(watchman.node.address) as stream, suppress(ConnectionError):
            stream.socket.sendall(data)
            stream.socket.shutdown(socket.SHUT_WR)
            while stream.receive() is not None:
                pass

    attack()


@pytest.mark.parametrize(
    "sent",
    [
        message(b"a frame", TEXT),
        message(b"\xff", TEXT),
        message(b"", CONTINUATION),
        message(b"x" * 126, PING),
        message(b"\x03", CLOSE),
        message(b"", BINARY, first=0xC0),
        message(b"x", first=0) * 3,
        message(bytes(protocol.MOST_FRAME_BYTES + 1)),
        bytes([0x82, 0xFF]) + (2**63 - 1).to_bytes(8) + bytes(4),
        message(b"x" * 10**6, first=0) + message(b"x" * 10**6, CONTINUATION),
    ],
)
def test_messages_that_end_it(watchman: Watchman, sent: bytes) -> None:
    with RawStream(watchman.node.address) as stream, suppress(ConnectionError):
        stream.socket.sendall(sent)
        while stream.receive() is not None:
            pass
        assert stream.closed is not None


def test_the_largest_frame_is_read(watchman: Watchman) -> None:
    with RawStream(watchman.node.address) as stream:
        stream.send(bytes(protocol.MOST_FRAME_BYTES))
        while stream.receive() is not None:
            pass
        # It was read, and is no frame: not "too big".
        assert stream.closed == 1007


def test_what_opens_no_stream(watchman: Watchman) -> None:
    host, _, port = watchman.node.address.rpartition(":")
    whole = request()
    for sent, status in (
        (whole.replace(b"GET", b"POST"), b"405"),
        (whole.replace(b"Upgrade: websocket", b"Upgrade: h2c"), b"426"),
        (whole.replace(b"Version: 13", b"Version: 99"), b"426"),
        (request("Origin: http://a.example"), b"403"),
        (request(path="/v1/streams"), b"404"),
    ):
        with socket.create_connection((host, int(port)), PATIENCE) as raw:
            raw.sendall(sent)
            assert raw.recv(1000).split()[1] == status


def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_module, "_MOST_STREAMS", 2)
    hello = protocol.encode_frame([(protocol.HELLO, "hello", protocol.NOTHING)])
    with LocalNode("memory://") as node:
        streams = [RawStream(node.address) for _ in range(2)]
        for stream in streams:
            stream.send(hello)
            assert stream.receive() is not None
        with RawStream(node.address) as refused:
            assert refused.receive() is None
            assert refused.closed == 1013
        for stream in streams:
            stream.close()


def test_strangers_get_no_stream() -> None:
    with LocalNode("memory://", auth="tokens") as node:
        for headers in ((), ("Authorization: Bearer pxrs.a.b",), ("Authorization: Basic \xff",)):
            with RawStream(node.address, *headers) as stream:
                assert stream.status in (400, 401)
        assert node.server.held == 0


# Watches


def test_wakes_are_not_lost_and_not_kept(watchman: Watchman) -> None:
    """A client that is slow to read is told of each watch again, but not of each wake."""
    coord = watchman.node.px.stores.coord
    with RawStream(watchman.node.address) as stream:
        stream.send(protocol.encode_frame([(1, "node.watch_records", _WATCH)]))
        heard = _received(stream)
        for number in range(50):
            for _ in range(20):
                coord.commit((), (Put("a", b"%d" % number),))
            # The last of them was told, or comes.
            while (1, protocol.WOKEN) not in heard:
                heard = _received(stream)
            assert len(heard) == len(set(heard))
            heard = []


def _received(stream: RawStream) -> list[tuple[int, int]]:
    frame = stream.receive()
    assert frame is not None
    return [(number, kind) for number, kind, _ in protocol.decode_answers(frame)]


def test_watches_share_one_thread(watchman: Watchman) -> None:
    before = threading.active_count()
    with RawStream(watchman.node.address) as stream:
        arm = wire.METHODS["node.watch_records"]
        sent = [(n, arm.name, arm.encode([n, [f"{n}/"]])) for n in range(1, 1001)]
        stream.send(*protocol.encode_calls(sent))
        answers = 0
        while answers < 1000:
            answers += sum(kind == protocol.ANSWER for _, kind in _received(stream))
        assert threading.active_count() <= before + stores_module._THREADS + 5
        watchman.node.px.stores.coord.commit((), (Put("77/a", b"x"),))
        while (77, protocol.WOKEN) not in _received(stream):
            pass


def test_pages_are_cut_and_put_together(watchman: Watchman) -> None:
    stores = RemoteStores(remote_settings(parse_url(f"pxrs://{watchman.node.address}")))
    names = [f"p/{number:04}" for number in range(300)]
    for number, name in enumerate(names):
        stores.coord.commit((), (Put(name, bytes(10**6 if number % 25 == 20 else 10)),))
    assert [it.key for it in stores.coord.list("p/")] == names
    assert [it.key for it in stores.coord.list("p/", names[3], 200)] == names[4:204]
    assert [it.key for it in stores.coord.list("p/", limit=1)] == names[:1]
    with pytest.raises(InvalidRequest):
        stores.coord.list("p/", limit=0)
    stores.close()
