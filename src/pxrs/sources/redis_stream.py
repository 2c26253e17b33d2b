"""A stream of Redis or Valkey, as a source.

The server gives ids that rise and commits one command at a time, so an entry is final as soon as
it can be read. An id, milliseconds and a counter, is one integer here.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from pxrs.errors import (
    Closed,
    ConfigError,
    InvalidRequest,
    MissingExtra,
    OffsetOutOfRange,
    SourceChanged,
    StoreUnavailable,
    quoted,
)
from pxrs.forks import Origin
from pxrs.sources.api import LastKeys, SourceRead
from pxrs.sources.rows import READ_BYTES, RowsPerRead, as_json, named
from pxrs.stores.api import Watch
from pxrs.stores.wakeups import Wakeups
from pxrs.types import Bounds, Row
from pxrs.urls import about_options, public, take_apart

if TYPE_CHECKING:
    from redis import Redis

# Counters of four million entries in a millisecond, and times until 2039.
_COUNTER_BITS = 22
_COUNTERS = (1 << _COUNTER_BITS) - 1
_TIMES = (1 << (63 - _COUNTER_BITS)) - 1
# Milliseconds that a blocking read lasts, and seconds between two of them.
_BLOCK_MS = 1000
_PAUSE, _TROUBLE = 0.002, 0.5
_TIMEOUT = 10.0
# Entries that are asked for at a time where they are only counted.
_COUNTED_AT_A_TIME = 500


@dataclasses.dataclass(frozen=True)
class RedisStream:
    """A stream at a server of Redis 7, Valkey or newer: `redis://host:6379/0`, `rediss://…`.

    `key` names the field whose entries stay in order; without it all are in one partition. `value`
    is one field, or several, which become a JSON object of texts; without it all fields do. The
    time is that of the entry's id. Offsets are ids: milliseconds × 2²² + counter.

    Entries that were trimmed are out of range; those deleted one by one are gaps. A replica that is
    promoted may lack entries that were read already: then `SourceChanged` stops the readers, if its
    last id is lower. It needs `pip install 'pxrs[redis]'`.
    """

    url: str
    stream: str
    key: str | None = None
    value: str | Sequence[str] | None = None

    partitioner = "xxhash"

    def __post_init__(self) -> None:
        url = take_apart(self.url)
        if url.scheme not in ("redis", "rediss"):
            raise InvalidRequest(
                f"url must look like redis://host:6379 or rediss://host:6379, got {url.scheme}://"
            )
        for name in (self.stream, self.key, *self.values):
            if name is not None and (not isinstance(name, str) or not name):
                raise InvalidRequest(
                    f"streams and fields must be named by text, got {quoted(name)}"
                )

    @property
    def values(self) -> tuple[str, ...]:
        return named(self.value)

    def settings(self) -> dict[str, Any]:
        """The settings that are kept with the virtual topic; without a password."""
        kept: dict[str, Any] = {
            "kind": "redis_stream",
            "url": public(self.url),
            "stream": self.stream,
            "key": self.key,
            "value": list(self.value) if isinstance(self.value, list | tuple) else self.value,
        }
        return {name: value for name, value in kept.items() if value is not None}

    def __repr__(self) -> str:
        return f"RedisStream({self.settings()})"

    def open(self, store_url: str) -> OpenRedisStream:
        """Return the source, which connects when it is used."""
        try:
            import redis
        except ImportError as error:
            raise MissingExtra("RedisStream", "redis") from error

        url = take_apart(self.url)
        # Older versions of the client do not check the name by themselves.
        checks_name = url.scheme == "rediss" and "ssl_check_hostname" not in url.options
        more: dict[str, Any] = {"ssl_check_hostname": True} if checks_name else {}

        def connect(*, single: bool) -> Redis:
            client = redis.Redis.from_url(
                url.whole,
                single_connection_client=single,
                socket_timeout=_TIMEOUT + _BLOCK_MS / 1000,
                socket_connect_timeout=_TIMEOUT,
                decode_responses=False,
                **more,
            )
            # The client itself looks at some of the options only when it connects.
            pool = client.connection_pool
            pool.connection_class(**pool.connection_kwargs)
            return client

        try:
            return OpenRedisStream(self, connect)
        except (TypeError, ValueError) as error:
            said = about_options(self.url, f"the client does not take an option: {error}")
            raise ConfigError(f"{public(self.url)}: {said}") from None


class _Place(NamedTuple):
    """An offset, and how many entries were ever added below it."""

    offset: int
    entries: int


class _Info(NamedTuple):
    """The state of the stream as the server reports it.

    From `start` on nothing was removed, but for entries that were deleted one by one; `end` is
    above the last id.
    """

    start: _Place
    end: _Place


_NOTHING = _Info(_Place(0, 0), _Place(0, 0))


class OpenRedisStream:
    """See `Source`."""

    streams = 1

    def __init__(self, stream: RedisStream, connect: Callable[..., Redis]) -> None:
        self.stream = stream
        self._origin = Origin("source")
        self._lock = threading.RLock()
        self._connect = connect
        self._client = connect(single=False)
        self._rows = RowsPerRead()
        self._row = _maker(stream)
        # As of the last look.
        self._seen = _NOTHING
        self._wakeups: Wakeups[None] = Wakeups(threading.RLock())
        self._listener: _Listener | None = None
        self._closed = False

    def check(self) -> None:
        """Refuse a server or a stream that can't be read."""
        with self._use():
            info = self._client.xinfo_stream(self.stream.stream) if self._exists() else None
            if info is not None:
                self._told(info)

    def _exists(self) -> bool:
        kind: Any = self._client.type(self.stream.stream)
        if kind not in (b"stream", b"none"):
            raise ConfigError(f"{self.stream.stream!r} is a {kind.decode()}, not a stream")
        return bool(kind == b"stream")

    def read(self, stream: int, offset: int, limit: int, until: int | None = None) -> SourceRead:
        with self._use():
            most = min(limit, self._rows.count)
            last = "+" if until is None else _id_of(max(until - 1, 0))
            # In one transaction: entries that come after the look are above the end that it saw.
            pipeline = self._client.pipeline(transaction=True)
            pipeline.xinfo_stream(self.stream.stream)
            pipeline.xrange(self.stream.stream, _id_of(offset), last, count=most)
            told, entries = pipeline.execute(raise_on_error=False)
            info = self._told(told)
            if isinstance(entries, Exception):
                raise entries
            start, end = info.start.offset, info.end.offset
            if offset < start:
                raise OffsetOutOfRange(self.stream.stream, 0, offset, start, end)
            end = end if until is None else min(end, until)
            rows = [self._row(_offset_of(entry), fields) for entry, fields in entries]
            fitting = self._rows.fitting(rows)
            if fitting == len(rows) and len(entries) < most:
                return SourceRead(rows, max(end, offset), self._rows.size)
            return SourceRead(rows[:fitting], rows[fitting - 1].offset + 1, self._rows.size)

    def last_keys(
        self, stream: int, start: int, end: int, limit: int, partition: int | None = None
    ) -> LastKeys | None:
        """See `TellsLastKeys`. The server sends whole entries, so these are a few megabytes."""
        if partition is not None:
            return None
        rows: list[Row] = []
        low, size = end, 0
        while low > start and len(rows) < limit and size < READ_BYTES:
            with self._use():
                entries: Any = self._client.xrevrange(
                    self.stream.stream, _id_of(low - 1), _id_of(start), count=_COUNTED_AT_A_TIME
                )
            more = [self._row(_offset_of(entry), fields) for entry, fields in entries]
            size += sum(len(row.value or b"") for row in more)
            rows += more
            low = more[-1].offset if len(more) == _COUNTED_AT_A_TIME else start
        return LastKeys([(row.offset, row.key) for row in reversed(rows)], low)

    def bounds(self, stream: int) -> Bounds:
        with self._use():
            info = self._look()
            return Bounds(info.start.offset, info.end.offset)

    def final(self, stream: int) -> int | None:
        with self._use():
            return self._look().end.offset

    def offset_at(self, stream: int, timestamp: int) -> int | None:
        with self._use():
            first = f"{max(0, timestamp)}-0"
            found = self._client.xrange(self.stream.stream, first, "+", count=1)
            return _offset_of(found[0][0]) if found else None

    def _look(self) -> _Info:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.xinfo_stream(self.stream.stream)
        return self._told(pipeline.execute(raise_on_error=False)[0])

    def _told(self, told: Mapping[str, Any] | Exception) -> _Info:
        """The server's answer; raises `SourceChanged` if the stream has less than it had before."""
        info = self._info(told)
        before, end = self._seen.end, info.end
        if end.offset < before.offset or end.entries < before.entries:
            raise SourceChanged(
                f"stream {self.stream.stream!r} was read up to {_id_of(max(before.offset - 1, 0))}"
                f", and its last id is {_id_of(max(end.offset - 1, 0))} now, of {end.entries} "
                "entries: it was deleted, restored or made anew, or a replica that lacks entries "
                "was promoted. Detach the topic and attach the stream under another name, or "
                "reset the groups to where they are to go on"
            )
        self._seen = info
        return info

    def _info(self, told: Mapping[str, Any] | Exception) -> _Info:
        if isinstance(told, Exception):
            if "no such key" in str(told):
                return _NOTHING
            raise told
        if "entries-added" not in told:
            raise ConfigError(
                "the server must be Redis 7, Valkey or newer: this one does not report how many "
                "entries were removed from a stream"
            )
        added = told["entries-added"]
        end = _Place(_offset_of(told["last-generated-id"]) + 1 if added else 0, added)
        return _Info(self._start(told, end), end)

    def _start(self, told: Mapping[str, Any], end: _Place) -> _Place:
        """The first place from which on nothing was trimmed.

        The server reports how many entries were removed, not which. They are trimmed from the
        front: as long as there are as many as were added since a place, they are those. Readers
        that were at the end at the last look go on there, though all before it may be gone by now.
        """
        length, first = told["length"], told["first-entry"]
        places = [
            place
            for place in (_Place(0, 0), self._seen.start, self._seen.end)
            if length >= end.entries - place.entries
        ]
        first = _Place(_offset_of(first[0]), end.entries - length) if first else end
        return min([first, *places])

    def watch(self) -> Watch:
        with self._use():
            if self._listener is None:
                # From here on: a watch that is handed out is woken by all that comes later.
                end = self._look().end.offset
                client = self._connect(single=True)
                self._listener = _Listener(client, self.stream.stream, end, self._ring)
            return self._wakeups.watch(lambda _: True)

    def _ring(self) -> None:
        self._wakeups.ring([None])

    def close(self) -> None:
        if self._origin.is_parent:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            listener = self._listener
        if listener is not None:
            listener.close(self._client)
        self._client.close()
        self._ring()

    @contextmanager
    def _use(self) -> Iterator[None]:
        from redis.exceptions import (
            AuthenticationError,
            AuthorizationError,
            NoPermissionError,
            RedisError,
            ResponseError,
        )

        self._origin.refuse_child()
        with self._lock:
            if self._closed:
                raise Closed(f"the source over stream {self.stream.stream!r} was closed")
            try:
                yield
            except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
                raise ConfigError(
                    f"{public(self.stream.url)} refuses: {error}; attach the stream with a URL "
                    "that has a user and password, in each process: they are not kept"
                ) from error
            except ResponseError as error:
                raise ConfigError(
                    f"stream {self.stream.stream!r} can't be read: {error}"
                ) from error
            except (RedisError, OSError) as error:
                raise StoreUnavailable(
                    f"{public(self.stream.url)} can't be reached: {error}"
                ) from error


