"""`connect` and what it returns: the verbs of pxrs on one set of stores."""

from __future__ import annotations

import weakref
from types import TracebackType

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import ProducerSettings
from pxrs.runtime.producer import Producer
from pxrs.runtime.reader import Reader
from pxrs.runtime.topics import TopicInfo, Topics
from pxrs.serde import Serde
from pxrs.stores.api import Stores
from pxrs.stores.open import open_stores
from pxrs.types import Topic

_DEFAULTS = ProducerSettings()


def connect(url: str) -> Pxrs:
    """Open a store, creating it if need be.

    `sqlite:///app.db` (a file shared by processes of one host; `?durability=relaxed`,
    `?busy_timeout=10`), `memory://` (this process only; `memory://name` is shared within it).
    """
    return Pxrs(open_stores(url))


class Pxrs:
    """An open store. Thread-safe; close it, or use it as a context manager."""

    def __init__(self, stores: Stores, clock: Clock = SYSTEM_CLOCK) -> None:
        self.stores = stores
        self._clock = clock
        self._topics = Topics(stores.coord, stores.log, clock)
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()

    @property
    def url(self) -> str:
        """Where the store is."""
        return self.stores.url

    def create_topic(
        self,
        name: str,
        partitions: int,
        *,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> Topic:
        """Make a topic with a fixed number of partitions.

        One that exists just so is returned, one that differs is a `TopicExists`. Retention is
        per partition and drops whole batches, oldest first.
        """
        return self._topics.create(
            name, partitions, retention_ms=retention_ms, retention_bytes=retention_bytes
        )

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        return self._topics.list()

    def describe_topic(self, name: str) -> TopicInfo:
        """A topic and what its partitions hold."""
        return self._topics.describe(name)

    def delete_topic(self, name: str) -> None:
        """Remove a topic and all its messages."""
        self._topics.delete(name)

    def apply_retention(self, name: str) -> None:
        """Drop now what the topic's retention no longer keeps; producers do it as they go."""
        self._topics.retain(self._topics.find(name))

    def producer(
        self,
        *,
        linger: float = _DEFAULTS.linger,
        batch_bytes: int = _DEFAULTS.batch_bytes,
        buffer_bytes: int = _DEFAULTS.buffer_bytes,
        max_message_bytes: int = _DEFAULTS.max_message_bytes,
        max_block: float = _DEFAULTS.max_block,
        delivery_timeout: float = _DEFAULTS.delivery_timeout,
        compression: str = _DEFAULTS.compression,
        partitioner: str = _DEFAULTS.partitioner,
        serde: Serde | None = None,
        key_serde: Serde | None = None,
    ) -> Producer:
        """A producer. `linger`: how long a message may wait for company, in seconds."""
        settings = ProducerSettings(
            linger=linger,
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
            max_message_bytes=max_message_bytes,
            max_block=max_block,
            delivery_timeout=delivery_timeout,
            compression=compression,
            partitioner=partitioner,
        )
        producer = Producer(self._topics, self.stores.log, self._clock, settings, key_serde, serde)
        self._producers.add(producer)
        return producer

    def reader(
        self, topic: str, *, serde: Serde | None = None, key_serde: Serde | None = None
    ) -> Reader:
        """Read a topic without a group."""
        return Reader(self._topics.find(topic), self.stores.log, self._clock, key_serde, serde)

    def close(self) -> None:
        """Flush and close every producer, then the store."""
        for producer in list(self._producers):
            producer.close()
        self.stores.close()

    def __enter__(self) -> Pxrs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
