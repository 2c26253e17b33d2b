"""The connection to NATS: requests that fail at once when it breaks, and hints that come by it.

nats-py leaves a request whose connection broke to its timeout. Here every request waits for its
answer or for the loss of the connection, whichever is first, and the error shows whether it may
have reached a server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import ssl
from collections.abc import Callable, Coroutine, Mapping
from itertools import count
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

import nats
from pxrs.chance import CHANCE
from pxrs.config import NatsSettings, TlsFiles
from pxrs.errors import ConfigError, MissingExtra, StoreUnavailable
from pxrs.stores.jetstream import link
from pxrs.stores.jetstream.entries import SEQUENCE

_LOG = logging.getLogger("pxrs.nats")
_LEAST_VERSION = (2, 11)
_CONNECT_TIMEOUT = 3
# The beginnings of both parts of a file with credentials.
_MARKS = ("BEGIN NATS USER JWT", "BEGIN USER NKEY SEED")
_STATUS = "Status"
_NO_RESPONDERS = "503"
_PAUSE = 0.2
_PING_EVERY = 1.5
_PING_PATIENCE = 4
# If no byte has moved for this long when an answer is overdue, stop waiting for it.
_SILENCE = 1.0


class NotSent(Exception):  # noqa: N818 - not an error by itself: it is tried again
    """The request reached no server: there is no connection, or no server answers such requests."""


class NoAnswer(Exception):  # noqa: N818
    """The request went out and no answer came: it may have been carried out."""


class ApiError(Exception):
    """JetStream refused. `err_code` is the reason."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code


