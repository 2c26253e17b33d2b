"""Closing a store whose etcd is dead, and one that was opened before a fork."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.config import etcd_settings, parse_url
from pxrs.errors import Closed, StoreUnavailable
from pxrs.stores.etcd.coord import EtcdCoord
from pxrs.stores.etcd.nodes import Nodes
from pxrs.types import Put
from support.child import Child, exit_code
from support.engine_fixtures import NewEngine
from support.inside import say

pytestmark = pytest.mark.engine("etcd")
PATIENCE = 20.0
TIMEOUT = 1.0
CONSUMERS = 3


def ends(call: Callable[[], None]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


def test_sessions_say_farewell_in_one_time_for_all(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = new_engine("etcd")
    url = f"{etcd.url}/x?timeout={TIMEOUT}"
    coord = EtcdCoord(etcd_settings(parse_url(url)))
    coord.watch("k")
    for _ in range(100):
        coord.session(60.0)
    px = pxrs.connect(url)
    for number in range(50):
        px.put("q", str(number))
    units = [px.begin() for _ in range(50)]
    # Each hold has a session of its own.
    assert all(unit.take("q", lock_for=60.0) for unit in units)
    etcd.kill()
    left: list[float] = []
    farewell = Nodes.farewell

    def noted(nodes: Nodes) -> float:
        left.append(farewell(nodes))
        return left[-1]

    monkeypatch.setattr(Nodes, "farewell", noted)
    for close, most in ((coord.close, 100), (px.close, 50)):
        left.clear()
        assert ends(close)
        # The first one has had all the time; nothing was left for the others.
        assert len(left) >= most
        assert not any(left[1:])


class Noticed(logging.Handler):
    """Counts the members that have noticed that the store is away."""

    def __init__(self, members: int) -> None:
        super().__init__(logging.WARNING)
        self._left = members
        self.by_all = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self._left -= "trying again" in record.getMessage()
        if not self._left:
            self.by_all.set()


def test_consumers_say_goodbye_to_a_dead_etcd_in_one_time_for_all(
    new_engine: NewEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = new_engine("etcd")
    log = f"sqlite:///{tmp_path}/log.db"
    px = pxrs.connect(log, coord=f"{etcd.url}/x?timeout={TIMEOUT}")
    px.topics.create("t", CONSUMERS)
    consumers = [px.consumer("t", "g", session_ttl=60.0) for _ in range(CONSUMERS)]
    noticed, logger = Noticed(CONSUMERS), logging.getLogger("pxrs.groups")
    logger.addHandler(noticed)
    etcd.kill()
    assert noticed.by_all.wait(PATIENCE)
    logger.removeHandler(noticed)
    # Of the thread that closes: for each call that has the whole time, how many members still ask.
    asking: list[int] = []
    call = Nodes.call

    def noted(nodes: Nodes, send: Any, timeout: float | None = None, size: int = 0) -> Any:
        if timeout is None and threading.current_thread() is threading.main_thread():
            stops = [each._member.background._stop.is_set() for each in consumers]
            asking.append(stops.count(False))
        return call(nodes, send, timeout, size)

    monkeypatch.setattr(Nodes, "call", noted)
    with pytest.raises(StoreUnavailable):
        px.close()
    assert asking == [0]
    assert all(consumer._member.has_left for consumer in consumers)


def close_in_a_child(url: str) -> None:
    """Fork while another thread is at it; say how the child ended."""
    px = pxrs.connect(url)
    px.put("q", "x")
    item = px.begin()
    item.take("q")
    coord = px.stores.coord
    watch = coord.watch("k")
    session = coord.session(60.0)
    busy = threading.Thread(target=lambda: [coord.commit([], [Put("k", b"")]) for _ in range(200)])
    busy.start()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            coord.get("k")
        except Closed:
            code = 0 if session.remaining() == 0.0 else 2
        try:
            watch.close()
            session.close()
        except Closed:
            pass
        px.close()
        os._exit(code)
    say(exit_code(pid))
    busy.join()
    # The parent goes on with all of it.
    session.renew()
    coord.commit([], [Put("k", b"")])
    say(watch.wait(PATIENCE))
    px.close()
    say("closed")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_at_once(etcd_url: str, tmp_path: Path) -> None:
    with Child(close_in_a_child, etcd_url) as child:
        assert [child.read(), child.read(), child.read()] == [0, True, "closed"]
