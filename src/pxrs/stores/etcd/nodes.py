"""The nodes of an etcd cluster, asked one after the other until one answers.

A request is sent only over an established connection. So a request that was never handed to a
node is known not to have happened; after every other failure it may have happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pxrs.clock import Clock
from pxrs.config import ServerSettings, TlsFiles
from pxrs.errors import Closed, ConfigError, PxrsError, StoreUnavailable
from pxrs.forks import Origin
from pxrs.stores.etcd.failures import Remedy, remedy, translated
from pxrs.stores.etcd.wire import grpc, rpc

T = TypeVar("T")
Words = list[tuple[str, str]]

# The timeout of one try; then the next node is asked. It doubles with every try that got no answer,
# because the link may be slow; gRPC's keep-alive finds out that a node is frozen.
_TRY = 2.0
# A request that carries much has this much more time, in bytes per second: 256 kbit/s.
_SLOWEST = 32_000
# How long to wait for one node's connection.
_LOOK = 0.5
_PAUSE = 0.05
# How long to ask for the reason why there is no connection, and how much of it is quoted.
_WHY = 0.1
_LONGEST = 300
# A request that the node itself answers, leader or not. gRPC's own way to wait for a connection
# leaves a thread behind that fails when the connection is given up.
_ANYBODY_THERE = rpc.RangeRequest(key=b"\0", serializable=True, count_only=True)
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # etcd disconnects clients that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    # Otherwise gRPC pings only once a minute while nothing else is sent.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Each handle has its own connections.
    ("grpc.use_local_subchannel_pool", 1),
)


class Node:
    """A connection to one node, and the calls of it that are used."""

    def __init__(self, host: str, credentials: Any | None) -> None:
        self.host = host
        if credentials is None:
            self.channel: Any = grpc.insecure_channel(host, _OPTIONS)
        else:
            self.channel = grpc.secure_channel(host, credentials, _OPTIONS)
        # Whether the last request was answered: then the next one probably will be, too.
        self.stands = False
        self.kv = rpc.KVStub(self.channel)
        self.leases = rpc.LeaseStub(self.channel)
        self.watching = rpc.WatchStub(self.channel)
        self.auth = rpc.AuthStub(self.channel)

    def connected(self, timeout: float) -> bool:
        """Wait until the connection is established; returns whether it is."""
        if self.stands:
            return True
        try:
            self.kv.Range(_ANYBODY_THERE, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            # A refusal is an answer, too.
            return remedy(error) is not Remedy.ANOTHER_NODE
        return True

    def trouble(self) -> str:
        """Why there is no connection, in gRPC's words: for instance a refused certificate."""
        try:
            self.kv.Range(_ANYBODY_THERE, timeout=_WHY)
        except grpc.RpcError as error:
            return str(error.details() or "")[:_LONGEST]
        return "it answers again"


class Left(Exception):  # noqa: N818 - what happened
    """Another thread has left this node while this one waited to log in to it."""


