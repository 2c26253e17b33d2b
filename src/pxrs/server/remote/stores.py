"""`pxrs.v1`: the store's own seams for clients that are engines themselves (`pxrs://`).

One stream a client. Its calls are made by threads, as the seams block; what is answered while a
frame is on its way goes with the next one. Sessions and watches are held for the client: a session
that it does not renew ends by itself, and those of a client that is gone are ended soon after.
Where the store lends sessions they outlive the node: the client goes on with them through another.
A node that was frozen has been left by its clients: it makes none of the calls that it finds then.

Any token gets a stream. Each call is checked against the token's rights as they are then: `gate.py`
makes the calls of a token that may not do everything. A token that is revoked ends its stream, and
one whose rights have changed too: the client comes again, and its watches are armed anew.

A call takes room, of its stream and of the node, from when it is read until its answer is sent.
While there is none no more is read, so a client that does not read its answers is not served more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from pxrs.client import frames
from pxrs.client.frames import ANSWER, ERROR, HELLO, WOKEN, Hello
from pxrs.client.topology import NodesView
from pxrs.clock import SYSTEM_CLOCK
from pxrs.config import check_partitions
from pxrs.errors import (
    InvalidRequest,
    NotAtomic,
    OutcomeUnknown,
    PxrsError,
    SessionLost,
    StoreError,
    quoted,
)
from pxrs.server.metrics import Metrics
from pxrs.server.remote.gate import Gate
from pxrs.server.remote.measures import Measures
from pxrs.server.remote.rights import CLUSTER
from pxrs.server.remote.warm_threads import WarmThreads
from pxrs.server.remote.watches import Watched, Watches
from pxrs.server.rest.problems import HttpError
from pxrs.server.rest.room import Room
from pxrs.server.rest.routes import Identify
from pxrs.server.tokens import Identity
from pxrs.stores.api import (
    GivesWay,
    ItemRestorer,
    LendsSessions,
    LentSession,
    Session,
    Stores,
    TellsTime,
    Watch,
)
from pxrs.stores.remote import wire
from pxrs.stores.remote.wire import METHODS, KeyCalls, WireAtomic
from pxrs.types import (
    Append,
    Check,
    Fetched,
    Holder,
    ItemState,
    LogPartition,
    Release,
    Taken,
)

T = TypeVar("T")

_LOG = logging.getLogger("pxrs.serve")
# Threads that make calls, for all clients, and calls that they have or have waiting.
_THREADS = 32
_MOST_CALLS = 2 * _THREADS
# How many of those that write to a store with one writer: while one syncs, the next one prepares.
_WRITERS = 2
_WRITES = frozenset(
    (
        "coord.commit",
        "node.atomic",
        "queues.apply",
        "queues.extend",
        "queues.release",
        "queues.take",
    )
)
_MOST_STREAMS = 500
_MOST_WATCHES = 1000
_MOST_SESSIONS = 1000
_MOST_TOGETHER = 500
# Bytes that the calls of one client have, with their answers until these are sent. The first ones
# wait for nobody: sessions have to be renewed however many want large answers.
_SHARE = 32 * 2**20
_ALWAYS = 2**18
# A call has so many at least, and so many more if its answer may be large. Such an answer is cut
# where that is as good, which is known of all but a first batch or item that is larger alone.
_CALL = 2**16
_LARGE = 4 * 2**20
# How many are asked for first where it is not known how large they are, and at most.
_FIRST_PAGE = 16
_PAGE = 500
_PAGES = _FIRST_PAGE * 2**20
_ANSWERS = {
    "coord.list": _PAGES, "queues.peek": _PAGES,
    "log.fetch": 2 * _LARGE, "queues.take": 2 * _LARGE, "queues.held": 2 * _LARGE,
    "coord.get": 2**20, "kv.read": 2**20 + 2**18,
}  # fmt: skip
_ENTRY = 100
_MOST_TAKEN = 500
# The kind of an answer that is none: the call was not made, for nobody waits for it.
_NONE = -1
_MAX_INFLIGHT = 256 * 2**20
_SECONDS = 30.0
# How long the sessions of a client whose stream broke wait for it to come back.
_GRACE = 2.0
# How often a node looks whether it runs, after how many looks clients hear of it, and how long it
# must have stood still for its clients to have left it, soon: see `SILENCE` of the client.
_BEAT = 0.25
_BEATS_TO_CLIENTS = 4
_FROZEN = 2.0
# What an answer needs while it is sent, in times its size: the socket's buffer has a copy.
COPIES = 2


class HeldSession(NamedTuple):
    """A session of a client, and the stream of this node that renewed it last.

    `lent` is the same session, if it can be gone on with through another node.
    """

    session: Session
    stream: Stream
    lent: LentSession | None = None

    def abandon(self) -> None:
        """End it, unless its client goes on with it elsewhere."""
        if self.lent is None:
            self.session.close()
        else:
            self.lent.abandon()


class StoreService:
    """Serves a store's seams to clients. Used by one event loop."""

    def __init__(
        self,
        stores: Stores,
        node: str,
        keys: KeyCalls,
        view: Callable[[], NodesView],
        room: Room | None = None,
        seconds: float = _SECONDS,
        metrics: Metrics | None = None,
    ) -> None:
        self.stores = stores
        self.node = node
        self.keys = keys
        self.view = view
        self.gate = Gate(stores)
        self.room = room or Room(_MAX_INFLIGHT)
        self.seconds = seconds
        self.measures = Measures(metrics or Metrics(SYSTEM_CLOCK))
        self.turns = asyncio.Semaphore(_MOST_CALLS)
        self.watches = Watches()
        self.pool = WarmThreads(_THREADS, "pxrs-v1")
        self.writers = self.pool
        if isinstance(stores.coord, GivesWay):
            # Threads that write take turns at the one writer anyway: with each turn another one has
            # to wake up and to get the interpreter, which costs more than the write.
            self.writers = WarmThreads(_THREADS, "pxrs-v1-writer", _WRITERS)
        self.sessions: dict[str, HeldSession] = {}
        self.lock = threading.Lock()
        # By session: held while this node adopts it. A client may renew twice at once when it has
        # come from another node; of two handles only the one that adopted last can renew.
        self._adopting: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._streams: set[Stream] = set()
        self._beat = SYSTEM_CLOCK.monotonic()
        self._beating: asyncio.Task[None] | None = None
        # Why the store can't be reached, if so.
        self.trouble = ""

    def note_store(self, trouble: str) -> None:
        """Whether the node reaches its store. If not, its clients go to others, if there are any.

        Only where their sessions live on there; who has others stays, as long as they last. On the
        event loop.
        """
        self.trouble = trouble
        if not self._refuses:
            return
        lends = isinstance(self.stores.coord, LendsSessions)
        with self.lock:
            bound = set() if lends else {held.stream for held in self.sessions.values()}
        going = self._streams - bound
        if going:
            _LOG.warning("%s; %d clients have to use another node", trouble, len(going))
        for stream in going:
            stream.end()

    def adopting(self, session: str) -> threading.Lock:
        """The lock under which this node adopts the session."""
        with self.lock:
            return self._adopting.setdefault(session, threading.Lock())

    @property
    def _refuses(self) -> bool:
        """Whether clients are better off with another node."""
        return bool(self.trouble) and any(it.name != self.node for it in self.view().nodes)

    @property
    def was_frozen(self) -> bool:
        """Whether it has stood still until now, for so long that its clients have left it."""
        return SYSTEM_CLOCK.monotonic() - self._beat > _FROZEN

    async def _look_at_itself(self) -> None:
        for number in count():
            self._beat = SYSTEM_CLOCK.monotonic()
            await asyncio.sleep(_BEAT)
            self.writers.hurry()
            if self.was_frozen:
                _LOG.warning("the node stood still; its clients have to come back")
                self.end_streams()
            elif number % _BEATS_TO_CLIENTS == 0:
                for stream in list(self._streams):
                    stream.show_life()

    @property
    def hello(self) -> Hello:
        """The description of the store that clients get."""
        abilities = {"now"} if isinstance(self.stores.coord, TellsTime) else set()
        with suppress(NotAtomic, PxrsError):
            self.stores.atomic()
            abilities.add("atomic")
        queue_limits = None
        with suppress(PxrsError):
            queue_limits = self.stores.queues.limits
            most = min(queue_limits.body_bytes, frames.MOST_BODY_BYTES)
            queue_limits = queue_limits._replace(body_bytes=most)
            abilities |= {"restore"} if isinstance(self.stores.queues, ItemRestorer) else set()
        abilities |= {"lends"} if isinstance(self.stores.coord, LendsSessions) else set()
        return Hello(self.node, self.stores.coord.limits, queue_limits, frozenset(abilities))

    async def talk(
        self, incoming: AsyncIterator[bytes], identify: Identify
    ) -> AsyncGenerator[bytes, None]:
        """One client's stream: its frames, and the answers. See `routes.Talk`."""
        identity = await identify()
        if len(self._streams) >= _MOST_STREAMS:
            raise HttpError(
                503,
                "too_many_clients",
                f"this node has {_MOST_STREAMS} clients, its limit; try another one",
            )
        if self._refuses:
            raise HttpError(503, "store_unavailable", f"{self.trouble}; try another node")
        if self._beating is None:
            self._beat = SYSTEM_CLOCK.monotonic()
            self._beating = asyncio.create_task(self._look_at_itself())
        stream = Stream(self, identity)
        self._streams.add(stream)
        reading = asyncio.create_task(stream.read(aiter(incoming), identify))
        try:
            async for frame in stream.answers(reading, identify):
                yield frame
        finally:
            reading.cancel()
            self._streams.discard(stream)
            stream.close()

    def changed(self) -> None:
        """Tell every client that follows the view that there is a new one."""
        for stream in list(self._streams):
            stream.tell_of_view()

    def end_streams(self) -> None:
        """Let the clients go to another node."""
        for stream in list(self._streams):
            stream.end()

    async def close(self) -> None:
        """End all streams, and what no other node can hold for their clients."""
        self.end_streams()
        self.watches.close()
        if self._beating is not None:
            self._beating.cancel()
        with self.lock:
            held, self.sessions = list(self.sessions.values()), {}
        loop = asyncio.get_running_loop()
        for each in held:
            if each.lent is None:
                with suppress(PxrsError):
                    await loop.run_in_executor(None, each.session.close)
        self.pool.close()
        self.writers.close()


