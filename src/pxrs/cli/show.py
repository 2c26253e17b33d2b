"""Prints messages, queue items and tables: for people, or as JSON for programs."""

from __future__ import annotations

import base64
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pxrs.queues.admin import ItemInfo
    from pxrs.running.topics import DeadMessage
    from pxrs.types import Header, Message

# Wider than any line: output into a pipe is neither wrapped nor cut.
_PIPE_WIDTH = 100_000
_WIDEST_KEY = 24
# Below this number a rate measures the start of the command, not the writing.
_WORTH_A_RATE = 1000


def console(*, err: bool = False, quiet: bool = False) -> Console:
    """A console that styles on a terminal, and prints plain unwrapped lines elsewhere."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    width = None if Console(file=stream).is_terminal else _PIPE_WIDTH
    return Console(stderr=err, quiet=quiet, highlight=False, emoji=False, markup=False, width=width)


def table(*columns: str, left: tuple[str, ...] = ()) -> Table:
    """A table without borders; columns hold numbers unless they are named in `left`."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return made


def json_text(document: Any) -> str:
    return msgspec.json.encode(document).decode()


def print_json(document: Any) -> None:
    """Prints one document on one line of stdout."""
    click.echo(json_text(document))


def count(number: int, what: str) -> str:
    """`1 message`, `2,000 messages`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7`."""
    shown: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if shown and shown[-1][1] == number - 1:
            shown[-1] = (shown[-1][0], number)
        else:
            shown.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in shown)


def speed(number: int, seconds: float, unit: str) -> str:
    """` in 1.20 s, 50,000 msg/s`; nothing where there were too few to measure."""
    if number < _WORTH_A_RATE:
        return ""
    return f" in {seconds:.2f} s, {per_second(number, seconds):,.0f} {unit}/s"


def per_second(number: int, seconds: float) -> float:
    return round(number / seconds, 1) if seconds > 0 else 0.0


def human_size(size: float) -> str:
    """`12.3 MB`: decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def human_duration(milliseconds: int) -> str:
    """`7d`, `12h`, `90s`: the largest unit that needs no fraction."""
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds % length == 0:
            return f"{milliseconds // length}{unit}"
    return f"{milliseconds}ms"


def human_time(milliseconds: int) -> str:
    """Local time, to the millisecond."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"


def human_age(seconds: float | None) -> str:
    """`0 s`, `3.2 s`, `5m 12s`, `3d 4h`; `?` where the age is not known."""
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds else "0 s"
    left, shown = round(seconds), []
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= length:
            shown.append(f"{left // length}{unit}")
            left %= length
    return " ".join(shown[:2])


def readable(data: str | bytes) -> str:
    """The data as one line that can't control a terminal; bytes that are no text are escaped."""
    text = data if isinstance(data, str) else data.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _header_texts(headers: Iterable[Header]) -> list[str]:
    return [f"{readable(name)}={readable(value or b'')}" for name, value in headers]


def _json_headers(headers: Iterable[Header]) -> list[dict[str, Any]]:
    return [{"name": name, **_json_bytes("value", value)} for name, value in headers]


def _json_bytes(name: str, data: bytes | None) -> dict[str, Any]:
    """The data as text if it is UTF-8, else in base64 with a flag beside it."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {name: base64.b64encode(data or b"").decode(), f"{name}_base64": True}


def value_line(value: str | bytes | None) -> bytes:
    """A value as it is; on a terminal without anything that could control it."""
    if sys.stdout.isatty():
        return readable(value or b"").encode() + b"\n"
    return (value.encode() if isinstance(value, str) else bytes(value or b"")) + b"\n"


# Messages


def message_formatter(
    *, as_json: bool, values_only: bool, position_width: int = 0, with_topic: bool = False
) -> Callable[[Message], bytes]:
    """Returns the function that turns a message into a line of output."""
    if as_json:
        return _message_json
    if values_only:
        return lambda message: value_line(message.value)
    return _MessageLines(position_width, with_topic).line


def _message_json(message: Message) -> bytes:
    document = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": message.timestamp,
        **_json_bytes("key", message.key),
        **_json_bytes("value", message.value),
        "headers": _json_headers(message.headers),
    }
    return json_text(document).encode() + b"\n"


class _MessageLines:
    """Formats messages as position, time, key and value. Columns widen as messages need it."""

    def __init__(self, position_width: int, with_topic: bool) -> None:
        self._position_width = position_width
        self._with_topic = with_topic
        self._key_width = 1
        self._styled = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

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
            *(self._style(text, dim=True) for text in _header_texts(message.headers)),
        ]
        return "  ".join(shown).encode(errors="backslashreplace") + b"\n"

    def _style(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._styled else text


# Queue items


def item_json(item: ItemInfo | DeadMessage) -> dict[str, Any]:
    """A queue's item, or a dead message."""
    told: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(item).items():
        if name == "headers":
            told[name] = _json_headers(value)
        else:
            told |= _json_bytes(name, value) if isinstance(value, bytes) else {name: value}
    return told


