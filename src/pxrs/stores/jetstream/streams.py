"""JetStream's API, one function per request that pxrs makes.

There are two ways to read: from the leader, which knows everything that was acknowledged, one
message at a time; or from any replica, which may be a moment behind but sends many messages at
once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

import msgspec

from pxrs.config import NatsSettings
from pxrs.errors import ConfigError, StoreError, StoreUnavailable
from pxrs.stores.jetstream.failures import (
    NAME_IN_USE,
    NO_MESSAGE,
    NO_STREAM,
    Stale,
    passing,
    translated,
)
from pxrs.stores.jetstream.wire import ApiError, NoAnswer, NotSent, Reply, Wire, status_of

R = TypeVar("R", bound=Reply)
T = TypeVar("T")

ROLLUP = "Nats-Rollup"
TTL = "Nats-TTL"

# How long one try may take before the next: a dead leader does not answer.
TRY = 2.0
# How long it may take in a cluster until every server knows which servers keep a stream.
_GETS_AROUND = 0.2
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)
_MOST_AT_ONCE = 256
# How many bytes are asked for at once: fewer if they take long to arrive. A server closes the
# connection of a client that does not accept its data within ten seconds.
_MOST_BYTES = 8 * 2**20
_FIRST_BYTES = 2**20
_LEAST_BYTES = 2**14
_SOON = 0.5
_LATE = 2.0


class Stored(NamedTuple):
    """A message of a stream."""

    seq: int
    headers: Mapping[str, str]
    data: bytes
    # Empty if a replica has answered.
    subject: str = ""


class _Message(msgspec.Struct):
    seq: int
    subject: str = ""
    hdrs: bytes = b""
    data: bytes = b""


class _Got(Reply):
    message: _Message | None = None


class _Acked(Reply):
    seq: int = 0


class State(msgspec.Struct, frozen=True):
    """A summary of a stream's messages. Any change makes it a different one."""

    messages: int = 0
    bytes: int = 0
    first_seq: int = 0
    last_seq: int = 0
    last_ts: str = ""


class _Config(msgspec.Struct):
    num_replicas: int = 1
    metadata: dict[str, str] = {}


class Info(Reply):
    """A stream's description of itself."""

    config: _Config | None = None
    state: State | None = None
    # The server's time when it answered.
    ts: datetime | None = None


class _Listed(Reply):
    total: int = 0
    streams: tuple[Info, ...] = ()


