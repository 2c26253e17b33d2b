"""`connect` and what it returns: the verbs of pxrs on one set of stores."""

from __future__ import annotations

import os
import re
import secrets
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from pxrs.arguments import check_handler
from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import (
    MOST_BYTES,
    ConsumerSettings,
    DeadLetter,
    ProducerSettings,
    check_member_name,
)
from pxrs.consuming.reader import Reader
from pxrs.decoding import Decoder
from pxrs.options import (
    ConsumerOptions,
    MemberOptions,
    ProducerOptions,
    RunOptions,
    filled,
    refuse_unknown,
    takes,
)
from pxrs.producing.producer import Producer
from pxrs.queue_verbs import SESSION_TTL, QueueVerbs, all_of
from pxrs.running.dead_letters import DeadLetters
from pxrs.running.inside import employer
from pxrs.running.job import Begun, Job, Running, job_of
from pxrs.serde import Serde
from pxrs.stores.api import Stores
from pxrs.stores.open import open_stores
from pxrs.topics import Topics
from pxrs.types import Message

# What only consumers need is loaded when the first one is made: a program that sends starts sooner.
if TYPE_CHECKING:
    from pxrs.consuming.callbacks import Callbacks
    from pxrs.consuming.consumer import Consumer
    from pxrs.consuming.health import Health
    from pxrs.consuming.in_hand import Elsewhere
    from pxrs.consuming.subscription import Subscription
    from pxrs.groups.admin import Groups
    from pxrs.running.runner import Runner


def connect(url: str, *, coord: str | None = None, log: str | None = None) -> Pxrs:
    """Open a store, creating it if need be.

    `sqlite:///app.db` (a file shared by processes of one host; `?durability=relaxed`,
    `?busy_timeout=10`), `memory://` (this process only; `memory://name` is shared within it).
    With `coord` groups and everything else that is owned are kept there, with `log` messages.
    `etcd://host:2379,host2:2379/prefix` and `zookeeper://host:2181/root` can be a `coord`
    (`?timeout=10`, `?ca=…&cert=…&key=…`, `user:password@`), and so can `mysql://user@host/database`;
    `nats://host:4222,host2:4222/prefix?replicas=3` can be a `log`.
    """
    return Pxrs(open_stores(url, coord=coord, log=log))


