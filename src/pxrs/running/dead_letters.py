"""Dead letters: messages on which a handler has failed for the last time, with the error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from pxrs.config import DeadLetter
from pxrs.errors import TopicExists, TopicNotFound
from pxrs.producing.producer import Producer
from pxrs.redaction import hidden
from pxrs.topics import Topics
from pxrs.types import Header, Message, Position

_TRIES = 3
# The most bytes of an error: one that quotes its message must not make the letter too large.
_MOST = 8192
_PREFIX = "pxrs-dlq-"
_TOPIC = f"{_PREFIX}topic"
_PARTITION = f"{_PREFIX}partition"


class Death(NamedTuple):
    """The facts in a dead letter: where its message came from, and what failed."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    group: str
    deliveries: int
    error: str
    traceback: str

    @classmethod
    def of(cls, letter: Message) -> Death | None:
        """Reads it from the headers of a letter; None if it is no dead letter."""
        added = dict(_added(letter))  # of a letter that died once more: the last ones
        said = {
            name: (value or b"").decode(errors="backslashreplace") for name, value in added.items()
        }

        def number(name: str) -> int:
            text = said.get(_PREFIX + name, "")
            return int(text) if text.isdecimal() else 0

        if _TOPIC not in said or not said.get(_PARTITION, "").isdecimal():
            return None
        return cls(
            said[_TOPIC],
            number("partition"),
            number("offset"),
            number("timestamp"),
            said.get(f"{_PREFIX}group", ""),
            number("attempts"),
            said.get(f"{_PREFIX}error", ""),
            said.get(f"{_PREFIX}traceback", ""),
        )


def without_origin(letter: Message) -> list[Header]:
    """The headers that the message had before it became this letter."""
    added = _added(letter)
    own = letter.headers[: len(letter.headers) - len(added)]
    return [*own, *(header for header in added if not header[0].startswith(_PREFIX))]


def _added(letter: Message) -> Sequence[Header]:
    """The headers from the last that names a topic on."""
    names = [name for name, _ in letter.headers]
    return letter.headers[len(names) - 1 - names[::-1].index(_TOPIC) :] if _TOPIC in names else ()


class DeadLetters:
    """Writes dead letters, durably, before their offset counts as handled."""

    def __init__(self, settings: DeadLetter, topics: Topics, producer: Producer) -> None:
        self._settings = settings
        self._topics = topics
        self._producer = producer
        self._known: set[str] = set()

    def bury(self, message: Message, group: str, attempts: int, error: BaseException) -> str:
        """Write the message and its failure as a dead letter, durably; returns the topic's name."""
        import traceback

        name = self._settings.name_for(message.topic)
        headers: list[Header] = [
            *message.headers,
            (_TOPIC, message.topic.encode()),
            (_PARTITION, str(message.partition).encode()),
            (f"{_PREFIX}offset", str(message.offset).encode()),
            (f"{_PREFIX}timestamp", str(message.timestamp).encode()),
            (f"{_PREFIX}group", group.encode()),
            (f"{_PREFIX}attempts", str(attempts).encode()),
            (f"{_PREFIX}error", _bytes(words_of(error))[:_MOST]),
            (
                f"{_PREFIX}traceback",
                _bytes(hidden("".join(traceback.format_exception(error))))[-_MOST:],
            ),
        ]
        for left in reversed(range(_TRIES)):
            self._make(name, message.topic)
            try:
                self._producer.send(name, message.value, message.key, headers=headers).result()
                break
            except (TopicNotFound, TopicExists):
                # A user has emptied the topic, by deleting it or by making it again. The producer
                # learns the one when it commits, the other with the next message.
                self._known.discard(name)
                if not left:
                    raise
        return name

    def close(self) -> None:
        """No more letters."""
        self._producer.close()

    def _make(self, name: str, source: str) -> None:
        if name in self._known:
            return
        # A user may have made it, with other settings.
        with suppress(TopicExists):
            self._topics.create(name, self._topics.find(source).partitions)
        self._known.add(name)


def where(message: Message | Position) -> str:
    """Names a message in logs and errors."""
    return f"{message.topic!r} partition {message.partition} offset {message.offset}"


def words_of(error: BaseException) -> str:
    """Describes an error in text that can be stored, even if its `__str__` fails."""
    try:
        words = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - an error's own words may raise anything
        return type(error).__name__
    return _bytes(hidden(words)).decode()


def printable(error: Exception) -> Exception | None:
    """The error for a log that shows its traceback; None if that could not be written."""
    try:
        str(error).encode()
    except Exception:  # noqa: BLE001 - as above
        return None
    return error


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
