"""How runs and listeners say that they are doing, and what they log of a store that is away."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import aio
from pxrs.errors import StoreReadOnly
from pxrs.stores.open import open_stores
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.queueplace import Place
from support.running import Running

pytestmark = pytest.mark.long

_LOOK = 0.01


class Lines(logging.Handler):
    """The lines of a logger; `wait` blocks until one has these words."""

    def __init__(self, when: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._when = when
        self._changed = threading.Condition()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._when()
        with self._changed:
            self.lines.append(record.getMessage())
            self._changed.notify_all()

    def wait(self, words: str) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(words in line for line in self.lines), PATIENCE
            ), self.lines


@contextmanager
def logged(name: str, when: Callable[[], None] = lambda: None) -> Iterator[Lines]:
    lines = Lines(when)
    logging.getLogger(name).addHandler(lines)
    yield lines
    logging.getLogger(name).removeHandler(lines)


def wait_until(condition: Callable[[], bool]) -> None:
    """Looking again and again: nobody is woken by how something is doing."""
    deadline = threading.Event()
    for _ in range(int(PATIENCE / _LOOK)):
        if condition():
            return
        deadline.wait(_LOOK)
    raise AssertionError("it does not come to that")


def states(px: pxrs.Pxrs) -> dict[str, str]:
    return {name: each.state for name, each in px.health().items()}


# Worker processes


def die(*_: Any) -> None:
    """In a worker process: whatever it handles kills it."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def px(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pxrs.Pxrs]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db") as px:
        px.topics.create("orders", partitions=2)
        yield px


NAMES = {
    "run": ["run:g/worker-0", "run:g/worker-1"],
    "listen": ["listen:inbox/worker-0", "listen:inbox/worker-1"],
}


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("verb", ["run", "listen"])
def test_worker_processes_that_die_are_not_well(px: pxrs.Pxrs, verb: str) -> None:
    seen: list[dict[str, pxrs.Health]] = []
    if verb == "run":
        Running(px, die, topic="orders", processes=2)
    else:
        px.listen("inbox", die, processes=2)
    wait_until(lambda: states(px) == dict.fromkeys(NAMES[verb], "running"))
    with logged("pxrs.processes", lambda: seen.append(px.health())) as lines:
        px.put("inbox", "x")
        with px.producer() as producer:
            for partition in (0, 1):
                producer.send("orders", "x", partition=partition)
        lines.wait("another one is started")
    (worker,) = [each for each in seen[0].values() if each.state == "restarting"]
    assert not worker.ok
    assert "was killed by SIGKILL" in worker.detail
    assert sorted(seen[0]) == NAMES[verb]
    px.stop()
    wait_until(lambda: px.health() == {})


@pytest.mark.engine("sqlite")
def test_worker_processes_that_are_to_come_are_named(px: pxrs.Pxrs) -> None:
    running = Running(px, die, topic="orders", processes=2)
    wait_until(lambda: px.health() != {})
    assert sorted(px.health()) == NAMES["run"]
    px.stop()
    running.join()
    assert (running.error, px.health()) == (None, {})


@pytest.mark.engine("sqlite")
def test_a_worker_process_that_lives_again_is_well_again(px: pxrs.Pxrs) -> None:
    running = Running(px, print, topic="orders", processes=1)
    wait_until(lambda: states(px) == {"run:g/worker-0": "running"})
    with logged("pxrs.processes") as lines:
        pid = int(px.health()["run:g/worker-0"].detail.split()[-1])
        os.kill(pid, signal.SIGKILL)
        lines.wait("another one is started")
        assert states(px) == {"run:g/worker-0": "restarting"}
        wait_until(lambda: states(px) == {"run:g/worker-0": "running"})
    px.stop()
    running.join()


# Listeners


@pytest.mark.engine("sqlite")
def test_listeners_are_there(px: pxrs.Pxrs) -> None:
    began, go_on = threading.Event(), threading.Event()

    def handle(item: pxrs.Item, tx: pxrs.UnitOfWork) -> None:
        began.set()
        assert go_on.wait(PATIENCE)

    first = px.listen("inbox", handle)
    second = px.listen("inbox", handle)
    assert states(px) == {"listen:inbox": "idle", "listen:inbox#2": "idle"}
    px.put("inbox", "x")
    assert began.wait(PATIENCE)
    assert sorted(states(px).values()) == ["idle", "running"]
    assert all(each.ok for each in px.health().values())
    go_on.set()
    for listener in (first, second):
        listener.stop()
        assert listener.join(PATIENCE)
    assert px.health() == {}


@pytest.mark.engine("sqlite")
def test_a_listener_that_has_failed_says_so(tmp_path: Path) -> None:
    def refuse(what: str) -> None:
        if what == "take":
            raise StoreReadOnly("the file can't be written")

    with closing(Place(open_stores(f"sqlite:///{tmp_path}/app.db"))) as place:
        place.on_call = refuse
        listener = place.px.listen("inbox", print)
        with pytest.raises(StoreReadOnly):
            listener.join(PATIENCE)
        (health,) = place.px.health().values()
        assert (health.state, health.ok) == ("failed", False)
        assert "can't be written" in health.detail
        place.px._running.clear()


@pytest.mark.engine("sqlite")
def test_asyncios_health_has_listeners(px: pxrs.Pxrs) -> None:
    async def main() -> None:
        async with aio.connect(px.url) as apx:
            async with apx.listen("inbox", print):
                assert [each.state for each in apx.health().values()] == ["idle"]
            assert apx.health() == {}

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.engine("postgres")
def test_an_outage_is_logged_when_it_begins_and_when_it_ends(new_engine: NewEngine) -> None:
    engine = new_engine("postgres")
    with pxrs.connect(engine.url) as px, logged("pxrs.listen") as lines:
        handled = threading.Event()
        with px.listen("inbox", lambda item, tx: handled.set(), workers=3):
            engine.kill()
            lines.wait("trying again until it works")
            (health,) = px.health().values()
            assert (health.state, health.ok) == ("lost the store", False)
            engine.restart()
            # By itself, without an item to handle.
            lines.wait("it works again, after")
            wait_until(lambda: [each.state for each in px.health().values()] == ["idle"])
            px.put("inbox", "x")
            assert handled.wait(PATIENCE)
    assert [line.split(":")[0] for line in lines.lines] == ["listener of 'inbox'"] * 2


@pytest.mark.engine("sqlite")
def test_an_outage_at_the_commit_is_logged(tmp_path: Path) -> None:
    with closing(Place(open_stores(f"sqlite:///{tmp_path}/app.db"))) as place:
        began = threading.Event()

        def handle(item: pxrs.Item, tx: pxrs.UnitOfWork) -> None:
            place.faults.cut_off(None, place.faults.clock.monotonic() + 3600)
            began.set()

        place.fill("inbox", "x")
        with logged("pxrs.listen") as lines, place.px.listen("inbox", handle):
            assert began.wait(PATIENCE)
            lines.wait("trying again until it works")
            assert [each.state for each in place.px.health().values()] == ["lost the store"]
            place.faults.heal()
            lines.wait("it works again, after")
        assert place.values("inbox") == []
