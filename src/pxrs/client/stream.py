"""One stream to one node: the calls of all threads, and their answers.

A thread that makes a call sends it itself. Calls that other threads make meanwhile go with the next
frame. It also reads the answer itself if no other thread reads, for that costs a switch of threads
less. The stream has a thread that reads whatever nobody waits for in this way: answers that take
long or that several threads wait for, and what the node sends unasked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from pxrs.client import frames
from pxrs.client.frames import Hello, Method

_LOG = logging.getLogger("pxrs.remote")
# For so long a thread reads the answer to its own call.
_SHORT = 0.05
# After so long without such a call the stream's thread reads again, and a thread that still seems
# to read after so many of these rounds was interrupted on its way out.
_REST = 0.05
_STUCK = 80


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """The node refuses this client; to try again is no use."""


class Connection(Protocol):
    """Carries frames. Raises `OSError` for any failure, `Refused` if the node refuses."""

    def send(self, frame: bytes) -> None:
        """Send one frame. One thread at a time."""
        ...

    def comes(self, until: float) -> bool:
        """Wait for anything to receive; returns false if there is nothing until then.

        The time is that of the monotonic clock.
        """
        ...

    def receive(self, until: float | None = None) -> list[bytes] | None:
        """Wait for frames; none if the node has closed the connection. One thread at a time.

        Returns None if no whole frame has come until then.
        """
        ...

    def close(self) -> None:
        """End it. Threads in `receive` or `send` get an error, or nothing."""
        ...

    def release(self) -> None:
        """Free its socket, once no thread uses it."""
        ...


class Pending:
    """A call until its answer comes.

    `was_sent`: it may have reached the node. Once nobody waits for it that does not change any
    more: a call that was not sent by then never is, so it can be made again.
    """

    def __init__(self, number: int, method: Method, arguments: Any) -> None:
        self.number = number
        self.method = method
        self.arguments = arguments
        self.size = len(memoryview(arguments))
        self.was_sent = False
        self.is_lost = False
        # Whether there is an answer, or there will be none.
        self.is_over = False
        # Whether a thread waits for the answer, and whether it is to send what waits to be sent.
        self.is_awaited = False
        self.has_turn = False
        self._kind = -1
        self._body: Any = None
        self._done = threading.Lock()
        self._done.acquire()

    def settle(self, kind: int, body: Any) -> None:
        self._kind, self._body = kind, body
        self.is_over = True
        self.wake()

    def lose(self) -> None:
        self.is_lost = self.is_over = True
        self.wake()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it is woken already, and sees everything that was set before
            self._done.release()

    def wait(self, timeout: float) -> bool:
        """Wait until it is over or has the turn to send; returns whether it was woken."""
        return self._done.acquire(timeout=max(0.0, timeout))

    @property
    def body(self) -> Any:
        """The node's answer; raises the error if it answered with one."""
        if self._kind == frames.ERROR:
            raise frames.decode_error(self._body)
        return self._body


