"""One way to check, route and encode what is sent, by a producer or inside a transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from pxrs.clock import Clock
from pxrs.codec.batches import check_timestamp, encode
from pxrs.config import ProducerSettings
from pxrs.core.routing import hasher
from pxrs.errors import InvalidRequest, MessageTooLarge, PartitionNotFound, quoted
from pxrs.producing.buffer import RECORD_BYTES
from pxrs.serde import Serde, check_serde, to_bytes
from pxrs.topics import Topics
from pxrs.types import Append, Header, LogPartition, Topic

NO_HEADERS: list[Header] = []
_CHUNK = 4096


class Checks:
    """Encodes and checks the messages of one producer or transaction, up to a size."""

    def __init__(
        self, most: int, key_serde: Serde | None = None, value_serde: Serde | None = None
    ) -> None:
        check_serde(key_serde, "key_serde")
        check_serde(value_serde, "serde")
        self._most = most
        self._key_serde = key_serde
        self._value_serde = value_serde
        self._serdes = key_serde is not None or value_serde is not None

    def ready(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[bytes | None, bytes | None]]:
        """The pairs as bytes, checked."""
        ready = []
        most, serdes = self._most, self._serdes
        for pair in pairs:
            try:
                key, value = pair
                if type(key) is str and not serdes:
                    key = key.encode()
            except UnicodeEncodeError:
                key = plain(key, "key")
            except (TypeError, ValueError):
                raise InvalidRequest(
                    f"send_many takes pairs (key, value), not {type(pair).__name__}"
                ) from None
            if type(value) is not bytes or type(key) is not bytes or serdes:
                key, value = self.encode(key, value)
                self.size(key, value, None)
            elif len(value) + len(key) > most:
                self.size(key, value, None)
            ready.append((key, value))
        return ready

    def encode(self, key: Any, value: Any) -> tuple[bytes | None, bytes | None]:
        """Key and value as bytes."""
        if self._key_serde is None or key is None:
            key = plain(key, "key")
        else:
            key = encoded(self._key_serde, key, "key")
        if self._value_serde is None:
            return key, plain(value, "value")
        return key, encoded(self._value_serde, value, "value")

    def size(
        self, key: bytes | None, value: bytes | None, headers: Sequence[Header] | None
    ) -> tuple[int, list[Header]]:
        """Returns the size of the message in the buffer, and its headers; rejects large ones."""
        checked = checked_headers(headers) if headers else NO_HEADERS
        size = len(key or b"") + len(value or b"")
        size += sum(len(name.encode()) + len(content or b"") for name, content in checked)
        if size > self._most:
            raise MessageTooLarge(
                f"the message is {size} bytes long; the limit is {self._most} "
                "(a producer's max_message_bytes sets another one; transactions have this one)"
            )
        return size + RECORD_BYTES, checked


def plain(value: object, what: str) -> bytes | None:
    """The bytes of a value that needs no serde."""
    return None if value is None else to_bytes(value, what)


def encoded(serde: Serde, value: object, what: str) -> bytes:
    """Encodes a value with the serde."""
    data = serde.encode(value)
    if not isinstance(data, bytes):
        raise InvalidRequest(f"the serde made a {type(data).__name__} of a {what}, not bytes")
    return data


def chunks(messages: Iterable[tuple[Any, Any]]) -> Iterable[Iterable[tuple[Any, Any]]]:
    """A list in one piece, an iterator in pieces that need not be kept in memory together."""
    if isinstance(messages, list | tuple):
        yield messages
        return
    if isinstance(messages, Mapping | str | bytes) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            f"send_many takes pairs (key, value), not a {type(messages).__name__}; "
            "of a dict that would be its items()"
        )
    rest = iter(messages)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk


def checked_headers(headers: object) -> list[Header]:
    """The headers as the codec needs them."""
    if not isinstance(headers, list | tuple):
        raise InvalidRequest(
            f"headers are a list of pairs, a str and bytes (or None), not {type(headers).__name__}"
        )
    for header in headers:
        if (
            not isinstance(header, list | tuple)
            or len(header) != 2
            or not isinstance(header[0], str)
            or not isinstance(header[1], bytes | None)
        ):
            raise InvalidRequest(
                f"a header must be a pair of a str and bytes (or None), got {quoted(header)}"
            )
        to_bytes(header[0], "header name")
    return [(name, content) for name, content in headers]


def check_partition(topic: Topic, partition: object) -> None:
    """Refuse a value that is no partition of the topic, such as a bool or a numeral."""
    if type(partition) is not int or not 0 <= partition < topic.partitions:
        raise PartitionNotFound(topic.name, partition, topic.partitions)


_MOST_BYTES = ProducerSettings().max_message_bytes
_Record = tuple[bytes | None, bytes | None, list[Header], int]


class Outgoing:
    """The messages of a transaction. They carry no producer id: a rollback would leave a gap."""

    def __init__(
        self,
        topics: Topics,
        clock: Clock,
        key_serde: Serde | None = None,
        value_serde: Serde | None = None,
    ) -> None:
        self._topics = topics
        self._clock = clock
        self._checks = Checks(_MOST_BYTES, key_serde, value_serde)
        self._known: dict[str, Topic] = {}
        self._records: defaultdict[LogPartition, list[_Record]] = defaultdict(list)
        self._keyless = 0

    def send(
        self,
        topic: str,
        value: Any,
        key: Any,
        partition: int | None,
        headers: Sequence[Header] | None,
        timestamp: int | None = None,
    ) -> None:
        """Add a message; bad input raises here, not at the end."""
        if timestamp is not None:
            check_timestamp(timestamp)
        if topic not in self._known:
            self._known[topic] = self._topics._find_writable(topic)
        found = self._known[topic]
        key, value = self._checks.encode(key, value)
        _, checked = self._checks.size(key, value, headers)
        if partition is None:
            partition = self._route(found, key)
        else:
            check_partition(found, partition)
        at = self._clock.wall_ms() if timestamp is None else timestamp
        record = key, value, checked, at
        self._records[LogPartition(found.id, partition)].append(record)

    def appends(self) -> list[Append]:
        """One batch per partition, sorted: transactions that meet never wait in a circle."""
        return [Append(where, encode(self._records[where])) for where in sorted(self._records)]

    def _route(self, topic: Topic, key: bytes | None) -> int:
        if key is not None:
            return hasher(topic.partitioner, topic.partitions)(key) % topic.partitions
        self._keyless += 1
        return self._keyless % topic.partitions
