"""`--forks N`: runs tests in N forks of the process that has collected them.

Workers of pytest-xdist load and collect all tests each, which takes a worker six seconds of CPU
time. Forks have them. Nothing may have begun a thread before.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import struct
import sys
import threading
import warnings
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import pytest

_PR_SET_PDEATHSIG = 1
# Tests that a worker takes at once, while there are many: those of a module share its fixtures.
_MOST_AT_ONCE = 16
_CHUNK = struct.Struct("HH")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forks", type=int, default=0, metavar="N", help="run tests in N forked processes"
    )


def pytest_configure(config: pytest.Config) -> None:
    if count := config.getoption("--forks"):
        config.pluginmanager.register(_Forks(count), "forks")


class _Began(NamedTuple):
    """A worker runs the test of this number."""

    number: int


class _Ran(NamedTuple):
    """It has run it; what pytest reports of its phases, and warnings as pytest's hook has them."""

    number: int
    reports: list[dict[str, Any]]
    warnings: list[dict[str, Any]]


class _Worker(NamedTuple):
    pid: int
    # The tests it has begun and not ended: one at most.
    running: list[int]


class _Forks:
    """Hands out tests and reports what came of them. A worker that dies costs its test alone."""

    def __init__(self, count: int) -> None:
        self._count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        left = list(range(len(session.items)))
        while left:
            done = self._run(session, left)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            if not done:
                raise RuntimeError("all workers ended before they ran a test")
            left = [number for number in left if number not in done]
        return True

    def _run(self, session: pytest.Session, numbers: list[int]) -> set[int]:
        """Run these tests; those that were run. A worker that died has left some."""
        chunks = _filled_pipe(numbers, self._count)
        done: set[int] = set()
        workers: dict[Connection, _Worker] = {}
        try:
            for index in range(self._count):
                connection, pid = self._fork(session, numbers, chunks, index)
                workers[connection] = _Worker(pid, [])
            while workers:
                ready = wait(list(workers))
                for connection in [each for each in workers if each in ready]:
                    try:
                        told = connection.recv()
                    except EOFError:
                        done.update(_end(session, workers.pop(connection)))
                        connection.close()
                        continue
                    running = workers[connection].running
                    if isinstance(told, _Began):
                        running.append(told.number)
                    else:
                        running.clear()
                        done.add(told.number)
                        _report(session, told)
                if session.shouldfail or session.shouldstop:
                    # Workers find nothing left.
                    os.read(chunks, 2**16)
        finally:
            os.close(chunks)
            for connection, worker in workers.items():
                connection.close()
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return done

    def _fork(
        self, session: pytest.Session, numbers: list[int], chunks: int, index: int
    ) -> tuple[Connection, int]:
        assert threading.active_count() == 1, threading.enumerate()
        read_end, write_end = os.pipe()
        base = session.config._tmp_path_factory.mktemp(f"worker{index}")  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            os.close(write_end)
            return Connection(read_end, writable=False), pid
        code = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # What the first process does at its end does not happen here.
            atexit._clear()
            os.close(read_end)
            _become_a_worker(session.config, str(base / "tests"))
            _work(session, numbers, chunks, Connection(write_end, readable=False))
            code = 0
        finally:
            atexit._run_exitfuncs()
            os._exit(code)


def _filled_pipe(numbers: list[int], workers: int) -> int:
    """A pipe that every worker reads what it is to run from: first and count, fewer to the end."""
    read_end, write_end = os.pipe()
    at = 0
    while at < len(numbers):
        count = max(1, min(_MOST_AT_ONCE, (len(numbers) - at) // (4 * workers)))
        os.write(write_end, _CHUNK.pack(at, count))
        at += count
    os.close(write_end)
    return read_end


def _report(session: pytest.Session, ran: _Ran) -> None:
    hook = session.config.hook
    item = session.items[ran.number]
    for data in ran.reports:
        report = hook.pytest_report_from_serializable(config=session.config, data=data)
        hook.pytest_runtest_logreport(report=report)
    for warning in ran.warnings:
        hook.pytest_warning_recorded.call_historic(kwargs=warning)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _end(session: pytest.Session, worker: _Worker) -> list[int]:
    """A worker has ended; the test that it died of, which has failed."""
    code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    for number in worker.running:
        item = session.items[number]
        what = f"the worker ended while it ran this test: exit code {code}"
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", what, "call", start=0, stop=0
        )
        session.config.hook.pytest_runtest_logreport(report=report)
    return worker.running


def _become_a_worker(config: pytest.Config, folder: str) -> None:
    """Have output captured and temporary files apart from the other workers."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    for name in ("terminalreporter", "terminalprogress"):
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    config.option.basetemp = folder
    config._tmp_path_factory = pytest.TempPathFactory.from_config(  # type: ignore[attr-defined]
        config, _ispytest=True
    )


def _work(session: pytest.Session, numbers: list[int], chunks: int, connection: Connection) -> None:
    reporter = _Reporter(session.config)
    session.config.pluginmanager.register(reporter, "forked-reporter")
    mine = _next(numbers, chunks)
    while mine:
        number = mine.pop(0)
        # Which test is next says which fixtures stay.
        mine = mine or _next(numbers, chunks)
        following = session.items[mine[0]] if mine else None
        connection.send(_Began(number))
        item = session.items[number]
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        connection.send(_Ran(number, *reporter.take()))


def _next(numbers: list[int], chunks: int) -> list[int]:
    data = os.read(chunks, _CHUNK.size)
    if not data:
        return []
    first, count = _CHUNK.unpack(data)
    return numbers[first : first + count]


class _Reporter:
    """Keeps what the process that collected the tests is to report."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reports: list[dict[str, Any]] = []
        self._warnings: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        # What is the source of a warning may be anything: it stays here.
        warning_message.source = None
        self._warnings.append(
            {
                "warning_message": warning_message,
                "when": when,
                "nodeid": nodeid,
                "location": location,
            }
        )

    def take(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        taken = self._reports, self._warnings
        self._reports, self._warnings = [], []
        return taken
