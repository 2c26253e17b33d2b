"""Nodes that go, answers that are lost, frames that make no sense: what a `pxrs://` client does."""

from __future__ import annotations

import socket
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pxrs
from pxrs import Closed, ConfigError, NotAtomic, OutcomeUnknown, StoreUnavailable
from pxrs.client import frames
from pxrs.config import parse_url, remote_settings
from pxrs.errors import (
    CommitConflict,
    InvalidRequest,
    PxrsError,
    SessionLost,
    StoreBusy,
    VersionMismatch,
)
from pxrs.stores.open import open_stores
from pxrs.stores.remote import wire
from pxrs.stores.remote.stores import RemoteStores
from pxrs.types import Check, Committed, Put, Version, Versioned
from pxrs.urls import public
from support.child import PATIENCE
from support.remote_lab import ServedStores
from support.websocket import NONSENSE, RawStream

pytestmark = pytest.mark.engine("sqlite")


class Nodes:
    """Two nodes of one file."""

    def __init__(self, folder: Path) -> None:
        self._store = f"sqlite:///{folder}/nodes.db"
        self.served = [ServedStores(open_stores(self._store)) for _ in range(2)]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.served)
        return f"pxrs://{hosts}?timeout=10"

    def kill(self, number: int) -> None:
        self.served[number].close()

    def close(self) -> None:
        for each in self.served:
            each.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


@pytest.fixture
def stores(nodes: Nodes) -> Iterator[RemoteStores]:
    stores = RemoteStores(remote_settings(parse_url(nodes.url)))
    yield stores
    stores.close()


def test_reads_go_on_through_another_node(nodes: Nodes, stores: RemoteStores) -> None:
    stores.coord.commit((), (Put("a", b"1"),))
    assert stores._link.hello.node == "lab"
    nodes.kill(0)
    found = stores.coord.get("a")
    assert found is not None
    assert found.value == b"1"
    assert isinstance(stores.coord.commit((), (Put("a", b"2"),)), Committed)


def test_a_write_that_was_under_way_is_unknown_and_not_repeated(
    nodes: Nodes, stores: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    coord = nodes.served[0]._stores.coord
    commit = coord.commit

    def slow(*args: Any, **named: Any) -> Any:
        entered.set()
        go_on.wait(PATIENCE)
        return commit(*args, **named)

    monkeypatch.setattr(coord, "commit", slow)
    told: list[BaseException] = []

    def write() -> None:
        try:
            stores.coord.commit((Check("a", 0),), (Put("a", b"1"),))
        except BaseException as error:  # noqa: BLE001 - looked at below
            told.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert entered.wait(PATIENCE)
    stores._link._stream.close()  # type: ignore[union-attr]
    thread.join(PATIENCE)
    assert isinstance(told[0], OutcomeUnknown)
    assert stores.coord.get("a") is None
    go_on.set()
    with closing(stores.coord.watch("a")) as watch:
        while stores.coord.get("a") is None:
            assert watch.wait(PATIENCE)


def test_watches_are_armed_again_and_wake(nodes: Nodes, stores: RemoteStores) -> None:
    watch = stores.coord.watch("a")
    assert not watch.wait(0)
    nodes.kill(0)
    # Whatever it missed may have changed: it wakes when another node answers.
    assert stores.coord.get("a") is None
    assert watch.wait(PATIENCE)
    other = RemoteStores(remote_settings(parse_url(nodes.url)))
    other.coord.commit((), (Put("a", b"1"),))
    while stores.coord.get("a") is None:
        assert watch.wait(PATIENCE)
    watch.close()
    assert watch.wait(0)
    other.close()


def test_a_session_outlives_its_node_and_is_over_when_it_ends(
    nodes: Nodes, stores: RemoteStores
) -> None:
    session = stores.coord.session(30)
    stores.coord.commit((), (Put("a", b"1", session.id),))
    session.renew()
    nodes.kill(0)
    session.renew()
    assert stores.coord.get("a") is not None
    stores._link.call("node.close_session", session.id)
    assert stores.coord.get("a") is None
    with pytest.raises(SessionLost):
        session.renew()
    assert session.remaining() == 0


def test_where_sessions_are_not_lent_they_end_with_their_node() -> None:
    served = [ServedStores(open_stores("memory://")) for _ in range(2)]
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in served)
    with closing(RemoteStores(remote_settings(parse_url(f"pxrs://{hosts}")))) as stores:
        session = stores.coord.session(30)
        session.renew()
        served[0].close()
        with pytest.raises(SessionLost):
            session.renew()
        assert session.remaining() == 0
    served[1].close()


