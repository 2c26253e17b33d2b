"""Engines that are killed and come back, under load."""

from __future__ import annotations

import urllib.request
from contextlib import closing

import pytest
from engines.probes import tcp_says

import engines
from support.counting import Counting
from support.engine_fixtures import NewEngine
from support.site import open_coord

_OPTIONS: dict[str, dict[str, bool]] = {"etcd": {"to_be_killed": True}, "zookeeper": {}}
ENGINES = [
    pytest.param("etcd", marks=pytest.mark.engine("etcd")),
    pytest.param("zookeeper", marks=pytest.mark.engine("zookeeper")),
]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_restarts_under_load(name: str, new_engine: NewEngine) -> None:
    engine = new_engine(name, **_OPTIONS[name])
    with closing(open_coord(engine.url)) as coord, Counting(coord) as counting:
        counting.await_more(20)
        for restart in (engine.kill, engine.stop):
            restart()
            engine.restart()
            counting.await_more(20)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ENGINES)
def test_three_nodes_lose_their_leader_under_load(name: str, new_engine: NewEngine) -> None:
    engine = new_engine(name, nodes=3, **_OPTIONS[name])
    with closing(open_coord(engine.url)) as coord, Counting(coord) as counting:
        # Longer than a loaded machine takes to kill, elect and restart: it is renewed once a round.
        session = coord.session(120.0)
        watch = coord.watch("count/")
        counting.await_more(20)
        for _ in range(3):
            leader = _LEADER_OF[name](engine)
            engine.kill(leader)
            counting.await_more(20)
            session.renew()
            watch.wait(0)
            assert watch.wait(20.0)
            engine.restart(leader)


def leader_of_etcd(etcd: engines.Engine) -> int:
    """Which node says that it leads."""
    for number in range(len(etcd.nodes)):
        port = etcd.ports[3 * number + 2]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            if b"etcd_server_is_leader 1" in answer.read():
                return number
    raise AssertionError("there is no leader")


def leader_of_zookeeper(zookeeper: engines.Engine) -> int:
    """Which node says that it leads."""
    for number in range(len(zookeeper.nodes)):
        if tcp_says(zookeeper.ports[4 * number], b"srvr", b"Mode: leader"):
            return number
    raise AssertionError("there is no leader")


_LEADER_OF = {"etcd": leader_of_etcd, "zookeeper": leader_of_zookeeper}
