"""Worker processes for `px.run`: spawned, never forked, each a member of the group of its own.

For handlers that compute: threads share one interpreter lock, processes do not. A worker that
dies is started again; one whose handler gave up for good ends them all.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from pxrs.config import parse_url, split_url
from pxrs.errors import ConfigError, HandlerFailed, PxrsError
from pxrs.runtime.job import Job
from pxrs.runtime.runner import stop_on_signals

_GAVE_UP = 70
_PR_SET_PDEATHSIG = 1
_RESTART_PAUSE = 0.5
_LOOK = 0.5


class WorkerJob(msgspec.Struct, frozen=True):
    """What a worker process is told: the job, and where the store is."""

    url: str
    job: Job

    def __call__(self, number: int) -> None:
        """Run it in this process, as worker `number`."""
        from pxrs.runtime.app import connect

        with connect(self.url) as px:
            px.run(**self.job.arguments(number))


class ProcessRun:
    """See `pxrs.runtime.job.Running`: the job in processes of its own."""

    def __init__(self, url: str, job: Job) -> None:
        refuse_memory(url)
        self._workers = Workers(WorkerJob(url, job), job.processes)

    def run(self) -> None:
        with stop_on_signals(self.stop):
            self._workers.run()

    def stop(self) -> None:
        self._workers.stop()


def refuse_memory(url: str) -> None:
    """Raise where processes would each have a store of their own."""
    if any(parse_url(place).scheme == "memory" for place in split_url(url).urls()):
        raise ConfigError("processes can't share memory://; use a file, or threads")


class Workers:
    """Keeps a number of processes running until it is stopped."""

    def __init__(self, target: Callable[[int], None], count: int) -> None:
        self._target = target
        self._context = multiprocessing.get_context("spawn")
        self._count = count
        self._processes: list[BaseProcess] = []
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ask them to finish: they drain, commit and leave. From any thread or signal."""
        self._stopping.set()

    def run(self) -> None:
        """Until stopped; raises `HandlerFailed` if a worker's handler gave up."""
        failed = False
        if not self._stopping.is_set():
            self._processes = [self._start(number) for number in range(self._count)]
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
