"""Closing a store whose ZooKeeper is frozen, or does not say a word."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

import pxrs
from pxrs.config import parse_url, zookeeper_settings
from pxrs.errors import StoreUnavailable
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.stores.zookeeper.link import Farewell
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("zookeeper")
# Long enough to connect on a busy machine.
TIMEOUT = 3.0


class Waits:
    """Notes how long a handle may wait for each closing, and until when: the same for all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: list[float] = []
        self.until: set[float | None] = set()
        left = Farewell.left

        def counted(farewell: Farewell) -> float:
            self.left.append(left(farewell))
            self.until.add(farewell._until)
            return self.left[-1]

        monkeypatch.setattr(Farewell, "left", counted)


def test_sessions_of_a_frozen_server_say_farewell_in_one_time_for_all(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    zookeeper = new_engine("zookeeper")
    coord = ZooKeeperCoord(zookeeper_settings(parse_url(f"{zookeeper.url}/x?timeout={TIMEOUT}")))
    sessions = [coord.session(60.0) for _ in range(5)]
    waits = Waits(monkeypatch)
    zookeeper.nodes[0].freeze()
    coord.close()
    assert all(session.over for session in sessions)
    # The first has had all the time; nothing was left for the others.
    assert len(waits.left) >= len(sessions)
    assert not any(waits.left[1:])
    assert len(waits.until) == 1


def test_sessions_whose_server_is_given_up_have_no_time_of_their_own(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kazoo gives up a server that is silent for two thirds of a session: no answer to anything."""
    zookeeper = new_engine("zookeeper")
    coord = ZooKeeperCoord(zookeeper_settings(parse_url(f"{zookeeper.url}/x?timeout=30")))
    sessions = [coord.session(1.0) for _ in range(3)]
    waits = Waits(monkeypatch)
    zookeeper.nodes[0].freeze()
    for session in sessions:
        session.close()
    assert len(waits.left) >= len(sessions)
    assert len(waits.until) == 1
    zookeeper.nodes[0].thaw()
    coord.close()


def test_holds_of_a_frozen_server_do_too(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    zookeeper = new_engine("zookeeper")
    px = pxrs.connect(f"{zookeeper.url}/x?timeout={TIMEOUT}")
    for number in range(5):
        px.put("q", str(number))
    units = [px.begin() for _ in range(5)]
    assert all(unit.take("q", lock_for=60.0) for unit in units)
    waits = Waits(monkeypatch)
    zookeeper.nodes[0].freeze()
    px.close()
    assert len(waits.left) >= len(units)
    # Several threads close at once, so not only the first one may find time left.
    assert len(waits.until) == 1


def test_a_server_that_never_answers_is_given_up_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kazoo goes on with its attempt to connect, but not the caller."""
    waits = Waits(monkeypatch)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"zookeeper://127.0.0.1:{silent.getsockname()[1]}/x?timeout=0.2"
        with pytest.raises(StoreUnavailable):
            ZooKeeperCoord(zookeeper_settings(parse_url(url)))
        assert [each.name for each in threading.enumerate()].count("pxrs-zookeeper-stop") == 1
    assert waits.left == []


def test_a_session_that_ends_in_time_does_not_shorten_the_next_farewell(
    zookeeper_url: str,
) -> None:
    with closing(ZooKeeperCoord(zookeeper_settings(parse_url(zookeeper_url)))) as coord:
        coord.session(60.0).close()
        assert coord._link.farewell._until is None
