"""Nodes that answer with anything at all: a client gets errors of ours, soon, and stays usable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.sync.server import ServerConnection, serve

from pxrs.client import frames as protocol
from pxrs.config import parse_url, remote_settings
from pxrs.errors import ConfigError, PxrsError, StoreUnavailable
from pxrs.stores.remote import wire
from pxrs.stores.remote.stores import RemoteStores
from pxrs.types import Limits, Put, QueueLimits, Versioned
from support.child import PATIENCE
from support.fuzzing import limits

pytestmark = pytest.mark.engine("memory")

_HELLO = protocol.encode_hello(
    protocol.Hello("bad", Limits(10, 1000), QueueLimits(10, 1000), frozenset({"now", "atomic"}))
)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5)
    | st.binary(max_size=9) | st.floats(),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=9,
)  # fmt: skip
_RAW = (_ANYTHING.map(msgspec.msgpack.encode) | st.binary(max_size=20)).map(msgspec.Raw)


class BadNode:
    """Answers each frame with what `script` has; HELLO as a node does, if `greets`."""

    def __init__(self) -> None:
        self.script: list[bytes] = []
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
            for answer in self.script:
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
    @given(st.lists(frames, max_size=3))
    def attack(script: list[bytes]) -> None:
        bad.script = script
        stores = bad.open(0.15)
        for call in (
            lambda: stores.coord.get("a"),
            lambda: stores.coord.list("a"),
            lambda: stores.coord.commit((), (Put("a", b"x"),)),
            lambda: stores.queues.find("a"),
            lambda: stores.coord.session(5),
            lambda: stores.coord.watch("a").close(),
        ):
            with suppress(PxrsError):
                call()
        stores.close()

    attack()
    # Each connection has a thread, until it has broken.
    left = [it for it in threading.enumerate() if it.name == "pxrs-remote"]
    for thread in left:
        thread.join(PATIENCE)
        assert not thread.is_alive()


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
