"""How messages are shown: for people, as JSON lines, or just their values."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from pxrs.cli.options import Settings
from pxrs.cli.output import human_time, json_text, readable

if TYPE_CHECKING:
    from pxrs.types import Header, Message

_WIDEST_KEY = 24


def check_output(settings: Settings, *, values_only: bool) -> None:
    """Refuse what contradicts itself, before anything is opened."""
    if values_only and settings.json:
        raise click.UsageError("--values-only and --json are two different outputs")


def formatter(
    settings: Settings, *, values_only: bool, position_width: int = 0, with_topic: bool = False
) -> Callable[[Message], bytes]:
    """How a message becomes a line."""
    if settings.json:
        return _as_json
    if values_only:
        return _value_on_terminal if sys.stdout.isatty() else _value
    return Lines(position_width, styled=sys.stdout.isatty(), with_topic=with_topic).line


def _value(message: Message) -> bytes:
    return bytes(message.value or b"") + b"\n"


def _value_on_terminal(message: Message) -> bytes:
    return readable(message.value or b"").encode() + b"\n"


def _as_json(message: Message) -> bytes:
    document = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": message.timestamp,
        **content("key", message.key),
        **content("value", message.value),
        "headers": headers_content(message.headers),
    }
    return json_text(document).encode() + b"\n"


def headers_content(headers: Iterable[Header]) -> list[dict[str, Any]]:
    """Headers for JSON, in their order."""
    return [{"name": name, **content("value", text)} for name, text in headers]


def content(name: str, data: bytes | None) -> dict[str, Any]:
    """As text where it is UTF-8; else in base64, and a flag says so."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {name: base64.b64encode(data or b"").decode(), f"{name}_base64": True}


class Lines:
    """Messages for people: where, when, key, value. Keys line up as far as is sensible."""

    def __init__(self, position_width: int, *, styled: bool, with_topic: bool = False) -> None:
        self._position_width = position_width
        self._with_topic = with_topic
        self._key_width = 1
        self._styled = styled and not os.environ.get("NO_COLOR")

    def line(self, message: Message) -> bytes:
        position = f"{message.partition}:{message.offset}"
        if self._with_topic:
            position = f"{message.topic}:{position}"
        self._position_width = max(self._position_width, len(position))
        key = "-" if message.key is None else readable(message.key)
        self._key_width = min(max(self._key_width, len(key)), _WIDEST_KEY)
        shown = [
            self._style(position.ljust(self._position_width), fg="cyan"),
            self._style(human_time(message.timestamp), dim=True),
            self._style(key.ljust(self._key_width), fg="green", dim=message.key is None),
            self._style("-", dim=True) if message.value is None else readable(message.value),
        ]
        shown += [
            self._style(f"{readable(name.encode())}={readable(text or b'')}", dim=True)
            for name, text in message.headers
        ]
        return "  ".join(shown).encode(errors="backslashreplace") + b"\n"

    def _style(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._styled else text
