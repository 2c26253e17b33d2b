"""Worker processes for `px.run`: spawned, never forked, each a member of the group of its own.

For handlers that compute: threads share one interpreter lock, processes do not. A worker that
dies is started again; one whose handler gave up for good ends them all.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from pxrs.config import parse_url, split_url
from pxrs.core.retry import Backoff
from pxrs.errors import ConfigError, HandlerFailed, PxrsError
from pxrs.runtime.failure import OnFailure
from pxrs.runtime.runner import stop_on_signals
from pxrs.serde import Serde
from pxrs.types import Message

_GAVE_UP = 70
_PR_SET_PDEATHSIG = 1
_RESTART_PAUSE = 0.5
_LOOK = 0.5


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is told: the arguments of `run`, and where the store is."""

    url: str
    handler: Callable[[Message], Any]
    topic: str | Sequence[str] | re.Pattern[str]
    group: str
    workers: int
    parallel: str
    retry: Backoff
    on_failure: OnFailure
    max_in_flight: int
    max_handler_time: float | None
    instance: str | None
    auto_commit_interval: float
    start: str
    session_ttl: float
    revoke_timeout: float | None
    serde: Serde | None
    key_serde: Serde | None

    def __call__(self, number: int) -> None:
        """Run it in this process, as worker `number`."""
        from pxrs.runtime.app import connect

        arguments = msgspec.structs.asdict(self)
        handler, url = arguments.pop("handler"), arguments.pop("url")
        if self.instance is not None:
            arguments["instance"] = f"{self.instance}-{number}"
        with connect(url) as px:
            px.run(handler, **arguments)


def run_in_processes(job: Job, count: int) -> None:
    """Run the job in so many processes until a signal stops it."""
    if any(parse_url(url).scheme == "memory" for url in split_url(job.url).urls()):
        raise ConfigError("processes can't share memory://; use a file, or threads")
    workers = Workers(job, count)
    with stop_on_signals(workers.stop):
        workers.run()


class Workers:
    """Keeps a number of processes running until it is stopped."""

    def __init__(self, target: Callable[[int], None], count: int) -> None:
        self._target = target
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = [self._start(number) for number in range(count)]
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ask them to finish: they drain, commit and leave. From any thread or signal."""
        self._stopping.set()

    def run(self) -> None:
        """Until stopped; raises `HandlerFailed` if a worker's handler gave up."""
        failed = False
        while not self._stopping.is_set() and not failed:
            wait([process.sentinel for process in self._processes], _LOOK)
            for number, process in enumerate(self._processes):
                if process.exitcode == _GAVE_UP:
                    failed = True
                elif process.exitcode is not None and not self._stopping.wait(_RESTART_PAUSE):
                    self._processes[number] = self._start(number)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        if failed:
            raise HandlerFailed("a worker's handler gave up; its log says on which message")

    def _start(self, number: int) -> BaseProcess:
        process = self._context.Process(
            target=_work, args=(self._target, number, os.getpid()), name=f"pxrs-worker-{number}"
        )
        process.start()
        return process


def _work(target: Callable[[int], None], number: int, parent: int) -> None:
    _end_with(parent)
    try:
        target(number)
    except PxrsError as error:
        print(f"pxrs worker {number}: {error}", file=sys.stderr)
        sys.exit(_GAVE_UP if isinstance(error, HandlerFailed) else 1)


def _end_with(parent: int) -> None:
    """SIGTERM when the parent is gone, so that no orphan keeps its partitions."""
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
