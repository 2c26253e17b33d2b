"""The demo's processes as their parent sees them."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from pxrs.errors import PxrsError


class DemoFailed(PxrsError):  # noqa: N818 - named like the errors it stands among
    """The demo could not be carried through; that says nothing about what it would have proved."""


@dataclass(frozen=True)
class Report:
    """What a process said; its end is a report without a word."""

    who: str
    words: dict[str, Any] | None


class Cast:
    """Starts processes and hears what they say. Leaving the block ends them all."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

    def start(self, who: str, *arguments: str) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "pxrs.cli.demo.child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C is for the parent; a child ends when its stdin does.
            process_group=0,
        )
        thread = threading.Thread(target=self._hear, args=(who, process), daemon=True)
        self._processes[who] = process
        self._threads.append(thread)
        thread.start()

    def next_report(self, timeout: float) -> Report | None:
        """What somebody says next; None if nobody does."""
        try:
            return self._reports.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None

    def wait_for(self, who: str, word: str, timeout: float) -> dict[str, Any]:
        """The next report of `who` that holds `word`; others are dropped."""
        deadline = time.monotonic() + timeout
        while (report := self.next_report(deadline - time.monotonic())) is not None:
            if report.who == who and report.words is None:
                raise self.failure(who)
            if report.who == who and report.words is not None and word in report.words:
                return report.words
        raise DemoFailed(
            f"{who} did not report {word!r} within {timeout:g} s; is the machine busy?"
        )

    def ask_to_stop(self, who: str) -> None:
        stdin = self._processes[who].stdin
        with suppress(BrokenPipeError):
            if stdin is not None:
                stdin.write(b"stop\n")
                stdin.flush()

    def kill(self, who: str) -> None:
        """SIGKILL: it can't clean up, flush or say good-bye."""
        self._processes[who].kill()

    def failure(self, who: str) -> DemoFailed:
        """For a process that ended by itself: its last words."""
        process = self._processes[who]
        code = process.wait()
        errors = process.stderr.read().decode(errors="replace") if process.stderr else ""
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        return DemoFailed(f"{who} ended with code {code}: {last}")

    def _hear(self, who: str, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            self._reports.put(Report(who, msgspec.json.decode(line)))
        self._reports.put(Report(who, None))

    def __enter__(self) -> Cast:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        for thread in self._threads:
            thread.join()
        for process in self._processes.values():
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
