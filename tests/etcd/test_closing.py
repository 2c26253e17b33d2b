"""Closing a store whose etcd is dead, and one that was opened before a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import pxrs
from pxrs.config import etcd_settings, parse_url
from pxrs.errors import Closed
from pxrs.stores.etcd.coord import EtcdCoord
from pxrs.stores.etcd.nodes import Nodes
from pxrs.types import Put
from support.child import Child, exit_code
from support.engine_fixtures import NewEngine
from support.inside import say

pytestmark = pytest.mark.engine("etcd")
PATIENCE = 20.0
TIMEOUT = 1.0


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
