"""`pxrs read`: messages of a topic, from anywhere, once or as they come."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from pxrs.cli import options
from pxrs.cli.options import Settings, shared
from pxrs.cli.output import human_time, json_text, readable
from pxrs.errors import DamagedBatch, OffsetOutOfRange

if TYPE_CHECKING:
    from pxrs.runtime.reader import Reader, Start
    from pxrs.types import Bounds, Message

_AT_ONCE = 1000
_WIDEST_KEY = 24

Skipped = Callable[[DamagedBatch], None]


@click.command()
@click.argument("topic")
@click.option("--partition", "-p", type=int, help="Only this one.  [default: all]")
@click.option(
    "--offset",
    "-o",
    type=options.offset,
    help="A number (with --partition), earliest or latest.  "
    "[default: earliest; latest with --follow]",
)
@click.option(
    "--timestamp", "-t", type=options.moment, help="From this time on: ISO 8601, or epoch ms."
)
@click.option("--max", "-n", "most", type=click.IntRange(min=1), help="Stop after so many.")
@click.option("--follow", "-f", is_flag=True, help="Wait for more, until Ctrl-C.")
@click.option("--skip-damaged", is_flag=True, help="Go on after a damaged batch; tells on stderr.")
@click.option("--values-only", is_flag=True, help="Values as they are, a line each.")
@shared
@click.pass_obj
def read(
    settings: Settings,
    topic: str,
    partition: int | None,
    offset: Start | None,
    timestamp: int | None,
    most: int | None,
    follow: bool,
    skip_damaged: bool,
    values_only: bool,
) -> None:
    """Show messages of TOPIC, partition by partition, up to where it ends now.

    Nothing is consumed: no group, no checkpoint.
    """
    if offset is not None and timestamp is not None:
        raise click.UsageError("start from --offset or from --timestamp, not both")
    if values_only and settings.json:
        raise click.UsageError("--values-only and --json are two different outputs")
    skipped = _teller(settings) if skip_damaged else None
    with settings.connect() as px:
        reader = px.reader(topic)
        if isinstance(offset, int) and partition is None and reader.topic.partitions > 1:
            raise click.UsageError(
                f"each of the {reader.topic.partitions} partitions has its own offsets: "
                "say which with --partition"
            )
        start = offset if offset is not None else "latest" if follow else "earliest"
        numbers = range(reader.topic.partitions) if partition is None else [partition]
        bounds = {number: reader.bounds(number) for number in numbers}
        if timestamp is None:
            positions = {n: _from(reader, n, start, bounds[n]) for n in numbers}
        else:
            positions = {n: _at(reader, n, timestamp, bounds[n].end, skipped) for n in numbers}
        if follow:
            source = _following(reader, positions, skipped)
        else:
            ends = {number: held.end for number, held in bounds.items()}
            source = _up_to(reader, positions, ends, skipped)
        show = _formatter(settings, bounds, values_only=values_only)
        out = sys.stdout.buffer
        with closing(source):
            for message in islice(source, most):
                out.write(show(message))
                if follow:
                    out.flush()


def _from(reader: Reader, partition: int, start: Start, held: Bounds) -> int:
    if start == "earliest":
        return held.start
    if start == "latest":
        return held.end
    if not held.start <= start <= held.end:
        raise OffsetOutOfRange(reader.topic.name, partition, start, *held)
    return start


def _at(reader: Reader, partition: int, timestamp: int, end: int, skipped: Skipped | None) -> int:
    """The offset of the first message of that time or later, or the end."""
    try:
        found = reader.offset_at(partition, timestamp)
    except DamagedBatch as error:
        # Whether it begins in here nobody can tell any more: begin here, and let reading skip it.
        if skipped is None:
            raise
        return error.offset
    return end if found is None else found


def _up_to(
    reader: Reader, positions: dict[int, int], ends: dict[int, int], skipped: Skipped | None
) -> Generator[Message]:
    """One partition after the other, up to where it ended."""
    for number, position in positions.items():
        while position < ends[number]:
            try:
                found = reader.read(number, position, min(_AT_ONCE, ends[number] - position))
            except DamagedBatch as error:
                if skipped is None:
                    raise
                skipped(error)
                position = error.next_offset
                continue
            if not found:
                break
            yield from found
            position = found[-1].offset + 1


def _following(
    reader: Reader, positions: dict[int, int], skipped: Skipped | None
) -> Generator[Message]:
    """As they come, for ever."""
    while True:
        try:
            for message in reader.follow(start=positions):
                positions[message.partition] = message.offset + 1
                yield message
        except DamagedBatch as error:
            if skipped is None:
                raise
            skipped(error)
            positions[error.partition] = error.next_offset


def _teller(settings: Settings) -> Skipped:
    """Says on stderr what is skipped."""

    def tell(error: DamagedBatch) -> None:
        first, last = error.offset, error.next_offset - 1
        if settings.json:
            skipped = {"topic": error.topic, "partition": error.partition}
            click.echo(json_text({"skipped": {**skipped, "first": first, "last": last}}), err=True)
        else:
            text = f"skipped {error.partition}:{first} to {error.partition}:{last}: damaged batch"
            click.secho(text, fg="yellow", err=True)

    return tell


def _formatter(
    settings: Settings, bounds: dict[int, Bounds], *, values_only: bool
) -> Callable[[Message], bytes]:
    """How a message becomes a line."""
    if settings.json:
        return _as_json
    if values_only:
        return _value_on_terminal if sys.stdout.isatty() else _value
    last, end = max(bounds), max(held.end for held in bounds.values())
    return Lines(len(f"{last}:{end}"), styled=sys.stdout.isatty()).line


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
        **_content("key", message.key),
        **_content("value", message.value),
        "headers": [{"name": name, **_content("value", text)} for name, text in message.headers],
    }
    return json_text(document).encode() + b"\n"


def _content(name: str, data: bytes | None) -> dict[str, Any]:
    """As text where it is UTF-8; else in base64, and a flag says so."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {name: base64.b64encode(data or b"").decode(), f"{name}_base64": True}


class Lines:
    """Messages for people: where, when, key, value. Keys line up as far as is sensible."""

    def __init__(self, position_width: int, *, styled: bool) -> None:
        self._position_width = position_width
        self._key_width = 1
        self._styled = styled and not os.environ.get("NO_COLOR")

    def line(self, message: Message) -> bytes:
        position = f"{message.partition}:{message.offset}".ljust(self._position_width)
        key = "-" if message.key is None else readable(message.key)
        self._key_width = min(max(self._key_width, len(key)), _WIDEST_KEY)
        shown = [
            self._style(position, fg="cyan"),
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
