"""A connection to a ZooKeeper ensemble. Raises errors of pxrs (`failures.py`)."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.handlers.utils import fileobj_to_fd
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from pxrs.clock import Clock
from pxrs.config import ServerSettings, TlsFiles
from pxrs.errors import Closed, ConfigError, PxrsError, StoreUnavailable
from pxrs.forks import Origin
from pxrs.stores.zookeeper.failures import DOUBTFUL, came_back_empty, translated, zk

# kazoo reports every lost connection; who uses it learns that from us.
_LOGGER = logging.getLogger("pxrs.zookeeper")
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False
# Below that it logs logins.
_LOGGER.setLevel(logging.INFO)

_PAUSE = 0.02
# How long it may take to see whether the servers let anybody in.
_NEWCOMER = 2.0


class Link:
    """One kazoo client, which is one ZooKeeper session."""

    def __init__(self, settings: ServerSettings, clock: Clock, session_timeout: float) -> None:
        self._settings = settings
        self._clock = clock
        self._closed = threading.Event()
        self.origin = Origin()
        self._handler = Handler(None if settings.tls is None else _context(settings.tls))
        self.client: Any = _client(settings, self._handler, session_timeout)
        self._turned_away = False
        self.negotiated = session_timeout
        self._learn_what_is_negotiated()
        try:
            self.client.start(settings.timeout)
        except KazooTimeoutError:
            self.stop()
            raise self._unreachable() from None
        except zk.AuthFailedError as error:
            self.stop()
            raise translated(error) from error

    @property
    def timeout(self) -> float:
        """The timeout of a request."""
        return self._settings.timeout

    def deadline(self) -> float:
        """Returns when a request that begins now gives up."""
        return self._clock.monotonic() + self.timeout

    def call(
        self,
        send: Callable[[Any], Any],
        deadline: float | None = None,
        expected: tuple[type[Exception], ...] = (),
    ) -> Any:
        """Send until it is answered or the time is up: `StoreUnavailable`. For what may be
        repeated. Of ZooKeeper's own errors only the expected ones come as they are."""
        deadline = self.deadline() if deadline is None else deadline
        while True:
            try:
                return self.once(send, deadline, expected)
            except DOUBTFUL as error:
                if self._clock.monotonic() >= deadline:
                    raise translated(error) from error
                self._closed.wait(_PAUSE)

    def make(
        self,
        path: str,
        deadline: float | None = None,
        *,
        value: bytes = b"",
        ephemeral: bool = False,
    ) -> float:
        """Make a znode; when the request that was answered was sent.

        One that is there is fine: an earlier try may not have been answered.
        """
        sent = 0.0

        def create(client: Any) -> Any:
            nonlocal sent
            sent = self._clock.monotonic()
            return client.create_async(path, value, ephemeral=ephemeral)

        with suppress(zk.NodeExistsError):
            self.call(create, deadline, (zk.NodeExistsError,))
        return sent

    def make_all(self, path: str) -> None:
        """Make a znode and all above it, where they are not there."""
        parts = path.split("/")[1:]
        for depth in range(1, len(parts) + 1):
            self.make("/" + "/".join(parts[:depth]))

    def once(
        self,
        send: Callable[[Any], Any],
        deadline: float,
        expected: tuple[type[Exception], ...] = (),
    ) -> Any:
        """Send once, over a connection that stands; `DOUBTFUL` errors leave it open.

        `StoreUnavailable` if there was no connection: then it was not sent.
        """
        self._await_connection(deadline)
        try:
            answer = send(self.client)
            if hasattr(answer, "get"):
                return self._result(answer, deadline)
            return [self._result(each, deadline) for each in answer]
        except (*DOUBTFUL, *expected):
            raise
        except zk.KazooException as error:
            raise translated(error) from error

    def stop(self) -> None:
        """Give the connection up, and with it the session; in a forked child it is its parent's."""
        if self.origin.is_parent:
            return
        self._closed.set()
        self.client.stop()
        self.client.close()

    def check_open(self) -> None:
        """Raise `Closed` if it is, or if this is another process than the one that opened it."""
        if self._closed.is_set():
            raise Closed("the store was closed")
        self.origin.refuse_child()

    def _learn_what_is_negotiated(self) -> None:
        """Keep in `negotiated` after how many seconds of silence the server ends the session.

        The server has the last word on it, and kazoo keeps the answer to itself: its reading
        timeout is two thirds of it.
        """
        connection = self.client._connection
        connect = connection._connect

        def learn(*args: Any) -> Any:
            self._turned_away = True
            read_timeout, connect_timeout = connect(*args)
            self._turned_away = False
            self.negotiated = read_timeout * 1.5 / 1000
            return read_timeout, connect_timeout

        connection._connect = learn

    def _unreachable(self) -> PxrsError:
        if self._turned_away and self._have_servers_gone_back():
            return came_back_empty()
        refused = self._handler.refused
        why = "" if refused is None else f"; {refused}"
        return StoreUnavailable(
            f"no ZooKeeper server can be reached: {', '.join(self._settings.hosts)}{why}"
        )

    def _have_servers_gone_back(self) -> bool:
        """Whether the servers have lost transactions that this client has seen.

        They turn away who has seen more than they have, without a word; a new client gets in.
        """
        if not self.client.last_zxid:
            return False
        handler = Handler(None if self._settings.tls is None else _context(self._settings.tls))
        newcomer = _client(self._settings, handler, _NEWCOMER)
        try:
            newcomer.start(min(self.timeout, _NEWCOMER))
            newcomer.sync("/")
            newcomer.exists("/")
            return bool(newcomer.last_zxid < self.client.last_zxid)
        except (zk.KazooException, KazooTimeoutError):
            return False
        finally:
            newcomer.stop()
            newcomer.close()

    def _await_connection(self, deadline: float) -> None:
        while not self.client.connected:
            self.check_open()
            if self._clock.monotonic() >= deadline:
                raise self._unreachable()
            self._closed.wait(_PAUSE)
        self.check_open()

    def _result(self, answer: Any, deadline: float) -> Any:
        try:
            return answer.get(timeout=max(0.0, deadline - self._clock.monotonic()))
        except DOUBTFUL:
            self.check_open()
            raise


