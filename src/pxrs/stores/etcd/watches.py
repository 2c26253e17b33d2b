"""Watches, all on one stream, resumed where they were when the stream breaks.

A watcher is confirmed by the node before `watch` returns, and from then on knows the revision
from which it has to hear everything. A new stream, to whatever node, starts there. Only when
etcd has compacted that revision away can't it: then the watch starts at what is left and its
holder is woken, which reads again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pxrs.clock import Clock
from pxrs.errors import PxrsError, StoreUnavailable
from pxrs.loop import Loop
from pxrs.stores.etcd.nodes import Nodes
from pxrs.stores.etcd.wire import after_prefix, grpc, rpc
from pxrs.stores.wakeups import LocalWatch

_PAUSE = 0.1
_CONNECT = 2.0


@dataclass
class Watcher:
    """One prefix of one watch, as the node knows it."""

    number: int
    prefix: bytes
    watch: LocalWatch
    confirmed: threading.Event = field(default_factory=threading.Event)
    # The first revision that it has not heard of; 0 before it was confirmed.
    next_revision: int = 0

    def request(self) -> Any:
        """Asks a node for everything that this watcher has not heard."""
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
    """One gRPC call, and what is still to be sent on it."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.call: Any = None

    def send(self, request: Any) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)
        if self.call is not None:
            self.call.cancel()

    def requests(self) -> Iterator[Any]:
        while (request := self._requests.get()) is not None:
            yield request


class Watches:
    """The watches of one handle. A thread listens for them from the first one on."""

    def __init__(self, nodes: Nodes, clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock
        self._lock = threading.RLock()
        self._numbers = count(1)
        self._watchers: dict[int, Watcher] = {}
        self._stream: Stream | None = None
        self._loop = Loop("pxrs-etcd-watch", self._listen)
        self._closed = threading.Event()

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

    def _await(self, added: list[Watcher], watch: LocalWatch) -> None:
        deadline = self._clock.monotonic() + self._nodes.timeout
        for watcher in added:
            while not watcher.confirmed.wait(_PAUSE):
                try:
                    self._nodes.check_open()
                    if self._clock.monotonic() >= deadline:
                        raise StoreUnavailable("no etcd node has confirmed a watch in time")
                except PxrsError:
                    watch.close()
                    raise

    def _forget(self, watch: LocalWatch) -> None:
        for number in [each.number for each in self._watchers.values() if each.watch is watch]:
            del self._watchers[number]
            if self._stream is not None:
                self._stream.send(
                    rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=number))
                )

    def _listen(self) -> float | None:
        """Follow one stream, to whatever node; in how many seconds to begin another."""
        if self._closed.is_set():
            return None
        try:
            node = self._nodes.stand(self._clock.monotonic() + _CONNECT)
        except PxrsError:
            return _PAUSE
        try:
            self._follow(node)
        except (grpc.RpcError, ValueError):
            self._nodes.leave(node)
            self._nodes.forget_token()
        return _PAUSE

    def _follow(self, node: Any) -> None:
        """Read one stream to its end; it ends with an error, or when it is closed."""
        stream = Stream()
        stream.call = node.watching.Watch(
            stream.requests(), metadata=self._nodes.metadata(node, _CONNECT)
        )
        try:
            with self._lock:
                if self._closed.is_set():
                    return
                self._stream = stream
                for watcher in self._watchers.values():
                    stream.send(watcher.request())
            for response in stream.call:
                self._hear(stream, response)
        finally:
            with self._lock:
                self._stream = None
            stream.end()

    def _hear(self, stream: Stream, response: Any) -> None:
        with self._lock:
            watcher = self._watchers.get(response.watch_id)
            if watcher is None:
                return
            if response.created and not response.canceled:
                if not watcher.next_revision:
                    watcher.next_revision = response.header.revision + 1
                watcher.confirmed.set()
            if response.canceled:
                self._start_over(stream, watcher, response.compact_revision)
            elif response.events:
                watcher.next_revision = response.events[-1].kv.mod_revision + 1
                watcher.watch.wake()
            elif not response.created:
                watcher.next_revision = max(watcher.next_revision, response.header.revision + 1)

    def _start_over(self, stream: Stream, watcher: Watcher, compacted: int) -> None:
        """Listen from what is left: what it had to hear is gone, or the node gave it up."""
        # Under another number: the node does not take one twice on a stream.
        del self._watchers[watcher.number]
        watcher.number = next(self._numbers)
        self._watchers[watcher.number] = watcher
        watcher.next_revision = compacted or watcher.next_revision
        stream.send(watcher.request())
        watcher.watch.wake()
