"""A warning of a crowd comes when most steps met with it, and not all the time."""

from __future__ import annotations

from pxrs.stores.crowding import Crowding
from pxrs.testing import VirtualClock


def test_it_warns_of_a_crowd_now_and_then() -> None:
    clock, told = VirtualClock(), list[float]()
    crowding = Crowding(clock, told.append, sample=4, most=0.5, again=60.0)

    def take(steps: str) -> None:
        for step in steps:
            crowding.note(crowded=step == "x")

    take("xx-")
    assert told == []
    take("-")
    assert told == [0.5]
    take("xxxx")
    clock.advance(59.0)
    take("xxxx")
    assert told == [0.5]
    clock.advance(1.0)
    take("x---")
    assert told == [0.5]
    take("-xxx")
    assert told == [0.5, 0.75]
