"""Turns of a listener's workers: beside others, or alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pxrs.clock import SYSTEM_CLOCK
from pxrs.running import suspect_items
from pxrs.running.suspect_items import WorkerTurns

PATIENCE = 30.0


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> WorkerTurns:
    monkeypatch.setattr(suspect_items, "_LOOK_AGAIN", 0.05)
    monkeypatch.setattr(suspect_items, "_LOOK_EVERY", 0.01)
    return WorkerTurns(SYSTEM_CLOCK)


def always() -> bool:
    return True


def never() -> bool:
    return False


def at_the_second_look() -> Callable[[], bool]:
    """Stops who has had to wait."""
    looks = iter([False])
    return lambda: next(looks, True)


def begins(turns: WorkerTurns, who: str) -> bool:
    return turns.begin(who, always, at_the_second_look())


def test_many_at_once_or_one_alone(turns: WorkerTurns) -> None:
    assert begins(turns, "a")
    assert begins(turns, "b")
    assert not turns.be_alone("a", never)
    turns.end("b")
    assert turns.be_alone("a", never)
    assert not begins(turns, "b")
    turns.share("a")
    assert begins(turns, "b")


def test_who_wants_to_be_alone_is_not_starved(turns: WorkerTurns) -> None:
    """Nobody begins while it looks whether it still wants to, however long the others take."""
    assert begins(turns, "a")
    assert begins(turns, "long")
    assert not turns.be_alone("a", never)
    assert not begins(turns, "next")
    turns.share("a")
    assert begins(turns, "next")


def test_two_who_want_to_be_alone_are_so_in_turn(turns: WorkerTurns) -> None:
    for who in ("a", "b"):
        assert begins(turns, who)
    alone, may_end = threading.Semaphore(0), threading.Semaphore(0)
    at_once: list[int] = [0]

    def be_alone(who: str) -> bool:
        while not turns.be_alone(who, never):
            pass
        at_once[0] += 1
        is_alone = at_once[0] == 1
        alone.release()
        may_end.acquire()
        at_once[0] -= 1
        turns.end(who)
        return is_alone

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(be_alone, who) for who in ("a", "b")]
        for _ in both:
            assert alone.acquire(timeout=PATIENCE)
            may_end.release()
        assert [each.result(PATIENCE) for each in both] == [True, True]


def test_who_holds_nothing_any_more_is_not_waited_for(turns: WorkerTurns) -> None:
    held = True
    assert turns.begin("late", lambda: held, never)
    assert begins(turns, "a")
    assert not turns.be_alone("a", never)
    held = False
    assert turns.be_alone("a", never)
    turns.end("a")
    held = True
    assert turns.be_alone("late", never)
    assert not begins(turns, "a")
    held = False
    assert begins(turns, "a")
    turns.end("late")
    assert turns.be_alone("a", never)


def test_who_stops_has_no_turn_and_is_in_nobodys_way(turns: WorkerTurns) -> None:
    assert begins(turns, "a")
    assert begins(turns, "b")
    assert not turns.be_alone("a", always)
    assert begins(turns, "c")
    turns.end("c")
    assert turns.be_alone("b", never)
    assert not turns.begin("a", always, always)