class Stream:
    """One client's stream: its calls, its watches, and the sessions it renews."""

    def __init__(self, service: StoreService, identity: Identity | None) -> None:
        self._service = service
        self._identity = identity
        # Whose calls are checked one by one; None for who may do everything.
        everything = identity is None or identity.may(*CLUSTER)
        self._limited = None if everything else identity
        self._room = service.room
        self._loop = asyncio.get_running_loop()
        # What threads have done: number, kind, body, and the room that the call has.
        self._done: deque[tuple[int, int, msgspec.Raw, int]] = deque()
        self._ringing = False
        # On the event loop: what is to be sent, and how much room all of it has.
        self._unsent: deque[tuple[int, int, msgspec.Raw]] = deque()
        self._held = 0
        self._calls = 0
        self._freed = asyncio.Event()
        self._rung = asyncio.Event()
        self._is_silent = False
        self._watches: dict[int, Watched] = {}
        # Watches to be told of. One that is woken while it is told is told of again.
        self._woken: set[int] = set()
        # Of the nodes' view; the last one that the client asked for.
        self._view_watch: int | None = None
        self._lock = threading.Lock()
        self._over = False

    # On the event loop

    async def read(self, incoming: AsyncIterator[bytes], identify: Identify) -> None:
        """Takes the client's calls until it ends, sends what can't be read, or may not any more."""
        async for frame in incoming:
            if not self._is_same(await identify()):
                return
            calls = frames.decode_calls(frame)
            if calls and calls[0][1] == frames.PIECE:
                number, name, arguments, size = await self._put_together(calls, incoming)
                await self._submit(number, name, arguments, size)
                continue
            for number, name, arguments in calls:
                size = _size(name, arguments)
                await self._enter(size)
                # A part of a large frame would keep the whole.
                kept = msgspec.Raw(bytes(arguments)) if len(frame) > _CALL else arguments
                await self._submit(number, name, kept, size)

    def _is_same(self, identity: Identity | None) -> bool:
        """Whether the client's rights are those that the stream began with."""
        return identity is self._identity or identity == self._identity

    async def _put_together(
        self, calls: Sequence[tuple[int, str, msgspec.Raw]], incoming: AsyncIterator[bytes]
    ) -> tuple[int, str, msgspec.Raw, int]:
        """One call that comes in pieces, each in a frame of its own; it has room when it is here.

        One that does not come to its end in time ends the stream.
        """
        size = frames.MOST_CALL_BYTES + _LARGE
        await self._enter(size)
        try:
            number, whole = calls[0][0], bytearray()
            async with self._room.moving(size, self._service.seconds):
                while True:
                    if len(calls) != 1 or calls[0][0] != number:
                        raise InvalidRequest("the pieces of a call must come one after the other")
                    _, name, sent = calls[0]
                    whole += frames.decode_piece(sent)
                    if len(whole) > frames.MOST_CALL_BYTES:
                        raise InvalidRequest(f"a call has {frames.MOST_CALL_BYTES} bytes at most")
                    if name != frames.PIECE:
                        return number, name, msgspec.Raw(bytes(whole)), size
                    if (frame := await anext(incoming, None)) is None:
                        raise InvalidRequest("the stream ended in the middle of a call")
                    calls = frames.decode_calls(frame)
        except TimeoutError:
            self._give_back(size)
            raise InvalidRequest("the rest of a call did not come in time") from None
        except BaseException:
            self._give_back(size)
            raise

    async def _enter(self, size: int) -> None:
        """Wait until there is room for a call: in this stream's share, then in the node."""
        while self._held and self._held + size > _SHARE:
            self._freed.clear()
            await self._freed.wait()
        self._held += size
        if self._held <= _ALWAYS:
            self._room.add(size)
        elif not self._room.take(size):
            try:
                await self._room.wait_for(size, self._service.seconds)
            except BaseException:
                self._held -= size
                raise

    def _give_back(self, size: int) -> None:
        self._held -= size
        self._room.give_back(size)
        self._freed.set()

    async def _submit(self, number: int, name: str, arguments: msgspec.Raw, size: int) -> None:
        """Have a call made that has this room. Streams take turns."""
        try:
            await self._service.turns.acquire()
        except BaseException:
            self._give_back(size)
            raise
        self._calls += 1
        service = self._service
        pool = service.writers if name in _WRITES else service.pool
        pool.submit(partial(self._make, number, name, arguments, size))

    async def answers(
        self, reading: asyncio.Task[None], identify: Identify
    ) -> AsyncIterator[bytes]:
        """Frames of answers, until the client has ended and all is answered."""
        reading.add_done_callback(lambda _: self._rung.set())
        while not self._over and not (reading.done() and (_failed(reading) or not self._calls)):
            await self._rung.wait()
            self._rung.clear()
            # A token may have been revoked since its client was last heard of.
            if self._has_news and not self._is_same(await identify()):
                return
            while not self._over and (some := self._next_answers()):
                size = COPIES * sum(len(memoryview(body)) for _, _, body in some)
                frame = frames.encode_frame(some)
                some.clear()
                try:
                    yield frame
                finally:
                    self._give_back(size)
        if failure := _failed(reading):
            raise failure

    @property
    def _has_news(self) -> bool:
        """Whether there is more to send than a sign of life."""
        return self._identity is not None and bool(self._unsent or self._woken)

    def _next_answers(self) -> list[tuple[int, int, msgspec.Raw]]:
        with self._lock:
            woken, self._woken = self._woken, set()
        if self._is_silent:
            # A watch that no client has.
            woken.add(HELLO)
            self._is_silent = False
        some = [(number, WOKEN, frames.NOTHING) for number in woken]
        # They have no room, which is given back for all of the frame.
        self._room.add(more := COPIES * len(memoryview(frames.NOTHING)) * len(some))
        self._held += more
        size = 0
        while self._unsent and len(some) < _MOST_TOGETHER:
            size += len(memoryview(self._unsent[0][2]))
            if some and size > frames.MOST_PIECE_BYTES:
                break
            some.append(self._unsent.popleft())
        return some

    def _settle(self) -> None:
        """Calls were made: their answers have room now, and not more."""
        self._ringing = False
        while self._done:
            number, kind, body, size = self._done.popleft()
            self._calls -= 1
            self._service.turns.release()
            if kind != _NONE and not self._over:
                needed = COPIES * len(memoryview(body))
                self._held += needed
                self._room.add(needed)
                self._unsent.append((number, kind, body))
            self._give_back(size)
        self._rung.set()

    def show_life(self) -> None:
        """Send something, if nothing else is to be sent: the client leaves a silent node."""
        self._is_silent = True
        self._rung.set()

    def tell_of_view(self) -> None:
        """Wake the client, if it follows the view."""
        if self._view_watch is not None:
            self._wake(self._view_watch)

    def end(self) -> None:
        """Stop answering."""
        self._over = True
        self._rung.set()

    def close(self) -> None:
        """Ends the watches at once, and the sessions if the client does not come back soon."""
        self._over = True
        while self._unsent:
            self._give_back(COPIES * len(memoryview(self._unsent.popleft()[2])))
        with self._lock:
            watches, self._watches = list(self._watches.values()), {}
        for watched in watches:
            self._service.watches.remove(watched)
        self._loop.call_later(_GRACE, self._submit_end)

    def _submit_end(self) -> None:
        if self._service.trouble:
            # Clients could not come back, and where they are now could not be seen.
            self._loop.call_later(_GRACE, self._submit_end)
            return
        with suppress(RuntimeError):  # the node has stopped, and has ended them
            self._service.pool.submit(self._end_sessions)

    # In threads

    def _make(self, number: int, name: str, arguments: msgspec.Raw, size: int) -> None:
        """Makes one call, and has its answer sent."""
        kind, body = _NONE, frames.NOTHING
        failed, began = "", perf_counter()
        try:
            if not self._over and not self._service.was_frozen:
                kind, body = self._answer(number, name, arguments)
        except PxrsError as error:
            kind, body, failed = ERROR, frames.encode_error(_told(error)), error.code
        except Exception:  # noqa: BLE001 - told and logged
            # A bug of ours; nobody knows how far it came.
            _LOG.exception("a call of %s failed", quoted(name))
            lost = OutcomeUnknown("the node failed to do this; its log has the details")
            kind, body, failed = ERROR, frames.encode_error(lost), "internal_error"
        finally:
            # First: whoever has the answer sees it counted.
            if failed:
                self._service.measures.failed(name, failed, perf_counter() - began)
            self._done.append((number, kind, body, size))
            if not self._ringing:
                self._ringing = True
                with suppress(RuntimeError):  # the loop was closed
                    self._loop.call_soon_threadsafe(self._settle)

    def _answer(self, number: int, name: str, arguments: msgspec.Raw) -> tuple[int, msgspec.Raw]:
        if number == HELLO:
            return ANSWER, frames.encode_hello(self._service.hello)
        method = METHODS.get(name)
        if method is None:
            raise InvalidRequest(f"there is no method {quoted(name)}")
        call, given, limited = self._target(name), method.decode(arguments), self._limited
        began = perf_counter()
        answer = (
            call(**given)
            if limited is None
            else self._service.gate.call(limited, name, given, call)
        )
        took = perf_counter() - began
        body = method.encode_answer(answer)
        _check_answer(len(memoryview(body)))
        self._service.measures.done(name, given, answer, took)
        return ANSWER, body

    def _target(self, name: str) -> Callable[..., Any]:
        folder, _, method = name.partition(".")
        if folder == "node" or name in _BOUNDED:
            own = _BOUNDED.get(name, f"_{method}")
            return getattr(self, own)  # type: ignore[no-any-return]
        if folder == "kv":
            return getattr(self._service.keys, method)  # type: ignore[no-any-return]
        found = getattr(getattr(self._service.stores, folder), method, None)
        if found is None:
            raise InvalidRequest(f"this store has no {name}")
        return found  # type: ignore[no-any-return]

    # Calls whose answers are as large as what is in the store

    def _list(
        self, prefix: str, after: str | None, limit: int | None, read: Any = None
    ) -> wire.Records:
        """`read`: instead of the store's own list, of those that the caller may see."""
        read = read or self._service.stores.coord.list
        found, is_cut = _pages(
            lambda after, count: read(prefix, after, count),
            after, limit, lambda record: record.key, lambda record: len(record.value),
        )  # fmt: skip
        return wire.Records(found, is_cut)

    def _peek(
        self, queue: str, states: Sequence[ItemState], after: int | None, limit: int
    ) -> wire.Items:
        queues = self._service.stores.queues
        found, is_cut = _pages(
            lambda after, count: queues.peek(queue, states, after=after, limit=count),
            after, limit, lambda item: item.id, lambda item: len(item.body),
        )  # fmt: skip
        return wire.Items(found, is_cut)

    def _create_log(self, topic_id: str, partitions: int) -> None:
        check_partitions(partitions)
        self._service.stores.log.create(topic_id, partitions)

    def _fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        return self._service.stores.log.fetch(where, offset, min(max_bytes, _LARGE))

    def _take(self, queue: str, holder: Holder, count: int, **options: Any) -> Taken:
        queues = self._service.stores.queues
        taken = queues.take(queue, holder, min(count, _MOST_TAKEN), **options)
        try:
            _check_answer(sum(len(item.body) for item in taken.items))
        except InvalidRequest:
            queues.release(holder, [Release(item.held) for item in taken.items])
            raise
        return taken

    def _open_session(self, ttl: float) -> str:
        with self._service.lock:
            if len(self._service.sessions) >= _MOST_SESSIONS:
                raise InvalidRequest(f"a node holds at most {_MOST_SESSIONS} sessions of clients")
        coord = self._service.stores.coord
        if isinstance(coord, LendsSessions):
            lent = coord.lend(ttl)
            held = HeldSession(lent, self, lent)
        else:
            held = HeldSession(coord.session(ttl), self)
        if not self._hold(held):
            held.abandon()
        return held.session.id

    def _renew_session(self, session: str) -> None:
        with self._service.adopting(session):
            held = self._service.sessions.get(session)
            if held is None or (held.lent is not None and held.stream is not self):
                # The client comes from another node, or comes back from there.
                self._hold(self._adopted(session))
                return
        try:
            held.session.renew()
        except SessionLost:
            self._service.sessions.pop(session, None)
            raise
        with self._service.lock:
            if session in self._service.sessions and not self._over:
                self._service.sessions[session] = held._replace(stream=self)

    def _adopted(self, session: str) -> HeldSession:
        coord = self._service.stores.coord
        if not isinstance(coord, LendsSessions):
            raise SessionLost(f"session {session} is not held by this node; open a new one")
        lent = coord.adopt(session)
        return HeldSession(lent, self, lent)

    def _hold(self, held: HeldSession) -> bool:
        """Keep the session for the client; false if that has gone, or there are too many.

        Then nobody notices if the client dies, and its session ends by its time.
        """
        sessions, name = self._service.sessions, held.session.id
        with self._service.lock:
            if self._over or (name not in sessions and len(sessions) >= _MOST_SESSIONS):
                return False
            sessions[name] = held
            return True

    def _close_session(self, session: str) -> None:
        with self._service.lock:
            held = self._service.sessions.pop(session, None)
        if held is None:
            with suppress(SessionLost):
                held = self._adopted(session)
        if held is not None:
            held.session.close()

    def _end_sessions(self) -> None:
        with self._service.lock:
            mine = [it for it in self._service.sessions.values() if it.stream is self]
            for held in mine:
                del self._service.sessions[held.session.id]
        for held in mine:
            with suppress(PxrsError):
                held.abandon()

    def _watch_records(self, watch: int, where: list[str]) -> None:
        size = sum(map(len, where))
        self._watch(watch, lambda: self._service.stores.coord.watch(*where), size)

    def _watch_log(self, watch: int, where: list[LogPartition]) -> None:
        size = sum(len(it.topic_id) for it in where)
        self._watch(watch, lambda: self._service.stores.log.watch(*where), size)

    def _watch_queues(self, watch: int, where: list[str]) -> None:
        size = sum(map(len, where))
        self._watch(watch, lambda: self._service.stores.queues.watch(*where), size)

    def _watch(self, number: int, arm: Callable[[], Watch], size: int) -> None:
        with self._lock:
            if number in self._watches:
                return
            if len(self._watches) >= _MOST_WATCHES:
                raise InvalidRequest(f"a client has at most {_MOST_WATCHES} watches")
        watched = self._service.watches.add(arm, lambda: self._wake(number), size)
        with self._lock:
            if not self._over and self._watches.setdefault(number, watched) is watched:
                return
        # The stream has ended meanwhile, or the client has armed it twice at once.
        self._service.watches.remove(watched)

    def _wake(self, number: int) -> None:
        with self._lock:
            self._woken.add(number)
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._rung.set)

    def _unwatch(self, watch: int) -> None:
        with self._lock:
            found = self._watches.pop(watch, None)
        if found is not None:
            self._service.watches.remove(found)

    def _view(self) -> NodesView:
        return self._service.view()

    def _watch_view(self, watch: int) -> None:
        self._view_watch = watch

    def _atomic(
        self,
        checks: list[Check],
        writes: list[wire.WireWrite],
        appends: list[Append],
        change: wire.WireChange | None,
    ) -> WireAtomic:
        with self._service.stores.atomic() as atomic:
            atomic.check(*checks)
            atomic.write(*wire.unpack_writes(writes))
            for where, batch in appends:
                atomic.append(where, batch)
            if change is not None:
                atomic.queue(change.unpacked())
        return WireAtomic(atomic.versions, atomic.appended, atomic.queued)


