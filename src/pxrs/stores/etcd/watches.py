"""Watches, all on one stream, resumed where they were when the stream breaks.

The node confirms a watcher before `watch` returns, and from then on the watcher knows the revision
from which it must get every event. A new stream, to any node, starts there. Only if etcd has
compacted that revision away, it can't: then the watch starts at the oldest revision that is left
and wakes its caller, who reads again.

A stream is silent while nothing changes, but also when its node is frozen. So every other second
this handle creates a watcher on it that it does not need: if the node does not even confirm that,
the handle leaves the node. When a node gives up a watcher, its reason does not help much (etcd
3.5.1 calls an expired token a denied permission). So the first time the handle logs in and starts
again, with longer and longer pauses; the second time, calls that wait for the confirmation of a
watch get the error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.errors import PxrsError, StoreUnavailable
from pxrs.loop import Loop
from pxrs.stores.etcd.failures import Remedy, not_allowed, remedy, translated
from pxrs.stores.etcd.nodes import Left, Node, Nodes, Words
from pxrs.stores.etcd.wire import after_prefix, grpc, rpc
from pxrs.stores.wakeups import LocalWatch

# Between two streams that fail; doubled each time.
_PAUSE = 0.1
_LONGEST_PAUSE = 3.2
_CONNECT = 2.0
# How often a stream is tested, and how long its node has for an answer.
_TRIAL = 2.0


class Refused(Exception):  # noqa: N818 - what happened
    """The node has given up a watcher."""


@dataclass
class Watcher:
    """One prefix of one watch: one watcher of the node."""

    number: int
    prefix: bytes
    watch: LocalWatch
    confirmed: threading.Event = field(default_factory=threading.Event)
    # The first revision of which it has no events yet; 0 before it was confirmed.
    next_revision: int = 0
    # Why it can't be confirmed.
    error: PxrsError | None = None

    def request(self) -> Any:
        """The request for all events that this watcher has not got yet."""
        return rpc.WatchRequest(
            create_request=rpc.WatchCreateRequest(
                key=self.prefix,
                range_end=after_prefix(self.prefix),
                start_revision=self.next_revision,
                watch_id=self.number,
                progress_notify=True,
            )
        )


class Stream:
    """One gRPC call, and the requests to send on it. `trial` makes a request that tests it."""

    def __init__(self, trial: Callable[[], Any]) -> None:
        self._trial = trial
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.call: Any = None
        # Whether a response arrived since the last trial.
        self.heard = True

    def send(self, request: Any) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)
        if self.call is not None:
            self.call.cancel()

    def requests(self) -> Iterator[Any]:
        """Yield requests for gRPC's sending thread; cancels the call when the node is silent."""
        now = SYSTEM_CLOCK.monotonic
        due = now()
        while True:
            try:
                request = self._requests.get(timeout=max(0.0, due - now()))
            except queue.Empty:
                if not self.heard:
                    self.call.cancel()
                    return
                self.heard = False
                due = now() + _TRIAL
                request = self._trial()
            if request is None:
                return
            yield request


