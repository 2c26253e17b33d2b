"""Wake-ups across processes: one listening thread per open store, with a connection of its own.

NOTIFY is a hint that may be lost: behind a pooler it never arrives. So the thread also polls
everything that is watched (`looks.py`), and the sessions of other processes. How often depends on
the notifications that it got.

Whatever goes wrong in the thread, it goes on: waiting callers would never learn of its end. After
an error it wakes all watches.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial

import psycopg

from pxrs.clock import Clock
from pxrs.errors import Closed
from pxrs.stores.observer import TICK
from pxrs.stores.postgres.database import Database, Pg, hang_up
from pxrs.stores.postgres.functions import SUSPECTS
from pxrs.stores.postgres.looks import QUICK, Looks, Pace
from pxrs.stores.postgres.notifier import EVERYTHING, Notifier, channel_of
from pxrs.stores.postgres.sessions import Anchor, Observation, Statement
from pxrs.stores.wakeups import KEY, KINDS, QUEUE, LocalWatch, Wakeups, Wanted, named
from pxrs.types import Versioned

_RETRY = (0.1, 2.0)


class ChangeListener:
    """Listens while there is a watch or a session of this process."""

    def __init__(self, database: Database, clock: Clock, channel: str | None = None) -> None:
        self._database = database
        self._clock = clock
        self._listens_to = channel_of(database.schema)
        self._notifier = Notifier(database, channel or self._listens_to)
        self._looks = Looks()
        # Reentrant: the garbage collector may close a watch in the middle of making another.
        self._lock = threading.RLock()
        self._wakeups: dict[str, Wakeups[str]] = {kind: Wakeups(self._lock) for kind in KINDS}
        self.observation = Observation(database, clock, self._tell)
        self._pace = Pace()
        self._anchors: list[Anchor] = []
        self._connection: Pg | None = None
        self._thread: threading.Thread | None = None
        self._stirred, self._stir_it = -1, -1
        self._closed = False
        database.origin.on_fork(self._abandon)

    # What stores call

    def ring(self, kind: str, names: Iterable[str]) -> None:
        """Wake all who watch these, here and elsewhere: this process committed a change of them."""
        self._tell([kind + name for name in names])

    def _tell(self, words: Collection[str]) -> None:
        if words:
            self._wake(words)
            self._notifier.ring(words)

    def read(self, records: Sequence[Versioned]) -> None:
        """Note that a caller in this process has read these, and may wait until they change."""
        wants = self._wakeups[KEY].wanted()
        if wants:
            self._looks.read(
                each for each in records if any(want(KEY + each.key) for want in wants)
            )

    def watch(self, kind: str, names: Iterable[str]) -> LocalWatch:
        """An armed watch: it wakes at the next look on anything that no look has seen before."""
        self._start()
        watch = self._wakeups[kind].watch(Wanted(kind, names))
        self._stir()
        return watch

    def guard(self, anchor: Anchor | None) -> None:
        """Wake all watches of records and queues when this connection is closed."""
        if anchor is None:
            return
        with self._lock:
            if anchor not in self._anchors:
                self._anchors.append(anchor)
        self._start()
        self._stir()

    def close(self) -> None:
        """Stop listening and wake all waiting threads."""
        self._notifier.close()
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._stir()
            thread.join(timeout=1.0)
            if thread.is_alive():
                # The thread waits for a server that does not answer.
                connection = self._connection
                if connection is not None:
                    with suppress(OSError, psycopg.Error):
                        hang_up(connection)
                thread.join()
            self._close_pipe()
        for wakeups in self._wakeups.values():
            wakeups.close()

    # The thread

    def _start(self) -> None:
        self._database.check_open()
        with self._lock:
            if self._closed:
                raise Closed("the store was closed")
            if self._thread is None:
                self._stirred, self._stir_it = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._thread = threading.Thread(
                    target=self._listen, name="pxrs-changes", daemon=True
                )
                self._thread.start()

    def _stir(self) -> None:
        # With the lock: after `close` in another thread, the number may be another file's.
        with self._lock:
            if self._stir_it >= 0:
                with suppress(BlockingIOError):
                    os.write(self._stir_it, b"x")

    def _close_pipe(self) -> None:
        with self._lock:
            stirred, self._stirred = self._stirred, -1
            stir_it, self._stir_it = self._stir_it, -1
        os.close(stirred)
        os.close(stir_it)

    def _calm(self) -> None:
        """Empty the pipe that wakes this thread, which now looks at what it was woken for."""
        with suppress(BlockingIOError):
            os.read(self._stirred, 4096)

    def _listen(self) -> None:
        pause, longest = _RETRY
        while not self._closed:
            try:
                self._serve()
            except Exception:  # noqa: BLE001 - waiting callers would never learn of it
                self._pace.listening = False
                self.observation.observer.out_of_touch()
                self._doubt()
                select.select([self._stirred], [], [], pause)
                self._calm()
                pause = min(2 * pause, longest)
            else:
                pause = _RETRY[0]

    def _doubt(self) -> None:
        """Wake all watches, because an event may have been missed."""
        self._looks.forget()
        self._wake_all(KINDS)

    def _wake(self, words: Iterable[str]) -> None:
        for kind, wakeups in self._wakeups.items():
            wakeups.ring([word for word in words if word.startswith(kind)])

    def _wake_all(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            self._wakeups[kind].wake(lambda wants: True)

    def _is_watched(self, *kinds: str) -> bool:
        return any(self._wakeups[kind].wanted() for kind in kinds)

    def _serve(self) -> None:
        connection = self._connection = self._database.connect()
        self._pace.listening = False
        try:
            self._doubt()
            self._hear_and_look(connection)
        finally:
            self._connection = None
            self._database.drop(connection)

    def _hear_and_look(self, connection: Pg) -> None:
        now = self._clock.monotonic
        on_it = partial(self._database.run, connection)
        tick = look = rested = now()
        while not self._closed:
            self._listen_if_wanted(connection)
            stirred, heard = self._wait(connection, min(tick, look) - now())
            if heard:
                self._hear(connection)
            if stirred:
                look = max(rested, min(look, now() + QUICK))
            observe = now() >= tick and self._is_watched(KEY, QUEUE)
            # One query does both if both are due soon.
            if now() >= look or (observe and now() >= max(rested, look - TICK / 2)):
                took = self._look(on_it, observe)
                rested = now() + self._pace.rest(took)
                look = max(rested, now() + self._pace.pause)
                self._hear(connection)
            elif observe:
                self.observation.look(on_it, on_it)
                self._hear(connection)
            if now() >= tick:
                tick = now() + TICK
            look = max(rested, min(look, now() + self._pace.pause))

    def _listen_if_wanted(self, connection: Pg) -> None:
        """LISTEN from the first watch on: notifications must not wake a process that only puts."""
        wanted = self._pace.wanted = self._is_watched(*KINDS)
        if wanted and not self._pace.listening and not self._database.pooled:
            connection.execute(f"LISTEN {self._listens_to}".encode())
            self._pace.listening = True
            self._doubt()

    def _wait(self, connection: Pg, seconds: float) -> tuple[bool, bool]:
        """Wait; returns whether this thread was woken, and whether the server sent something."""
        poll = select.poll()
        poll.register(self._stirred, select.POLLIN)
        poll.register(connection.fileno(), select.POLLIN)
        anchors = {}
        with self._lock:
            for anchor in self._anchors:
                if not anchor.connection.closed:
                    anchors[anchor.connection.fileno()] = anchor
                    poll.register(anchor.connection.fileno(), select.POLLRDHUP)
        ready = {fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)}
        stirred = self._stirred in ready
        if stirred:
            self._calm()
        for fd in ready & anchors.keys():
            self._anchor_lost(anchors[fd])
        return stirred, connection.fileno() in ready

    def _anchor_lost(self, anchor: Anchor) -> None:
        """Handle a connection that the server has closed: the sessions that it held are over."""
        anchor.lost = True
        with self._lock:
            self._anchors = [each for each in self._anchors if each is not anchor]
        self._wake_all((KEY, QUEUE))

    def _hear(self, connection: Pg) -> None:
        """Handle notifications. Call it after each query, too: they may have come with its answer,
        and then the socket does not become readable again for them."""
        words: set[str] = set()
        for notification in connection.notifies(timeout=0):
            words.update(notification.payload.split("\n"))
        if not words:
            return
        self._pace.heard()
        if EVERYTHING in words:
            self._doubt()
        self._wake(words)

    def _look(self, on_it: Statement, observe: bool) -> float:
        """Poll all that is watched and, to `observe`, other sessions; returns the seconds taken."""
        wanted = {word for each in self._wakeups.values() for word in named(each.wanted())}
        if not wanted:
            self._looks.forget()
            return 0.0
        sent = self._clock.monotonic()
        also = SUSPECTS if observe else None
        seen, answer = self._looks.look(on_it, wanted, also)
        took = self._clock.monotonic() - sent
        if observe:
            self.observation.judge(answer, sent, on_it)
        self._pace.looked(seen.changed, seen.told)
        for wakeups in self._wakeups.values():
            wakeups.wake(lambda wants: not seen.words.isdisjoint(named([wants])))
        return took

    def _abandon(self) -> None:
        """In a forked child: the thread is gone, and so are its descriptors."""
        self._lock = threading.RLock()
        self._looks.abandon()
        for wakeups in self._wakeups.values():
            wakeups.abandon(self._lock)
        self._closed = True
        if self._thread is not None:
            self._thread = None
            self._close_pipe()
