"""What happens to a message on which the handler has failed for the last time."""

from __future__ import annotations

import re
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

    def name_for(self, topic: str) -> str:
        """Where the dead letters of a topic go."""
        return self.topic or f"{topic}.dlq"

    def are_in(self, name: str, topics: re.Pattern[str]) -> bool:
        """Whether the dead letters of topics that match the pattern go to this one."""
        if self.topic is not None:
            return name == self.topic
        source = name.removesuffix(".dlq")
        return source != name and topics.fullmatch(source) is not None


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

        name = self._settings.name_for(message.topic)
        self._make(name, message.topic)
        headers: list[Header] = [
            *message.headers,
            ("pxrs-dlq-topic", message.topic.encode()),
            ("pxrs-dlq-partition", str(message.partition).encode()),
            ("pxrs-dlq-offset", str(message.offset).encode()),
            ("pxrs-dlq-timestamp", str(message.timestamp).encode()),
            ("pxrs-dlq-group", group.encode()),
            ("pxrs-dlq-attempts", str(attempts).encode()),
            ("pxrs-dlq-error", _bytes(words_of(error))),
            ("pxrs-dlq-traceback", _bytes("".join(traceback.format_exception(error)))[-8192:]),
        ]
        self._producer.send(name, message.value, message.key, headers=headers).result()
        return name

    def close(self) -> None:
        """No more letters."""
        self._producer.close()

    def _make(self, name: str, source: str) -> None:
        if name in self._known:
            return
        # Somebody may have made it, with settings of their own.
        with suppress(TopicExists):
            self._topics.create(name, self._topics.find(source).partitions)
        self._known.add(name)


def words_of(error: BaseException) -> str:
    """What the error says, if it can be made to speak, in letters that can be written."""
    try:
        words = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an error's own words may raise anything
        return type(error).__name__
    return _bytes(words).decode()


def printable(error: Exception) -> Exception | None:
    """The error for a log that shows its traceback; None if that could not be written."""
    try:
        str(error).encode()
    except Exception:  # noqa: BLE001 - as above
        return None
    return error


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
