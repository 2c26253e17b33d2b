"""Real processes for tests: they run a function of a test module and talk in JSON lines.

A process that has pxrs loaded forks them. A child dies with its parent. Nothing waits by sleeping:
`read` blocks until the child has said something, and fails when it does not within its patience.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pxrs.stores.api import Stores
from pxrs.stores.sqlite.stores import SqliteStores
from support.inside import LONGEST_ORDER, Order

PATIENCE = 30.0
_TESTS = Path(__file__).parents[1]
_START = "from support.inside import main; main()"
PYTHONPATH = os.pathsep.join([str(_TESTS), str(_TESTS.parent)])


class Process:
    """A process that the forker has forked. `stopped` is set when it has stood still."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stopped = threading.Event()
        self._ended = threading.Event()
        self._code = 0

    def end(self, code: int) -> None:
        self._code = code
        self._ended.set()

    @property
    def returncode(self) -> int | None:
        """As `wait`; None while it runs."""
        return self._code if self._ended.is_set() else None

    def wait(self) -> int:
        """Its exit code, or the signal that ended it as a negative number."""
        assert self._ended.wait(PATIENCE), f"process {self.pid} does not end"
        return self._code

    def signal(self, number: int) -> None:
        if not self._ended.is_set():
            # It may have ended and its end not be told yet.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def freeze(self) -> None:
        """Stop it, and come back when it stands still."""
        self.stopped.clear()
        self.signal(signal.SIGSTOP)
        assert self.stopped.wait(PATIENCE), f"process {self.pid} does not stop"


class Forker:
    """The process that forks the children of this one: `support.inside.main`."""

    def __init__(self) -> None:
        # A packet is one order, or one answer.
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
            )
        self._turn = threading.Lock()
        self._started: queue.Queue[Process] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        atexit.register(self._end)

    def fork(
        self,
        function: Callable[..., None],
        args: tuple[Any, ...],
        fds: list[int],
        environment: Mapping[str, str] = MappingProxyType({}),
        loads: Sequence[str] = (),
    ) -> Process:
        """`fds`: its stdin, stdout, stderr, and for what it says. `loads`: what it has loaded."""
        target = f"{function.__module__}:{function.__qualname__}"
        found = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
        order = json.dumps(Order(target, list(args), os.getcwd(), found, list(loads))).encode()
        assert len(order) <= LONGEST_ORDER
        with self._turn:
            socket.send_fds(self._socket, [order], fds)
            return self._started.get(timeout=PATIENCE)

    def _listen(self) -> None:
        processes: dict[int, Process] = {}
        while answer := self._socket.recv(4096):
            pid, word, code = json.loads(answer)
            if word == "started":
                processes[pid] = Process(pid)
                self._started.put(processes[pid])
            elif word == "stopped":
                processes[pid].stopped.set()
            else:
                processes.pop(pid).end(code)

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._listener.join()
        self._socket.close()


@cache
def forker() -> Forker:
    """One for all tests of this process. It ends when this process does, and so do its children."""
    return Forker()


class Child:
    """A process that runs `function(*args)`; its arguments and words are JSON."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        # A pipe for what it says: its stdout stays free for what it prints by accident.
        read_end, write_end = os.pipe()
        its_stdin, self._stdin = os.pipe()
        self._process = forker().fork(function, args, [its_stdin, 1, 2, write_end])
        os.close(write_end)
        os.close(its_stdin)
        self._words: queue.Queue[Any] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, args=(read_end,), daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> Any:
        """The next thing it says; fails when it has ended or says nothing."""
        word = self._words.get(timeout=PATIENCE)
        if word is _END:
            raise AssertionError(f"the child ended early: exit code {self._process.wait()}")
        return word

    def rest(self) -> list[Any]:
        """All it says until it ends."""
        words = []
        while (word := self._words.get(timeout=PATIENCE)) is not _END:
            words.append(word)
        return words

    def tell(self) -> None:
        """Let it go on from `wait_for_parent`."""
        os.write(self._stdin, b"\n")

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.join()

    def signal(self, number: int) -> None:
        self._process.signal(number)

    def freeze(self) -> None:
        """Stop it, and come back when it stands still."""
        self._process.freeze()

    def freeze_between_writes(self, stores: Stores) -> None:
        """Stop it where none of its threads is inside a write to an SQLite file.

        One that is frozen there stops the file for all, as docs/engines.md says. This
        process writes meanwhile, so no other can.
        """
        if isinstance(stores, SqliteStores):
            stores.database.write(lambda turn: self.freeze())
        else:
            self.freeze()

    def join(self) -> int:
        """Wait for its end; its exit code."""
        code = self._process.wait()
        self._listener.join(PATIENCE)
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1
        return code

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _listen(self, fd: int) -> None:
        with open(fd, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    self._words.put(json.loads(line))
        self._words.put(_END)


_END = object()


def exit_code(pid: int) -> int:
    """How a forked child ended; one that hangs is killed."""
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    )
    thread.start()
    thread.join(PATIENCE)
    if not codes:
        os.kill(pid, signal.SIGKILL)
        thread.join()
    return codes[0]
