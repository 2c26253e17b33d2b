"""Other processes: spawned, spoken to over a pipe, never left behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

REPLY_TIMEOUT = 300.0
END_TIMEOUT = 10.0

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class _Failed:
    trace: str


class Child:
    """Runs `work(line, *arguments)` in a new process; `line` is its end of the pipe."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._line, far = _spawn.Pipe()
        self._process = _spawn.Process(target=_run, args=(work, far, arguments), daemon=True)
        self._process.start()
        far.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, value: Any) -> None:
        self._line.send(value)

    def hear(self, timeout: float = REPLY_TIMEOUT) -> Any:
        """What the child said next; raises if it failed, ended or stays silent."""
        if not self._line.poll(timeout):
            raise TimeoutError(f"process {self.pid} said nothing for {timeout:g} s")
        try:
            said = self._line.recv()
        except EOFError:
            raise RuntimeError(f"process {self.pid} ended without a word") from None
        match said:
            case _Failed(trace):
                raise RuntimeError(trace)
            case _:
                return said

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._process.join(END_TIMEOUT)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._line.close()


def _run(work: Callable[..., None], line: Connection, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(line, *arguments)
    except Exception:
        line.send(_Failed(traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
