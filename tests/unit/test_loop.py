"""The loop of every thread: steps, pauses, alarms."""

from __future__ import annotations

import threading

from pxrs.loop import Loop

PATIENCE = 30.0


class Steps:
    """Counts its steps; each waits for an alarm."""

    def __init__(self) -> None:
        self.taken = threading.Semaphore(0)
        self.loop = Loop("pxrs-test", self.step)
        self.over = False

    def step(self) -> float | None:
        self.taken.release()
        return None if self.over else PATIENCE

    def end(self) -> None:
        self.over = True
        self.loop.wake()
        self.loop.join(PATIENCE)


def test_alarms_of_a_loop_that_does_not_run_take_no_memory() -> None:
    steps = Steps()
    for _ in range(1000):
        steps.loop.wake()
    assert steps.loop._alarm.qsize() == 1


def test_one_that_was_woken_before_it_ran_takes_its_step_twice() -> None:
    steps = Steps()
    steps.loop.wake()
    steps.loop.start()
    for _ in range(2):
        assert steps.taken.acquire(timeout=PATIENCE)
    assert not steps.taken.acquire(timeout=0.1)
    steps.end()


def test_each_alarm_is_followed_by_a_step() -> None:
    steps = Steps()
    steps.loop.start()
    assert steps.taken.acquire(timeout=PATIENCE)
    for _ in range(100):
        steps.loop.wake()
        assert steps.taken.acquire(timeout=PATIENCE)
    steps.end()