class Streams:
    """Requests to JetStream on one connection."""

    def __init__(self, wire: Wire, settings: NatsSettings) -> None:
        self.wire = wire
        self.settings = settings
        root = f"$JS.{settings.domain}.API" if settings.domain else "$JS.API"
        self._stream_api = f"{root}.STREAM"
        self._direct = f"{root}.DIRECT.GET"
        self._read_bytes = _FIRST_BYTES

    # Streams

    async def create(self, name: str, config: Mapping[str, Any]) -> Info | None:
        """Make the stream; None if there is one of this name and other settings."""
        try:
            what = {"name": name, **config}
            return await self._ask("CREATE", name, what, Info, refusal=NAME_IN_USE)
        except ApiError:
            return None

    async def info(self, name: str) -> Info | None:
        """The stream, None if there is none.

        In a cluster a server that was just elected, or was deposed and does not know it yet, may
        answer that there is no such stream. That counts only if no server answers for the stream
        itself, either, at two tries: servers learn a little late which of them keeps a stream.
        """
        patience = self.patience()
        doubts = 1 if self._clustered else 0
        while True:
            try:
                return await self._ask("INFO", name, {}, Info, refusal=NO_STREAM)
            except ApiError as error:
                if not await self._is_served(name):
                    if not doubts:
                        return None
                    doubts -= 1
                await patience.pause(error, _GETS_AROUND)

    async def require_majority(self) -> None:
        """Raise `StoreUnavailable` unless a majority of the servers agrees on something now.

        Servers that are cut off from the majority answer from old knowledge, for ten seconds. They
        can't make a stream: so this makes one, and removes it. If the account may have no more
        streams, this shows nothing, and the server's answer is believed.
        """
        if not self._clustered:
            return
        word = secrets.token_hex(6)
        name, prefix = f"{self.settings.prefix}-probe-{word}", self.settings.prefix
        config = {"name": name, "subjects": [f"{prefix}-probe.{word}"], "storage": "file"}
        try:
            await self._ask("CREATE", name, config, Info)
        except StoreUnavailable:
            raise
        except (StoreError, ConfigError):
            return
        with suppress(StoreError, ConfigError, ApiError):
            await self._ask("DELETE", name, {}, Reply, refusal=NO_STREAM)

    async def all(self, subject: str) -> list[Info]:
        """All streams with subjects that match."""
        found: list[Info] = []
        while True:
            which = {"subject": subject, "offset": len(found)}
            page = await self._ask("LIST", "", which, _Listed)
            found += page.streams
            if not page.streams or len(found) >= page.total:
                return found

    async def _is_served(self, name: str) -> bool:
        """Whether any server keeps the stream: such a server answers whether it leads or not."""
        if not self._clustered:
            return False
        try:
            await self.wire.request(f"{self._direct}.{name}", b'{"seq":1}', TRY)
        except NotSent:
            return False
        except NoAnswer:
            return True
        return True

    @property
    def _clustered(self) -> bool:
        return bool(self.wire.server_info().get("cluster"))

    async def delete(self, name: str) -> Exception | None:
        """Ask for the stream's removal, one try. Returns why it may still be there, if it may."""
        try:
            (answer,) = await self.wire.request(f"{self._stream_api}.DELETE.{name}", b"", TRY)
            msgspec.json.decode(answer.data, type=Reply).check()
        except (NotSent, NoAnswer) as error:
            return error
        except ApiError as error:
            if error.err_code != NO_STREAM and not passing(error):
                raise translated(error) from error
            return error
        return None

    async def purge(self, name: str, subject: str, before: int | None = None) -> None:
        """Remove the messages of a subject, those with sequences below `before` if that is given.

        Returns when a majority of the replicas has agreed.
        """
        which = {"filter": subject} if before is None else {"filter": subject, "seq": before}
        await self._ask("PURGE", name, which, Reply, there=True)

    # From the leader

    async def last(self, name: str, subject: str) -> Stored | None:
        """The subject's last message."""
        return await self._get(name, {"last_by_subj": subject})

    async def next(self, name: str, subject: str, seq: int) -> Stored | None:
        """The subject's first message at or after a sequence."""
        return await self._get(name, {"seq": max(1, seq), "next_by_subj": subject})

    async def at(self, name: str, seq: int) -> Stored | None:
        """The message with this sequence."""
        return await self._get(name, {"seq": seq})

    async def _get(self, name: str, which: Mapping[str, Any]) -> Stored | None:
        try:
            got = await self._ask("MSG.GET", name, which, _Got, there=True, refusal=NO_MESSAGE)
        except ApiError:
            return None
        message = got.message
        assert message is not None
        return Stored(message.seq, parse_headers(message.hdrs), message.data, message.subject)

    # From any replica

    async def read(
        self, name: str, subject: str, seq: int, count: int, max_bytes: int
    ) -> tuple[list[Stored], int]:
        """Messages from a sequence on, and how many follow after them."""
        now = asyncio.get_running_loop().time

        async def attempt() -> tuple[list[Stored], int]:
            size = max(1, min(max_bytes, self._read_bytes))
            which = {
                "seq": max(1, seq),
                "next_by_subj": subject,
                "batch": min(count, _MOST_AT_ONCE),
                "max_bytes": size,
            }
            payload = msgspec.json.encode(which)
            began = now()
            try:
                *messages, end = await self.wire.request(
                    f"{self._direct}.{name}", payload, TRY, many=True
                )
            except NoAnswer:
                self._adapt(size, _LATE)
                raise
            self._adapt(size, now() - began)
            status = status_of(end)
            if status not in ("204", "404"):
                raise StoreError(f"NATS answered a read with status {status}")
            pending = int(end.headers.get("Nats-Num-Pending", 0)) if end.headers else 0
            found = [
                Stored(int(each.headers["Nats-Sequence"]), each.headers, each.data)
                for each in messages
                if each.headers
            ]
            return found, pending

        return await self._patiently(name, attempt)

    def _adapt(self, size: int, took: float) -> None:
        """Ask for more bytes at once if the last ones came fast, for fewer if they came late."""
        if took >= _LATE:
            self._read_bytes = max(_LEAST_BYTES, min(self._read_bytes, size // 2))
        elif took < _SOON and size == self._read_bytes:
            self._read_bytes = min(_MOST_BYTES, 2 * size)

    # Writing

    async def publish(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
        timeout: float,
        connection: int | None = None,
    ) -> int:
        """Store a message, one try; its sequence. Raises `NotSent`, `NoAnswer` or `ApiError`."""
        (answer,) = await self.wire.request(subject, data, timeout, headers, connection=connection)
        acked = msgspec.json.decode(answer.data, type=_Acked)
        acked.check()
        return acked.seq

    # Patience

    async def _ask(
        self,
        verb: str,
        name: str,
        what: Mapping[str, Any],
        kind: type[R],
        *,
        there: bool = False,
        refusal: int | None = None,
    ) -> R:
        """Send a request. `there`: the stream that should exist; raises `Stale` if it is gone.

        Raises `ApiError` for the one `refusal` that the caller expects, and translates others.
        """
        payload = msgspec.json.encode(what) if what else b""
        subject = f"{self._stream_api}.{verb}.{name}" if name else f"{self._stream_api}.{verb}"

        async def attempt() -> R:
            (answer,) = await self.wire.request(subject, payload, TRY)
            reply = msgspec.json.decode(answer.data, type=kind)
            reply.check()
            return reply

        try:
            return await self._patiently(name if there else None, attempt)
        except ApiError as error:
            if error.err_code == refusal:
                raise
            raise translated(error) from error

    async def _patiently(self, name: str | None, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try again after temporary failures until the time is up. Only for idempotent calls.

        With a stream's name, it raises `Stale` if the reason is that the stream is gone.
        """
        patience = self.patience()
        while True:
            try:
                return await attempt()
            except (NotSent, NoAnswer) as error:
                why: Exception = error
                if name is not None and isinstance(error, NotSent):
                    await self.require(name)
            except ApiError as error:
                if error.err_code == NO_STREAM and name is not None:
                    await self.require(name)
                elif not passing(error):
                    raise
                why = error
            await patience.pause(why)

    async def require(self, name: str) -> None:
        """Raise `Stale` unless there is such a stream."""
        if await self.info(name) is None:
            raise Stale(name)

    def patience(self) -> Patience:
        return Patience(self.settings.timeout)


class Patience:
    """A deadline: how long one operation keeps trying, counted from now."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._deadline = asyncio.get_running_loop().time() + timeout
        self._pauses = chain(_PAUSES, repeat(_PAUSES[-1]))

    async def pause(self, why: Exception, delay: float | None = None) -> None:
        """Wait before the next try, or raise `StoreUnavailable` if there is no time for it."""
        usual = next(self._pauses)
        delay = usual if delay is None else delay
        if asyncio.get_running_loop().time() + delay >= self._deadline:
            raise StoreUnavailable(
                f"NATS did not carry out a request within {self._timeout:g} s: {why}"
            ) from why
        await asyncio.sleep(delay)


def parse_headers(raw: bytes) -> dict[str, str]:
    """The headers of a message as the leader sends them."""
    headers = {}
    for line in raw.decode(errors="replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name] = value.strip()
    return headers
