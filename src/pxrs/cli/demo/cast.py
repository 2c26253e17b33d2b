"""The demo's processes as their parent sees them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from pxrs.config import URL_VARIABLE
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

    def __init__(self, url: str) -> None:
        # Not as an argument: it may hold a password, and everybody can see those.
        self._environment = {**os.environ, URL_VARIABLE: url}
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
            env=self._environment,
        )
        thread = threading.Thread(target=self._hear, args=(who, process), daemon=True)
        self._processes[who] = process
        self._threads.append(thread)
        thread.start()

    def reports(self, timeout: float = 0.0) -> list[Report]:
        """What was said since the last call; waits for the first word up to `timeout`."""
        found: list[Report] = []
        with suppress(queue.Empty):
            found.append(self._reports.get(timeout=timeout) if timeout else self._next())
            while True:
                found.append(self._next())
        return found

    def _next(self) -> Report:
        return self._reports.get_nowait()

    def order(self, who: str, order: str) -> None:
        """Tell a process what to do."""
        stdin = self._processes[who].stdin
        with suppress(BrokenPipeError):
            if stdin is not None:
                stdin.write(f"{order}\n".encode())
                stdin.flush()

    def send_signal(self, who: str, number: signal.Signals) -> None:
        """SIGKILL: it can't clean up or say good-bye. SIGSTOP: it does not know it stands still."""
        self._processes[who].send_signal(number)

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
