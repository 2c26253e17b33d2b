"""Commits the writes of concurrent threads together, without a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pxrs.errors import OutcomeUnknown

Work = TypeVar("Work")
Answer = TypeVar("Answer")


class Waiting(Generic[Work, Answer]):
    """A thread's work, until it has its answer. `leads`: its thread is to commit."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.leads = False
        self.is_settled = False
        self._answer: Answer | BaseException | None = None
        # Held until the thread is woken. Every write has one: it is lighter than an Event.
        self._turn = threading.Lock()
        self._turn.acquire()

    def settle(self, answer: Answer | BaseException) -> None:
        """Gives the answer, or the error to raise, and wakes the thread."""
        self._answer = answer
        self.is_settled = True
        self.wake()

    def wake(self) -> None:
        self._turn.release()

    def wait(self) -> None:
        """Waits until it is woken: it has its answer, or it leads."""
        self._turn.acquire()

    @property
    def answer(self) -> Answer | BaseException:
        """The answer, or the error to raise."""
        answer: Answer | BaseException = self._answer  # type: ignore[assignment]
        return answer


class GroupCommit(Generic[Work, Answer]):
    """Has one of the waiting threads commit for all.

    The first thread that comes commits the work that is there. Threads that come meanwhile wait,
    and when it is done it wakes the first of them to commit for all of those. `commit` is called by
    one thread at a time. It takes the waiting in order, settles as many as it can, at least the
    first, and returns; the others stay. With a `pause`, a thread that commits after a commit for
    several waits this many seconds for the threads that were just answered: they come back at once,
    and would otherwise have to wait for the whole commit.
    """

    def __init__(
        self, commit: Callable[[Sequence[Waiting[Work, Answer]]], None], pause: float = 0.0
    ) -> None:
        self._commit = commit
        self._pause = pause
        self._last_count = 0
        self._lock = threading.Lock()
        self._waiting: list[Waiting[Work, Answer]] = []
        self._is_led = False

    def do(self, work: Work) -> Answer:
        """Returns the answer to this work, or raises it."""
        (answer,) = self.do_all([work])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def do_all(self, works: Sequence[Work]) -> list[Answer | BaseException]:
        """Returns the answers to several works of this thread, errors as they are."""
        mine: list[Waiting[Work, Answer]] = [Waiting(work) for work in works]
        try:
            leads_at_once = False
            with self._lock:
                self._waiting += mine
                if mine and not self._is_led:
                    self._is_led = mine[0].leads = leads_at_once = True
            for number, each in enumerate(mine):
                # All others are woken, also one that this thread has made the leader itself.
                if number or not leads_at_once:
                    each.wait()
                while each.leads and not each.is_settled:
                    self._commit_waiting()
                # The next work of this thread may lead after it.
                self._leave(each)
        except BaseException:
            for each in mine:
                self._leave(each)
            raise
        return [each.answer for each in mine]

    def _commit_waiting(self) -> None:
        if self._pause and self._last_count > 1:
            time.sleep(self._pause)
        with self._lock:
            batch = list(self._waiting)
        self._last_count = len(batch)
        try:
            self._commit(batch)
        except BaseException as error:
            # Interrupted, or a bug: how far the commit came is not known.
            for each in batch:
                if not each.is_settled:
                    each.settle(OutcomeUnknown(f"the thread that committed this failed: {error!r}"))
            raise
        finally:
            with self._lock:
                self._waiting = [each for each in self._waiting if not each.is_settled]

    def _leave(self, mine: Waiting[Work, Answer]) -> None:
        """Ends this thread's part, after an interrupt too: if it led, another one leads now."""
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
            if not mine.leads:
                return
            mine.leads = False
            self._is_led = bool(self._waiting)
            if self._waiting:
                self._waiting[0].leads = True
                self._waiting[0].wake()
