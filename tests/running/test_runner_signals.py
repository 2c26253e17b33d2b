"""Signals that come while `px.run` finishes what is in hand.

A supervisor, or Ctrl-C in a terminal, signals all processes of a group; the parent of worker
processes tells them again. None of that may cut a handler off.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import pxrs
from support.child import Child
from support.inside import say

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]


def wait_for_the_drain() -> None:
    """Until a thread waits for the workers."""
    names: set[str] = set()
    while "drain" not in names:
        for frame in sys._current_frames().values():
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]


def run_and_be_told_twice(url: str, first: int, second: int) -> None:
    """In a child: a handler that is at work while signals come."""

    def handle(message: pxrs.Message) -> None:
        os.kill(os.getpid(), first)
        wait_for_the_drain()
        os.kill(os.getpid(), second)
        if (first, second) == (signal.SIGINT, signal.SIGINT):
            threading.Event().wait()  # never returns: impatience is the only way out
        say("finished")

    with pxrs.connect(url) as px:
        try:
            px.run(handle, topic="orders", group="g").join()
        except KeyboardInterrupt:
            say("interrupted")
        say(px.groups.describe("g").lag)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (signal.SIGTERM, signal.SIGTERM, ["finished", 0]),
        (signal.SIGINT, signal.SIGTERM, ["finished", 0]),
        (signal.SIGTERM, signal.SIGINT, ["finished", 0]),
        (signal.SIGINT, signal.SIGINT, ["interrupted", 1]),
    ],
)
def test_only_a_second_interrupt_is_impatient(
    tmp_path: Path, first: int, second: int, words: list[object]
) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    with pxrs.connect(url) as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            producer.send("orders", "a")
    with Child(run_and_be_told_twice, url, first, second) as child:
        assert child.rest() == words
        assert child.join() == 0