class _Maybe:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def get(self, timeout: float) -> Any:
        try:
            return self._answer.get(timeout=timeout)
        except zk.NoNodeError:
            return None


def maybe(answer: Any) -> Any:
    """An answer that is None where there is no such znode."""
    return _Maybe(answer)


def _client(settings: ServerSettings, handler: Handler, session_timeout: float) -> Any:
    return KazooClient(
        hosts=",".join(settings.hosts),
        timeout=session_timeout,
        handler=handler,
        connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=0.5),
        logger=_LOGGER,
        use_ssl=settings.tls is not None,
        **_identity(settings),
    )


def _identity(settings: ServerSettings) -> dict[str, Any]:
    if settings.user is None:
        return {}
    login = f"{settings.user}:{settings.password or ''}"
    return {"auth_data": [("digest", login)], "default_acl": CREATOR_ALL_ACL}


def _context(files: TlsFiles) -> ssl.SSLContext:
    """Servers have to show a certificate for the name that the URL has, by this authority."""
    try:
        context = ssl.create_default_context(cafile=files.ca)
        if files.cert is not None:
            context.load_cert_chain(files.cert, files.key)
    except ssl.SSLError as error:
        raise ConfigError(f"the files of ca, cert and key can't be used: {error}") from error
    except OSError as error:
        raise ConfigError(f"a file of ca, cert or key can't be read: {error.strerror}") from error
    return context


# Waiting for sockets as kazoo's threads do it, several times for every request. kazoo makes a new
# epoll for each wait: four system calls more. `poll` does it in one.

_READABLE = select.POLLIN | select.POLLPRI
_BROKEN = select.POLLERR | select.POLLHUP | select.POLLNVAL

Sockets = Sequence[Any]


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with a cheaper wait, and with TLS that checks whom it talks to.

    kazoo's own way to connect checks no names, and trusts the system's authorities beside the
    one that is given. `refused`: why the last server's certificate was not accepted.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._context = context
        self.refused: str | None = None

    def create_connection(
        self, address: tuple[str, int], hostname: str, timeout: float, **_: Any
    ) -> socket.socket:
        """A connection to one server. kazoo takes any `OSError` as a reason to try the next."""
        plain = socket.create_connection(address, timeout)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is None:
                return plain
            encrypted = self._context.wrap_socket(plain, server_hostname=hostname)
        except BaseException as error:
            plain.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                self.refused = (
                    f"the certificate of {hostname} is not accepted ({error.verify_message}): "
                    "it must name the host as the URL does, and be signed by what ca= names"
                )
            raise
        self.refused = None
        return encrypted

    def select(
        self, readers: Sockets, writers: Sockets, others: Sockets, timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Which of them can be read from, and which written to. `others` are not asked for."""
        poll = select.poll()
        wanted = [(fileobj_to_fd(each), _READABLE) for each in readers]
        wanted += [(fileobj_to_fd(each), select.POLLOUT) for each in writers]
        masks: dict[int, int] = {}
        for number, mask in wanted:
            masks[number] = masks.get(number, 0) | mask
        for number, mask in masks.items():
            poll.register(number, mask)
        ready = dict(poll.poll(None if timeout is None else timeout * 1000))
        able = [bool(ready.get(number, 0) & (mask | _BROKEN)) for number, mask in wanted]
        return (
            list(compress(readers, able)),
            list(compress(writers, able[len(readers) :])),
            [],
        )
