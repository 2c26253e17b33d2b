"""What happens to a message on which the handler has failed for the last time."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from pxrs.config import check_topic_name
from pxrs.errors import TopicExists
from pxrs.runtime.producer import Producer
from pxrs.runtime.topics import Topics
from pxrs.types import Header, Message


class DeadLetter(msgspec.Struct, frozen=True):
    """Write it to a topic of its own and go on. `<topic>.dlq` by default, made when needed.

    It keeps payload and headers, and gets headers that say where it came from and what failed.
    """

    topic: str | None = None

    def __post_init__(self) -> None:
        if self.topic is not None:
            check_topic_name(self.topic)


class Stop(msgspec.Struct, frozen=True):
    """Stop the group there: nothing after it in its partition is committed."""


OnFailure = DeadLetter | Stop


class DeadLetters:
    """Writes dead letters, durably, before their offset counts as handled."""

    def __init__(self, settings: DeadLetter, topics: Topics, producer: Producer) -> None:
        self._settings = settings
        self._topics = topics
        self._producer = producer
        self._known: set[str] = set()

    def bury(self, message: Message, group: str, attempts: int, error: BaseException) -> str:
        """Write the message with what is known of its failure, durably; the topic's name."""
        import traceback

        name = self._settings.topic or f"{message.topic}.dlq"
        self._make(name, message.topic)
        headers: list[Header] = [
            *message.headers,
            ("pxrs-dlq-topic", message.topic.encode()),
            ("pxrs-dlq-partition", str(message.partition).encode()),
            ("pxrs-dlq-offset", str(message.offset).encode()),
            ("pxrs-dlq-timestamp", str(message.timestamp).encode()),
            ("pxrs-dlq-group", group.encode()),
            ("pxrs-dlq-attempts", str(attempts).encode()),
            ("pxrs-dlq-error", f"{type(error).__name__}: {error}".encode()),
            ("pxrs-dlq-traceback", "".join(traceback.format_exception(error)).encode()[-8192:]),
        ]
        self._producer.send(name, message.value, message.key, headers=headers).result()
        return name

    def _make(self, name: str, source: str) -> None:
        if name in self._known:
            return
        # Somebody may have made it, with settings of their own.
        with suppress(TopicExists):
            self._topics.create(name, self._topics.find(source).partitions)
        self._known.add(name)
