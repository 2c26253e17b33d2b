"""Requests share room for their bodies: some wait, in order, and some are told to come again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pxrs.server.rest.problems import HttpError
from pxrs.server.rest.room import Room
from support.loops import run

LONG = 60.0


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: run(test())


async def waiting(room: Room, size: int, timeout: float = LONG) -> asyncio.Task[None]:
    """A request that waits for room by now."""
    task = asyncio.create_task(room.wait_for(size, timeout))
    await asyncio.sleep(0)
    return task


@on_a_loop
async def test_those_that_wait_come_in_order() -> None:
    room = Room(10)
    assert room.take(8)
    assert not room.take(3)
    large = await waiting(room, 9)
    small = await waiting(room, 1)
    # There would be room for it, but it would overtake.
    assert not room.take(1)
    room.give_back(8)
    await asyncio.gather(large, small)
    assert not room.take(1)


@on_a_loop
async def test_one_that_is_larger_than_all_room_comes_alone() -> None:
    room = Room(10)
    assert room.take(1)
    huge = await waiting(room, 99)
    room.give_back(1)
    await huge
    assert not room.take(1)
    room.give_back(99)
    assert room.take(10)


@on_a_loop
async def test_one_that_waited_too_long_is_told_and_holds_up_no_other() -> None:
    room = Room(10)
    assert room.take(5)
    late = await waiting(room, 9, timeout=0.001)
    behind = await waiting(room, 5)
    with pytest.raises(HttpError) as refused:
        await late
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    await behind


@on_a_loop
async def test_one_that_goes_away_gives_back_what_it_had_just_got() -> None:
    room = Room(10)
    assert room.take(10)
    gone = await waiting(room, 10)
    room.give_back(10)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert room.take(10)
