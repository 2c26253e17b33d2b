"""`pxrs topics`: create, list, describe and delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pxrs.cli.options import Settings, ask, duration, shared, size, yes_option
from pxrs.cli.show import (
    console,
    count,
    human_duration,
    human_size,
    human_time,
    print_json,
    table,
)
from pxrs.core.routing import DEFAULT_PARTITIONER, PARTITIONERS

if TYPE_CHECKING:
    from rich.table import Table

    from pxrs.topics import TopicInfo
    from pxrs.types import Topic


@click.group()
@shared
def topics(_: Settings) -> None:
    """Create, list, describe and delete topics."""


@topics.command()
@click.argument("name")
@click.option("--partitions", "-p", type=int, required=True, help="How many; fixed for ever.")
@click.option(
    "--partitioner",
    type=click.Choice(list(PARTITIONERS)),
    default=DEFAULT_PARTITIONER,
    show_default=True,
    help="Which partition a key belongs to; murmur2 is Kafka's way.",
)
@click.option("--retention-time", type=duration, help="Keep messages this long: 7d, 12h, 90s.")
@click.option("--retention-bytes", type=size, help="Keep this much per partition: 1GB, 64MiB.")
@shared
def create(
    settings: Settings,
    name: str,
    partitions: int,
    partitioner: str,
    retention_time: int | None,
    retention_bytes: int | None,
) -> None:
    """Create topic NAME. Nothing happens if it exists with the same settings.

    A group can use at most as many consumers as there are partitions. Without retention,
    messages are kept for ever.
    """
    with settings.create() as px:
        topic = px.topics.create(
            name,
            partitions,
            partitioner=partitioner,
            retention=None if retention_time is None else retention_time / 1000,
            retention_bytes=retention_bytes,
        )
    settings.print(
        topic, f"{topic.name}: {count(topic.partitions, 'partition')}, keeps {_keeps(topic)}"
    )


@topics.command("list")
@shared
def list_topics(settings: Settings) -> None:
    """Show all topics."""
    with settings.connect() as px:
        found = px.topics.list()
    rows = [(topic.name, f"{topic.partitions:,}", _keeps(topic)) for topic in found]
    columns = ("topic", "partitions", "keeps")
    settings.print_list("topics", found, columns, rows, left=("topic", "keeps"))


@topics.command()
@click.argument("name")
@shared
def describe(settings: Settings, name: str) -> None:
    """Show what each partition of topic NAME holds.

    Offsets go from start up to, but not including, end.
    """
    with settings.connect() as px:
        info = px.topics.describe(name)
    is_virtual = info.topic.source is not None
    if settings.json:
        parts = [
            {
                "partition": part.partition,
                "start": part.start,
                "end": part.end,
                "messages": None if is_virtual else part.end - part.start,
                "bytes": part.size,
            }
            for part in info.partitions
        ]
        print_json(
            {
                "topic": info.topic,
                "messages": None if is_virtual else info.messages,
                "bytes": info.size,
                "partitions": parts,
            }
        )
        return
    topic = info.topic
    out = console()
    out.print(topic.name, style="bold", end="")
    if info.topic.source is not None:
        out.print(f": {count(topic.partitions, 'partition')} over a source, see pxrs sources")
    else:
        held = count(info.messages, "message")
        out.print(f": {held}, {human_size(info.size)}, keeps {_keeps(topic)}")
    out.print(f"id {topic.id}, created {human_time(topic.created_ms)}", style="dim")
    out.print(_partitions(info))


def _partitions(info: TopicInfo) -> Table:
    if info.topic.source is not None:
        rows = table("partition", "start", "end")
        for part in info.partitions:
            rows.add_row(*(f"{n:,}" for n in (part.partition, part.start, part.end)))
        return rows
    rows = table("partition", "start", "end", "messages", "bytes")
    for part in info.partitions:
        messages = part.end - part.start
        shown = (part.partition, part.start, part.end, messages, part.size)
        rows.add_row(*(f"{n:,}" for n in shown))
    return rows


@topics.command()
@click.argument("name")
@yes_option
@shared
def delete(settings: Settings, name: str, yes: bool) -> None:
    """Delete topic NAME and all its messages."""
    with settings.connect() as px:
        if not yes:
            ask(f"Delete {name} and {_what_goes(px.topics.describe(name))}?")
        px.topics.delete(name)
    settings.print({"deleted": name}, f"{name} deleted")


def _what_goes(info: TopicInfo) -> str:
    if info.topic.source is not None:
        return "the checkpoints of its groups (its source stays)"
    return f"its {count(info.messages, 'message')}"


def _keeps(topic: Topic) -> str:
    kept = []
    if topic.retention_ms is not None:
        kept.append(human_duration(topic.retention_ms))
    if topic.retention_bytes is not None:
        kept.append(f"{human_size(topic.retention_bytes)} per partition")
    return ", ".join(kept) or "everything"
