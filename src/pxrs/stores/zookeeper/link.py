"""A connection to a ZooKeeper ensemble. Raises errors of pxrs (`failures.py`)."""

from __future__ import annotations

import logging
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, TypeVar

from kazoo.client import KazooClient, KazooState
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.handlers.utils import fileobj_to_fd
from kazoo.protocol.serialization import Create2
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from pxrs.clock import Clock
from pxrs.config import ServerSettings, TlsFiles
from pxrs.errors import Closed, ConfigError, PxrsError, StoreUnavailable
from pxrs.forks import Origin
from pxrs.stores.zookeeper.failures import DOUBTFUL, came_back_empty, translated, zk

# kazoo logs every lost connection; callers learn of it from errors of pxrs.
_LOGGER = logging.getLogger("pxrs.zookeeper")
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False
# At lower levels it logs logins.
_LOGGER.setLevel(logging.INFO)

_PAUSE = 0.02
# How long it may take to see whether the servers accept a new client.
_NEWCOMER = 2.0

# Bytes per second: what carries much has more time than `timeout`.
_SLOWEST = 32_000

T = TypeVar("T")


class Farewell:
    """How long the connections of one handle are waited for when they are closed: all together.

    kazoo notices only after a while that a server is frozen or out of reach, and each client does
    so by itself. A connection that is not closed in time goes on closing in the background, and
    the servers end its session by themselves.
    """

    def __init__(self, timeout: float, clock: Clock) -> None:
        self._timeout = timeout
        self._clock = clock
        self._until: float | None = None

    def left(self) -> float:
        """Returns how many seconds are left, counted from the first call of a row of closings."""
        now = self._clock.monotonic()
        until = self._until
        if until is None:
            until = self._until = now + self._timeout
        return max(0.0, until - now)

    def closed(self) -> None:
        """Note that a connection was closed in time: the next one has all the time again."""
        self._until = None

    def answered(self) -> None:
        """Note that the servers answer. Before the time is up, the answer may be an old one."""
        until = self._until
        if until is not None and self._clock.monotonic() >= until:
            self._until = None