def print_items(items: Sequence[ItemInfo]) -> None:
    """Prints a row per item."""
    rows = table("id", "state", "age", "tried", "prio", left=("state",))
    _add_rows(
        rows,
        {"key": _key, "value": _value},
        items,
        lambda item: [item.state.value, _ago(item.put_ms), item.deliveries, item.priority],
    )


def print_dead(items: Sequence[ItemInfo | DeadMessage]) -> None:
    """Prints a row per dead item or message, with the error that killed it."""
    _add_rows(
        table("id", "dead for", "tried"),
        {"key": _key, "error": lambda item: readable(item.error) or "-", "value": _value},
        items,
        lambda item: [_ago(item.dead_ms or 0), item.deliveries],
    )


def _add_rows(
    rows: Table,
    texts: dict[str, Callable[[Any], str]],
    items: Sequence[ItemInfo | DeadMessage],
    facts: Callable[[Any], list[Any]],
) -> None:
    """Prints the table with columns for `texts`, which are cut where a terminal is narrow."""
    from rich.text import Text

    for name in texts:
        rows.add_column(name)
    for item in items:
        rows.add_row(
            str(item.id),
            *map(str, facts(item)),
            *(Text(text(item), no_wrap=True, overflow="ellipsis") for text in texts.values()),
        )
    console().print(rows)


def print_item(item: ItemInfo) -> None:
    """Prints everything about one item and cuts nothing."""
    facts = [
        ("state", item.state.value),
        ("put", human_time(item.put_ms)),
        ("last taken", _moment(item.taken_ms)),
        ("visible from", _moment(item.visible_ms)),
        ("died", _moment(item.dead_ms)),
        ("deliveries", f"{item.deliveries:,}"),
        ("priority", str(item.priority)),
        ("key", readable(item.key or "")),
        ("error", readable(item.error)),
        *((f"header {readable(name)}", readable(value or b"")) for name, value in item.headers),
    ]
    _print_facts(f"{item.queue} {item.id}", facts, item.value)


def print_one_dead(letter: ItemInfo | DeadMessage) -> None:
    """Prints everything about one dead item or message and cuts nothing."""
    from pxrs.queues.admin import ItemInfo

    if isinstance(letter, ItemInfo):
        print_item(letter)
        return
    facts = [
        ("partition", str(letter.partition)),
        ("offset", str(letter.offset)),
        ("sent", human_time(letter.timestamp)),
        ("died", human_time(letter.dead_ms)),
        ("group", readable(letter.group)),
        ("deliveries", f"{letter.deliveries:,}"),
        ("key", readable(letter.key or b"")),
        ("error", readable(letter.error)),
        *((f"header {readable(name)}", readable(value or b"")) for name, value in letter.headers),
        ("traceback", "\n".join(readable(line) for line in letter.traceback.split("\n"))),
    ]
    _print_facts(f"{letter.topic} {letter.id}", facts, letter.value or b"")


def _print_facts(title: str, facts: list[tuple[str, str]], value: str | bytes) -> None:
    out = console()
    out.print(title, style="bold")
    width = max(len(name) for name, _ in facts)
    for name, fact in facts:
        if fact:
            out.print(f"{name.ljust(width)}  ", style="dim", end="")
            out.print(fact, soft_wrap=True)
    out.print()
    text = value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")
    out.print("\n".join(readable(line) for line in text.split("\n")), soft_wrap=True)


def _key(item: ItemInfo | DeadMessage) -> str:
    return "-" if item.key is None else readable(item.key)


def _value(item: ItemInfo | DeadMessage) -> str:
    return "  ".join([readable(item.value or b""), *_header_texts(item.headers)])


def _ago(milliseconds: int) -> str:
    return human_age(max(0.0, time.time() - milliseconds / 1000))


def _moment(milliseconds: int | None) -> str:
    return "" if milliseconds is None else human_time(milliseconds)
