"""Real processes for tests: they run a function of a test module and talk in JSON lines.

A child dies with its parent. Nothing waits by sleeping: `read` blocks until the child has
said something, and fails when it does not within its patience.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pxrs.stores.api import Stores
from pxrs.stores.sqlite.stores import SqliteStores

PATIENCE = 30.0
_TESTS = Path(__file__).parents[1]
_START = "from support.inside import main; main()"


class Child:
    """A process that runs `function(*args)`; its arguments and words are JSON."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        target = f"{function.__module__}:{function.__qualname__}"
        # A pipe for what it says: its stdout stays free for what it prints by accident.
        read_end, write_end = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, target, str(write_end), json.dumps(args)],
            stdin=subprocess.PIPE,
            pass_fds=(write_end,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent)])},
        )
        os.close(write_end)
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
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.join()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Stop it, and come back when it stands still."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

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
        code = self._process.wait(PATIENCE)
        self._listener.join(PATIENCE)
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.join()

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
