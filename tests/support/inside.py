"""The child's side of `support.child`."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
from types import ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1
_LOOK = 0.001
_voice = -1
_turn = threading.Lock()


def say(word: Any) -> None:
    """Tell the parent, from any thread. What a killed child could not finish is not heard.

    Only short writes to a pipe are whole: without the lock, long words of two threads mix.
    """
    data = (json.dumps(word) + "\n").encode()
    with _turn:
        while data:
            data = data[os.write(_voice, data) :]


def wait_for_parent() -> None:
    """Block until the parent tells this process to go on."""
    sys.stdin.buffer.readline()


def default(number: int) -> Any:
    """What Python does about a signal."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def wait_until_heard(number: int, before: Any = None) -> None:
    """Until somebody else handles the signal."""
    before = before or default(number)
    while signal.getsignal(number) == before:
        threading.Event().wait(_LOOK)


def signal_when_heard(number: int, before: Any = None) -> None:
    """Send a signal to this process once somebody else handles it; does not wait."""

    def send() -> None:
        wait_until_heard(number, before)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


class _Mark:
    """Any mark or fixture, with arguments or without: leaves the function as it is."""

    def __getattr__(self, name: str) -> _Mark:
        return self

    def __getitem__(self, kind: Any) -> _Mark:
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options and callable(args[0]) else self


class _Marks(ModuleType):
    """Stands in for pytest while a test module is loaded: half of a child's start was pytest's.

    Nobody collects tests here. Who wants anything else of pytest gets it.
    """

    mark = fixture = param = StashKey = _Mark()

    def __getattr__(self, name: str) -> Any:
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def main() -> None:
    """Run the function that the command line names."""
    global _voice
    sys.modules["pytest"] = _Marks("pytest")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    target, voice, args = sys.argv[1:]
    _voice = int(voice)
    module, name = target.split(":")
    getattr(importlib.import_module(module), name)(*json.loads(args))
