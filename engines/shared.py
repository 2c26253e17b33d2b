"""One engine of a kind for several processes: test workers ask the process that started them.

A name such as `mariadb/sources` is an engine of that kind set apart from the other ones. Whoever
hosts starts an engine when it is asked for the first time, and all of them die with it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import NoReturn

import engines
from engines.places import new_folder

ADDRESS = "PXRS_ENGINES"
_PR_SET_PDEATHSIG = 1


class Host:
    """Answers names of engines with URLs. Children find it by the environment."""

    def __init__(self) -> None:
        self._started: dict[str, engines.Engine] = {}
        self._listener = Listener(str(new_folder("host") / "socket"), "AF_UNIX", backlog=64)
        self._thread = threading.Thread(target=self._serve, name="engine-host", daemon=True)
        self._thread.start()
        os.environ[ADDRESS] = str(self._listener.address)

    def close(self) -> None:
        """End all engines."""
        os.environ.pop(ADDRESS, None)
        self._listener.close()
        for engine in self._started.values():
            engine.close()

    def _serve(self) -> None:
        # One at a time: two that ask for the same engine get the same one.
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError, EOFError):
                self._answer(connection)

    def _answer(self, connection: Connection) -> None:
        name = connection.recv()
        try:
            if name not in self._started:
                # One that is set apart has another name behind its kind: mariadb/sources.
                self._started[name] = engines.start(name.partition("/")[0])
            connection.send((True, self._started[name].url))
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            kind = "" if isinstance(error, engines.Missing) else f"{type(error).__name__}: "
            connection.send((False, f"{kind}{error}"))


class HostProcess:
    """A host in a process of its own: who forks later may have no thread here."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            _be_a_host(there)
        there.close()
        os.environ[ADDRESS] = self._socket.recv(4096).decode()

    def close(self) -> None:
        """End all engines."""
        os.environ.pop(ADDRESS, None)
        # Forks of this process may have the socket too: to close it would tell nothing.
        self._socket.send(b"x")
        self._socket.close()
        os.waitpid(self._pid, 0)


def _be_a_host(parent: socket.socket) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Ctrl-C goes to all of them: engines are there until their users have ended.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # What the parent does at its end does not happen here.
        atexit._clear()
        host = Host()
        parent.send(os.environ[ADDRESS].encode())
        parent.recv(1)
        host.close()
        code = 0
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def shared_url(name: str) -> str:
    """The URL of the host's engine of this name; `Missing` says why there is none."""
    with Client(str(Path(os.environ[ADDRESS])), "AF_UNIX") as connection:
        connection.send(name)
        there, answer = connection.recv()
    if not there:
        raise engines.Missing(answer)
    return str(answer)
