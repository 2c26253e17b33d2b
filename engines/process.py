"""One child process: how it is launched, watched and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_POLL = 0.01
_FAREWELL = 10.0
_BECOME = str(Path(__file__).with_name("become.py"))
# The death signal comes when the *thread* that launched a child ends: this one ends with us.
_LAUNCHER = ThreadPoolExecutor(1, thread_name_prefix="engine-launcher")


class DiedEarly(Exception):  # noqa: N818 - what happened
    """A child ended before it was ready; the text holds what it said last."""


@dataclass(frozen=True)
class Command:
    """How one node is run, and how to see that it can be used."""

    argv: Sequence[str]
    ready: Callable[[], bool]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    # When its data is not needed any more.
    end_signal: signal.Signals = signal.SIGKILL


class Process:
    """A node. It can be started again, on the same data, after it was stopped or killed."""

    def __init__(self, name: str, command: Command, log: Path) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None, f"{self.name} was not started"
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def launch(self) -> None:
        """Start it; `await_ready` says when it can be used."""
        assert not self.running, f"{self.name} runs already"
        with self.log.open("ab") as output:
            self._child = _LAUNCHER.submit(spawn, self._command, output.fileno()).result()

    def await_ready(self, patience: float = 60.0) -> None:
        """Block until it can be used; `DiedEarly` when it ends instead."""
        assert self._child is not None
        deadline = time.monotonic() + patience
        while not self._command.ready():
            try:
                code = self._child.wait(_POLL)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
                self.kill()
                raise TimeoutError(
                    f"{self.name} was not ready in {patience} s: {self._last()}"
                ) from None
            raise DiedEarly(f"{self.name} ended with {code}: {self._last()}")

    def stop(self, patience: float = 10.0) -> None:
        """End it in an orderly way, by force if it does not listen."""
        self._ask_to_end(self._command.stop_signal, patience)

    def end(self) -> None:
        """End it at once; whatever it holds outside of its folder goes with it."""
        if self._command.end_signal is not signal.SIGKILL:
            self._ask_to_end(self._command.end_signal, _FAREWELL)
        self.kill()

    def _ask_to_end(self, how: signal.Signals, patience: float) -> None:
        if self._child is None:
            return
        if self.running:
            self._child.send_signal(signal.SIGCONT)
            self._child.send_signal(how)
            try:
                self._child.wait(patience)
            except subprocess.TimeoutExpired:
                self.kill()
        self._child.wait()

    def kill(self) -> None:
        """kill -9, with all processes it has started."""
        if self._child is None or self._child.poll() is not None:
            return
        family = psutil.Process(self._child.pid).children(recursive=True)
        os.killpg(self._child.pid, signal.SIGKILL)
        # Some servers' processes have groups of their own.
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._child.wait()
        psutil.wait_procs(family, timeout=_FAREWELL)

    def freeze(self) -> None:
        """Stop it, and return when it stands still; the kernel still answers for its sockets.

        Until the thread that the signal was sent to gets a core, all others go on.
        """
        os.killpg(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let it go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def _last(self) -> str:
        return self.log.read_text(errors="replace")[-2000:].strip() or "it said nothing"


def spawn(command: Command, output: int) -> subprocess.Popen[bytes]:
    """A process in a group of its own that is killed when this one is."""
    return subprocess.Popen(
        [*_becoming(command.user), *command.argv],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **command.env},
        cwd="/",
        start_new_session=True,
    )


def run_as(user: str | None, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a program to its end; what it said is in the error if it fails."""
    done = subprocess.run(
        [*_becoming(user), *argv],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, **(env or {})},
    )
    if done.returncode:
        raise RuntimeError(f"{argv[0]} failed: {done.stderr} {done.stdout}")


def _becoming(user: str | None) -> list[str]:
    return [sys.executable, "-I", "-S", _BECOME, str(os.getpid()), user or ""]
