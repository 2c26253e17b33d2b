"""Listener workers in processes of their own: spawned, each with its session and its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from pxrs.consuming.health import Health
from pxrs.errors import InvalidRequest
from pxrs.options import ListenOptions
from pxrs.running.dead_letters import words_of
from pxrs.running.processes import Workers, refuse_memory
from pxrs.running.signals import stop_on_signals, wait_awake


class ListenerJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is told: the arguments of `listen`, and where the store is."""

    url: str
    queue: str
    handler: Callable[..., Any]
    options: ListenOptions

    def __call__(self, number: int) -> None:
        """Listen in this process until it is told to stop."""
        from pxrs.app import connect

        with connect(self.url) as px:
            here: ListenOptions = {**self.options, "processes": 0}
            px.listen(self.queue, self.handler, **here).join()


class ProcessListener:
    """A listener whose workers are processes. One that dies is started again."""

    def __init__(self, job: ListenerJob, count: int, stop_all: Callable[[], None]) -> None:
        refuse_memory(job.url)
        self._job = job
        self._count = count
        self._stop_all = stop_all
        self._workers: Workers | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self) -> ProcessListener:
        """Start the processes. After a `stop` it can be started again."""
        if self._thread is not None and self._thread.is_alive():
            raise InvalidRequest("the listener is running")
        self._failure = None
        self._workers = Workers(self._job, self._count)
        self._thread = threading.Thread(target=self._run, args=(self._workers,), daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take no more items and finish those in hand; does not wait. From any thread."""
        if self._workers is not None:
            self._workers.stop()

    def _health(self) -> dict[str, Health]:
        """How its processes are doing; nothing once it has ended as it was told to."""
        name = f"listen:{self._job.queue}"
        if self._failure is not None:
            return {name: Health("failed", words_of(self._failure))}
        if self._workers is None or self._thread is None or not self._thread.is_alive():
            return {}
        return self._workers.health(name)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all processes have finished; whether they have. See `Listener.join`."""
        thread = self._thread
        if thread is None:
            return True

        def has_ended(seconds: float | None) -> bool:
            thread.join(seconds)
            return not thread.is_alive()

        with stop_on_signals(self._stop_all):
            ended = wait_awake(has_ended, timeout)
        if self._failure is not None:
            raise self._failure
        return ended

    def _run(self, workers: Workers) -> None:
        try:
            workers.run()
        except BaseException as error:  # noqa: BLE001 - whoever joins is told
            self._failure = error

    def __enter__(self) -> ProcessListener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.join()