def test_a_client_that_is_gone_holds_nothing_for_long(nodes: Nodes, stores: RemoteStores) -> None:
    gone = RemoteStores(remote_settings(parse_url(nodes.url)))
    session = gone.coord.session(300)
    gone.coord.commit((), (Put("a", b"1", session.id),))
    watch = stores.coord.watch("a")
    gone.close()
    while stores.coord.get("a") is not None:
        assert watch.wait(PATIENCE)
    watch.close()


def test_a_broken_stream_keeps_the_session_of_a_client_that_comes_back(
    stores: RemoteStores,
) -> None:
    session = stores.coord.session(30)
    stores._link._stream.close()  # type: ignore[union-attr]
    session.renew()


def test_without_a_node_it_says_where_it_looked() -> None:
    with pytest.raises(StoreUnavailable, match=r"no node can be reached at 127\.0\.0\.1:1"):
        pxrs.connect("pxrs://127.0.0.1:1?timeout=0.3")


def test_a_closed_one_says_so(nodes: Nodes) -> None:
    px = pxrs.connect(nodes.url)
    watch = px.stores.coord.watch("a")
    px.close()
    assert watch.wait(0)
    with pytest.raises(Closed):
        px.stores.coord.get("a")


def test_the_callers_own_sql_is_not_carried(nodes: Nodes) -> None:
    with pxrs.connect(nodes.url) as px, closing(sqlite3.connect(":memory:")) as mine:
        refused = pytest.raises(NotAtomic, match="connect to the database itself")
        with refused, px.transaction(join=mine) as tx:
            tx.put("a", "b")
        with pytest.raises(NotAtomic, match="behind nodes"), px.transaction() as tx:
            tx.execute("SELECT 1")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("pxrs://", "names no host"),
        ("pxrs://host/path", "has no path"),
        ("pxrs://host:99999", "host:port"),
        ("pxrs://host?tls=maybe", "true or false"),
        ("pxrs://host?timeout=-1", "above 0"),
        ("pxrs://host?nothing=1", "nothing"),
    ],
)
def test_urls(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        pxrs.connect(url)


def test_tokens_of_urls_are_not_shown() -> None:
    url = "pxrs://pxrs.name.secret@host:6000,other:6001?timeout=5"
    settings = remote_settings(parse_url(url))
    assert (settings.token, settings.hosts) == ("pxrs.name.secret", ("host:6000", "other:6001"))
    assert settings.url == url
    assert "secret" not in public(url)


# The wire


def test_errors_come_as_they_were() -> None:
    for error in (
        CommitConflict({"a": Versioned("a", b"x", 3), "b": None}),
        VersionMismatch(b"\xff", Version(1, 2), None),
        pxrs.Fenced("gone", [pxrs.TopicPartition("t", 1)]),
        pxrs.OffsetOutOfRange("t", 1, 5, 6, 7),
        pxrs.GroupNotEmpty("g", ("a", "b")),
    ):
        back = frames.decode_error(frames.encode_error(error))
        assert type(back) is type(error)
        assert (str(back), vars(back)) == (str(error), vars(error))
        assert back.retryable == error.retryable


def test_an_error_of_a_later_version_is_unknown() -> None:
    assert isinstance(frames.unpack_error(frames.WireError("Later", "text")), OutcomeUnknown)


def test_every_method_of_the_seams_is_carried() -> None:
    from pxrs.stores import api

    for seam, folder, own in (
        (api.CoordStore, "coord", {"limits", "watch", "session", "close"}),
        (api.LogStore, "log", {"watch", "close"}),
        (api.QueueStore, "queues", {"limits", "watch", "close"}),
    ):
        methods = {name for name in vars(seam) if not name.startswith("_")} - own
        assert methods <= {name.partition(".")[2] for name in wire.METHODS if folder in name}


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused(frame: bytes) -> None:
    try:
        calls = frames.decode_calls(frame)
    except InvalidRequest:
        return
    for _, name, arguments in calls:
        if (method := wire.METHODS.get(name)) is not None:
            try:
                method.decode(arguments)
            except InvalidRequest:
                continue


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9)
    | st.binary(max_size=9) | st.floats(),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(st.sampled_from(sorted(wire.METHODS)), st.lists(_values, max_size=6))