class Link:
    """One kazoo client, which is one ZooKeeper session."""

    def __init__(
        self,
        settings: ServerSettings,
        clock: Clock,
        session_timeout: float,
        farewell: Farewell,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self.farewell = farewell
        self._closed = threading.Event()
        self._stopping: threading.Thread | None = None
        # Whether kazoo has given the server up, instead of hearing from it that the session ended.
        self._gave_up = False
        self._lock = threading.Lock()
        self.origin = Origin()
        self._handler = Handler(None if settings.tls is None else _context(settings.tls))
        self.client: Any = _client(settings, self._handler, session_timeout)
        self._turned_away = False
        self.negotiated = session_timeout
        self._learn_what_is_negotiated()
        # Not kazoo's `start`: when the time is up, that waits until no connection is under way.
        try:
            self.client.start_async().wait(settings.timeout)
        except zk.AuthFailedError as error:
            self.stop()
            raise translated(error) from error
        if not self.client.connected:
            self._stop_in_background()
            raise self._unreachable()

    @property
    def hosts(self) -> str:
        """All servers, as kazoo takes them."""
        return ",".join(self._settings.hosts)

    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        """Open another connection to a server; nothing was said on it. Raises `OSError`."""
        return self._handler.create_connection((host, port), host, timeout)

    @property
    def timeout(self) -> float:
        """The timeout of a request."""
        return self._settings.timeout

    def deadline(self, patience: float | None = None) -> float:
        """Returns when a request that begins now gives up: after `patience`, or the timeout."""
        return self._clock.monotonic() + (self.timeout if patience is None else patience)

    def is_late(self, deadline: float) -> bool:
        return self._clock.monotonic() >= deadline

    def call(
        self,
        send: Callable[[Any], Any],
        deadline: float | None = None,
        expected: tuple[type[Exception], ...] = (),
    ) -> Any:
        """Send a request that may be repeated until it is answered; raises `StoreUnavailable` if
        the time is up. Of ZooKeeper's own errors only the expected ones are raised as they are."""
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
        """Make a znode; returns when the request that was answered was sent.

        The znode may exist already: an earlier try may not have been answered.
        """
        sent = 0.0

        def create(client: Any) -> Any:
            nonlocal sent
            sent = self._clock.monotonic()
            return client.create_async(path, value, ephemeral=ephemeral)

        with suppress(zk.NodeExistsError):
            self.call(create, deadline, (zk.NodeExistsError,))
        return sent

    def make_container(self, path: str, deadline: float, *expected: type[Exception]) -> bool:
        """Make a znode that the servers remove when it has lost its last child.

        Returns whether this call has made it. Servers before 3.5.3 do not remove it.
        """
        expected = (zk.NodeExistsError, *expected)
        try:
            try:
                unknown = (zk.UnimplementedError, *expected)
                self.call(lambda client: _create_container(client, path), deadline, unknown)
            except zk.UnimplementedError:
                self.call(lambda client: client.create_async(path), deadline, expected)
        except zk.NodeExistsError:
            return False
        return True

    def make_all(self, path: str) -> None:
        """Make a znode and all above it, unless they exist."""
        parts = path.split("/")[1:]
        for depth in range(1, len(parts) + 1):
            self.make("/" + "/".join(parts[:depth]))

    def once(
        self,
        send: Callable[[Any], Any],
        deadline: float,
        expected: tuple[type[Exception], ...] = (),
        *,
        carries: int = 0,
    ) -> Any:
        """Send once, over an established connection; after `DOUBTFUL` errors the outcome is open.

        Raises `StoreUnavailable` if there was no connection: then it was not sent. A request that
        carries many bytes has more time once there is one.
        """
        self._await_connection(deadline)
        deadline += time_to_carry(carries)
        try:
            answer = send(self.client)
            if hasattr(answer, "get"):
                return self._result(answer, deadline)
            results = []
            for each in answer:
                results.append(self._result(each, deadline))
                # The others come behind it.
                deadline += time_to_carry(_carried(results[-1]))
            return results
        except (*DOUBTFUL, *expected):
            raise
        except zk.KazooException as error:
            raise translated(error) from error

    def in_one_session(self, look: Callable[[], T]) -> T:
        """Call `look`, again until all its requests ran in the same session of ZooKeeper.

        A session never reads older data than it has read before, whichever server answers. The
        session that follows after its end may.
        """
        while True:
            session = self.client.client_id
            found = look()
            if self.client.client_id == session:
                return found

    def stop(self) -> None:
        """Close the connection, and with it the session; not in a forked child.

        Waits for that as long as `farewell` says.
        """
        if self.origin.is_parent:
            return
        stopping, left = self._stop_in_background(), self.farewell.left()
        stopping.join(left)
        if not stopping.is_alive() and not self._gave_up:
            self.farewell.closed()

    def _stop_in_background(self) -> threading.Thread:
        self._closed.set()
        with self._lock:
            if self._stopping is None:
                self.client.add_listener(self._note_state)
                self._gave_up = not self.client.connected
                self._stopping = threading.Thread(
                    target=self._stop, name="pxrs-zookeeper-stop", daemon=True
                )
                self._stopping.start()
            return self._stopping

    def _note_state(self, state: Any) -> None:
        if state == KazooState.SUSPENDED:
            self._gave_up = True

    def _stop(self) -> None:
        self.client.stop()
        self.client.close()

    def check_open(self) -> None:
        """Raise `Closed` if the store was closed, or was opened by the parent of this process."""
        if self._closed.is_set():
            raise Closed("the store was closed")
        self.origin.refuse_child()

    def _learn_what_is_negotiated(self) -> None:
        """Keep in `negotiated` after how many seconds of silence the server ends the session.

        The server decides on it, and kazoo does not pass its answer on: but kazoo's read timeout is
        two thirds of it.
        """
        connection = self.client._connection
        connect = connection._connect

        def learn(*args: Any) -> Any:
            self._turned_away = True
            read_timeout, connect_timeout = connect(*args)
            self._turned_away = False
            self.negotiated = read_timeout * 1.5 / 1000
            self._handler.patience = read_timeout / 1000
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

        Servers silently turn away a client that has seen more than they have; a new client gets in.
        """
        if not self.client.last_zxid:
            return False
        handler = Handler(None if self._settings.tls is None else _context(self._settings.tls))
        newcomer = _client(self._settings, handler, _NEWCOMER)
        try:
            newcomer.start(min(self.timeout, _NEWCOMER))
            agreed(newcomer, "/").get(_NEWCOMER)
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
            result = answer.get(timeout=max(0.0, deadline - self._clock.monotonic()))
        except DOUBTFUL:
            self.check_open()
            raise
        self.farewell.answered()
        return result


def time_to_carry(size: int) -> float:
    """How many seconds so many bytes may take over a slow link."""
    return size / _SLOWEST


def _carried(result: Any) -> int:
    """About how many bytes of data an answer has."""
    match result:
        case (bytes() as data, _):
            return len(data)
        case (list() as names, _):
            return sum(map(len, names))
    return 0


class _Maybe:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def get(self, timeout: float) -> Any:
        try:
            return self._answer.get(timeout=timeout)
        except zk.NoNodeError:
            return None


def maybe(answer: Any) -> Any:
    """An answer that is None if there is no such znode."""
    return _Maybe(answer)


class _Agreed:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def get(self, timeout: float) -> None:
        (result,) = self._answer.get(timeout=timeout)
        if isinstance(result, Exception):
            raise result

    def then(self, call: Callable[[], None]) -> None:
        """Have a thread of kazoo call this once a majority has agreed."""

        def answered(answer: Any) -> None:
            if answer.successful() and not isinstance(answer.value[0], Exception):
                call()

        self._answer.rawlink(answered)


def agreed(client: Any, path: str) -> Any:
    """Have a majority agree that the znode exists; raises `NoNodeError` if it does not.

    A later request in the same session is answered by what a majority had agreed on when this was
    sent, or by something newer. ZooKeeper's `sync` makes no such promise: a leader that was deposed
    while it stood still answers it alone, until it notices. This is a transaction, though one that
    changes nothing, and there is no transaction without a majority.
    """
    multi = client.transaction()
    multi.check(path, -1)
    return _Agreed(multi.commit_async())


class _CreateContainer(Create2):  # type: ignore[misc]
    """kazoo knows no containers. They are created and answered as other znodes are."""

    type = 19


_CONTAINER = 4


def _create_container(client: Any, path: str) -> Any:
    answer = client.handler.async_result()
    acl = client.default_acl or OPEN_ACL_UNSAFE
    client._call(_CreateContainer(path, b"", acl, _CONTAINER), answer)
    return answer


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
    """Servers must have a certificate of this authority, for the host name in the URL."""
    try:
        context = ssl.create_default_context(cafile=files.ca)
        if files.cert is not None:
            context.load_cert_chain(files.cert, files.key)
    except ssl.SSLError as error:
        raise ConfigError(f"the files of ca, cert and key can't be used: {error}") from error
    except OSError as error:
        raise ConfigError(f"a file of ca, cert or key can't be read: {error.strerror}") from error
    return context


# kazoo's threads wait for sockets several times for every request. kazoo makes a new epoll for each
# wait: four more system calls. `poll` does it in one.
#
# And kazoo finds out that a server is silent by a ping, which it sends only if it has sent nothing
# else for a while. So it would stay with a frozen server as long as there are new requests.

_READABLE = select.POLLIN | select.POLLPRI
_BROKEN = select.POLLERR | select.POLLHUP | select.POLLNVAL

Sockets = Sequence[Any]


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with a cheaper wait, and with TLS that checks the server's name.

    kazoo's own way to connect checks no names, and trusts the system's authorities besides the
    one that is given. `refused`: why the last server's certificate was not accepted. `patience`:
    after how many seconds without a word the connection is given up, if something was asked.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._context = context
        self.refused: str | None = None
        self.patience = math.inf
        # When the first request was sent since the server has said something.
        self._asked: float | None = None

    def create_connection(
        self, address: tuple[str, int], hostname: str, timeout: float, **_: Any
    ) -> socket.socket:
        """Connect to one server. After any `OSError` kazoo tries the next one."""
        self._asked = None
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
        """Return which can be read from, and which written to. kazoo does not use `others`."""
        # Only kazoo's loop waits for two: the server, and requests that it has to send.
        if len(readers) < 2:
            return self._select(readers, writers, timeout)
        now = time.monotonic()
        left = math.inf if self._asked is None else self._asked + self.patience - now
        wait = min(left, math.inf if timeout is None else timeout)
        found = self._select(readers, writers, None if wait == math.inf else max(0.0, wait))
        server, requests = readers
        if server in found[0]:
            self._asked = None
        elif left <= 0:
            raise KazooTimeoutError("the server does not answer")
        elif requests in found[0] and self._asked is None:
            self._asked = time.monotonic()
        return found

    def _select(
        self, readers: Sockets, writers: Sockets, timeout: float | None
    ) -> tuple[list[Any], list[Any], list[Any]]:
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
