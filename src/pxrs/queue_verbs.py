"""The queue half of an open store: units of work, listeners, and the queues themselves.

What it needs is loaded at first use: a program that only sends does not pay for it.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from pxrs.callers import check_connection, given_connection
from pxrs.clock import Clock
from pxrs.options import ListenOptions, filled, refuse_unknown, takes
from pxrs.running.job import DEFAULT_POLICY, ListenerSettings
from pxrs.serde import Serde
from pxrs.stores.api import Stores
from pxrs.topics import Topics
from pxrs.types import Header, Queue

if TYPE_CHECKING:
    from pxrs.queues.admin import Queues
    from pxrs.queues.held_items import Context
    from pxrs.queues.unit_of_work import UnitOfWork
    from pxrs.running.listener import Handler, Listener
    from pxrs.running.listener_processes import ProcessListener
    from pxrs.running.listener_turns import Turns

SESSION_TTL = 10.0
T = TypeVar("T")


def all_of(some: weakref.WeakSet[T]) -> list[T]:
    """Those that are there now, while another thread may add to them."""
    while True:
        try:
            return list(some)
        except RuntimeError:
            # One was added meanwhile.
            continue


class QueueVerbs:
    """What `Pxrs` can do with queues. One session holds the items of all its transactions."""

    def __init__(
        self, stores: Stores, topics: Topics, clock: Clock, session_ttl: float = SESSION_TTL
    ) -> None:
        self.stores = stores
        self._topics = topics
        self._clock = clock
        self._session_ttl = session_ttl
        self._queues: Queues | None = None
        self._work_context: Context | None = None
        self._making = threading.Lock()
        self._turns: Turns | None = None
        self._listeners: weakref.WeakSet[Listener | ProcessListener] = weakref.WeakSet()

    def transaction(
        self,
        connection: None = None,
        *,
        commits: Any = None,
        join: Any = None,
        serde: Serde | None = None,
        strict: bool = False,
    ) -> UnitOfWork:
        """A unit of work for a `with` block: take and put items, send messages, run SQL.

        Leaving the block commits all of it at once, an exception rolls back: on a connection of
        pxrs, or on one of the caller's that pxrs `commits`, with whatever is done on it. With
        `join` pxrs neither begins nor commits nor rolls back: what the block did is written when
        it is left, and lands when, and only if, the caller commits. `strict`: taking from a queue
        that does not exist is an error.
        """
        from pxrs.queues.unit_of_work import UnitOfWork

        given = given_connection("px.transaction", connection, commits, join)
        return UnitOfWork(self._context(), connection=given, serde=serde, strict=strict)

    def begin(
        self,
        connection: None = None,
        *,
        commits: Any = None,
        join: Any = None,
        serde: Serde | None = None,
        strict: bool = False,
    ) -> UnitOfWork:
        """As `transaction`, but `commit()` has to be called: leaving the block rolls back."""
        from pxrs.queues.unit_of_work import UnitOfWork

        given = given_connection("px.begin", connection, commits, join)
        return UnitOfWork(
            self._context(), connection=given, serde=serde, strict=strict, commit_on_exit=False
        )

    def put(
        self,
        queue: str,
        value: Any,
        *,
        priority: int = 0,
        delay: float = 0.0,
        key: str | None = None,
        headers: Sequence[Header] | None = None,
        dedupe: str | None = None,
        dedupe_window: float = 300.0,
        serde: Serde | None = None,
        connection: Any = None,
    ) -> None:
        """Put one item, durably. See `UnitOfWork.put`.

        With a `connection` of the caller's it is put when, and only if, the caller commits.
        """
        with self.transaction(join=connection, serde=serde) as work:
            work.put(
                queue,
                value,
                priority=priority,
                delay=delay,
                key=key,
                headers=headers,
                dedupe=dedupe,
                dedupe_window=dedupe_window,
            )

    def send(
        self,
        topic: str,
        value: Any,
        key: Any = None,
        *,
        connection: Any,
        partition: int | None = None,
        headers: Sequence[Header] | None = None,
    ) -> None:
        """Send one message when, and only if, the caller commits what it does on `connection`.

        All other messages are sent by a `producer`.
        """
        check_connection(connection)
        with self.transaction(join=connection) as work:
            work.send(topic, value, key, partition=partition, headers=headers)

    @takes(ListenOptions, defaults=[ListenerSettings])
    def listen(
        self, queue: str, handler: Handler, **options: Unpack[ListenOptions]
    ) -> Listener | ProcessListener:
        """Call `handler(item, tx)` for the queue's items, with several workers; starts at once.

        When the handler returns its transaction commits: the item is done and what it put is
        there. What it raises rolls back, and the policy decides what comes next: by default
        five deliveries with growing delays, then the item is dead. `stop()` lets the workers
        finish, `join()` waits for them; while the main thread is in there SIGTERM and SIGINT do
        what `Pxrs.stop` does.

        With a `deadline` an item is lost after so many seconds unless it is being handled: then
        it is extended, for `max_handler_time` seconds at most. With `processes` so many
        processes have `workers` threads each; the handler has to be importable. An item whose
        last holder died is handled while no other worker of the process has one in hand.
        """
        from pxrs.arguments import check_handler
        from pxrs.running.listener import Listener

        refuse_unknown("listen", options, ListenOptions)
        check_handler(handler, "item", "tx", instead="pxrs.aio's listen")
        policy, serde = options.get("policy"), options.get("serde")
        policy = DEFAULT_POLICY if policy is None else policy
        settings = filled(ListenerSettings, options, queue=queue, policy=policy)
        listener: Listener | ProcessListener
        if settings.processes:
            from pxrs.running.listener_processes import ListenerJob, ProcessListener

            job = ListenerJob(url=self.stores.url, queue=queue, handler=handler, options=options)
            listener = ProcessListener(job, settings.processes, self.stop)
        else:
            from pxrs.running.listener_turns import Turns

            with self._making:
                self._turns = self._turns or Turns(self._clock)
            listener = Listener(
                handler,
                settings,
                self.stores.queues,
                lambda: self.begin(serde=serde),
                self._turns,
                self._clock,
                self.stop,
            )
        self._listeners.add(listener)
        return listener.start()

    def create_queue(self, name: str, *, fifo: bool = False) -> Queue:
        """Make a queue; putting to one that does not exist makes it, too, without `fifo`.

        A fifo queue hands an item out when the one before it is done: one at a time.
        """
        return self.queues.create(name, fifo=fifo)

    @property
    def queues(self) -> Queues:
        """The queues of this store: list, describe, peek, purge; dead letters: redrive, drop."""
        if self._queues is None:
            from pxrs.queues.admin import Queues

            self._queues = Queues(self.stores.queues, self._clock)
        return self._queues

    def _context(self) -> Context:
        with self._making:
            if self._work_context is None:
                from pxrs.queues.held_items import Context
                from pxrs.queues.hold_session import HoldSession

                hold_session = HoldSession(self.stores, self._clock, self._session_ttl)
                self._work_context = Context(
                    self.stores, self._topics, self._clock, hold_session, random.Random()
                )
            return self._work_context

    def stop(self) -> None:
        """End every listener: they finish what is in hand. Does not wait."""
        for listener in all_of(self._listeners):
            listener.stop()

    def _join_listeners(self) -> None:
        with ExitStack() as joining:
            for listener in all_of(self._listeners):
                joining.callback(listener.join)

    def _end_session(self) -> None:
        """What is still held is free."""
        if self._work_context is not None:
            self._work_context.hold_session.close()
