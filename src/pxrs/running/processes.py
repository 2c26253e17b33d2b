"""Worker processes of `px.run` and `px.listen`: spawned, never forked. Each opens the store.

For handlers that compute: threads share one interpreter lock, processes do not. A worker that
dies or loses the store is started again; one that would fail in the same way again ends them all,
and the parent's `join` raises its error.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from random import Random
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from pxrs.codec.messages import Decoder
from pxrs.config import parse_url, split_url
from pxrs.consuming.health import Health
from pxrs.core.retry import Backoff
from pxrs.errors import ConfigError, InvalidRequest, PxrsError, StoreError, quoted
from pxrs.running.dead_letters import where
from pxrs.running.job import Job, RunJob
from pxrs.running.suspect_messages import SuspectMessages
from pxrs.urls import Shy

_LOG = logging.getLogger("pxrs.processes")
_GAVE_UP = 70
_INTERRUPTED = 130
_BEGUN = "begun"
_PR_SET_PDEATHSIG = 1
_HANDLERS = (
    "A handler has to be a function of a module, not a lambda or one inside of another function"
)
_RESTART = Backoff(first=0.5, longest=30.0, jitter=0.0)
_LONG_LIFE = 60.0
_LOOK = 0.5


class WorkerJob(Shy, frozen=True):
    """The work of a worker process: the job, in the store at this URL.

    `work` opens the store and does it until it is stopped: a function of a module, as the process
    gets it by its name.
    """

    work: Callable[[str, Job], None]
    url: str
    job: Job

    def __call__(self, number: int) -> None:
        """Do it in this process, as worker `number`, until it is stopped."""
        self.work(self.url, self.job.in_process(number))

    def watched(self, suspects: SuspectMessages, number: int) -> WorkerJob:
        """The job of worker `number`, whose messages in hand become suspect if it dies."""
        handler = suspects.watched(number, self.job.handler)
        # The handler decodes by itself.
        job = msgspec.structs.replace(self.job, handler=handler, serde=None, key_serde=None)
        return WorkerJob(self.work, self.url, job)


def _refuse_memory(url: str) -> None:
    """Raise if each process would have a store of its own."""
    if any(parse_url(place).scheme == "memory" for place in split_url(url).urls()):
        raise ConfigError("processes can't share memory://; use a file, or threads (workers=…)")


class WorkerProcess:
    """A worker process, and its reports: that it has begun, and why it gave up."""

    def __init__(self, process: BaseProcess, reports: Connection[Any, Any]) -> None:
        self.process = process
        self.reports = reports
        self.started = monotonic()
        self.has_begun = False
        self._gave_up_for: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    @property
    def events(self) -> list[Any]:
        """Returns what to wait for: its end, and its start until that was reported."""
        return [self.process.sentinel, *(() if self.has_begun else (self.reports,))]

    def hear(self) -> None:
        """Note its reports; does not wait."""
        with suppress(EOFError):
            # Not until the end of the pipe: processes that the worker forked may outlive it.
            while self.reports.poll():
                report = self.reports.recv()
                if isinstance(report, BaseException):
                    self._gave_up_for = report
                self.has_begun = True

    def why_it_gave_up(self) -> BaseException | None:
        """Returns the error it ended with; None if another process may succeed."""
        with self.reports:
            self.hear()
        if self._gave_up_for is not None:
            return self._gave_up_for
        if self.has_begun or (self.process.exitcode or 0) < 0:
            # It lost the store, or was killed.
            return None
        return InvalidRequest(
            f"worker process {self.process.name} could not start, for the reason that it has "
            "printed. It imports the program's main module: what starts the workers must stand "
            "under `if __name__ == '__main__':` there"
        )

    def how_it_ended(self) -> str:
        """Names the process and its exit code or signal, for logs."""
        code = self.process.exitcode or 0
        if code >= 0:
            how = f"ended with exit code {code}"
        else:
            signals = {each.value: each.name for each in signal.Signals}
            how = f"was killed by {signals.get(-code, f'signal {-code}')}"
        return f"worker process {self.process.name} (pid {self.process.pid}) {how}"


class Death(NamedTuple):
    """The end of a worker, and the seconds until another one takes its place."""

    how: str
    pause: float


class Restarts:
    """Computes the wait before a worker is started again: longer each time it dies young."""

    def __init__(self) -> None:
        self._deaths: Counter[int] = Counter()
        self._random = Random()

    def pause(self, number: int, lived: float) -> float:
        """Seconds until a new worker `number` starts, after one that lived for `lived` seconds."""
        if lived >= _LONG_LIFE:
            self._deaths[number] = 0
        self._deaths[number] += 1
        return _RESTART.delay(self._deaths[number], self._random) or 0.0


class Workers:
    """Keeps a number of processes running until it is stopped. See `handle.Work`."""

    handled = None
    failed = None

    def __init__(self, target: Callable[[int], None], count: int, name: str = "workers") -> None:
        _refuse_what_cannot_be_sent(target)
        self.name = name
        self._target = target
        self._context = multiprocessing.get_context("spawn")
        # Items need no watching: a queue counts their deliveries, and knows whose holder died.
        self._suspects: SuspectMessages | None = None
        if isinstance(target, WorkerJob) and isinstance(job := target.job, RunJob):
            decoder = Decoder(job.key_serde, job.serde)
            self._suspects = SuspectMessages(
                self._context, job.workers, job.retry.attempts, decoder
            )
        self._count = count
        self._workers: dict[int, WorkerProcess] = {}
        self._due: dict[int, float] = {}
        self._last_deaths: dict[int, Death] = {}
        self._restarts = Restarts()
        self._stopping = threading.Event()

    @classmethod
    def of(cls, work: Callable[[str, Job], None], url: str, job: Job) -> Workers:
        """The workers for the processes of a job. See `WorkerJob`."""
        _refuse_memory(url)
        return cls(WorkerJob(work, url, job), job.processes, job.name)

    def stop(self) -> None:
        """Ask the workers to finish: they drain, commit and leave. From any thread or signal."""
        self._stopping.set()

    def health(self) -> dict[str, Health]:
        """Return the health of each worker, as this process knows it. From any thread."""
        names = {number: f"{self.name}/worker-{number}" for number in range(self._count)}
        return {name: self._health_of(number) for number, name in names.items()}

    def _health_of(self, number: int) -> Health:
        """After a death, the next worker is healthy once it has lived as long as the pause was."""
        worker, death = self._workers.get(number), self._last_deaths.get(number)
        if worker is None or not worker.has_begun:
            if death is None:
                return Health("joining", "its process is being started")
            return Health("restarting", f"{death.how}; another one is being started")
        if death is not None and monotonic() - worker.started < death.pause:
            return Health("restarting", f"{death.how}; another one has just begun")
        return Health("running", f"process {worker.process.pid}")

    def run(self) -> None:
        """Run until stopped; raises the error for which a worker gave up."""
        failure: BaseException | None = None
        try:
            self._due = dict.fromkeys(range(self._count), 0.0)
            while not self._stopping.is_set() and failure is None:
                self._start_those_that_are_due()
                self._wait()
                failure = self._look_for_the_dead()
        finally:
            # Also if one could not be started: else the others would go on, unknown to the caller.
            for worker in self._workers.values():
                worker.process.terminate()
        for worker in self._workers.values():
            worker.process.join()
            worker.reports.close()
        if failure is not None:
            raise failure

    def _wait(self) -> None:
        """Wait until a worker has begun, has ended or is due, or for a while."""
        if self._workers:
            wait([event for worker in self._workers.values() for event in worker.events], _LOOK)
        else:
            self._stopping.wait(_LOOK)

    def _look_for_the_dead(self) -> BaseException | None:
        """Note when to replace workers that died; returns the error for which one gave up."""
        for number, worker in list(self._workers.items()):
            if not worker.has_ended:
                worker.hear()
                continue
            del self._workers[number]
            if (failure := worker.why_it_gave_up()) is not None:
                return failure
            if not self._stopping.is_set():
                now = monotonic()
                pause = self._restarts.pause(number, now - worker.started)
                self._due[number] = now + pause
                how = worker.how_it_ended()
                if self._suspects is not None and (found := self._suspects.count(number)):
                    how += f" with {', '.join(map(where, found))} in hand"
                self._last_deaths[number] = Death(how, pause)
                _LOG.error("%s; another one is started in %.2g s", how, pause)
        return None

    def _start_those_that_are_due(self) -> None:
        now = monotonic()
        for number in [number for number, due in self._due.items() if due <= now]:
            if self._stopping.is_set():
                return
            self._workers[number] = self._start(number)
            del self._due[number]

    def _start(self, number: int) -> WorkerProcess:
        reports, reporting = self._context.Pipe(duplex=False)
        target = self._target
        if self._suspects is not None and isinstance(target, WorkerJob):
            target = target.watched(self._suspects, number)
        process = self._context.Process(
            target=_work,
            args=(target, number, os.getpid(), reporting),
            name=f"pxrs-worker-{number}",
        )
        # Closed here, so that its end is the end of the reports.
        with reporting, _interrupts_blocked():
            process.start()
        return WorkerProcess(process, reports)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ctrl-C reaches children, too. One that is still importing would print a traceback: a process
    started in here gets no SIGINT before it can handle it. See `_leave_interrupts`.
    """
    # The tracker unblocks signals when it starts its own process.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_interrupts() -> None:
    """Until its `run` handles SIGINT, a worker leaves it to its parent, which ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _refuse_what_cannot_be_sent(target: Callable[[int], None]) -> None:
    if (error := _why_not_sent(target)) is None:
        return
    for name, value in _parts_of(target):
        if (reason := _why_not_sent(value)) is not None:
            advice = (
                _HANDLERS if name == "handler" else f"Let {name} be something that can be pickled"
            )
            raise InvalidRequest(
                f"{name}={quoted(value)} can't be sent to worker processes: {reason}. {advice}; "
                "or use threads (workers=…)"
            ) from reason
    raise InvalidRequest(f"this can't be sent to worker processes: {error}") from error


def _parts_of(target: Any) -> Iterator[tuple[str, Any]]:
    """The arguments that the target consists of, with their names."""
    parts = msgspec.structs.asdict(target) if isinstance(target, msgspec.Struct) else {}
    for name, value in parts.items():
        if isinstance(value, Job):
            yield from _parts_of(value)
        elif isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def _why_not_sent(value: object) -> Exception | None:
    try:
        ForkingPickler.dumps(value)
    except Exception as error:  # noqa: BLE001 - pickling may raise anything
        return error
    return None


def _work(
    target: Callable[[int], None], number: int, parent: int, reporting: Connection[Any, Any]
) -> None:
    _leave_interrupts()
    _end_with(parent)
    reporting.send(_BEGUN)
    try:
        target(number)
    except KeyboardInterrupt:
        # A second SIGINT, in a terminal: the parent reports it.
        sys.exit(_INTERRUPTED)
    except StoreError as error:
        print(f"pxrs worker {number}: {error}", file=sys.stderr)
        sys.exit(1)
    except PxrsError as error:
        reporting.send(error)
        sys.exit(_GAVE_UP)


def _end_with(parent: int) -> None:
    """Send SIGTERM to this process when its parent is gone: an orphan must not keep partitions."""
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
