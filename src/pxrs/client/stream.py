"""One stream to one node: the calls of all threads, and their answers.

A thread that makes a call sends it itself. What others want to send meanwhile goes with the next
frame.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from pxrs.client import frames
from pxrs.client.frames import Hello, Method

_LOG = logging.getLogger("pxrs.remote")


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """The node will not talk to this client, however often it tries."""


class Connection(Protocol):
    """Carries frames. Raises `OSError` from whatever fails, `Refused` if the node says so."""

    def send(self, frame: bytes) -> None:
        """Send one frame. One thread at a time."""
        ...

    def receive(self) -> list[bytes]:
        """Wait for frames; none if the node has closed it. One thread."""
        ...

    def close(self) -> None:
        """End it. Who waits in `receive` or `send` gets an error, or nothing."""
        ...

    def release(self) -> None:
        """Give back what it has, once nobody uses it."""
        ...


class Pending:
    """A call until its answer comes. `was_sent`: it may have reached the node."""

    def __init__(self, number: int, method: Method, arguments: Any) -> None:
        self.number = number
        self.method = method
        self.arguments = arguments
        self.size = len(memoryview(arguments))
        self.was_sent = False
        self.is_lost = False
        self._kind = -1
        self._body: Any = None
        self._done = threading.Lock()
        self._done.acquire()

    def settle(self, kind: int, body: Any) -> None:
        self._kind, self._body = kind, body
        self._done.release()

    def lose(self) -> None:
        self.is_lost = True
        self._done.release()

    def wait(self, timeout: float) -> bool:
        """Whether there is an answer, or there will be none."""
        return self._done.acquire(timeout=max(0.0, timeout))

    @property
    def body(self) -> Any:
        """What the node answered; raises the error that it told."""
        if self._kind == frames.ERROR:
            raise frames.decode_error(self._body)
        return self._body


class Stream:
    """One connection to one node.

    `woken` is called with the number of a watch, and with None when the stream has broken.
    """

    def __init__(
        self, connection: Connection, woken: Callable[[int | None], None], name: str
    ) -> None:
        self.name = name
        # What the node has told of itself; set once it has.
        self.hello: Hello
        self._connection = connection
        self._woken = woken
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._outgoing: list[Pending] = []
        self._sending = threading.Lock()
        self.is_broken = False
        # Why the node does not talk to us, if it said so.
        self.refusal = ""
        self._reader = threading.Thread(target=self._read, name="pxrs-remote", daemon=True)
        self._reader.start()

    def send(self, pending: Pending) -> None:
        """Have a call sent; it is lost at once if the stream is broken."""
        with self._lock:
            if self.is_broken:
                pending.lose()
                return
            self._pending[pending.number] = pending
            self._outgoing.append(pending)
        # Who sends now looks again when it is done, so nothing is left behind.
        while self._outgoing and self._sending.acquire(blocking=False):
            try:
                self._send_waiting()
            except Exception as error:  # noqa: BLE001 - whatever breaks it, it is broken
                _LOG.debug("the stream to %s broke: %s", self.name, error)
                self._break()
            except BaseException:
                # A part of a frame may have gone, of other threads' calls, too.
                self._break()
                raise
            finally:
                self._sending.release()

    def _send_waiting(self) -> None:
        with self._lock:
            waiting, self._outgoing = self._outgoing, []
        for pending in waiting:
            pending.was_sent = True
        calls = [(it.number, it.method.name, it.arguments) for it in waiting]
        for frame in frames.encode_calls(calls):
            self._connection.send(frame)

    def answered(self, pending: Pending, timeout: float) -> bool:
        """Sends a call and waits; whether the node has answered it."""
        answered = False
        try:
            self.send(pending)
            answered = pending.wait(timeout) and not pending.is_lost
        finally:
            if not answered:
                self.forget(pending)
        return answered

    def forget(self, pending: Pending) -> None:
        """Nobody waits for its answer any more."""
        with self._lock:
            self._pending.pop(pending.number, None)

    def close(self) -> None:
        """End the stream; what has no answer yet is lost."""
        self._break()

    def _read(self) -> None:
        try:
            while received := self._connection.receive():
                for frame in received:
                    for number, kind, body in frames.decode_answers(frame):
                        self._take_answer(number, kind, body)
        except Refused as refused:
            self.refusal = str(refused)
        except Exception as error:  # noqa: BLE001 - whatever ends it, it is over
            _LOG.debug("the stream to %s broke: %s", self.name, error)
        finally:
            self._break()
            # Not while a thread sends: the number of the socket may be another's then.
            with self._sending:
                self._connection.release()

    def _take_answer(self, number: int, kind: int, body: Any) -> None:
        if kind == frames.WOKEN:
            self._woken(number)
            return
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.settle(kind, body)

    def _break(self) -> None:
        with self._lock:
            is_news, self.is_broken = not self.is_broken, True
            lost, self._pending, self._outgoing = self._pending, {}, []
        # Who waits in it is let go, and who reads it ends it.
        self._connection.close()
        for pending in lost.values():
            pending.lose()
        if is_news:
            self._woken(None)