class _Listener:
    """A thread in a blocking read, which wakes the watches when an entry comes."""

    def __init__(self, client: Redis, stream: str, end: int, ring: Callable[[], None]) -> None:
        self._client = client
        self._stream = stream
        self._last: Any = _id_of(max(end - 1, 0))
        self._ring = ring
        self._ended = threading.Event()
        self._id: int | None = None
        self._thread = threading.Thread(target=self._run, name="pxrs-redis-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from redis.exceptions import RedisError

        # It has one connection, whose id is known: `close` ends its read by that id.
        client = self._client
        while not self._ended.is_set():
            try:
                if self._id is None:
                    self._id = client.client_id()
                found = client.xread({self._stream: self._last}, count=1, block=_BLOCK_MS)
                if found:
                    self._last = self._newest(client)
                    self._ring()
                    # Many may come at once: one look is enough for all.
                    self._ended.wait(_PAUSE)
            except (RedisError, OSError):
                self._id = None
                # Wakes readers, whose reads raise the error.
                self._ring()
                self._ended.wait(_TROUBLE)

    def _newest(self, client: Any) -> Any:
        newest = client.xrevrange(self._stream, count=1)
        return newest[0][0] if newest else self._last

    def close(self, other: Redis) -> None:
        self._ended.set()
        with suppress(Exception):
            if self._id is not None:
                other.client_unblock(self._id)
        self._thread.join(_TIMEOUT)
        self._client.close()


def _id_of(offset: int) -> str:
    return f"{offset >> _COUNTER_BITS}-{offset & _COUNTERS}"


def _offset_of(entry: Any) -> int:
    """The offset of an entry's id."""
    text = entry.decode() if isinstance(entry, bytes) else str(entry)
    time, counter = map(int, text.split("-"))
    if time > _TIMES or counter > _COUNTERS:
        raise ConfigError(
            f"the id {text} does not fit into an offset: ids must be milliseconds up to {_TIMES}, "
            f"with a counter up to {_COUNTERS}"
        )
    return time << _COUNTER_BITS | counter


def _maker(stream: RedisStream) -> Callable[[int, Mapping[bytes, bytes]], Row]:
    """Returns a function that makes a row of an entry."""
    key = None if stream.key is None else stream.key.encode()
    names = [name.encode() for name in stream.values]
    single = names[0] if isinstance(stream.value, str) else None

    def row(offset: int, fields: Mapping[bytes, bytes]) -> Row:
        if single is not None:
            value = fields.get(single)
        else:
            value = as_json({_text(name): _text(fields.get(name)) for name in names or fields})
        of_key = None if key is None else fields.get(key)
        return Row(offset, offset >> _COUNTER_BITS, of_key, value)

    return row


def _text(value: bytes | None) -> str | None:
    """Bytes that are no text stay recognizable, and make no entry unreadable."""
    return None if value is None else value.decode(errors="backslashreplace")
