"""`connect` and what it returns: the verbs of pxrs on one set of stores."""

from __future__ import annotations

import os
import random
import re
import secrets
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from pxrs import signatures
from pxrs.arguments import check_connection, check_handler, given_connection
from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.codec.messages import Decoder
from pxrs.config import (
    MOST_BYTES,
    ConsumerSettings,
    DeadLetter,
    ProducerSettings,
    check_member_name,
)
from pxrs.consuming.reader import Reader
from pxrs.errors import ConfigError
from pxrs.options import (
    ConsumerOptions,
    ListenOptions,
    MemberOptions,
    ProducerOptions,
    PutManyOptions,
    PutOptions,
    RunOptions,
    TransactionOptions,
    declared,
    filled,
    refuse_unknown,
    takes,
)
from pxrs.producing.producer import Producer
from pxrs.running.dead_letters import DeadLetters
from pxrs.running.handle import Running, Work
from pxrs.running.job import Job, ListenJob, RunJob, listen_job, run_job
from pxrs.running.topics import Topics
from pxrs.serde import Serde
from pxrs.sources.log import with_sources
from pxrs.stores.api import OfNodes, Stores
from pxrs.stores.open import open_stores
from pxrs.topics import Topics as TopicRecords
from pxrs.types import Header, Message, Plain, Read, Topic

# Modules for consumers and queues are loaded at first use: a program that only sends starts sooner.
if TYPE_CHECKING:
    from pxrs.client.client import Client
    from pxrs.consuming.consumer import Consumer
    from pxrs.consuming.health import Health
    from pxrs.consuming.member import Member
    from pxrs.groups.admin import Groups
    from pxrs.kv.store import KeyValues
    from pxrs.queues.admin import Queues
    from pxrs.queues.held_items import Context
    from pxrs.queues.unit_of_work import UnitOfWork
    from pxrs.running.listener import Handler, Listener
    from pxrs.running.relay import Relay, RelayJob
    from pxrs.running.runner import Runner
    from pxrs.running.suspect_items import WorkerTurns
    from pxrs.sources.admin import Sources
    from pxrs.sources.api import Source
    from pxrs.sources.descriptions import Description

SESSION_TTL = 10.0
T = TypeVar("T")


def connect(url: str, *, coord: str | None = None, log: str | None = None) -> Pxrs:
    """Open a store, creating it if need be; close it, or use it as a context manager.

    These keep everything: topics, groups and work queues.

    - `sqlite:///app.db` or `sqlite:////var/lib/app.db`: a file, for processes of one host.
      `?durability=relaxed` survives a crash of the process but not of the host; `?busy_timeout=10`
      is how many seconds a commit waits for other writers.
    - `postgresql://user:password@host:5432/database` (extra `postgres`). `?schema=pxrs` holds the
      tables, `?connections=8` bounds the pool, `?busy_timeout=10` as above; all other options are
      libpq's, such as `sslmode`.
    - `memory://`: this process only; `memory://name` is shared within it.

    These keep groups and work queues; messages are kept elsewhere (`log=`).

    - `mysql://user:password@host:3306/database`, `mariadb://…` (extra `sql`). Options are the
      driver's own, such as `?read_timeout=15` and `?ssl_ca=…`. `oracle://…` is the same code for
      Oracle, which was never run there.
    - `etcd://host:2379,host2:2379/prefix` (extra `etcd`) and `zookeeper://host:2181,host2:2181/root`
      (extra `zookeeper`). `?timeout=10` seconds for a request; `?tls=true`, or
      `?ca=…&cert=…&key=…` with files; `user:password@` before the hosts.

    This one keeps messages only; coordination is kept elsewhere (`coord=`, or the first URL).

    - `nats://host:4222,host2:4222/prefix` (extra `nats`): JetStream. `?replicas=3` (1, 3 or 5),
      `?timeout=20`, `?domain=…`, `?credentials=…` or `?nkey=…`, and TLS as above.

    And everything on nodes of `pxrs serve` (extra `remote`), which keep it in their own store:

    - `pxrs://host:6080,host2:6080`, with a token: `pxrs://TOKEN@host:6080`. `?timeout=15` seconds
      for a call, whichever node answers; TLS as above. `tx.execute` is not carried.

    `coord` is the store of groups, queues and all else that is owned, `log` that of messages:
    `connect("sqlite:///app.db", coord="etcd://host:2379")`,
    `connect("etcd://a,b,c", log="nats://a,b,c?replicas=3")`. One text can name all of it:
    `connect("etcd://a,b,c log=nats://a,b,c?replicas=3")`. Extras are installed with
    `pip install 'pxrs[postgres]'`.
    """
    return Pxrs(open_stores(url, coord=coord, log=log))


