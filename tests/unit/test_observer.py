"""Who may end a session by its time, and that somebody does in the end."""

from __future__ import annotations

import pytest

from pxrs.stores.observer import OUT_OF_TOUCH, Observer, Suspect
from pxrs.testing.clock import VirtualClock

TTL = 10.0
LATE = Suspect("s", TTL, "then", is_late=True)
AHEAD = Suspect("s", TTL, "far", is_late=False)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def observer(clock: VirtualClock) -> Observer:
    return Observer(clock)


def look(
    observer: Observer, clock: VirtualClock, *suspects: Suspect, server: str | None = None
) -> bool:
    """Whether one look would end the session."""
    return observer.judge(suspects, clock.monotonic(), server) == ["s"]


def stay_in_touch(
    observer: Observer, clock: VirtualClock, seconds: float, *suspects: Suspect
) -> None:
    for _ in range(int(seconds)):
        assert not look(observer, clock, *suspects)
        clock.advance(1.0)


def test_who_was_in_touch_for_a_ttl_ends_it_at_once(
    observer: Observer, clock: VirtualClock
) -> None:
    stay_in_touch(observer, clock, TTL)
    assert look(observer, clock, LATE)


def test_who_has_just_come_waits_for_a_ttl(observer: Observer, clock: VirtualClock) -> None:
    stay_in_touch(observer, clock, TTL, LATE)
    assert look(observer, clock, LATE)


@pytest.mark.parametrize("notices", [True, False])
def test_who_was_out_of_touch_waits_for_a_ttl(
    observer: Observer, clock: VirtualClock, *, notices: bool
) -> None:
    stay_in_touch(observer, clock, TTL)
    if notices:
        observer.out_of_touch()
    else:
        clock.advance(OUT_OF_TOUCH + 1)
    stay_in_touch(observer, clock, TTL, LATE)
    assert look(observer, clock, LATE)


def test_a_server_that_was_started_again_is_another_one(
    observer: Observer, clock: VirtualClock
) -> None:
    stay_in_touch(observer, clock, TTL)
    assert not look(observer, clock, LATE, server="another")


def test_who_looks_rarely_ends_it_in_the_end(observer: Observer, clock: VirtualClock) -> None:
    """Looks too far apart to count as contact: a busy process may have no others."""
    looks = 0
    while not look(observer, clock, LATE):
        clock.advance(OUT_OF_TOUCH + 2)
        looks += 1
        assert looks <= 2


def test_who_was_renewed_meanwhile_is_another_suspect(
    observer: Observer, clock: VirtualClock
) -> None:
    for moment in range(5):
        assert not look(observer, clock, LATE._replace(deadline=moment))
        clock.advance(TTL)


def test_one_that_was_not_suspect_in_between_starts_anew(
    observer: Observer, clock: VirtualClock
) -> None:
    assert not look(observer, clock, LATE)
    clock.advance(TTL)
    assert not look(observer, clock)
    clock.advance(OUT_OF_TOUCH + 1)
    assert not look(observer, clock, LATE)


def test_a_deadline_too_far_ahead_is_waited_for_from_when_it_was_seen(
    observer: Observer, clock: VirtualClock
) -> None:
    """Contact proves nothing here: the holder may be about to renew."""
    stay_in_touch(observer, clock, 3 * TTL)
    stay_in_touch(observer, clock, TTL, AHEAD)
    assert look(observer, clock, AHEAD)


def test_a_question_that_was_sent_before_proves_nothing_yet(
    observer: Observer, clock: VirtualClock
) -> None:
    """Its answer may be as old as the question."""
    sent = clock.monotonic()
    stay_in_touch(observer, clock, TTL)
    assert observer.judge([LATE], sent) == []
