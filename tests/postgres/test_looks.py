"""What a process looks at by itself, if no notification comes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pxrs.clock import SYSTEM_CLOCK, SystemClock
from pxrs.stores.postgres.looks import Looks, Pace
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.types import Check, Conflict, Delete, Put
from support.child import PATIENCE
from support.postgres import PostgresLab

pytestmark = pytest.mark.engine("postgres")


class Gate:
    """Looks wait while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._looked = threading.Semaphore(0)
        self.open()
        look = Looks.look

        def gated(*arguments: Any) -> Any:
            assert self._open.wait(PATIENCE)
            seen = look(*arguments)
            self._looked.release()
            return seen

        monkeypatch.setattr(Looks, "look", gated)

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        """Nobody looks from now on, and there was a look before."""
        assert self._looked.acquire(timeout=PATIENCE)
        self._open.clear()
        while self._looked.acquire(blocking=False):
            pass


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.mark.parametrize("read", ["get", "list", "conflict"])
def test_a_record_that_came_and_went_between_two_looks(
    deaf: PostgresLab, gate: Gate, read: str
) -> None:
    """Who has read it meanwhile waits for its end, and both looks saw nothing."""
    here, there = deaf.open().coord, deaf.open().coord
    watch = here.watch("k/")
    gate.shut()
    watch.wait(0)
    there.commit((), (Put("k/1", b"1"),))
    if read == "get":
        assert here.get("k/1") is not None
    elif read == "list":
        assert here.list("k/")
    else:
        assert isinstance(here.commit((Check("k/1", 0),), (Put("k/1", b"2"),)), Conflict)
    there.commit((), (Delete("k/1"),))
    gate.open()
    assert watch.wait(PATIENCE)
    watch.close()


def test_what_stays_as_it_was_read_wakes_nobody(deaf: PostgresLab, gate: Gate) -> None:
    here = deaf.open().coord
    here.commit((), (Put("k/1", b"1"),))
    watch = here.watch("k/")
    for _ in range(2):
        assert here.get("k/1") is not None
        gate.shut()
        gate.open()
    watch.wait(0)
    for _ in range(3):
        assert here.get("k/1") is not None
        gate.shut()
        gate.open()
        assert not watch.wait(0)
    watch.close()


class Stalls(SystemClock):
    """A clock that can be told that minutes have passed."""

    def __init__(self) -> None:
        self._passed = 0.0
        self.monotonic = lambda: SYSTEM_CLOCK.monotonic() + self._passed  # type: ignore[assignment]

    def stall(self) -> None:
        self._passed += 600


def test_one_look_that_took_long_is_no_reason_to_rest(
    deaf: PostgresLab, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that stood still for a while says nothing of what a look costs."""
    clock, looked, stalls = Stalls(), threading.Semaphore(0), threading.Event()
    look = Looks.look

    def stalling(*arguments: Any) -> Any:
        seen = look(*arguments)
        if stalls.is_set():
            stalls.clear()
            clock.stall()
            looked.release()
        return seen

    monkeypatch.setattr(Looks, "look", stalling)
    here, there = deaf.open().coord, PostgresStores(postgres_url, clock=clock)
    watch = there.coord.watch("k/")
    stalls.set()
    assert looked.acquire(timeout=PATIENCE)
    # The look that stalled may still have to tell of what it saw.
    here.commit((), (Put("k/1", b"1"),))
    assert watch.wait(PATIENCE)
    here.commit((), (Put("k/1", b"2"),))
    assert watch.wait(PATIENCE)
    watch.close()
    there.close()


def test_looks_that_take_long_are_rare_but_never_given_up() -> None:
    pace = Pace()
    assert [pace.rest(took) for took in (0.2, 0.2, 600, 0.1, 600, 600)] == [0, 2, 2, 1, 1, 5]
