"""A lock between the threads of a process, where steps stand for threads."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Blocked(Exception):  # noqa: N818 - what happened, not an error
    """A thread would wait for another one of its process: its step is taken again later."""


class StepLock:
    """Held by one kind of steps at a time, as often as they like.

    `before` is called by whoever is about to take it: other threads may be faster.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        # Which kinds of steps are under way, each inside a store call of the one before.
        self.steps: list[str] = []
        self._holder: str | None = None
        self._depth = 0

    def acquire(self) -> None:
        if not self._depth:
            self._before()
        current = self.steps[-1] if self.steps else ""
        if self._depth and self._holder != current:
            raise Blocked(f"{current} waits for {self._holder}")
        self._holder = current
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1

    def __enter__(self) -> StepLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