class Watches:
    """The watches of one handle. A thread listens for them from the first one on.

    `check` raises if the cluster has lost its data (`history.py`).
    """

    def __init__(
        self, nodes: Nodes, clock: Clock, folder: bytes, check: Callable[[], None]
    ) -> None:
        self._nodes = nodes
        self._clock = clock
        self._folder = folder
        self._check = check
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._watchers: dict[int, Watcher] = {}
        self._stream: Stream | None = None
        self._loop = Loop("pxrs-etcd-watch", self._listen)
        self._closed = threading.Event()
        nodes.origin.on_fork(self._abandon)
        # How many streams in a row failed, and on how many of them a node refused a watcher.
        self._failures = self._refusals = 0

    def watch(self, prefixes: list[bytes]) -> LocalWatch:
        """A watch that a node has confirmed for every prefix."""
        watch = LocalWatch(self._lock, lambda: None, self._forget)
        with self._lock:
            added = [Watcher(next(self._numbers), prefix, watch) for prefix in prefixes]
            for watcher in added:
                self._watchers[watcher.number] = watcher
                if self._stream is not None:
                    self._stream.send(watcher.request())
            self._loop.start()
        self._await(added, watch)
        return watch

    def close(self) -> None:
        """Close every watch and end the thread."""
        self._closed.set()
        with self._lock:
            for watch in {watcher.watch for watcher in self._watchers.values()}:
                watch.close()
            if self._stream is not None:
                self._stream.end()
        self._loop.wake()
        self._loop.join(_CONNECT)

    def give_up(self) -> None:
        """Wake every watch and stop listening, because all requests fail from now on."""
        with self._lock:
            for watcher in self._watchers.values():
                watcher.watch.wake()
            if self._stream is not None:
                self._stream.end()

    def _abandon(self) -> None:
        """In a forked child: there is no thread, and the lock may never be released."""
        self._lock = threading.RLock()
        for watcher in self._watchers.values():
            watcher.watch.abandon(self._lock)
        self._watchers, self._stream = {}, None

    def _await(self, added: list[Watcher], watch: LocalWatch) -> None:
        deadline = self._clock.monotonic() + self._nodes.timeout
        for watcher in added:
            while not watcher.confirmed.wait(_PAUSE):
                try:
                    self._nodes.check_open()
                    if watcher.error is not None:
                        raise watcher.error
                    if self._clock.monotonic() >= deadline:
                        raise StoreUnavailable("no etcd node has confirmed a watch in time")
                except PxrsError:
                    watch.close()
                    raise

    def _forget(self, watch: LocalWatch) -> None:
        for number in [each.number for each in self._watchers.values() if each.watch is watch]:
            del self._watchers[number]
            if self._stream is not None:
                self._stream.send(_cancellation(number))

    def _listen(self) -> float | None:
        """Follow one stream, to any node; returns in how many seconds to begin another."""
        if self._closed.is_set() or self._nodes.failed:
            return None
        words: Words = []
        deadline = self._clock.monotonic() + _CONNECT
        try:
            # If the cluster lost its data, a watcher would wait for a revision that is far away.
            self._check()
            node = self._nodes.stand(deadline)
            try:
                words = self._nodes.metadata(node, deadline)
                self._follow(node, words)
            except (grpc.RpcError, ValueError) as error:
                self._nodes.leave(node)
                self._judge(words, error)
        except Left:
            pass
        except PxrsError as error:
            if not error.retryable:
                self._tell(error)
        except Refused as refused:
            self._nodes.forget_token(words)
            self._refusals += 1
            if self._refusals > 1:
                self._tell(not_allowed(f"a watch was given up: {refused}"))
        self._failures += 1
        return min(_PAUSE * 2.0 ** min(self._failures - 1, 10), _LONGEST_PAUSE)

    def _judge(self, words: Words, error: Exception) -> None:
        """Prepare for the next stream after this one has failed."""
        if not isinstance(error, grpc.RpcError):
            return
        kind = remedy(error)
        if kind is Remedy.NEW_TOKEN:
            self._nodes.forget_token(words)
        elif kind is Remedy.NONE:
            self._tell(translated(error))

    def _tell(self, error: PxrsError) -> None:
        """Pass the error to the calls that wait for the confirmation of a watch."""
        with self._lock:
            for watcher in self._watchers.values():
                if not watcher.confirmed.is_set():
                    watcher.error = error

    def _follow(self, node: Node, words: Words) -> None:
        """Read one stream to its end; it ends with an error, or when it is closed."""
        stream = Stream(self._trial)
        stream.call = node.watching.Watch(stream.requests(), metadata=words)
        try:
            with self._lock:
                if self._closed.is_set():
                    return
                self._stream = stream
                for watcher in self._watchers.values():
                    stream.send(watcher.request())
            for response in stream.call:
                stream.heard = True
                self._hear(stream, response)
        finally:
            with self._lock:
                self._stream = None
            stream.end()

    def _trial(self) -> Any:
        # It watches a key that no record has.
        create = rpc.WatchCreateRequest(key=self._folder, watch_id=next(self._numbers))
        return rpc.WatchRequest(create_request=create)

    def _hear(self, stream: Stream, response: Any) -> None:
        with self._lock:
            watcher = self._watchers.get(response.watch_id)
            if response.created and not response.canceled:
                self._failures = self._refusals = 0
                if watcher is None:
                    stream.send(_cancellation(response.watch_id))
                    return
                if not watcher.next_revision:
                    watcher.next_revision = response.header.revision + 1
                watcher.confirmed.set()
            if response.canceled and not response.compact_revision:
                if watcher is not None or response.created:
                    raise Refused(response.cancel_reason)
            elif watcher is None:
                return
            elif response.canceled:
                self._start_over(stream, watcher, response.compact_revision)
            elif response.events:
                watcher.next_revision = response.events[-1].kv.mod_revision + 1
                watcher.watch.wake()
            elif not response.created:
                watcher.next_revision = max(watcher.next_revision, response.header.revision + 1)

    def _start_over(self, stream: Stream, watcher: Watcher, compacted: int) -> None:
        """Listen from the oldest revision that is left: events before it are gone."""
        # Under another number, because a node does not accept a number twice on a stream.
        del self._watchers[watcher.number]
        watcher.number = next(self._numbers)
        self._watchers[watcher.number] = watcher
        watcher.next_revision = compacted
        stream.send(watcher.request())
        watcher.watch.wake()


def _cancellation(number: int) -> Any:
    return rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=number))
