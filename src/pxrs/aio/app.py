"""`connect` for asyncio, and what it opens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Unpack

from pxrs import app as blocking
from pxrs import options as blocking_options
from pxrs.aio.consumer import ConsumerOptions, Joining, OnLoop
from pxrs.aio.groups import Groups
from pxrs.aio.handlers import OnOwnLoop, OnThisLoop
from pxrs.aio.producer import Producer
from pxrs.aio.queue_verbs import QueueVerbs
from pxrs.aio.reader import Reader
from pxrs.aio.signals import stop_on_signals_of_loop
from pxrs.aio.threads import Threads, outcome, waited_out
from pxrs.arguments import check_handler
from pxrs.config import ConsumerSettings, ProducerSettings
from pxrs.consuming.consumer import Consumer as BlockingConsumer
from pxrs.consuming.health import Health
from pxrs.errors import DeliveryFailed, OutcomeUnknown
from pxrs.options import MemberOptions, ProducerOptions, RunOptions, refuse_unknown, takes
from pxrs.running.job import Job, job_of
from pxrs.serde import Serde
from pxrs.topics import TopicInfo
from pxrs.types import Message, Topic


def connect(url: str, *, coord: str | None = None, log: str | None = None) -> Connecting:
    """Open a store: `px = await connect(url)` or `async with connect(url) as px`.

    For the URLs see `pxrs.connect`.
    """
    return Connecting(partial(blocking.connect, url, coord=coord, log=log))


class Connecting:
    """A store about to be opened, by awaiting it or by entering it."""

    def __init__(self, connect: Callable[[], blocking.Pxrs]) -> None:
        self._connect = connect
        self._opened: Pxrs | None = None

    def __await__(self) -> Generator[Any, None, Pxrs]:
        return self._open().__await__()

    async def __aenter__(self) -> Pxrs:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._opened is not None:
            await self._opened._end(error)

    async def _open(self) -> Pxrs:
        threads = Threads()
        opening = threads.start(self._connect)
        try:
            return Pxrs(await outcome(opening), threads)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise


class Pxrs(QueueVerbs):
    """An open store. Bound to no event loop; `await` its `close`, or use it with `async with`.

    Every method is that of `pxrs.Pxrs`, awaited. Cancelling a call does not undo it.
    """

    def __init__(self, px: blocking.Pxrs, threads: Threads) -> None:
        super().__init__(px, threads)
        self._closing: Future[None] | None = None

    @property
    def url(self) -> str:
        """Where the store is."""
        return self._px.url

    async def create_topic(
        self,
        name: str,
        partitions: int,
        *,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> Topic:
        """Make a topic with a fixed number of partitions. See `pxrs.Pxrs.create_topic`."""
        return await self._threads.call(
            partial(
                self._px.create_topic,
                name,
                partitions,
                retention_ms=retention_ms,
                retention_bytes=retention_bytes,
            )
        )

    async def topics(self) -> list[Topic]:
        """All topics, by name."""
        return await self._threads.call(self._px.topics)

    async def describe_topic(self, name: str) -> TopicInfo:
        """A topic and what its partitions hold."""
        return await self._threads.call(partial(self._px.describe_topic, name))

    async def delete_topic(self, name: str) -> None:
        """Remove a topic and all its messages."""
        await self._threads.call(partial(self._px.delete_topic, name))

    async def apply_retention(self, name: str) -> None:
        """Drop now what the topic's retention no longer keeps; producers do it as they go."""
        await self._threads.call(partial(self._px.apply_retention, name))

    async def redrive(self, topic: str, *, to: str | None = None) -> dict[str, int]:
        """Send dead letters back to where they came from. See `pxrs.Pxrs.redrive`."""
        return await outcome(self._threads.start(partial(self._px.redrive, topic, to=to)))

    @takes(ProducerOptions, defaults=[ProducerSettings])
    def producer(self, **options: Unpack[ProducerOptions]) -> Producer:
        """A producer, for `async with`. See `pxrs.Pxrs.producer`."""
        return Producer(self._px.producer(**options), self._threads)

    async def reader(
        self, topic: str, *, serde: Serde | None = None, key_serde: Serde | None = None
    ) -> Reader:
        """Read a topic without a group."""
        reader = await self._threads.call(
            partial(self._px.reader, topic, serde=serde, key_serde=key_serde)
        )
        return Reader(reader, self._threads)

    @takes(
        MemberOptions,
        blocking_options.ConsumerOptions,
        ConsumerOptions,
        defaults=[ConsumerSettings],
    )
    def consumer(
        self,
        topics: str | Sequence[str] | re.Pattern[str],
        group: str,
        **options: Unpack[ConsumerOptions],
    ) -> Joining:
        """Consume topics as a member of a group: `async with px.consumer(…) as consumer`.

        See `pxrs.Pxrs.consumer`. The callbacks run on the event loop, while a call for messages
        is awaited; they may be coroutine functions.
        """
        refuse_unknown("consumer", options, ConsumerOptions)

        def join(on_loop: OnLoop) -> BlockingConsumer:
            told: Any = {
                **options,
                "on_assigned": on_loop(options.get("on_assigned")),
                "on_revoked": on_loop(options.get("on_revoked")),
                "on_lost": on_loop(options.get("on_lost")),
            }
            return self._px.consumer(topics, group, **told)

        return Joining(self._threads, join)

    @takes(MemberOptions, RunOptions, defaults=[ConsumerSettings, Job])
    async def run(
        self,
        handler: Callable[[Message], Any],
        *,
        topic: str | Sequence[str] | re.Pattern[str],
        group: str,
        **options: Unpack[RunOptions],
    ) -> None:
        """Call `handler(message)` for every message of the group's share. See `pxrs.Pxrs.run`.

        The handler may be a coroutine function: then `workers` is how many messages are awaited
        at a time, on this loop. A plain function is called by threads. `stop` ends it: what is
        in hand is finished and committed first. So does cancelling, which cancels handlers that
        are being awaited: their messages come again. On the main thread's loop SIGTERM does what
        `stop` does; SIGINT is `asyncio.run`'s, which cancels what is awaited.
        """
        check_handler(handler, "message")
        on_loop = OnThisLoop(handler, asyncio.get_running_loop())
        called = OnOwnLoop(handler) if options.get("processes") else on_loop
        running = self._px.new_run(job_of(called, topic, group, options))

        def give_up() -> None:
            running.stop()
            on_loop.abandon()

        with stop_on_signals_of_loop(self._px.stop):
            await waited_out(self._threads.start(running.run), give_up)

    def stop(self) -> None:
        """End every run and listener of this object. Not awaited. See `pxrs.Pxrs.stop`."""
        self._px.stop()

    def health(self) -> dict[str, Health]:
        """How all that runs under this object is doing, by name. Does not wait."""
        return self._px.health()

    @property
    def groups(self) -> Groups:
        """The groups of this store: list, describe, explain, reset and delete them."""
        return Groups(self._px.groups, self._threads)

    async def close(self) -> None:
        """Stop every listener and run, close every consumer, flush every producer, close the store.

        Whoever follows, polls or takes gets a `Closed`. Raises as `pxrs.Pxrs.close` does.
        """
        await self._end(None)

    async def _end(self, reason: BaseException | None) -> None:
        """Close because of an error that is on its way: see `pxrs.Producer._end`."""
        if self._closing is None:
            # In this context: a handler that closes the store must not wait for itself.
            end = partial(self._px._end, reason)
            self._closing = self._threads.start(partial(copy_context().run, end))
            self._threads.close()
            self._ears.close()
            await outcome(self._closing)
        elif not self._px.is_around_here:  # else who closes it waits for this very handler
            with suppress(DeliveryFailed, OutcomeUnknown):  # the first one is told
                await outcome(self._closing)

    async def __aenter__(self) -> Pxrs:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end(error)


def _close_unwanted(opening: Future[blocking.Pxrs]) -> None:
    """Nobody waited for this store to open."""
    if opening.exception() is None:
        opening.result().close()