class Pxrs(QueueVerbs):
    """An open store. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        stores: Stores,
        clock: Clock = SYSTEM_CLOCK,
        *,
        session_ttl: float = SESSION_TTL,
    ) -> None:
        topics = Topics(stores.coord, stores.log, clock)
        super().__init__(stores, topics, clock, session_ttl)
        self._groups: Groups | None = None
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._running: weakref.WeakSet[Begun] = weakref.WeakSet()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()

    @property
    def url(self) -> str:
        """Where the store is."""
        return self.stores.url

    @property
    def topics(self) -> Topics:
        """Make, list, describe and delete topics."""
        return self._topics

    @takes(ProducerOptions, defaults=[ProducerSettings])
    def producer(self, **options: Unpack[ProducerOptions]) -> Producer:
        """A producer. Use it with `with`: leaving it flushes."""
        refuse_unknown("producer", options, ProducerOptions)
        settings = filled(ProducerSettings, options)
        serde, key_serde = options.get("serde"), options.get("key_serde")
        producer = Producer(self._topics, self.stores.log, self._clock, settings, key_serde, serde)
        self._producers.add(producer)
        return producer

    def reader(
        self, topic: str, *, serde: Serde | None = None, key_serde: Serde | None = None
    ) -> Reader:
        """Read a topic without a group."""
        decoder = Decoder(key_serde, serde)
        return Reader(self._topics.find(topic), self.stores.log, self._clock, decoder)

    @takes(MemberOptions, ConsumerOptions, defaults=[ConsumerSettings])
    def consumer(
        self,
        topics: str | Sequence[str] | re.Pattern[str],
        group: str,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer:
        """Consume topics as a member of a group: a name, several, or a compiled pattern."""
        refuse_unknown("consumer", options, ConsumerOptions)
        settings = _member_settings(group, options)
        from pxrs.consuming.callbacks import Callbacks
        from pxrs.consuming.subscription import Subscription

        callbacks = Callbacks(
            options.get("on_assigned"), options.get("on_revoked"), options.get("on_lost")
        )
        decoder = Decoder(options.get("key_serde"), options.get("serde"))
        wanted = Subscription(topics, self._topics)
        return self._new_consumer(wanted, settings, decoder, callbacks)

    @takes(MemberOptions, RunOptions, defaults=[ConsumerSettings, Job])
    def run(
        self,
        handler: Callable[[Message], Any],
        *,
        topic: str | Sequence[str] | re.Pattern[str],
        group: str,
        **options: Unpack[RunOptions],
    ) -> None:
        """Call `handler(message)` for every message of the group's share, until stopped.

        SIGTERM and SIGINT stop it, as `stop` does, if the main thread is in here: it finishes what
        is in hand, commits and leaves, and so does all else that runs under this object. Order is
        kept per partition, or with `parallel="key"` per key. A handler that raises is called
        again after `retry`'s delays, while other keys go on; then `on_failure` decides. Both
        are logged (`pxrs.run`). One that wants to end the program (`sys.exit`) ends the run with
        `HandlerFailed`.

        `workers` are threads. With `processes` so many processes do the same, each with its
        threads and a member of its own; the handler has to be importable, not a closure.
        """
        check_handler(handler, "message", instead="pxrs.aio's run")
        self.new_run(job_of(handler, topic, group, options)).run()

    def new_run(self, job: Job) -> Running:
        """What `run` runs; `stop` knows it from here on."""
        running: Running
        if job.processes:
            # Worker processes are rare, and multiprocessing is slow to import.
            from pxrs.running.processes import ProcessRun

            running = ProcessRun(self.stores.url, job)
        else:
            running = self._new_runner(job)
        begun = Begun(running, self.stop)
        self._running.add(begun)
        return begun

    def _new_runner(self, job: Job) -> Runner:
        from pxrs.consuming.callbacks import Callbacks
        from pxrs.consuming.in_hand import Elsewhere
        from pxrs.consuming.subscription import Subscription
        from pxrs.running.runner import Runner

        letters = None
        if isinstance(job.on_failure, DeadLetter):
            producer = self._resender()
            letters = DeadLetters(job.on_failure, self._topics, producer)
        settings = _member_settings(job.group, job.member)
        nothing = Callbacks(None, None, None)

        def join(runner: Runner) -> Consumer:
            return self._new_consumer(
                Subscription(job.topic, self._topics, job.on_failure),
                settings,
                Decoder(),
                nothing,
                Elsewhere(runner.in_hand, runner.since, job.max_in_flight),
            )

        return Runner(job, self._clock, letters, join)

    def redrive(self, topic: str, *, to: str | None = None) -> dict[str, int]:
        """Send the dead letters of `topic` back to where they came from, or all to topic `to`.

        How many went where. Each letter is sent back once: what was is the checkpoint of the
        group `<topic>.redrive`; letters that come meanwhile are left for the next time.
        """
        from pxrs.running.redriving import Redriving

        redriving = Redriving(self._topics, self.groups, topic, to)
        if not redriving.is_finished():
            letters = self.consumer(
                topic, redriving.group, auto_commit=False, on_trimmed="earliest"
            )
            with letters, self._resender() as producer:
                redriving.run(letters, producer)
        return dict(redriving.sent)

    def _resender(self) -> Producer:
        """For messages that were sent once: whatever could be can be again, with headers added."""
        return self.producer(max_message_bytes=MOST_BYTES, buffer_bytes=MOST_BYTES)

    def stop(self) -> None:
        """End every run and listener of this object: they finish what is in hand, and leave.

        Does not wait. From any thread, and from handlers.
        """
        super().stop()
        for running in all_of(self._running):
            running.stop()

    def _new_consumer(
        self,
        wanted: Subscription,
        settings: ConsumerSettings,
        decoder: Decoder,
        callbacks: Callbacks,
        elsewhere: Elsewhere | None = None,
    ) -> Consumer:
        from pxrs.consuming.consumer import Consumer

        consumer = Consumer(self._context(), wanted, settings, decoder, callbacks, elsewhere)
        self._consumers.add(consumer)
        return consumer

    def health(self) -> dict[str, Health]:
        """How all that runs under this object is doing, by name. From any thread.

        For probes: `all(each.ok for each in px.health().values())`. A consumer's name is its
        member's, and so is a run's; worker processes are `run:<group>/worker-0` and on, as this
        process knows them; a listener is `listen:<queue>`, with its processes as above.
        """
        here = [consumer for consumer in all_of(self._consumers) if not consumer.has_left]
        found = [(each.member, each.health()) for each in here]
        for running in all_of(self._running):
            found += running.health().items()
        for listener in all_of(self._listeners):
            found += listener._health().items()
        return _named(found)

    @property
    def groups(self) -> Groups:
        """The groups of this store: list, describe, explain, reset and delete them."""
        if self._groups is None:
            from pxrs.groups.admin import Groups

            self._groups = Groups(self.stores.coord, self.stores.log, self._topics, self._clock)
        return self._groups

    def close(self) -> None:
        """Stop every listener and run, close every consumer, flush every producer, close the store.

        Runs finish what is in hand and commit it, as with `stop`; for 30 seconds at most. A handler
        that calls this is not waited for: its message or item comes again. Raises what a producer's
        `close` raises, once all is closed.
        """
        self._end(None)

    def _end(self, reason: BaseException | None) -> None:
        """Close because of an error that is on its way: see `Producer._end`."""
        self.stop()
        # Last in, first out. One that fails to close must not keep the others, and the store, open.
        with ExitStack() as closing:
            closing.callback(self.stores.close)
            closing.callback(self._end_session)
            for producer in list(self._producers):
                closing.callback(producer._end, reason)
            for consumer in list(self._consumers):
                closing.callback(consumer.close)
            if not self.is_around_here:
                closing.callback(self._join_listeners)
                for running in all_of(self._running):
                    closing.callback(running.join)

    @property
    def is_around_here(self) -> bool:
        """Whether this is code that one of its runs or listeners calls: a handler."""
        return employer() in self._listeners or any(
            running.is_around_here for running in all_of(self._running)
        )

    def __enter__(self) -> Pxrs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)


def _named(found: list[tuple[str, Health]]) -> dict[str, Health]:
    """By name, sorted; those with a name that there is already are numbered."""
    named: dict[str, Health] = {}
    times: Counter[str] = Counter()
    for name, health in sorted(found, key=lambda each: each[0]):
        times[name] += 1
        named[name if times[name] == 1 else f"{name}#{times[name]}"] = health
    return named


def _member_settings(group: str, options: MemberOptions) -> ConsumerSettings:
    instance = options.get("instance")
    return filled(
        ConsumerSettings,
        options,
        group=group,
        member_name=_member_name(instance),
        static=instance is not None,
        client=f"{socket.gethostname()}:{os.getpid()}",
    )


def _member_name(instance: str | None) -> str:
    """A static member's own name, or a new one."""
    if instance is not None:
        return check_member_name(instance)
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40] or "member"
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"