class Pxrs:
    """An open store. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        stores: Stores,
        clock: Clock = SYSTEM_CLOCK,
        *,
        session_ttl: float = SESSION_TTL,
    ) -> None:
        self.stores = stores
        self._clock = clock
        self._session_ttl = session_ttl
        # Where messages are read: virtual topics are beside the store's own.
        self._stores = with_sources(stores, clock)
        self._topics = TopicRecords(stores.coord, self._stores.log, clock)
        self._groups: Groups | None = None
        self._queues: Queues | None = None
        self._kv: KeyValues | None = None
        # One session holds the items of all transactions.
        self._work_context: Context | None = None
        self._making = threading.Lock()
        self._turns: WorkerTurns | None = None
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        # Members of runs: a run reports their health, and closes them.
        self._run_members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._running: list[Running] = []
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()

    @property
    def url(self) -> str:
        """The URL that opens this store again, in another process, too; with its password."""
        return self.stores.url

    @property
    def topics(self) -> Topics:
        """The topics of this store: make, list, describe, delete; dead letters: look, redrive."""
        # Made anew each time: an attribute would keep this object alive.
        return Topics(
            self.stores.coord,
            self._stores.log,
            self._clock,
            groups=lambda: self.groups,
            consumer=partial(self.consumer, auto_commit=False, on_trimmed="earliest"),
            producer=self._resender,
        )

    @takes(ProducerOptions, defaults=[ProducerSettings])
    def producer(
        self, *, serde: Serde[Plain] | None = None, **options: Unpack[ProducerOptions]
    ) -> Producer[Plain]:
        """A producer. Use it with `with`: leaving it flushes.

        `serde` turns objects into values; without one, they are text or bytes.
        """
        refuse_unknown("producer", options, ProducerOptions)
        settings = filled(ProducerSettings, options)
        key_serde = options.get("key_serde")
        producer = Producer(self._topics, self._stores.log, self._clock, settings, key_serde, serde)
        self._producers.add(producer)
        return producer

    def reader(
        self, topic: str, *, serde: Serde[Read] | None = None, key_serde: Serde | None = None
    ) -> Reader[Read]:
        """Read a topic without a group."""
        decoder = Decoder(key_serde, serde)
        return Reader(self._topics.find(topic), self._stores.log, self._clock, decoder)

    @takes(MemberOptions, ConsumerOptions, defaults=[ConsumerSettings])
    @declared(signatures.Consuming[None].consumer)
    def consumer(
        self, topics: Any, group: str, *, serde: Any, **options: Unpack[ConsumerOptions]
    ) -> Consumer:
        """Consume topics as a member of a group: a name, several, or a compiled pattern.

        `serde` turns values into objects; without one, they are bytes.
        """
        refuse_unknown("consumer", options, ConsumerOptions)
        settings = _member_settings(group, options)
        from pxrs.consuming.callbacks import Callbacks
        from pxrs.consuming.consumer import Consumer
        from pxrs.consuming.member import Member
        from pxrs.consuming.subscription import Subscription

        callbacks = Callbacks(
            options.get("on_assigned"), options.get("on_revoked"), options.get("on_lost")
        )
        decoder = Decoder(options.get("key_serde"), serde)
        wanted = Subscription(topics, self._topics)
        member = Member(self._context(), wanted, settings, decoder, callbacks)
        self._members.add(member)
        return Consumer(member)

    @signatures.run
    def run(
        self,
        handler: Callable[[Message], Any],
        *,
        topic: str | Sequence[str] | re.Pattern[str],
        group: str,
        serde: Serde | None = None,
        **options: Unpack[RunOptions],
    ) -> Running:
        """Call `handler(message)` for every message of the group's share, until stopped.

        It starts at once, in the background: `px.run(…).join()` waits until it is stopped, and
        leaving `with px.run(…):` stops it. Stopping finishes what is in hand, commits and leaves
        the group. Order is kept per partition, or with `parallel="key"` per key. A handler that
        raises is called again after `retry`'s delays, while other keys go on; then `on_failure`
        decides. Both are logged (`pxrs.run`). One that wants to end the program (`sys.exit`) ends
        the run: `join` raises `HandlerFailed`.

        `workers` are threads. With `processes`, that many processes do the same, each with its
        threads and a member of its own; the handler must be importable, not a closure. `serde`
        turns values into objects; without one, they are bytes.
        """
        check_handler(handler, "message", instead="pxrs.aio's run")
        return self._start(run_job(handler, topic, group, serde, options))

    def _start(self, job: Job) -> Running:
        """Start a run or a listener, which `stop`, `health` and `close` know from here on."""
        work: Work
        if job.processes:
            # Worker processes are rare, and multiprocessing is slow to import.
            from pxrs.running.processes import Workers

            work = Workers.of(_work_in_process, self.stores.url, job)
        elif isinstance(job, RunJob):
            work = self._new_runner(job)
        else:
            work = self._new_listener(job)
        return self._begin(work)

    def _begin(self, work: Work) -> Running:
        running = Running(work, self.stop)
        with self._making:
            # A failed one stays until its error was raised to a caller: a probe must see it.
            self._running = [each for each in self._running if not each._is_settled]
            self._running.append(running)
        return running._start()

    def _new_runner(self, job: RunJob) -> Runner:
        from pxrs.consuming.callbacks import Callbacks
        from pxrs.consuming.member import Member
        from pxrs.consuming.subscription import Subscription
        from pxrs.running.runner import Runner

        letters = None
        if isinstance(job.on_failure, DeadLetter):
            letters = DeadLetters(job.on_failure, self._topics, self._resender())
        settings = _member_settings(job.group, job.member)
        nothing = Callbacks(None, None, None)

        def join() -> Member:
            wanted = Subscription(job.topic, self._topics, job.on_failure)
            member = Member(
                self._context(), wanted, settings, Decoder(), nothing, job.max_in_flight
            )
            self._run_members.add(member)
            return member

        return Runner(job, self._clock, letters, join)

    @takes(TransactionOptions, strict=False)
    def transaction(
        self,
        connection: None = None,
        *,
        serde: Serde[Plain] | None = None,
        **options: Unpack[TransactionOptions],
    ) -> UnitOfWork[Plain]:
        """A unit of work for a `with` block: take and put items, send messages, run SQL.

        Leaving the block commits all of it at once, an exception rolls back: on a connection of
        pxrs, or on one of the caller's.
        """
        return self._unit_of_work("transaction", connection, serde, options, commit_on_exit=True)

    @takes(TransactionOptions, strict=False)
    def begin(
        self,
        connection: None = None,
        *,
        serde: Serde[Plain] | None = None,
        **options: Unpack[TransactionOptions],
    ) -> UnitOfWork[Plain]:
        """As `transaction`, but `commit()` must be called: leaving the block rolls back."""
        return self._unit_of_work("begin", connection, serde, options, commit_on_exit=False)

    def _joining(self, connection: Any, serde: Serde[Plain] | None = None) -> UnitOfWork[Plain]:
        """A unit of work for one change: in the caller's transaction, or else in its own."""
        from pxrs.queues.unit_of_work import UnitOfWork

        return UnitOfWork(self._context(), connection=connection, serde=serde)

    def _unit_of_work(
        self,
        verb: str,
        unsaid: object,
        serde: Serde[Plain] | None,
        options: TransactionOptions,
        *,
        commit_on_exit: bool,
    ) -> UnitOfWork[Plain]:
        from pxrs.queues.unit_of_work import UnitOfWork

        return UnitOfWork(
            self._context(),
            connection=given_connection(verb, unsaid, options),
            serde=serde,
            strict=options.get("strict", False),
            commit_on_exit=commit_on_exit,
        )

    @signatures.put
    def put(
        self,
        queue: str,
        value: Any,
        *,
        serde: Serde | None = None,
        connection: Any = None,
        **options: Unpack[PutOptions],
    ) -> int | None:
        """Put one item, durably; returns its id, or None if it is a duplicate (`dedupe`).

        None, too, if the store did not answer the commit and only later confirmed that it was done.
        With a `connection` of the caller's it is put when, and only if, the caller commits.
        """
        with self._joining(connection, serde) as work:
            item = work.put(queue, value, **options)
        return item.id

    @signatures.put_many
    def put_many(
        self,
        queue: str,
        values: Iterable[Any],
        *,
        serde: Serde | None = None,
        connection: Any = None,
        **options: Unpack[PutManyOptions],
    ) -> list[int | None]:
        """Put several items of one kind, all or none, in one commit; their ids. See `put`."""
        with self._joining(connection, serde) as work:
            items = work.put_many(queue, values, **options)
        return [item.id for item in items]

    def send(
        self,
        topic: str,
        value: str | bytes | None,
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
        with self._joining(connection) as work:
            work.send(topic, value, key, partition=partition, headers=headers)

    @signatures.listen
    def listen(
        self,
        queue: str,
        handler: Handler,
        *,
        serde: Serde | None = None,
        **options: Unpack[ListenOptions],
    ) -> Running:
        """Call `handler(item, tx)` for every item of the queue, until stopped.

        It starts at once, in the background: `px.listen(…).join()` waits until it is stopped, and
        leaving `with px.listen(…):` stops it. When the handler returns its transaction commits:
        the item is done and what it put is there. If it raises, the transaction rolls back, and
        the item is delivered again after `retry`'s delays, five times in all by default; then
        `on_failure` decides. Failures are logged (`pxrs.listen`). A handler that wants to end the
        program (`sys.exit`) ends the listener: `join` raises `HandlerFailed`.

        `workers` are threads. With `processes`, that many processes have `workers` threads each;
        the handler must be importable, not a closure. An item whose last holder died is handled
        while no other worker of the process has one in hand. `serde` turns values into objects,
        and objects into values; without one, they are text or bytes.
        """
        check_handler(handler, "item", "tx", instead="pxrs.aio's listen")
        return self._start(listen_job(queue, handler, serde, options))

    def _new_listener(self, job: ListenJob) -> Listener:
        from pxrs.queues.unit_of_work import UnitOfWork
        from pxrs.running.listener import Listener
        from pxrs.running.suspect_items import WorkerTurns

        with self._making:
            self._turns = self._turns or WorkerTurns(self._clock)
        begin = partial(UnitOfWork, self._context(), serde=job.serde, commit_on_exit=False)
        return Listener(job, self.stores.queues, begin, self._turns, self._clock)

    def attach(self, name: str, source: Description | Source, *, partitions: int) -> Topic:
        """Lay a virtual topic over a source: a table, or another ordered stream that exists.

        Nothing is copied. Groups consume it as any topic; a row's partition is the hash of its
        key, its offset is its own. It is recorded once, for all processes; attaching it again with
        the same settings changes nothing, with others it is `TopicExists`. The source is checked
        first: `ConfigError` if rows could be skipped.
        """
        return self.sources._attach(name, source, partitions)

    @takes(MemberOptions, defaults=[ConsumerSettings])
    def relay(
        self,
        source: str | Description | Source,
        *,
        topic: str,
        group: str = "relay",
        **options: Unpack[MemberOptions],
    ) -> Running:
        """Copy a source into a topic of this store, each message once, until stopped.

        `source` is the name of a virtual topic, or of any other; or a source, which is attached
        as `<topic>.source` then, with as many partitions as the topic has. Keys, values, headers
        and times are kept, and so is the order of a key's messages. Messages without a key keep
        their order, too; those without a time get that of the copy. Several members share the
        work.

        The messages are committed together with the checkpoint where one store holds both.
        Otherwise they are appended so that the log recognises repeats. It starts at once, in the
        background, as `run` does: `px.relay(…).join()` waits until it is stopped.
        """
        refuse_unknown("relay", options, MemberOptions)
        if options.get("key_serde") is not None:
            raise ConfigError("key_serde has no use in relay: keys are copied as they are")
        target = self._topics._find_writable(topic)
        settings = _member_settings(group, options, auto_commit=False)
        if isinstance(source, str):
            found = self._topics.find(source)
        else:
            found = self.attach(f"{topic}.source", source, partitions=target.partitions)
        from pxrs.running.relay import begin_relay

        job = begin_relay(self.stores.coord, found, target, group)
        return self._begin(self._new_relay(job, settings))

    def _new_relay(self, job: RelayJob, settings: ConsumerSettings) -> Relay:
        from pxrs.consuming.callbacks import Callbacks
        from pxrs.consuming.member import Member
        from pxrs.consuming.subscription import Subscription
        from pxrs.running.relay import Relay

        def join() -> Member:
            wanted = Subscription(job.source.name, self._topics)
            nothing = Callbacks(None, None, None)
            member = Member(self._context(), wanted, settings, Decoder(), nothing)
            self._run_members.add(member)
            return member

        return Relay(job, self.stores.coord, self._stores.log, self._clock, join)

    @property
    def sources(self) -> Sources:
        """The virtual topics of this store: list, describe, prepare and detach them."""
        from pxrs.sources.admin import Sources

        return Sources(self._topics, self._stores.log, self.stores.url)

    @property
    def kv(self) -> KeyValues:
        """The keys and values of this store: put, get, delete, scan and watch them."""
        if self._kv is None:
            with self._making:
                self._kv = self._kv or self._new_keys()
        return self._kv

    def _new_keys(self) -> KeyValues:
        from pxrs.kv.led import LedKeys
        from pxrs.kv.store import KeyValues

        if isinstance(self.stores, OfNodes):
            return LedKeys(self.stores.coord, self._clock, self.stores.client)
        return KeyValues(self.stores.coord, self._clock)

    @property
    def client(self) -> Client:
        """The nodes behind a `pxrs://` URL: their list, the leaders of slots, and statistics."""
        if not isinstance(self.stores, OfNodes):
            raise ConfigError("only a store at pxrs:// has nodes; this one is used directly")
        return self.stores.client

    @property
    def queues(self) -> Queues:
        """The queues of this store: list, describe, peek, purge; dead letters: redrive, drop."""
        if self._queues is None:
            from pxrs.queues.admin import Queues

            self._queues = Queues(self.stores.queues, self._clock)
        return self._queues

    def _resender(self) -> Producer:
        """A producer for messages that were sent before, which may be larger by added headers."""
        return self.producer(max_message_bytes=MOST_BYTES, buffer_bytes=MOST_BYTES)

    def stop(self) -> None:
        """End every run and listener of this object: they finish what is in hand, and leave.

        Does not wait. From any thread, and from handlers.
        """
        for running in list(self._running):
            running.stop()

    def _context(self) -> Context:
        with self._making:
            if self._work_context is None:
                from pxrs.queues.held_items import Context
                from pxrs.queues.hold_session import HoldSession

                hold_session = HoldSession(self.stores, self._clock, self._session_ttl)
                self._work_context = Context(
                    self._stores, self._topics, self._clock, hold_session, random.Random()
                )
            return self._work_context

    def health(self) -> dict[str, Health]:
        """Return the health of every consumer, run and listener, by name. From any thread.

        For probes: `all(each.ok for each in px.health().values())`. A consumer's name is its
        member's; see `Running.health` for the others. A run or listener that has ended by itself
        is "failed" until its `join` has raised the error, and another one is started.
        """
        here = [member for member in _all_of(self._members) if not member.has_left]
        found = [(member.name, member.health()) for member in here]
        for running in list(self._running):
            found += running.health().items()
        return _named(found)

    @property
    def groups(self) -> Groups:
        """The groups of this store: list, describe, explain, reset and delete them."""
        if self._groups is None:
            from pxrs.groups.admin import Groups

            self._groups = Groups(self.stores.coord, self._stores.log, self._topics, self._clock)
        return self._groups

    def close(self) -> None:
        """Stop every listener and run, close every consumer, flush every producer, close the store.

        Runs and listeners finish what is in hand and commit it, as with `stop`; for 30 seconds at
        most. A handler that calls this is not waited for: its message or item comes again. Once
        all is closed, raises the errors of a producer's `close`, and of a run or listener that has
        ended by itself and was not joined.
        """
        self._end(None)

    def _end(self, reason: BaseException | None) -> None:
        """Close because of an error that is being raised: see `Producer._end`."""
        self.stop()
        # Last in, first out. A failure to close one must not leave the others, and the store, open.
        with ExitStack() as closing:
            closing.callback(self._stores.close)
            closing.callback(self._end_session)
            for producer in _all_of(self._producers):
                closing.callback(producer._end, reason)
            members = [*_all_of(self._members), *_all_of(self._run_members)]
            if members:
                from pxrs.consuming.member import close_together

                closing.callback(close_together, members)
            if not self._is_around_here:
                for running in self._running:
                    closing.callback(running._close)

    @property
    def _is_around_here(self) -> bool:
        """Whether the caller is inside of a handler of one of its runs or listeners."""
        return any(running._is_around_here for running in self._running)

    def _end_session(self) -> None:
        """Free items that are still held."""
        if self._work_context is not None:
            self._work_context.hold_session.close()

    def __enter__(self) -> Pxrs:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)


def _work_in_process(url: str, job: Job) -> None:
    """The work of a worker process, from its beginning to its end."""
    with connect(url) as px:
        px._start(job).join()


def _all_of(some: weakref.WeakSet[T]) -> list[T]:
    """A list of the present members, while another thread may add some."""
    while True:
        try:
            return list(some)
        except RuntimeError:
            # One was added meanwhile.
            continue


def _named(found: list[tuple[str, Health]]) -> dict[str, Health]:
    """Sorts by name; numbers those whose name is taken already."""
    named: dict[str, Health] = {}
    times: Counter[str] = Counter()
    for name, health in sorted(found, key=lambda each: each[0]):
        times[name] += 1
        named[name if times[name] == 1 else f"{name}#{times[name]}"] = health
    return named


def _member_settings(group: str, options: MemberOptions, **given: object) -> ConsumerSettings:
    instance = options.get("instance")
    return filled(
        ConsumerSettings,
        options,
        group=group,
        member_name=_member_name(instance),
        static=instance is not None,
        client=f"{socket.gethostname()}:{os.getpid()}",
        **given,
    )


def _member_name(instance: str | None) -> str:
    """A static member's own name, or a new one."""
    if instance is not None:
        return check_member_name(instance)
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40] or "member"
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"