_BOUNDED = {
    "coord.list": "_list", "log.fetch": "_fetch", "log.create": "_create_log",
    "queues.take": "_take", "queues.peek": "_peek",
}  # fmt: skip


def _size(name: str, arguments: msgspec.Raw) -> int:
    """How much room a call takes. Small entries need much more than their bytes."""
    given = len(memoryview(arguments))
    return _CALL + min(16 * given, given + _LARGE) + _ANSWERS.get(name, 0)


def _check_answer(size: int) -> None:
    if size > frames.MOST_ANSWER_BYTES:
        raise InvalidRequest(
            f"the answer has {size} bytes; a pxrs:// store gives {frames.MOST_ANSWER_BYTES} at a "
            "time: ask for less, or use the nodes' store itself"
        )


def _failed(reading: asyncio.Task[None]) -> BaseException | None:
    return reading.exception() if reading.done() and not reading.cancelled() else None


def _pages(
    read: Callable[[Any, int], list[T]],
    after: Any,
    limit: int | None,
    place: Callable[[T], Any],
    weigh: Callable[[T], int],
) -> tuple[list[T], bool]:
    """Reads pages until it has much; returns that, and whether it ended before all was read."""
    if limit is not None and limit < 1:
        return read(after, limit), False
    found: list[T] = []
    size, count = 0, _FIRST_PAGE
    while True:
        wanted = count if limit is None else min(count, limit - len(found))
        page = read(after, wanted)
        for each in page:
            size += weigh(each) + _ENTRY
            if found and size > _LARGE:
                return found, True
            found.append(each)
        if len(page) < wanted or len(found) == limit:
            return found, False
        after = place(page[-1])
        count = max(1, min(_PAGE, 4 * count, (_LARGE - size) * len(found) // size))


def _told(error: PxrsError) -> PxrsError:
    """The error that a client gets. A store's own text may name its address and its users."""
    if not isinstance(error, StoreError):
        return error
    _LOG.warning("a call failed: %s", error)
    told: PxrsError = type(error).__new__(type(error), "the node's store did not do this")
    return told