class Stream:
    """One connection to one node.

    `woken` is called with the number of a watch, and with None when the stream has broken.
    `is_heard` returns whether a thread waits for a watch.
    """

    def __init__(
        self,
        connection: Connection,
        woken: Callable[[int | None], None],
        name: str,
        is_heard: Callable[[], bool],
    ) -> None:
        self.name = name
        # The node's answer to the first frame; set once it came.
        self.hello: Hello
        self._connection = connection
        self._woken = woken
        self._is_heard = is_heard
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._outgoing: list[Pending] = []
        self._sending = threading.Lock()
        self.is_broken = False
        # It takes no new calls, and ends when all others have their answers.
        self.is_left = False
        # Why the node refuses this client, if it gave a reason.
        self.refusal = ""
        # Why the stream broke, as far as it is known.
        self.trouble = ""
        # The thread that reads now, and how often one has read the answer to its own call.
        self._reading: int | None = None
        self._read_by_callers = 0
        # Whether the stream's own thread has to read, or to look whether it has.
        self._needed = threading.Event()
        self._reader = threading.Thread(target=self._read, name="pxrs-remote", daemon=True)
        self._reader.start()

    @property
    def is_usable(self) -> bool:
        """Whether new calls may be made."""
        return not self.is_broken and not self.is_left

    def send(self, pending: Pending) -> None:
        """Send a call, here or in another thread; it is lost at once if the stream is broken."""
        with self._lock:
            if self.is_broken:
                pending.lose()
                return
            self._pending[pending.number] = pending
            self._outgoing.append(pending)
        self._send_all(pending)

    def _send_all(self, mine: Pending) -> None:
        """Sends what waits to be sent, unless another thread does.

        No call is left behind: a thread that has sent looks again. It goes on until its own call
        has its answer; then one that waits has the turn, and its thread does the same. A thread
        that has the turn and gives up first passes it on, see `forget`.
        """
        while self._outgoing and self._sending.acquire(blocking=False):
            try:
                self._send_waiting()
            except Exception as error:  # noqa: BLE001 - after any error, it is broken
                _LOG.debug("the stream to %s broke: %s", self.name, error)
                self._break()
            except BaseException:
                # A part of a frame may have gone, of other threads' calls, too.
                self._break()
                raise
            finally:
                self._sending.release()
            if mine.is_over and self._pass_on():
                return

    def _pass_on(self) -> bool:
        """Gives the turn to a thread that waits; returns false if none has a call to be sent."""
        with self._lock:
            for pending in self._outgoing:
                if pending.is_awaited:
                    pending.has_turn = True
                    pending.wake()
                    return True
        return False

    def _send_waiting(self) -> None:
        with self._lock:
            waiting, self._outgoing = self._outgoing, []
            # Under the lock, as in `forget`: a call is either marked here or never sent.
            for pending in waiting:
                pending.was_sent = True
        calls = [(it.number, it.method.name, it.arguments) for it in waiting]
        for frame in frames.encode_calls(calls):
            self._connection.send(frame)

    def answered(self, pending: Pending, timeout: float) -> bool:
        """Sends a call and waits; returns whether the node has answered it."""
        answered = False
        ends = time.monotonic() + timeout
        pending.is_awaited = True
        try:
            self.send(pending)
            if pending.was_sent and not pending.is_over:
                self._read_own(pending, min(ends, time.monotonic() + _SHORT))
            while not pending.is_over and pending.wait(ends - time.monotonic()):
                if pending.has_turn:
                    pending.has_turn = False
                    self._send_all(pending)
            answered = pending.is_over and not pending.is_lost
        finally:
            if not answered or pending.has_turn:
                self.forget(pending)
        return answered

    def forget(self, pending: Pending) -> None:
        """Drop a call whose answer is not wanted any more; if it was not sent, it never is."""
        with self._lock:
            self._pending.pop(pending.number, None)
            if not pending.was_sent and pending in self._outgoing:
                self._outgoing.remove(pending)
            had_turn, pending.has_turn = pending.has_turn, False
            is_over = self._is_over
        if had_turn:
            self._pass_on()
        if is_over:
            self._break()

    @property
    def _is_over(self) -> bool:
        """Whether it was left and no thread waits for an answer any more."""
        return self.is_left and not any(it.is_awaited for it in self._pending.values())

    def leave(self) -> None:
        """End the stream as soon as the calls that are under way have their answers."""
        with self._lock:
            self.is_left = True
            is_over = self._is_over
        if is_over:
            self._break()

    def close(self) -> None:
        """End the stream; calls without an answer are lost."""
        self._break()

    def attend(self) -> None:
        """Have the stream's own thread read what the node sends unasked."""
        self._needed.set()

    # Reading. One thread does it at a time, that in `_reading`. A caller that stops wakes the
    # stream's own thread if anyone waits; that one rests only while nobody waits, or a caller
    # reads. No call is left behind: a thread that waits was noted before it saw another one read,
    # and whoever stops reading says so before it looks who waits.

    def _read_own(self, mine: Pending, until: float) -> None:
        """Reads until the call is over or that time has come, unless another thread reads."""
        me = threading.get_ident()
        # This thread itself, if it makes a call in a signal handler while it waits for another.
        before: int | None = None
        try:
            with self._lock:
                before = self._reading
                if before is None:
                    self._reading = me
            # A node may send byte by byte, so that there is always something to read.
            while self._reading == me and not mine.is_over and time.monotonic() < until:
                if self._comes(until):
                    self._take_frames(until)
        finally:
            if self._reading == me:
                self._read_by_callers += 1
                self._reading = before
                if self._is_awaited or self.is_broken:
                    self._needed.set()

    @property
    def _is_awaited(self) -> bool:
        """Whether a thread waits for an answer, or for a watch."""
        return bool(self._pending) or self._is_heard()

    def _comes(self, until: float) -> bool:
        """Whether there is something to read by then. An interrupt here loses nothing."""
        try:
            return self._connection.comes(until)
        except Exception as error:  # noqa: BLE001 - as in `_take_frames`
            self._fail(error)
            return False

    def _read(self) -> None:
        """Reads, in the stream's own thread, what no caller reads."""
        me = threading.get_ident()
        try:
            while not self.is_broken:
                self._rest()
                with self._lock:
                    if self._reading is not None:
                        continue
                    self._reading = me
                try:
                    self._take_frames(None)
                finally:
                    self._reading = None
        finally:
            self._break()
            # Not while a thread reads or sends: the socket's number could be reused under it.
            for _ in range(_STUCK):
                if self._reading is None:
                    break
                time.sleep(_REST)
            with self._sending:
                self._connection.release()

    def _rest(self) -> None:
        """Waits for as long as callers read the answers to their calls themselves."""
        self._needed.clear()
        rounds = 0
        while not self.is_broken and not (self._reading is None and self._is_awaited):
            read = self._read_by_callers
            if self._needed.wait(_REST):
                return
            if read != self._read_by_callers:
                rounds = 0
            elif self._reading is None:
                return
            elif (rounds := rounds + 1) >= _STUCK:
                self._break()

    def _take_frames(self, until: float | None) -> None:
        """Takes what comes; breaks the stream if it is over, or if a part of it was lost."""
        try:
            received = self._connection.receive(until)
            for frame in received or ():
                for number, kind, body in frames.decode_answers(frame):
                    self._take_answer(number, kind, body)
            if received is not None and not received:
                self._break()
        except Refused as refused:
            self.refusal = str(refused)
            self._break()
        except Exception as error:  # noqa: BLE001 - after any error, it is over
            self._fail(error)
        except BaseException:
            self._break()
            raise

    def _fail(self, error: Exception) -> None:
        self.trouble = str(error)
        _LOG.debug("the stream to %s broke: %s", self.name, error)
        self._break()

    def _take_answer(self, number: int, kind: int, body: Any) -> None:
        if kind == frames.WOKEN:
            self._woken(number)
            return
        with self._lock:
            pending = self._pending.pop(number, None)
            is_over = self._is_over
        if pending is not None:
            pending.settle(kind, body)
        if is_over:
            self._break()

    def _break(self) -> None:
        with self._lock:
            is_news, self.is_broken = not self.is_broken, True
            lost, self._pending, self._outgoing = self._pending, {}, []
        # Wakes threads that wait in it; its own thread then ends it.
        self._connection.close()
        self._needed.set()
        for pending in lost.values():
            pending.lose()
        if is_news:
            self._woken(None)