def test_arguments_of_any_kind_are_refused_or_fit(name: str, values: list[Any]) -> None:
    try:
        arguments = wire.METHODS[name].decode(msgspec.Raw(msgspec.msgpack.encode(values)))
    except InvalidRequest:
        return
    assert tuple(arguments) == wire.METHODS[name].parameters


def test_a_stream_of_nonsense_ends_and_harms_nobody(nodes: Nodes, stores: RemoteStores) -> None:
    for frame in (b"", b"\xc1", b"\x93\x01\x02", b"\x91\x93\x01\xa1a\xc0"):
        with RawStream(f"127.0.0.1:{nodes.served[0].port}") as stream:
            stream.send(frame, NONSENSE)
            for _, kind, body in stream.answers():
                assert kind == frames.ERROR
                assert isinstance(frames.decode_error(body), PxrsError)
            assert stream.closed == 1007
    assert stores.coord.get("a") is None


def test_a_node_that_says_nothing_is_left(
    nodes: Nodes, stores: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the connection and takes what is sent, as a frozen one does."""
    monkeypatch.setattr("pxrs.client.websocket.SILENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = f"pxrs://127.0.0.1:{port},127.0.0.1:{nodes.served[0].port}?timeout=20"
        with closing(RemoteStores(remote_settings(parse_url(url)))) as client:
            assert client.coord.get("a") is None
            assert client._link.hello.node == "lab"


def test_a_node_shows_that_it_lives(nodes: Nodes) -> None:
    """Nothing is asked of it, and nothing happens: it is heard all the same."""
    with RawStream(f"127.0.0.1:{nodes.served[0].port}") as stream:
        for _ in range(2):
            frame = stream.receive()
            assert frame is not None
            assert [it[:2] for it in frames.decode_answers(frame)] == [(frames.HELLO, frames.WOKEN)]


@pytest.mark.long
def test_a_large_call_and_a_large_answer_pass_each_other(nodes: Nodes) -> None:
    """Both sides send more than sockets hold; nobody waits for the other to read first."""
    with closing(RemoteStores(remote_settings(parse_url(nodes.url)))) as client:
        for number in range(8):
            client.coord.commit((), (Put(f"large/{number}", bytes(10**6)),))

        def work(name: int) -> None:
            for _ in range(5):
                assert len(client.coord.list("large/")) == 8
                writes = [Put(f"w{name}/{number}", bytes(10**6)) for number in range(4)]
                client.coord.commit((), writes)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))


# Handing over


class Busy:
    """A method that fails with `StoreBusy` when it is called first, and says when it works."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self.has_failed = False
        self.worked = threading.Event()

    def __call__(self, *given: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise StoreBusy("for the first one who asks")
        answer = self._method(*given)
        self.worked.set()
        return answer


def test_a_session_is_handed_over_though_the_node_is_busy_at_first(
    nodes: Nodes, stores: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that had it lives, and gives it up soon: the next renewal would be too late."""
    first, second = (each._stores.coord for each in nodes.served)
    abandoned = threading.Event()
    lend = first.lend  # type: ignore[attr-defined]

    def lent(ttl: float) -> Any:
        session = lend(ttl)
        abandon = session.abandon

        def note() -> None:
            abandon()
            abandoned.set()

        session.abandon = note
        return session

    monkeypatch.setattr(first, "lend", lent)
    busy = Busy(second.adopt)  # type: ignore[attr-defined]
    monkeypatch.setattr(second, "adopt", busy)
    session = stores.coord.session(120)
    stores._link._stream.close()  # type: ignore[union-attr]
    assert abandoned.wait(PATIENCE)
    assert busy.has_failed
    session.renew()


def test_a_watch_is_armed_again_though_the_node_is_busy_at_first(
    nodes: Nodes, stores: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(nodes.served[1]._stores.coord.watch)
    monkeypatch.setattr(nodes.served[1]._stores.coord, "watch", busy)
    watch = stores.coord.watch("a")
    nodes.kill(0)
    assert stores.coord.get("a") is None
    assert busy.worked.wait(PATIENCE)
    with closing(RemoteStores(remote_settings(parse_url(nodes.url)))) as other:
        other.coord.commit((), (Put("a", b"1"),))
    while stores.coord.get("a") is None:
        assert watch.wait(PATIENCE)


def test_a_session_that_was_opened_while_its_stream_broke_is_handed_over(
    nodes: Nodes, stores: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next node was told of all sessions before this one was known."""
    call = stores._link.call

    def then_break(name: str, *given: Any, **named: Any) -> Any:
        answer = call(name, *given, **named)
        if name == "node.open_session":
            monkeypatch.setattr(stores._link, "call", call)
            stores._link._stream.close()  # type: ignore[union-attr]
            assert stores.coord.get("a") is None
        return answer

    adopted = Busy(nodes.served[1]._stores.coord.adopt)  # type: ignore[attr-defined]
    adopted.has_failed = True
    monkeypatch.setattr(nodes.served[1]._stores.coord, "adopt", adopted)
    monkeypatch.setattr(stores._link, "call", then_break)
    session = stores.coord.session(120)
    assert adopted.worked.wait(PATIENCE)
    session.renew()


def test_a_session_that_is_renewed_twice_at_once_is_held_by_the_last_handle(
    nodes: Nodes, stores: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its owner and by the thread that hands over, when the client has come to another node."""
    session = stores.coord.session(120)
    link = stores._link
    monkeypatch.setattr(link, "sessions", list)
    link._stream.close()  # type: ignore[union-attr]
    second = nodes.served[1]._stores.coord
    adopt = second.adopt  # type: ignore[attr-defined]
    adopted, overtaken = threading.Event(), threading.Event()

    def slowly(name: str) -> Any:
        handle = adopt(name)
        if not adopted.is_set():
            adopted.set()
            # One at a time: then nobody overtakes.
            overtaken.wait(0.5)
        return handle

    def renew() -> None:
        link.call("node.renew_session", session.id)

    monkeypatch.setattr(second, "adopt", slowly)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(renew)
        assert adopted.wait(PATIENCE)
        renew()
        overtaken.set()
        first.result()
    renew()


def test_a_queue_that_is_made_anew_is_not_deleted_by_a_repeat(
    nodes: Nodes, stores: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the first delete is lost; somebody makes a queue of that name again."""
    stores.queues.create("inbox")
    queues = nodes.served[0]._stores.queues
    delete = queues.delete

    def then_break(name: str) -> None:
        delete(name)
        queues.create(name)
        stores._link._stream.close()  # type: ignore[union-attr]

    monkeypatch.setattr(queues, "delete", then_break)
    with pytest.raises(OutcomeUnknown):
        stores.queues.delete("inbox")
    assert stores.queues.find("inbox") is not None
