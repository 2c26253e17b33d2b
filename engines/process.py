"""One child process: how it is launched, watched and ended."""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_POLL = 0.01
_LIBC = ctypes.CDLL(None, use_errno=True)
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
        if self._child is None:
            return
        if self.running:
            self._child.send_signal(signal.SIGCONT)
            self._child.send_signal(self._command.stop_signal)
            try:
                self._child.wait(patience)
            except subprocess.TimeoutExpired:
                self.kill()
        self._child.wait()

    def kill(self) -> None:
        """kill -9, with all processes it has started."""
        if self._child is None or self._child.poll() is not None:
            return
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def freeze(self) -> None:
        """Stop it in its tracks; the kernel still answers for its sockets."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def _last(self) -> str:
        return self.log.read_text(errors="replace")[-2000:].strip() or "it said nothing"


def spawn(command: Command, output: int) -> subprocess.Popen[bytes]:
    """A process in a group of its own that is killed when this one is."""
    owner: dict[str, Any] = {} if command.user is None else as_user(command.user)
    return subprocess.Popen(
        command.argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **command.env},
        cwd="/",
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - it makes one system call
        **owner,
    )


def as_user(name: str) -> dict[str, Any]:
    """Arguments for `subprocess` that run a child as somebody else."""
    entry = pwd.getpwnam(name)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def die_with_parent() -> None:
    """In the child, before exec. Only a system call: the parent has other threads."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
