"""Nodes that answer with anything at all: a client gets errors of ours, soon, and stays usable."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.sync.server import ServerConnection, serve

from pxrs.client import frames as protocol
from pxrs.client.websocket import connect
from pxrs.clock import SYSTEM_CLOCK
from pxrs.config import parse_url, remote_settings
from pxrs.core.retry import Backoff
from pxrs.errors import (
    ConfigError,
    OutcomeUnknown,
    PxrsError,
    RetryExhausted,
    StoreUnavailable,
)
from pxrs.kv.led import LedKeys
from pxrs.stores.remote import wire
from pxrs.stores.remote.stores import RemoteAtomic, RemoteStores
from pxrs.types import (
    Append,
    Batch,
    Holder,
    Limits,
    LogPartition,
    NewItem,
    Put,
    QueueChange,
    QueueLimits,
    Versioned,
)
from support.child import PATIENCE
from support.fuzzing import limits

pytestmark = pytest.mark.engine("memory")

_HELLO = protocol.encode_hello(
    protocol.Hello("bad", Limits(10, 1000), QueueLimits(10, 1000), frozenset({"now", "atomic"}))
)
_VIEW = {"epoch": 1, "nodes": [], "slots": []}
_APPEND = Append(LogPartition("id", 0), Batch(bytearray(100), 1, 0))
_PUT = QueueChange(Holder("", ""), put=(NewItem(queue="inbox", body=b"x"),))
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5)
    | st.binary(max_size=9) | st.floats(),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=9,
)  # fmt: skip
_RAW = (_ANYTHING.map(msgspec.msgpack.encode) | st.binary(max_size=20)).map(msgspec.Raw)


class BadNode:
    """Answers each frame with what `script` has; HELLO as a node does, if `greets`.

    A call of a method that `answers` names has that answer instead.
    """

    def __init__(self) -> None:
        self.script: list[bytes] = []
        self.answers: dict[str, Any] = {}
        self.breaks = False
        self.greets = True
        self._server = serve(self._talk, "127.0.0.1", 0, max_size=None, compression=None)
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _talk(self, client: ServerConnection) -> None:
        for frame in client:
            assert isinstance(frame, bytes)
            calls = protocol.decode_calls(frame)
            if self.greets and calls[0][0] == protocol.HELLO:
                client.send(protocol.encode_frame([(protocol.HELLO, protocol.ANSWER, _HELLO)]))
                continue
            if self.breaks:
                return
            found = [
                (number, protocol.ANSWER, protocol.raw(self.answers[name]))
                for number, name, _ in calls
                if name in self.answers
            ]
            for answer in [protocol.encode_frame(found)] if found else self.script:
                client.send(answer)

    def open(self, timeout: float = 0.3) -> RemoteStores:
        """Calls time out soon; it may greet later, on a busy machine."""
        url = f"pxrs://127.0.0.1:{self.port}?timeout={PATIENCE if self.greets else timeout}"
        stores = RemoteStores(remote_settings(parse_url(url)))
        stores._link.retry.timeout = timeout
        return stores

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(PATIENCE)


@pytest.fixture
def bad() -> Iterator[BadNode]:
    node = BadNode()
    yield node
    node.close()


def test_any_bytes_are_read_or_refused(pytestconfig: pytest.Config) -> None:
    @limits(pytestconfig, 300)
    @given(_RAW, st.sampled_from(sorted(wire.METHODS)))
    def read(sent: msgspec.Raw, name: str) -> None:
        error = protocol.decode_error(sent)
        assert isinstance(error, PxrsError)
        assert isinstance(str(error), str)
        for function in (
            wire.METHODS[name].decode_answer, wire.METHODS[name].decode, protocol.decode_hello,
            protocol.decode_piece, lambda raw: protocol.decode_calls(bytes(raw)),
            lambda raw: protocol.decode_answers(bytes(raw)),
        ):  # fmt: skip
            with suppress(PxrsError):
                function(sent)

    read()


def test_every_error_can_be_shown_whatever_it_has(pytestconfig: pytest.Config) -> None:
    @limits(pytestconfig, 300)
    @given(
        st.sampled_from(sorted(protocol._CLASSES)), st.text(max_size=9),
        st.dictionaries(
            st.sampled_from(["current", "expected", "parts", "members", "key", "args", "retryable",
                             "__class__", "__dict__", "topic"]), _ANYTHING, max_size=3),
    )  # fmt: skip
    def show(name: str, text: str, attributes: dict[str, Any]) -> None:
        sent = msgspec.msgpack.encode(protocol.WireError(name, text, attributes))
        error = protocol.decode_error(msgspec.Raw(sent))
        assert isinstance(error, PxrsError)
        assert text in str(error)
        assert isinstance(repr(error), str)

    show()


@pytest.mark.long
def test_answers_of_any_kind(bad: BadNode, pytestconfig: pytest.Config) -> None:
    """Numbers are those of calls under way, or of none; bodies fit, or are anything."""
    entries = st.tuples(st.integers(-1, 40), st.integers(-1, 4), _RAW)
    frames = st.lists(entries, max_size=5).map(protocol.encode_frame) | st.binary(max_size=20)

    @limits(pytestconfig, 15)
    @given(st.lists(frames, max_size=3), st.integers(0, 2))
    def attack(script: list[bytes], third: int) -> None:
        bad.script = script
        stores = bad.open(0.15)
        calls: list[Callable[[], object]] = [
            lambda: stores.coord.get("a"),
            lambda: stores.coord.list("a"),
            lambda: stores.coord.commit((), (Put("a", b"x"),)),
            lambda: stores.queues.find("a"),
            lambda: stores.coord.session(5),
            lambda: stores.coord.watch("a").close(),
            lambda: stores.log.append([_APPEND]),
            lambda: stores.log.fetch(_APPEND.where, 0, 100),
            lambda: stores.log.bounds("id"),
            lambda: stores.log.batch_at(_APPEND.where, 0),
            stores.client.view,
            lambda: keys_of(stores).get("k"),
            lambda: keys_of(stores).put("k", "v"),
            lambda: write(stores.atomic()),
        ]
        # Most of them wait until their time is over.
        for call in calls[third::3]:
            with suppress(PxrsError):
                call()
        stores.close()

    attack()
    # Each connection has a thread, until it has broken.
    left = [it for it in threading.enumerate() if it.name == "pxrs-remote"]
    for thread in left:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def keys_of(stores: RemoteStores) -> LedKeys:
    return LedKeys(stores.coord, SYSTEM_CLOCK, stores.client)


def write(atomic: RemoteAtomic) -> None:
    with atomic:
        atomic.write(Put("a", b"x"))
        atomic.append(*_APPEND)
        atomic.queue(_PUT)


# What each method is answered by a node that leaves something out, and a call of it.
_TOO_FEW: list[Any] = [
    ("kv.write", [], lambda stores: keys_of(stores).put("k", "v")),
    ("kv.write", [[None, None]] * 2, lambda stores: keys_of(stores).put("k", "v")),
    ("coord.commit", [True, {}], lambda stores: stores.coord.commit((), (Put("a", b"x"),))),
    ("log.append", [], lambda stores: stores.log.append([_APPEND])),
    ("queues.apply", [], lambda stores: stores.queues.apply(_PUT)),
    ("node.atomic", [{}, [[0, False]], [1]], lambda stores: write(stores.atomic())),
    ("node.atomic", [{"a": 1}, [], [1]], lambda stores: write(stores.atomic())),
    ("node.atomic", [{"a": 1}, [[0, False]], []], lambda stores: write(stores.atomic())),
]


@pytest.mark.parametrize(("name", "answer", "call"), _TOO_FEW)
def test_answers_that_leave_something_out_are_unknown(
    bad: BadNode, name: str, answer: Any, call: Callable[[RemoteStores], object]
) -> None:
    """Never an error that is not ours: the caller could not know what it means."""
    bad.answers = {name: answer, "node.view": _VIEW, "node.watch_view": None}
    seconds = 2 if name == "kv.write" else PATIENCE
    with closing(bad.open(seconds)) as stores, pytest.raises(OutcomeUnknown):
        call(stores)


@pytest.mark.parametrize("answer", [[], [None, None]])
def test_reads_that_have_no_answers_end(bad: BadNode, answer: list[None]) -> None:
    bad.answers = {"kv.read": answer, "node.view": _VIEW, "node.watch_view": None}
    stores = bad.open(1)
    told: list[BaseException] = []

    def read() -> None:
        try:
            keys_of(stores).get("k")
        except BaseException as error:  # noqa: BLE001 - looked at below
            told.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(PATIENCE)
    assert not reading.is_alive()
    assert isinstance(told[0], RetryExhausted)
    stores.close()


@pytest.mark.parametrize("address", ["", "nowhere", "host:port", "host:99999", "[::1", "a" * 300])
def test_a_view_with_addresses_that_are_none(bad: BadNode, address: str) -> None:
    """Whoever is said to lead the key can't be reached: another node is asked."""
    slots = ["odd"] * 64
    bad.answers = {
        "node.view": {"epoch": 1, "nodes": [["odd", address]], "slots": slots},
        "node.watch_view": None,
        "kv.read": [None],
    }
    with closing(bad.open(PATIENCE)) as stores:
        assert keys_of(stores).get("k") is None


