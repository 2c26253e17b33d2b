"""The clock that is moved by hand."""

from __future__ import annotations

import threading

import pytest

from pxrs.stores.memory.coord import SteppedClock
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.types import Put


def test_stands_still_until_it_is_moved() -> None:
    clock = VirtualClock(monotonic=5.0, wall_ms=1_000)
    assert (clock.monotonic(), clock.wall_ms()) == (5.0, 1_000)
    clock.advance(1.5)
    clock.advance(0)
    assert (clock.monotonic(), clock.wall_ms()) == (6.5, 2_500)


def test_never_goes_back() -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-0.1)
    assert clock.monotonic() == 0.0


def test_tells_subscribers_after_it_moved() -> None:
    clock = VirtualClock()
    seen: list[tuple[str, float]] = []
    leave = clock.subscribe(lambda: seen.append(("first", clock.monotonic())))
    clock.subscribe(lambda: seen.append(("second", clock.monotonic())))
    clock.advance(1)
    leave()
    leave()
    clock.advance(1)
    assert seen == [("first", 1.0), ("second", 1.0), ("second", 2.0)]
    assert isinstance(clock, SteppedClock)


@pytest.mark.engine("memory")
def test_advancing_wakes_who_waits_for_a_session_to_end() -> None:
    clock = VirtualClock()
    coord = MemoryStores(clock=clock).coord
    coord.commit((), (Put("k", b"", coord.session(10.0).id),))
    watch = coord.watch("k")
    gone = threading.Event()

    def sleep() -> None:
        while coord.get("k") is not None:
            watch.wait()
        gone.set()

    threading.Thread(target=sleep, daemon=True).start()
    clock.advance(9.0)
    assert coord.get("k") is not None
    clock.advance(1.0)
    assert gone.wait(10)
