"""Handlers that return before they have done anything: coroutines and generators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from functools import partial
from typing import Any

import pytest

import pxrs
from pxrs import Backoff, InvalidRequest, aio
from pxrs.testing import GroupLab
from support.child import PATIENCE

pytestmark = pytest.mark.engine("memory")


async def work(*taken: Any) -> None:
    raise AssertionError("nobody awaits it")


def generator(*taken: Any) -> Iterator[None]:
    yield


async def async_generator(*taken: Any) -> AsyncIterator[None]:
    yield


class Called:
    async def __call__(self, *taken: Any) -> None:
        await work()


class CalledGenerator:
    def __call__(self, *taken: Any) -> Iterator[None]:
        yield


class Promise(Awaitable[None]):
    def __await__(self) -> Generator[Any, Any, None]:
        return work().__await__()


def promise(*taken: Any) -> Promise:
    return Promise()


GENERATORS: list[Any] = [generator, async_generator, CalledGenerator(), partial(generator)]
COROUTINES: list[Any] = [work, Called(), partial(Called()), partial(work)]


def _later(handler: Any) -> Any:
    """A plain function, as far as anybody can see who does not call it."""

    def call(*taken: Any) -> Any:
        return handler(*taken)

    return call


LATER = [*map(_later, [work, generator, async_generator]), promise]


@pytest.fixture
def px() -> Iterator[pxrs.Pxrs]:
    with pxrs.connect("memory://") as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            producer.send("orders", "1")
        px.put("inbox", "1")
        yield px


@pytest.mark.parametrize("handler", [*COROUTINES, *GENERATORS])
def test_they_are_refused_at_once(px: pxrs.Pxrs, handler: Any) -> None:
    what = "coroutine function; use" if handler in COROUTINES else "a generator function"
    with pytest.raises(InvalidRequest, match=what):
        px.run(handler, topic="orders", group="g").join()
    with pytest.raises(InvalidRequest, match=what):
        px.listen("inbox", handler)
    with GroupLab() as lab, pytest.raises(InvalidRequest, match=what):
        lab.start("a", handler)
    assert px.groups.list() == []


@pytest.mark.parametrize("handler", LATER)
def test_run_takes_what_they_return_for_a_failure(px: pxrs.Pxrs, handler: Any) -> None:
    once = Backoff(attempts=1)
    with pytest.raises(pxrs.HandlerFailed, match=r"failed once .* the handler returned"):
        px.run(handler, topic="orders", group="g", retry=once, on_failure=pxrs.Stop()).join()
    assert px.groups.describe("g").lag == 1


@pytest.mark.parametrize("handler", LATER)
def test_listen_takes_what_they_return_for_a_failure(px: pxrs.Pxrs, handler: Any) -> None:
    with px.listen("inbox", handler, retry=pxrs.Backoff(attempts=1)) as listener:
        _until_one_is_dead(px)
    assert (listener.handled, listener.failed) == (0, 1)
    (dead,) = px.queues.dead("inbox")
    assert "the handler returned" in str(dead.error)


def _until_one_is_dead(px: pxrs.Pxrs) -> None:
    watch = px.stores.queues.watch("inbox")
    while not px.queues.describe("inbox").dead:
        assert watch.wait(PATIENCE), "nothing happens any more"
    watch.close()


@pytest.mark.parametrize("handler", LATER)
def test_the_lab_takes_what_they_return_for_a_failure(handler: Any) -> None:
    with GroupLab() as lab:
        lab.start("a", handler)
        lab.send("1")
        with pytest.raises(InvalidRequest, match="the handler returned"):
            lab.run_until_quiet()
        assert lab.handled == []


def test_asyncio_awaits_but_runs_no_generators() -> None:
    async def main() -> None:
        async with aio.connect("memory://") as px:
            await px.topics.create("orders", partitions=1)
            async with px.producer() as producer:
                await producer.send("orders", "1")
            for handler in GENERATORS:
                with pytest.raises(InvalidRequest, match="a generator function"):
                    await px.run(handler, topic="orders", group="g").join()
                with pytest.raises(InvalidRequest, match="a generator function"):
                    px.listen("inbox", handler)
            for handler in LATER[1:3]:
                with pytest.raises(pxrs.HandlerFailed, match="the handler returned a generator"):
                    await px.run(
                        handler, topic="orders", group="g",
                        retry=Backoff(attempts=1), on_failure=pxrs.Stop(),
                    ).join()  # fmt: skip

    asyncio.run(main())


def test_what_else_a_handler_returns_is_its_own_affair(px: pxrs.Pxrs) -> None:
    def handle(message: pxrs.Message) -> Any:
        px.stop()
        return [message, map]

    px.run(handle, topic="orders", group="g").join()
    assert px.groups.describe("g").lag == 0