class _Failure(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class Reply(msgspec.Struct):
    """Fields that every answer of JetStream may have."""

    error: _Failure | None = None

    def check(self) -> None:
        if self.error is not None:
            raise ApiError(self.error.code, self.error.err_code, self.error.description)


class _Call:
    """A request under way. `many`: several answers come, the last one with a status."""

    def __init__(self, many: bool) -> None:
        self.done: asyncio.Future[list[Msg]] = asyncio.get_running_loop().create_future()
        self._many = many
        self._answers: list[Msg] = []

    @property
    def heard(self) -> int:
        return len(self._answers)

    def take(self, message: Msg) -> None:
        if self.done.done():
            # After an election two servers may answer: the new leader and the old one.
            return
        self._answers.append(message)
        ended = not self._many or status_of(message) is not None
        if ended:
            self.done.set_result(self._answers)

    def fail(self) -> None:
        if not self.done.done():
            self.done.set_exception(NoAnswer("the connection was lost"))


def status_of(message: Msg) -> str | None:
    """The status of a message that the server itself made; None for a client's message.

    Any program can store a message with such a header: the server adds where that is stored.
    """
    headers = message.headers
    return headers.get(_STATUS) if headers and SEQUENCE not in headers else None


class _NoTls(nats.errors.Error):
    """The server did not offer TLS, which the settings demand."""


class _TlsClient(Client):
    """nats-py's client, changed to send nothing to a server before TLS is on.

    Unchanged, it uses TLS only if the server's greeting asks for it, which anyone on the way can
    change, and then sends the password in the clear.
    """

    def _connect_command(self) -> bytes:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is None or writer.get_extra_info("ssl_object") is None:
            raise _NoTls(
                "its greeting does not ask for TLS, but the URL has tls=true; configure TLS on "
                "the server, or find out who answers in its place"
            )
        command: bytes = super()._connect_command()
        return command


class Wire:
    """One connection, made again whenever it breaks. Used in its loop's thread only.

    nats-py's own reconnecting is off: it waits for a silent connection to accept data that can no
    longer be sent, and leaves the sockets of failed attempts open.
    """

    def __init__(self, settings: NatsSettings) -> None:
        self._settings = settings
        self._security = _security(settings)
        self._servers = list(settings.hosts)
        self._client: Client | None = None
        self._inbox = ""
        self._tokens = count()
        self._calls: dict[str, _Call] = {}
        self._up = asyncio.Event()
        # Why there is no connection, and what nats-py has noted in the present attempt.
        self._last_error: Exception | None = None
        self._noted: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._hints: dict[str, Callable[[Msg], None]] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._closed = False
        self.max_payload = 0
        # How many connections there were: a server that lost something was away before.
        self.connections = 0
        self.on_reconnect: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """Connect; raises `StoreUnavailable` if that can't be done now, `ConfigError` if never."""
        if not await self._connect_to_one():
            if isinstance(self._last_error, ConfigError):
                raise self._last_error
            places = ", ".join(self._settings.hosts)
            raise StoreUnavailable(f"NATS can't be reached at {places}: {self._why_not()}")
        self._start(self._watch_over())

    async def request(
        self,
        subject: str,
        payload: bytes,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        *,
        many: bool = False,
        connection: int | None = None,
    ) -> list[Msg]:
        """Send a request; returns one answer, or with `many` all up to the one with a status.

        Raises `NotSent` if no server got it, or if this is not the `connection` that is meant any
        more; `NoAnswer` if one may have. `timeout` counts from when the server has got it, or from
        the last of many answers, however slow the link is.
        """
        client = self._client
        if client is None or not self._up.is_set():
            client = await self._wait_until_up(timeout)
        if connection not in (None, self.connections):
            raise NotSent("the connection is another one now")
        token = str(next(self._tokens))
        call = self._calls[token] = _Call(many)
        try:
            try:
                await client.publish(
                    subject, payload, f"{self._inbox}.{token}", dict(headers) if headers else None
                )
            except nats.errors.Error as error:
                raise NotSent(str(error)) from error
            answers = await self._answers(client, call, timeout)
        finally:
            del self._calls[token]
        if status_of(answers[0]) == _NO_RESPONDERS:
            raise NotSent("no server answers: JetStream is off, or the stream has no leader now")
        return answers

    async def _answers(self, client: Client, call: _Call, timeout: float) -> list[Msg]:
        """Wait until the answers have come, or can no longer be on the link.

        The answer to a ping shows that the server has got the request, and that all it had sent by
        then has arrived. If that takes long, the request gets its whole time again from then on.
        The second ping shows that an answer of that time would have arrived, too.
        """
        now = asyncio.get_running_loop().time
        for _ in range(2):
            heard = -1
            while heard < call.heard and not call.done.done():
                heard = call.heard
                await asyncio.wait({call.done}, timeout=timeout)
            if not call.done.done():
                asked = now()
                try:
                    is_alive = await link.answers(client, _SILENCE, call.done)
                except (nats.errors.Error, OSError):
                    is_alive = False
                # nats-py's pings overtake data that it has not handed to the system yet.
                is_idle = now() - asked < timeout / 4 and not client.pending_data_size
                if not call.done.done() and (not is_alive or is_idle):
                    break
            if call.done.done():
                return call.done.result()
        raise NoAnswer(f"no answer within {timeout:g} s")

    def tell(self, subject: str, payload: bytes) -> None:
        """Publish a message to the present subscribers; lost if there is no connection."""
        if self._client is not None and self._up.is_set():
            self._start(self._tell(self._client, subject, payload))

    async def _tell(self, client: Client, subject: str, payload: bytes) -> None:
        try:
            await client.publish(subject, payload)
        except nats.errors.Error as error:
            _LOG.debug("telling %s: %s", subject, error)

    def server_info(self) -> dict[str, Any]:
        """The server's description of itself, as it was sent when the connection was made."""
        return dict(self._client._server_info) if self._client is not None else {}

    async def listen(self, subject: str, hint: Callable[[Msg], None]) -> None:
        """Call `hint` with every message on the subject, until `ignore`."""
        self._hints[subject] = hint
        if self._client is not None and self._up.is_set():
            await self._subscribe(self._client, subject)

    async def ignore(self, subject: str) -> None:
        """Stop listening to this subject."""
        self._hints.pop(subject, None)
        subscription = self._subscriptions.pop(subject, None)
        if subscription is not None and self._up.is_set():
            try:
                await subscription.unsubscribe()
            except nats.errors.Error as error:
                _LOG.debug("unsubscribing %s: %s", subject, error)

    async def settle(self) -> None:
        """Wait until the server has got everything that was sent, or no byte moves any more."""
        if self._client is not None and self._up.is_set():
            try:
                await link.answers(self._client, _SILENCE)
            except (nats.errors.Error, OSError) as error:
                _LOG.debug("flush: %s", error)

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._fail_calls()
        if self._client is not None:
            await self._discard(self._client)

    # Connecting

    async def _connect_to_one(self) -> bool:
        """Connect to the first server that can be reached, in random order."""
        refusal: ConfigError | None = None
        for server in CHANCE.sample(self._servers, len(self._servers)):
            client = Client() if self._settings.tls is None else _TlsClient()
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT):
                    await self._connect(client, server)
            except Exception as error:  # noqa: BLE001 - else nothing would ever try again
                why = self._better_reason(client, self._showable(error))
                refusal = why if isinstance(why, ConfigError) else refusal
                self._last_error = refusal or why
                await self._discard(client)
            except BaseException:
                await self._discard(client)
                raise
            else:
                return True
        return False

    def _showable(self, error: Exception) -> Exception:
        """The error as callers may see it. The text of an unexpected one may quote a login."""
        if isinstance(error, nats.errors.Error | OSError | ConfigError):
            return error
        file, kind = self._settings.credentials or self._settings.nkey, type(error).__name__
        if file is not None:
            return ConfigError(f"connecting with the login in file {file!r} failed: {kind}")
        return nats.errors.Error(f"connecting failed: {kind}")

    def _why_not(self) -> str:
        """Why there is no connection."""
        return str(self._last_error) or repr(self._last_error)

    def _better_reason(self, client: Client, error: Exception) -> Exception:
        """The real reason of a failure: nats-py's last error is often only that it gave up."""
        noted = self._noted
        if isinstance(noted, nats.errors.AuthorizationError):
            return noted
        info = getattr(client, "_server_info", None) or {}
        if isinstance(error, _NoTls | ConfigError):
            return error
        if info.get("auth_required") and not isinstance(error, nats.errors.AuthorizationError):
            return nats.errors.Error(f"it demands authorization and closed the connection: {error}")
        if isinstance(error, nats.errors.NoServersError) and noted is not None:
            return noted
        return error

    async def _connect(self, client: Client, server: str) -> None:
        async def on_closed() -> None:
            self._lose(client)

        self._noted = None
        login = _login(self._settings)
        await client.connect(
            servers=[f"nats://{server}"],
            name="pxrs",
            error_cb=self._note_error,
            closed_cb=on_closed,
            connect_timeout=_CONNECT_TIMEOUT,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            **self._security,
            **login,
        )
        version = client.connected_server_version
        if (version.major, version.minor) < _LEAST_VERSION:
            raise ConfigError(f"{version!r}: pxrs needs NATS 2.11 or newer")
        self._inbox = client.new_inbox()
        self._subscriptions.clear()
        await client.subscribe(f"{self._inbox}.*", cb=self._on_answer)
        for subject in self._hints:
            await self._subscribe(client, subject)
        self._learn_servers(client)
        self.max_payload = int(client.max_payload)
        self._client = client
        self.connections += 1
        self._up.set()

    def _learn_servers(self, client: Client) -> None:
        """Learn the other nodes of the cluster, which the server announces."""
        if self._settings.tls:
            return  # The names in their certificates are not known.
        for found in client.discovered_servers:
            if found.netloc not in self._servers:
                self._servers.append(found.netloc)

    async def _subscribe(self, client: Client, subject: str) -> None:
        async def on_hint(message: Msg) -> None:
            hint = self._hints.get(subject)
            if hint is not None:
                hint(message)

        self._subscriptions[subject] = await client.subscribe(subject, cb=on_hint)

    async def _wait_until_up(self, timeout: float) -> Client:
        try:
            async with asyncio.timeout(timeout):
                await self._up.wait()
        except TimeoutError:
            raise NotSent(f"no connection: {self._why_not()}") from None
        assert self._client is not None
        return self._client

    async def _on_answer(self, message: Msg) -> None:
        call = self._calls.get(message.subject.rpartition(".")[2])
        if call is not None:
            call.take(message)

    async def _note_error(self, error: Exception) -> None:
        self._noted = self._last_error = error
        _LOG.debug("nats: %r", error)

    # Losing and mending

    def _lose(self, client: Client) -> None:
        """Give up this connection and begin another."""
        if client is not self._client or not self._up.is_set():
            return
        self._up.clear()
        self._fail_calls()
        if not self._closed:
            self._start(self._mend(client))

    async def _mend(self, lost: Client) -> None:
        await self._discard(lost)
        while not await self._connect_to_one():
            await asyncio.sleep(_PAUSE)
        self.on_reconnect()

    async def _watch_over(self) -> None:
        """Ping now and then: only that shows that a silent connection is dead."""
        while True:
            await asyncio.sleep(_PING_EVERY)
            client = self._client
            if client is None or not self._up.is_set():
                continue
            try:
                is_alive = await link.answers(client, _PING_PATIENCE)
                why: Exception = nats.errors.Error("the server did not answer")
            except Exception as error:  # noqa: BLE001 - else nothing would ever ping again
                is_alive, why = False, self._showable(error)
            if not is_alive and client is self._client:
                self._last_error = why
                self._lose(client)

    async def _discard(self, client: Client) -> None:
        """Close without waiting for data that can no longer be sent.

        nats-py has no way to do that: closing waits until all data was accepted. So the socket
        under it is closed first.
        """
        writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
        if writer is not None:
            client._pending, client._pending_data_size = [], 0
            writer.transport.abort()
        try:
            async with asyncio.timeout(1):
                await client.close()
        except Exception as error:  # noqa: BLE001 - it is given up in any case
            _LOG.debug("closing: %r", error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fail_calls(self) -> None:
        for call in self._calls.values():
            call.fail()


def _security(settings: NatsSettings) -> dict[str, Any]:
    """Settings of the connection in nats-py's form, but for logins in files."""
    options: dict[str, Any] = {}
    if settings.credentials is not None or settings.nkey is not None:
        _require_nkeys()
    if settings.password is None:
        options["token"] = settings.user
    else:
        options |= {"user": settings.user, "password": settings.password}
    if settings.tls is not None:
        options["tls"] = _tls(settings.tls)
    return options


def _login(settings: NatsSettings) -> dict[str, Any]:
    """Logins in files, in nats-py's form. Read for each connection: they may be replaced.

    nats-py is given their text: it reads a file twice, and without end if there is no JWT in it.
    """
    options: dict[str, Any] = {}
    if settings.credentials is not None:
        text = _text_of(settings.credentials)
        if not all(mark in text for mark in _MARKS):
            raise ConfigError(f"file {settings.credentials!r} must have a user's JWT and seed")
        options["user_credentials"] = RawCredentials(text)
    if settings.nkey is not None:
        options["nkeys_seed_str"] = _text_of(settings.nkey)
    return options


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"file {path!r} can't be read: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"file {path!r} must be text") from None


def _tls(files: TlsFiles) -> ssl.SSLContext:
    for file in (files.ca, files.cert, files.key):
        if file is not None:
            _require_file(file)
    try:
        context = ssl.create_default_context(cafile=files.ca)
        if files.cert is not None:
            context.load_cert_chain(files.cert, files.key)
    except ssl.SSLError as error:
        raise ConfigError(f"the TLS files can't be used: {error}") from error
    return context


def _require_file(path: str) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise ConfigError(f"file {path!r} can't be read: {error.strerror}") from error


def _require_nkeys() -> None:
    if importlib.util.find_spec("nkeys") is None:
        raise MissingExtra("credentials= or nkey= of nats://", "nats")
