"""The child's side of `support.child`, and the process that forks children."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

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


class Order(NamedTuple):
    """What a child is to do, and where."""

    target: str
    args: list[Any]
    folder: str
    environment: Mapping[str, str]
    # What the forker loads first: this child and those after it have it.
    loads: list[str]


# A request has to fit: most of it is the environment.
LONGEST_ORDER = 128 * 1024
_NOTHING_LEFT = b""


def main() -> None:
    """Load pxrs and fork a child for each order. In a child: do what was ordered.

    Orders come from the socket that the command line names, each with the child's stdin, stdout,
    stderr and the pipe for its words. The answers say which process it is, and later when it
    stops and how it ends. Nothing here has threads or opens anything: what it forks is as a
    process that was started anew, and saves what it takes to load pxrs.
    """
    sys.modules["pytest"] = _Marks("pytest")
    for name in ("pxrs", "support.child"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        order = _await_order(parent)
    if order is None:
        return
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    module, name = order.target.split(":")
    getattr(importlib.import_module(module), name)(*order.args)


def _await_order(parent: socket.socket) -> Order | None:
    """What this process, which is a child then, is to do; None when the parent is gone."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(there.fileno())
    with here, there, selectors.DefaultSelector() as selector:
        selector.register(parent, selectors.EVENT_READ)
        selector.register(here, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if here in ready:
                here.recv(4096)
                _tell_of_children(parent)
            if parent in ready:
                data, fds, _, _ = socket.recv_fds(parent, LONGEST_ORDER, 4)
                if data == _NOTHING_LEFT:
                    return None
                order = Order(*json.loads(data))
                for name in order.loads:
                    importlib.import_module(name)
                if (pid := os.fork()) == 0:
                    _become_a_child(fds)
                    return order
                for fd in fds:
                    os.close(fd)
                _tell(parent, pid, "started", 0)


def _tell_of_children(parent: socket.socket) -> None:
    """Who has stopped, and who has ended how."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:
            return
        if found is None:
            return
        if found.si_code == os.CLD_STOPPED:
            _tell(parent, found.si_pid, "stopped", 0)
        else:
            ended = found.si_code == os.CLD_EXITED
            _tell(parent, found.si_pid, "ended", found.si_status if ended else -found.si_status)


def _tell(parent: socket.socket, pid: int, word: str, code: int) -> None:
    parent.send(json.dumps([pid, word, code]).encode())


def _become_a_child(fds: list[int]) -> None:
    global _voice
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    _voice = fds[3]
