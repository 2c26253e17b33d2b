"""`pxrs read`: shows messages of a topic without a group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import click

from pxrs.cli import options
from pxrs.cli.options import Settings, check_output, max_option, shared, values_only_option
from pxrs.cli.show import json_text, message_formatter
from pxrs.errors import DamagedBatch

if TYPE_CHECKING:
    from pxrs.consuming.reader import Reader, Start
    from pxrs.types import Message

_AT_ONCE = 1000

OnDamage = Callable[[DamagedBatch], None]


@click.command(short_help="Show messages of TOPIC without a group.")
@click.argument("topic")
@click.option("--partition", "-p", type=int, help="Only this partition.  [default: all]")
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
@max_option
@click.option("--follow", "-f", is_flag=True, help="Wait for new messages until Ctrl-C.")
@click.option("--skip-damaged", is_flag=True, help="Skip damaged batches; stderr names them.")
@values_only_option
@shared
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
    """Show the messages that TOPIC holds now, partition by partition.

    Reading needs no group and commits nothing.
    """
    if offset is not None and timestamp is not None:
        raise click.UsageError("use --offset or --timestamp, not both")
    check_output(settings, values_only=values_only)
    on_damage = partial(_report_skipped, settings.json) if skip_damaged else _refuse_damage
    with settings.connect() as px:
        reader = px.reader(topic)
        if isinstance(offset, int) and partition is None and reader.topic.partitions > 1:
            raise click.UsageError(
                f"--offset {offset} needs --partition: each of the {reader.topic.partitions} "
                "partitions has its own offsets"
            )
        start = offset if offset is not None else "latest" if follow else "earliest"
        numbers = range(reader.topic.partitions) if partition is None else [partition]
        bounds = {number: reader.bounds(number) for number in numbers}
        if timestamp is None:
            positions = {n: reader._start(n, start) for n in numbers}
        else:
            positions = {n: _at(reader, n, timestamp, bounds[n].end) for n in numbers}
        if follow:
            source = _following(reader, positions, on_damage)
        else:
            ends = {number: held.end for number, held in bounds.items()}
            source = _up_to(reader, positions, ends, on_damage)
        width = len(f"{max(bounds)}:{max(held.end for held in bounds.values())}")
        show = message_formatter(
            as_json=settings.json, values_only=values_only, position_width=width
        )
        out = sys.stdout.buffer
        with closing(source):
            for message in islice(source, most):
                out.write(show(message))
                if follow:
                    out.flush()


def _at(reader: Reader, partition: int, timestamp: int, end: int) -> int:
    """The offset of the first message of that time or later, else the end."""
    try:
        found = reader.offset_at(partition, timestamp)
    except DamagedBatch as error:
        # That message may have been in this batch: start here, and reading handles the damage.
        return error.offset
    return end if found is None else found


def _up_to(
    reader: Reader, positions: dict[int, int], ends: dict[int, int], on_damage: OnDamage
) -> Generator[Message]:
    """Yields one partition after the other, up to where each ended."""
    for number, position in positions.items():
        while position < ends[number]:
            try:
                found = reader.read(number, position, min(_AT_ONCE, ends[number] - position))
            except DamagedBatch as error:
                on_damage(error)
                position = error.next_offset
                continue
            if not found:
                break
            yield from found
            position = found[-1].offset + 1


def _following(
    reader: Reader, positions: dict[int, int], on_damage: OnDamage
) -> Generator[Message]:
    """Yields messages as they come, for ever."""
    while True:
        try:
            for message in reader.follow(start=positions):
                positions[message.partition] = message.offset + 1
                yield message
        except DamagedBatch as error:
            on_damage(error)
            positions[error.partition] = error.next_offset


def _refuse_damage(error: DamagedBatch) -> None:
    error.add_note("or use --skip-damaged")
    raise error


def _report_skipped(as_json: bool, error: DamagedBatch) -> None:
    """Prints on stderr which batch is skipped."""
    first, last = error.offset, error.next_offset - 1
    if as_json:
        skipped = {"topic": error.topic, "partition": error.partition}
        click.echo(json_text({"skipped": {**skipped, "first": first, "last": last}}), err=True)
    else:
        text = f"skipped {error.partition}:{first} to {error.partition}:{last}: damaged batch"
        click.secho(text, fg="yellow", err=True)
