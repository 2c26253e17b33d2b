"""`pxrs.v1`: the store's own seams for clients that are engines themselves (`pxrs://`).

One stream a client. Its calls are made by threads, as the seams block; what is answered while a
frame is on its way goes with the next one. Sessions and watches are held for the client: a session
that it does not renew ends by itself, and those of a client that is gone are ended soon after.
Where the store lends sessions they outlive the node: the client goes on with them through another.
A node that was frozen has been left by its clients: it makes none of the calls that it finds then.

Any token gets a stream. Each call is checked against the token's rights as they are then: `gate.py`
makes the calls of a token that may not do everything. A token that is revoked ends its stream, and
one whose rights have changed too: the client comes again, and its watches are armed anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import grpc
import msgspec

from pxrs.client import frames
from pxrs.client.frames import ANSWER, ERROR, HELLO, WOKEN, Hello
from pxrs.client.topology import NodesView
from pxrs.clock import SYSTEM_CLOCK
from pxrs.errors import (
    InvalidRequest,
    NotAtomic,
    OutcomeUnknown,
    PxrsError,
    SessionLost,
    StoreError,
    quoted,
)
from pxrs.server.rpc.calls import Caller, Calls
from pxrs.server.rpc.gate import Gate
from pxrs.server.rpc.rights import CLUSTER
from pxrs.server.rpc.warm_threads import WarmThreads
from pxrs.server.tokens import Identity
from pxrs.stores.api import (
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
from pxrs.types import Append, Check, LogPartition, QueueChange

_LOG = logging.getLogger("pxrs.serve")
# Threads that make calls, for all clients; and calls of one client that are under way at a time.
_THREADS = 32
_MOST_CALLS = 1000
_MOST_WATCHES = 1000
_MOST_SESSIONS = 1000
_MOST_TOGETHER = 500
# How long the sessions of a client whose stream broke wait for it to come back.
_GRACE = 2.0
_LOOK = 30.0
# How often a node looks whether it runs, and how long it must have stood still for its clients to
# have left it: see the pings of `client/stream.py`.
_BEAT = 0.25
_FROZEN = 2.0


class Held(NamedTuple):
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
        self, stores: Stores, node: str, keys: KeyCalls, view: Callable[[], NodesView]
    ) -> None:
        self.stores = stores
        self.node = node
        self.keys = keys
        self.view = view
        self.gate = Gate(stores)
        self.pool = WarmThreads(_THREADS, "pxrs-v1")
        self.sessions: dict[str, Held] = {}
        self.lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._beat = SYSTEM_CLOCK.monotonic()
        self._beating: asyncio.Task[None] | None = None

    @property
    def was_frozen(self) -> bool:
        """Whether it has stood still until now, for so long that its clients have left it."""
        return SYSTEM_CLOCK.monotonic() - self._beat > _FROZEN

    async def _look_at_itself(self) -> None:
        while True:
            self._beat = SYSTEM_CLOCK.monotonic()
            await asyncio.sleep(_BEAT)
            if self.was_frozen:
                _LOG.warning("the node stood still; its clients have to come back")
                self.end_streams()

    @property
    def hello(self) -> Hello:
        """What clients are told of the store."""
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
        return Hello(self.node, self.stores.coord.limits, queue_limits, frozenset(abilities))

    def handler(self, calls: Calls) -> grpc.GenericRpcHandler:
        """For the gRPC server."""
        return calls.dialogue(frames.SERVICE, frames.CALL, self.talk)

    async def talk(
        self, incoming: AsyncIterator[bytes], caller: Callable[[], Awaitable[Caller]]
    ) -> AsyncGenerator[bytes, None]:
        """One client's stream: its frames, and the answers. See `Calls.dialogue`."""
        identity = (await caller()).identity
        if self._beating is None:
            self._beat = SYSTEM_CLOCK.monotonic()
            self._beating = asyncio.create_task(self._look_at_itself())
        stream = Stream(self, identity)
        self._streams.add(stream)
        reading = asyncio.create_task(stream.read(incoming, caller))
        try:
            async for frame in stream.answers(reading, caller):
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


