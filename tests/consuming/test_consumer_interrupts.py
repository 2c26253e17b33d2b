"""Ctrl-C comes at any moment, also in the middle of `poll`: what was not seen comes again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any

import pytest

import pxrs
from support.child import PATIENCE
from support.interrupts import interrupted_at

pytestmark = pytest.mark.long

COUNT = 4


class Interrupted(BaseException):
    """What a signal handler may raise."""


def strike() -> None:
    raise Interrupted


def polls(consumer: pxrs.Consumer, seen: list[int]) -> None:
    for _ in range(2):
        found = consumer.poll(2, timeout=PATIENCE)
        seen += [message.offset for message in found]


def loop(consumer: pxrs.Consumer, seen: list[int]) -> None:
    messages: Any = iter(consumer)
    with closing(messages):
        for number, message in enumerate(messages, 1):
            seen.append(message.offset)
            if number == COUNT:
                break


def batches(consumer: pxrs.Consumer, seen: list[int]) -> None:
    lists: Any = consumer.batches(2)
    with closing(lists):
        for number, found in enumerate(lists, 1):
            seen += [message.offset for message in found]
            if number == 2:
                break


def commits(consumer: pxrs.Consumer, seen: list[int]) -> None:
    for _ in range(2):
        found = consumer.poll(2, timeout=PATIENCE)
        seen += [message.offset for message in found]
        consumer.commit()


@pytest.mark.parametrize("work", [polls, loop, batches, commits])
@pytest.mark.engine("memory")
def test_an_interrupt_loses_nothing_wherever_it_comes(
    work: Callable[[pxrs.Consumer, list[int]], None],
) -> None:
    with pxrs.connect("memory://") as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer, px.consumer("orders", "g", auto_commit=False) as consumer:
            seen: list[int] = []
            while not consumer.assignment:
                consumer.poll(timeout=0.01)
            for point in count():
                for _ in range(COUNT):
                    producer.send("orders", "v").result()
                end = px.topics.describe("orders").messages
                try:
                    task = partial(work, consumer, seen)
                    reached = interrupted_at(point, task, strike)
                except Interrupted:
                    reached = True
                while found := consumer.poll(timeout=0):
                    seen += [message.offset for message in found]
                assert set(seen) == set(range(end)), f"at point {point}"
                consumer.commit()
                assert px.groups.describe("g").partitions[0].checkpoint == end, f"point {point}"
                if not reached:
                    assert point > 50
                    return