@pytest.mark.parametrize(
    "attributes",
    [{}, {"key": b"k", "node": "a"}, {"key": b"k", "node": "a", "address": {}},
     {"key": 7, "node": "a", "address": "b:1"}],
)  # fmt: skip
def test_a_leader_that_is_none(attributes: dict[str, Any]) -> None:
    sent = protocol.raw(protocol.WireError("NotLeader", "text", attributes))
    assert isinstance(protocol.decode_error(sent), OutcomeUnknown)


def test_a_node_that_greets_and_breaks_is_not_tried_without_end(bad: BadNode) -> None:
    """Every call counts its attempts, and pauses between them."""
    bad.breaks = True
    stores = bad.open(PATIENCE)
    stores._link.retry.backoff = Backoff(0.001, 0.001, attempts=3)
    with pytest.raises(RetryExhausted) as raised:
        stores.coord.get("a")
    assert raised.value.attempts == 3
    assert stores.client.stats().retries == (2, 1)
    stores.close()


class Trickle:
    """Takes connections and answers a byte now and then, without end."""

    def __init__(self, begins: bytes) -> None:
        self._begins = begins
        self._over = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.sendall(self._begins)
            while not self._over.wait(0.05):
                client.sendall(b"x")

    def close(self) -> None:
        self._over.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def test_a_node_that_answers_byte_by_byte_is_passed_over(
    bad: BadNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, the answer never does: nobody waits for it without end."""
    monkeypatch.setattr("pxrs.client.pool._GREETING", 1.0)
    opened: list[RemoteStores] = []
    with closing(Trickle(b"HTTP/1.1 101 Switching Protocols\r\nX: ")) as slow:
        url = f"pxrs://127.0.0.1:{slow.port},127.0.0.1:{bad.port}?timeout={PATIENCE}"
        opening = threading.Thread(
            target=lambda: opened.append(RemoteStores(remote_settings(parse_url(url)))), daemon=True
        )
        opening.start()
        opening.join(PATIENCE)
        assert opened
        opened[0].close()


def test_a_node_that_begins_tls_byte_by_byte_is_passed_over() -> None:
    told: list[BaseException] = []
    # The header of a large record.
    with closing(Trickle(b"\x16\x03\x03\x40\x00")) as slow:

        def connect() -> None:
            try:
                url = f"pxrs://127.0.0.1:{slow.port}?timeout=0.5&tls=true"
                RemoteStores(remote_settings(parse_url(url)))
            except BaseException as error:  # noqa: BLE001 - looked at below
                told.append(error)

        connecting = threading.Thread(target=connect, daemon=True)
        connecting.start()
        connecting.join(PATIENCE)
        assert isinstance(told[0], RetryExhausted)


_SIZES = st.sampled_from([0, 1, 2, 3, 124, 125, 126, 127, 300, 2**16 - 1, 2**16])
BINARY, PING = Opcode.BINARY, Opcode.PING
_SENT = st.tuples(st.sampled_from([BINARY, BINARY, PING]), _SIZES)


def test_messages_are_the_same_however_they_are_cut(
    bad: BadNode, pytestconfig: pytest.Config
) -> None:
    """Messages that come alone take a shorter way; it must not be taken in the middle of one."""

    @limits(pytestconfig, 200)
    @given(
        st.lists(_SENT, max_size=6),
        st.sets(st.integers(0, 400), max_size=9),
        st.sampled_from([0, 2, 4]),
    )
    def read(sent: list[tuple[Opcode, int]], cuts: set[int], head: int) -> None:
        # What is in them looks like frames itself.
        parts = [
            Frame(kind, (b"\x82\x02%02d" % number * 2**14)[: size % 126 if kind is PING else size])
            for number, (kind, size) in enumerate(sent)
        ]
        wire = [part.serialize(mask=False) for part in parts]
        # Cut where frames end or seem to, and anywhere else.
        ends = [0, *accumulate(map(len, wire))]
        places = cuts.union(ends if not head else ())
        places |= {end + head + 4 * n for end in ends for n in range(9) if head}
        whole = b"".join(wire)
        chunks = [whole[start:end] for start, end in pairwise([0, *sorted(places), len(whole)])]
        coming = filter(None, chunks)
        monkeypatch.setattr(stream, "_receive", lambda _: next(coming, b""))
        found: list[bytes] = []
        while messages := stream.receive():
            found += messages
        assert found == [bytes(it.data) for it in parts if it.opcode is BINARY]

    settings = remote_settings(parse_url(f"pxrs://127.0.0.1:{bad.port}"))
    stream = connect(settings, f"127.0.0.1:{bad.port}", PATIENCE)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            read()
    finally:
        stream.close()
        stream.release()


def test_a_greeting_of_any_kind(bad: BadNode, pytestconfig: pytest.Config) -> None:
    bad.greets = False

    @limits(pytestconfig, 40)
    @given(st.sampled_from([protocol.ANSWER, protocol.ERROR, 7]), _RAW)
    def attack(kind: int, body: msgspec.Raw) -> None:
        bad.script = [msgspec.msgpack.encode([(protocol.HELLO, kind, body)])]
        with pytest.raises(PxrsError):
            bad.open(0.2)

    attack()


@pytest.mark.long
def test_a_frame_that_is_too_large_is_not_taken(bad: BadNode) -> None:
    stores = bad.open(5)
    bad.script = [bytes(protocol.MOST_ANSWER_BYTES + 2**20)]
    with pytest.raises((StoreUnavailable, ConfigError)):
        stores.coord.get("a")
    bad.script = [
        protocol.encode_frame([(n, protocol.ANSWER, protocol.NOTHING) for n in range(100)])
    ]
    assert stores.coord.get("a") is None
    stores.close()


def test_a_list_that_has_no_end_ends(bad: BadNode) -> None:
    """A node that says that there is more, and gives nothing."""
    empty = msgspec.Raw(msgspec.msgpack.encode([[], True]))
    bad.script = [protocol.encode_frame([(n, protocol.ANSWER, empty) for n in range(100)])]
    stores = bad.open(5)
    assert stores.coord.list("a") == []
    assert stores.queues.peek("a") == []
    again = msgspec.Raw(msgspec.msgpack.encode([[Versioned("a", b"", 1)], True]))
    bad.script = [protocol.encode_frame([(n, protocol.ANSWER, again) for n in range(100)])]
    with pytest.raises(StoreUnavailable, match="again and again"):
        stores.coord.list("a")
    stores.close()
