"""The connection to NATS: requests that fail at once when it breaks, and hints that come by it.

nats-py leaves a request whose connection broke to its timeout. Here every request waits for its
answer or for the loss of the connection, whichever is first, and says whether it may have
reached a server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import msgspec

from pxrs.config import NatsSettings
from pxrs.errors import ConfigError, MissingExtra, StoreUnavailable

try:
    import nats
    import nats.errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
except ImportError as error:
    raise MissingExtra("nats://", "nats") from error

_LOG = logging.getLogger("pxrs.nats")
_LEAST_VERSION = (2, 11)
_CONNECT_TIMEOUT = 3.0
_STATUS = "Status"
_NO_RESPONDERS = "503"
# A connection that says nothing is given up after two of these.
_PING_EVERY = 2


class NotSent(Exception):  # noqa: N818 - not an error by itself: it is tried again
    """The request reached nobody: no connection, or nobody there who answers such requests."""


class NoAnswer(Exception):  # noqa: N818
    """The request went out and no answer came: it may have been carried out."""


class ApiError(Exception):
    """JetStream refused. `err_code` tells why."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code


class _Failure(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class Reply(msgspec.Struct):
    """What every answer of JetStream may have."""

    error: _Failure | None = None

    def check(self) -> None:
        if self.error is not None:
            raise ApiError(self.error.code, self.error.err_code, self.error.description)


class _Call:
    """A request under way. `many`: answers come until one with a status."""

    def __init__(self, many: bool) -> None:
        self.done: asyncio.Future[list[Msg]] = asyncio.get_running_loop().create_future()
        self._many = many
        self._answers: list[Msg] = []

    def take(self, message: Msg) -> None:
        self._answers.append(message)
        ended = not self._many or status_of(message) is not None
        if ended and not self.done.done():
            self.done.set_result(self._answers)

    def fail(self) -> None:
        if not self.done.done():
            self.done.set_exception(NoAnswer("the connection was lost"))


def status_of(message: Msg) -> str | None:
    """The status of a message that the server itself made, None for one of somebody's."""
    return message.headers.get(_STATUS) if message.headers else None


class Wire:
    """One connection, made again whenever it breaks. Used in its loop's thread only."""

    def __init__(self, settings: NatsSettings) -> None:
        self._settings = settings
        self._client = Client()
        self._inbox = ""
        self._tokens = count()
        self._calls: dict[str, _Call] = {}
        self._up = asyncio.Event()
        self._last_error: Exception | None = None
        self._mending: asyncio.Task[None] | None = None
        self._hints: dict[str, Callable[[Msg], None]] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._closed = False
        self.on_reconnect: Callable[[], None] = lambda: None

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    async def open(self) -> None:
        """Connect; `StoreUnavailable` if that can't be done now."""
        try:
            await self._connect()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            why = self._last_error or error
            places = ", ".join(self._settings.shown)
            raise StoreUnavailable(
                f"NATS can't be reached at {places}: {str(why) or repr(why)}"
            ) from error
        version = self._client.connected_server_version
        if (version.major, version.minor) < _LEAST_VERSION:
            await self.close()
            raise ConfigError(f"{version!r}: pxrs needs NATS 2.11 or newer")

    async def request(
        self,
        subject: str,
        payload: bytes,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        *,
        many: bool = False,
    ) -> list[Msg]:
        """The answers; one, or with `many` all up to and including one that has a status.

        Raises `NotSent` if nobody got it, `NoAnswer` if somebody may have.
        """
        if not self._up.is_set():
            await self._wait_until_up(timeout)
        token = str(next(self._tokens))
        call = self._calls[token] = _Call(many)
        try:
            try:
                await self._client.publish(
                    subject, payload, f"{self._inbox}.{token}", dict(headers) if headers else None
                )
            except nats.errors.Error as error:
                raise NotSent(str(error)) from error
            async with asyncio.timeout(timeout):
                answers = await call.done
        except TimeoutError:
            raise NoAnswer(f"no answer within {timeout:g} s") from None
        finally:
            del self._calls[token]
        if status_of(answers[0]) == _NO_RESPONDERS:
            raise NotSent("nobody answers: JetStream is off, or the stream has no leader now")
        return answers

    async def listen(self, subject: str, hint: Callable[[Msg], None]) -> None:
        """Call `hint` with every message on the subject, until `ignore`."""
        self._hints[subject] = hint
        if not self._client.is_closed:
            await self._subscribe(subject)

    async def ignore(self, subject: str) -> None:
        """No more of this subject."""
        self._hints.pop(subject, None)
        subscription = self._subscriptions.pop(subject, None)
        if subscription is not None and not self._client.is_closed:
            try:
                await subscription.unsubscribe()
            except nats.errors.Error as error:
                _LOG.debug("unsubscribing %s: %s", subject, error)

    async def settle(self, timeout: float = 1.0) -> None:
        """Until the server has seen what was sent before; at most this long."""
        if self._up.is_set():
            try:
                await self._client.flush(timeout)  # type: ignore[arg-type]
            except (nats.errors.Error, OSError) as error:
                _LOG.debug("flush: %s", error)

    async def close(self) -> None:
        self._closed = True
        if self._mending is not None:
            self._mending.cancel()
        self._fail_calls()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                await self._client.close()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            _LOG.debug("closing: %s", error)

    async def _connect(self) -> None:
        settings = self._settings
        client = Client()
        await client.connect(
            servers=list(settings.servers),
            name="pxrs",
            error_cb=self._note_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_closed,
            connect_timeout=_CONNECT_TIMEOUT,  # type: ignore[arg-type]
            reconnect_time_wait=0.2,  # type: ignore[arg-type]
            max_reconnect_attempts=1,
            ping_interval=_PING_EVERY,
            max_outstanding_pings=2,
            # While there is no connection nothing is kept back: it would be sent when the
            # caller has long tried again.
            pending_size=0,
            **_security(settings),
        )
        # Once it was there it is tried for ever; at first, a wrong address should be told.
        client.options["max_reconnect_attempts"] = -1
        self._client = client
        self._inbox = client.new_inbox()
        self._subscriptions.clear()
        await client.subscribe(f"{self._inbox}.*", cb=self._on_answer)
        for subject in self._hints:
            await self._subscribe(subject)
        self._up.set()

    async def _subscribe(self, subject: str) -> None:
        async def on_hint(message: Msg) -> None:
            hint = self._hints.get(subject)
            if hint is not None:
                hint(message)

        self._subscriptions[subject] = await self._client.subscribe(subject, cb=on_hint)

    async def _wait_until_up(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._up.wait()
        except TimeoutError:
            raise NotSent(f"no connection: {self._last_error!r}") from None

    async def _on_answer(self, message: Msg) -> None:
        call = self._calls.get(message.subject.rpartition(".")[2])
        if call is not None:
            call.take(message)

    async def _note_error(self, error: Exception) -> None:
        self._last_error = error
        _LOG.debug("nats: %r", error)

    async def _on_disconnect(self) -> None:
        self._up.clear()
        self._fail_calls()

    async def _on_reconnect(self) -> None:
        self._up.set()
        self.on_reconnect()

    async def _on_closed(self) -> None:
        """The server sent us away (authorization, a protocol error): begin anew, patiently."""
        self._up.clear()
        self._fail_calls()
        if not self._closed and (self._mending is None or self._mending.done()):
            self._mending = asyncio.create_task(self._mend())

    async def _mend(self) -> None:
        while not self._closed:
            try:
                await self._connect()
            except (nats.errors.Error, OSError, TimeoutError) as error:
                self._last_error = error
                await asyncio.sleep(1.0)
            else:
                self.on_reconnect()
                return

    def _fail_calls(self) -> None:
        for call in self._calls.values():
            call.fail()


def _security(settings: NatsSettings) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if settings.credentials:
        options["user_credentials"] = settings.credentials
    if settings.nkey:
        options["nkeys_seed"] = settings.nkey
    if settings.tls:
        import ssl

        context = ssl.create_default_context(cafile=settings.tls_ca or None)
        if settings.tls_cert:
            context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
        options["tls"] = context
    return options