class Nodes:
    """All nodes; calls go to one of them until it fails."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        credentials = None if settings.tls is None else _credentials(settings.tls)
        self._nodes = [Node(host, credentials) for host in settings.hosts]
        self._current = 0
        self._token: str | None = None
        self._logging_in = threading.Lock()
        self.origin = Origin()
        self._closed = threading.Event()
        self._failure: PxrsError | None = None
        self._farewell: float | None = None

    @property
    def timeout(self) -> float:
        """The timeout of a request, all nodes together."""
        return self._settings.timeout

    def check_open(self) -> None:
        """Raise `Closed` if the store was closed, or was opened by the parent of this process.

        After `fail`, raise its error.
        """
        if self._closed.is_set():
            raise Closed("the store was closed")
        self.origin.refuse_child()
        if self._failure is not None:
            raise self._failure

    def fail(self, error: PxrsError) -> bool:
        """Refuse everything from now on; returns whether this is the first error of the kind."""
        with self._lock:
            first = self._failure is None
            self._failure = self._failure or error
        return first

    @property
    def failed(self) -> bool:
        """Whether everything is refused, or this process is a fork of the one that opened it."""
        return self._failure is not None or self.origin.is_parent

    def farewell(self) -> float:
        """How many seconds are left to end sessions and slots: `timeout` for all of them together.

        Counted from the first call since a node has answered. What is not ended by then expires by
        itself.
        """
        now = self._clock.monotonic()
        if self._farewell is None:
            self._farewell = now + self.timeout
        return max(0.0, self._farewell - now)

    def ask(self, method: Callable[[Node], Any], request: Any, timeout: float | None = None) -> Any:
        """Send a request as `call` does; returns the answer."""
        return self.call(
            lambda node, left, words: method(node)(request, timeout=left, metadata=words),
            timeout,
            request.ByteSize(),
        )

    def call(
        self,
        send: Callable[[Node, float, Words], T],
        timeout: float | None = None,
        size: int = 0,
    ) -> T:
        """Call `send` until a node has answered; raises `StoreUnavailable` if the time is up.

        The request may be sent several times, so it must be harmless when it is repeated. `size`:
        its bytes.
        """
        self.check_open()
        carrying = size / _SLOWEST
        patience = _TRY + carrying
        timeout = self.timeout if timeout is None else timeout
        deadline = self._clock.monotonic() + timeout + carrying
        while True:
            node = self.stand(deadline)
            words: Words = []
            try:
                words = self.metadata(node, deadline)
                answer = send(node, self._one_try(deadline, patience), words)
            except Left:
                continue
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    patience *= 2
                self._after(node, words, error, deadline)
            except ValueError:
                # gRPC raises this on a connection that was closed meanwhile.
                self.check_open()
                raise
            else:
                node.stands = True
                self._farewell = None
                return answer

    def each(self, method: Callable[[Node], Any], request: Any) -> dict[str, Any | PxrsError]:
        """Ask every node of the URL once; returns the answer, or the error, of each by its host."""
        self.check_open()
        answers: dict[str, Any | PxrsError] = {}
        for node in self._nodes:
            deadline = self._clock.monotonic() + _TRY
            try:
                words = [("hasleader", "true")]
                if self._settings.user is not None:
                    words.append(("token", self._log_in(self.stand(deadline), deadline)))
                answers[node.host] = method(node)(
                    request, timeout=_TRY, metadata=words, wait_for_ready=True
                )
            except grpc.RpcError as error:
                answers[node.host] = translated(error)
            except (PxrsError, Left) as error:
                known = isinstance(error, PxrsError)
                answers[node.host] = error if known else StoreUnavailable("it is not connected")
        return answers

    def stand(self, deadline: float) -> Node:
        """A node with an established connection, if possible the one used last."""
        while True:
            self.check_open()
            node = self._nodes[self._current]
            left = deadline - self._clock.monotonic()
            if node.connected(max(0.0, min(left, _LOOK))):
                return node
            self.leave(node)
            if left <= 0:
                hosts = ", ".join(each.host for each in self._nodes)
                why = "" if self._settings.tls is None else f" over TLS ({node.trouble()})"
                raise StoreUnavailable(f"no etcd node can be reached{why}: {hosts}")

    def leave(self, node: Node) -> None:
        """Use the next node from now on."""
        node.stands = False
        with self._lock:
            if self._nodes[self._current] is node:
                self._current = (self._current + 1) % len(self._nodes)

    def metadata(self, node: Node, deadline: float) -> Words:
        """gRPC metadata for every request: the login token, and "fail if there is no leader".

        Logs in if need be.
        """
        words = [("hasleader", "true")]
        if self._settings.user is not None:
            words.append(("token", self._log_in(node, deadline)))
        return words

    def forget_token(self, words: Words) -> None:
        """Log in again before the next request, if no other thread has done so since."""
        if ("token", self._token) in words:
            self._token = None

    def close(self) -> None:
        """Give up all connections."""
        self._closed.set()
        self.origin.close()
        for node in self._nodes:
            node.channel.close()

    def _log_in(self, node: Node, deadline: float) -> str:
        # One at a time: etcd makes a login expensive on purpose.
        with self._logging_in:
            if self._token is None:
                if node is not self._nodes[self._current]:
                    # The node did not answer the thread before: don't let each thread wait for it.
                    raise Left
                request = rpc.AuthenticateRequest(
                    name=self._settings.user, password=self._settings.password or ""
                )
                answer = node.auth.Authenticate(request, timeout=self._one_try(deadline))
                self._token = str(answer.token)
            return self._token

    def _one_try(self, deadline: float, patience: float | None = None) -> float:
        patience = _TRY if patience is None else patience
        return max(0.0, min(deadline - self._clock.monotonic(), patience))

    def _after(self, node: Node, words: Words, error: Any, deadline: float) -> None:
        """Prepare the next try, or raise the error for the caller."""
        self.check_open()
        kind = remedy(error)
        if kind is Remedy.NEW_TOKEN:
            self.forget_token(words)
        elif kind is Remedy.ANOTHER_NODE:
            self.leave(node)
        if kind is Remedy.NONE or self._clock.monotonic() >= deadline:
            raise translated(error) from error
        self._closed.wait(_PAUSE)


def _credentials(files: TlsFiles) -> Any:
    def read(name: str | None) -> bytes | None:
        try:
            return None if name is None else Path(name).read_bytes()
        except OSError as error:
            raise ConfigError(f"file {name!r} can't be read: {error.strerror}") from error

    return grpc.ssl_channel_credentials(read(files.ca), read(files.key), read(files.cert))
