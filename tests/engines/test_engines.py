"""The engines themselves: every one starts, dies with its parent, and keeps its data."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import psycopg
import pytest
from engines.places import free_ports
from engines.process import DiedEarly
from engines.shared import HostProcess, shared_url

import engines
from support.child import Child
from support.engine_fixtures import NewEngine
from support.inside import say, wait_for_parent


@pytest.mark.thorough
@pytest.mark.parametrize("name", engines.NAMES)
def test_every_engine_starts_again_after_a_kill(name: str, new_engine: NewEngine) -> None:
    engine = new_engine(name)
    url = engine.url
    engine.kill()
    assert not engine.nodes[0].running
    engine.restart()
    assert engine.nodes[0].running
    assert engine.url == url


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["etcd", "nats"])
def test_three_nodes(name: str, new_engine: NewEngine) -> None:
    engine = new_engine(name, nodes=3)
    engine.kill(1)
    assert [node.running for node in engine.nodes] == [True, False, True]
    engine.restart(1)
    assert [node.running for node in engine.nodes] == [True, True, True]


def test_data_outlives_a_kill(new_engine: NewEngine) -> None:
    engine = new_engine("postgres")
    with psycopg.connect(engine.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS one")
    engine.kill()
    engine.restart()
    with psycopg.connect(engine.url) as connection:
        assert connection.execute("SELECT one FROM kept").fetchall() == [(1,)]


def start_and_wait(name: str) -> None:
    engine = engines.start(name)
    say([engine.nodes[0].pid])
    wait_for_parent()


def host_and_wait() -> None:
    """One that hosts in another process has no thread, and its forks may ask for engines."""
    host = HostProcess()
    url = urlsplit(shared_url("nats"))
    assert threading.active_count() == 1
    say([url.hostname, url.port])
    wait_for_parent()
    host.close()


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_engines_die_with_a_host_in_a_process_of_its_own(how: str) -> None:
    with Child(host_and_wait) as child:
        where = tuple(child.read())
        with socket.create_connection(where) as connection:
            child.tell() if how == "closed" else child.kill()
            with suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
        if how == "closed":
            assert child.join() == 0


def test_an_engine_dies_with_its_parent() -> None:
    with Child(start_and_wait, "nats") as child:
        (pid,) = child.read()
        death = os.pidfd_open(pid)
        child.signal(signal.SIGKILL)
        child.join()
        assert signalled(death)


def signalled(pidfd: int) -> bool:
    ready, _, _ = select.select([pidfd], [], [], 10.0)
    os.close(pidfd)
    return bool(ready)


def test_a_taken_port_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answers: list[Callable[[int], list[int]]] = [
            lambda count: [taken.getsockname()[1], *free_ports(count - 1)],
            free_ports,
        ]

        def choose(count: int) -> list[int]:
            return answers.pop(0)(count)

        monkeypatch.setattr("engines.engine.free_ports", choose)
        with engines.start("nats") as engine:
            assert taken.getsockname()[1] not in engine.ports
    assert answers == []


def test_an_engine_that_ends_early_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines.build("etcd", flags=["--no-such-flag"])
    with pytest.raises(DiedEarly, match="no-such-flag"):
        engine.start()
