"""Keys: order inside, freedom outside."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from pxrs.core.schedule import Schedule


def test_a_key_is_handled_in_order_and_one_at_a_time() -> None:
    schedule: Schedule[str] = Schedule()
    schedule.put("a", "a1")
    schedule.put("a", "a2")
    schedule.put("b", "b1")
    assert schedule.take(0) == ("a", "a1")
    assert schedule.take(0) == ("b", "b1")
    assert schedule.take(0) is None
    schedule.done("a")
    assert schedule.take(0) == ("a", "a2")
    assert len(schedule) == 2


def test_a_parked_key_waits_alone() -> None:
    schedule: Schedule[str] = Schedule()
    schedule.put("a", "a1")
    schedule.put("b", "b1")
    assert schedule.take(0) == ("a", "a1")
    schedule.park("a", until=5.0)
    assert schedule.next_time() == 5.0
    assert schedule.take(1) == ("b", "b1")
    assert schedule.take(4.9) is None
    assert schedule.take(5.0) == ("a", "a1")
    schedule.done("a")
    assert schedule.next_time() is None


def test_what_is_due_again_goes_before_what_was_not_begun() -> None:
    schedule: Schedule[str] = Schedule()
    for number in range(9):
        schedule.put(number, f"{number}")
    assert schedule.take(0) == (0, "0")
    schedule.park(0, until=1.0)
    assert schedule.take(0.9) == (1, "1")
    schedule.done(1)
    assert schedule.take(1.0) == (0, "0")
    schedule.done(0)
    assert schedule.take(1.0) == (2, "2")


def test_what_fails_at_once_again_and_again_does_not_keep_others_from_their_turn() -> None:
    schedule: Schedule[str] = Schedule()
    for number in range(9):
        schedule.put(number, f"{number}")
    failing = [schedule.take(0) for _ in range(3)]
    assert failing == [(0, "0"), (1, "1"), (2, "2")]
    for key in (0, 1, 2):
        schedule.park(key, until=0)
    begun: list[object] = []
    while len(begun) < 6:
        taken = schedule.take(0)
        assert taken is not None
        if taken[0] in (0, 1, 2):
            schedule.park(taken[0], until=0)
        else:
            schedule.done(taken[0])
            begun.append(taken[0])
    assert begun == [3, 4, 5, 6, 7, 8]


@given(
    st.lists(st.integers(0, 4)),
    st.lists(st.sampled_from(["take", "done", "park"]), max_size=200),
    st.randoms(use_true_random=False),
)
def test_nothing_is_lost_doubled_or_overtaken(keys: list[int], events: list[str], rng) -> None:  # type: ignore[no-untyped-def]
    schedule: Schedule[tuple[int, int]] = Schedule()
    for number, key in enumerate(keys):
        schedule.put(key, (key, number))
    busy: dict[object, tuple[int, int]] = {}
    finished: defaultdict[int, list[int]] = defaultdict(list)
    now = 0.0
    for event in (*events, *["take", "done"] * (3 * len(keys))):
        now += 1
        if event == "take":
            taken = schedule.take(now)
            if taken is not None:
                assert taken[0] not in busy
                busy[taken[0]] = taken[1]
        elif busy:
            key = rng.choice(sorted(busy, key=str))
            item = busy.pop(key)
            if event == "done":
                schedule.done(key)
                finished[item[0]].append(item[1])
            else:
                schedule.park(key, now + rng.randrange(3))
    for key in set(keys):
        assert finished[key] == sorted(finished[key])
    done = sum(len(numbers) for numbers in finished.values())
    assert done + len(schedule) == len(keys)