class Stream:
    """One client's stream: its calls, its watches, and the sessions it renews."""

    def __init__(self, service: StoreService, identity: Identity | None) -> None:
        self._service = service
        self._identity = identity
        # Whose calls are checked one by one; None for who may do everything.
        everything = identity is None or identity.may(*CLUSTER)
        self._limited = None if everything else identity
        self._loop = asyncio.get_running_loop()
        self._ready: deque[tuple[int, int, msgspec.Raw]] = deque()
        self._ringing = False
        self._rung = asyncio.Event()
        self._room = asyncio.Semaphore(_MOST_CALLS)
        self._watches: dict[int, Watch] = {}
        # Of the nodes' view; the last one that the client asked for.
        self._view_watch: int | None = None
        self._over = False

    # On the event loop

    async def read(
        self, incoming: AsyncIterator[bytes], caller: Callable[[], Awaitable[Caller]]
    ) -> None:
        """Takes the client's calls until it ends, sends what can't be read, or may not any more."""
        async for frame in incoming:
            if not self._is_same(await caller()):
                return
            for number, name, arguments in frames.decode_calls(frame):
                await self._room.acquire()
                self._service.pool.submit(partial(self._make, number, name, arguments))

    def _is_same(self, caller: Caller) -> bool:
        """Whether the caller's rights are those that the stream began with."""
        return caller.identity is self._identity or caller.identity == self._identity

    async def answers(
        self, reading: asyncio.Task[None], caller: Callable[[], Awaitable[Caller]]
    ) -> AsyncIterator[bytes]:
        """Frames of answers, until the client has ended and all is answered."""
        reading.add_done_callback(lambda _: self._rung.set())
        while not self._over and not reading.done():
            await self._rung.wait()
            self._rung.clear()
            self._ringing = False
            # A token may have been revoked since its client was last heard of.
            if self._identity is not None and not self._is_same(await caller()):
                return
            while self._ready:
                some = [self._ready.popleft() for _ in range(min(len(self._ready), _MOST_TOGETHER))]
                for _, kind, _ in some:
                    if kind != WOKEN:
                        self._room.release()
                yield frames.encode_frame(some)
        if reading.done() and not reading.cancelled() and (failure := reading.exception()):
            raise failure

    def tell_of_view(self) -> None:
        """Wake the client, if it follows the view."""
        if self._view_watch is not None:
            self._tell(self._view_watch, WOKEN, frames.NOTHING)

    def end(self) -> None:
        """Stop answering."""
        self._over = True
        self._rung.set()

    def close(self) -> None:
        """Ends the watches at once, and the sessions if the client does not come back soon."""
        self._over = True
        for watch in list(self._watches.values()):
            watch.close()
        self._loop.call_later(_GRACE, self._submit_end)

    def _submit_end(self) -> None:
        with suppress(RuntimeError):  # the node has stopped, and has ended them
            self._service.pool.submit(self._end_sessions)

    # In threads

    def _make(self, number: int, name: str, arguments: msgspec.Raw) -> None:
        """Makes one call, and has its answer sent."""
        if self._over or self._service.was_frozen:
            return
        try:
            if number == HELLO:
                self._tell(number, ANSWER, frames.encode_hello(self._service.hello))
                return
            method = METHODS.get(name)
            if method is None:
                raise InvalidRequest(f"there is no method {quoted(name)}")
            call, given = self._target(name), method.decode(arguments)
            limited = self._limited
            answer = (
                call(**given)
                if limited is None
                else self._service.gate.call(limited, name, given, call)
            )
            self._tell(number, ANSWER, method.encode_answer(answer))
        except PxrsError as error:
            self._tell(number, ERROR, frames.encode_error(_told(error)))
        except Exception:  # noqa: BLE001 - told and logged
            # A bug of ours; nobody knows how far it came.
            _LOG.exception("a call of %s failed", name)
            failed = OutcomeUnknown("the node failed to do this; its log has the details")
            self._tell(number, ERROR, frames.encode_error(failed))

    def _target(self, name: str) -> Callable[..., Any]:
        folder, _, method = name.partition(".")
        if folder == "node":
            return getattr(self, f"_{method}")  # type: ignore[no-any-return]
        if folder == "kv":
            return getattr(self._service.keys, method)  # type: ignore[no-any-return]
        found = getattr(getattr(self._service.stores, folder), method, None)
        if found is None:
            raise InvalidRequest(f"this store has no {name}")
        return found  # type: ignore[no-any-return]

    def _tell(self, number: int, kind: int, body: msgspec.Raw) -> None:
        self._ready.append((number, kind, body))
        if not self._ringing:
            self._ringing = True
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._rung.set)

    def _open_session(self, ttl: float) -> str:
        with self._service.lock:
            if len(self._service.sessions) >= _MOST_SESSIONS:
                raise InvalidRequest(f"a node holds at most {_MOST_SESSIONS} sessions of clients")
        coord = self._service.stores.coord
        if isinstance(coord, LendsSessions):
            lent = coord.lend(ttl)
            held = Held(lent, self, lent)
        else:
            held = Held(coord.session(ttl), self)
        if not self._hold(held):
            held.abandon()
        return held.session.id

    def _renew_session(self, session: str) -> None:
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

    def _adopted(self, session: str) -> Held:
        coord = self._service.stores.coord
        if not isinstance(coord, LendsSessions):
            raise SessionLost(f"session {session} is not held by this node; open a new one")
        lent = coord.adopt(session)
        return Held(lent, self, lent)

    def _hold(self, held: Held) -> bool:
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
        self._watch(watch, lambda: self._service.stores.coord.watch(*where))

    def _watch_log(self, watch: int, where: list[LogPartition]) -> None:
        self._watch(watch, lambda: self._service.stores.log.watch(*where))

    def _watch_queues(self, watch: int, where: list[str]) -> None:
        self._watch(watch, lambda: self._service.stores.queues.watch(*where))

    def _watch(self, number: int, arm: Callable[[], Watch]) -> None:
        if len(self._watches) >= _MOST_WATCHES:
            raise InvalidRequest(f"a client has at most {_MOST_WATCHES} watches")
        if number in self._watches:
            return
        watch = self._watches[number] = arm()
        threading.Thread(
            target=self._await, args=(number, watch), name="pxrs-v1-watch", daemon=True
        ).start()

    def _await(self, number: int, watch: Watch) -> None:
        while not self._over and self._watches.get(number) is watch:
            try:
                woken = watch.wait(_LOOK)
            except PxrsError:
                woken = True
                threading.Event().wait(1.0)
            if woken and self._watches.get(number) is watch:
                self._tell(number, WOKEN, frames.NOTHING)

    def _unwatch(self, watch: int) -> None:
        found = self._watches.pop(watch, None)
        if found is not None:
            found.close()

    def _view(self) -> NodesView:
        return self._service.view()

    def _watch_view(self, watch: int) -> None:
        self._view_watch = watch

    def _atomic(
        self,
        checks: list[Check],
        writes: list[wire.WireWrite],
        appends: list[Append],
        change: QueueChange | None,
    ) -> WireAtomic:
        with self._service.stores.atomic() as atomic:
            atomic.check(*checks)
            atomic.write(*wire.unpack_writes(writes))
            for where, batch in appends:
                atomic.append(where, batch)
            if change is not None:
                atomic.queue(change)
        return WireAtomic(atomic.versions, atomic.appended, atomic.queued)


def _told(error: PxrsError) -> PxrsError:
    """What a client is told. What a store says may name its address and its users."""
    if not isinstance(error, StoreError):
        return error
    _LOG.warning("a call failed: %s", error)
    told: PxrsError = type(error).__new__(type(error), "the node's store did not do this")
    return told
