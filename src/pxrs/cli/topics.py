"""`pxrs topics`: create, list, describe, redrive and delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pxrs.cli.asking import ask, somebody_to_ask
from pxrs.cli.options import Settings, duration, shared, size
from pxrs.cli.output import (
    console,
    count,
    human_duration,
    human_size,
    human_time,
    print_json,
    table,
)
from pxrs.config import public

if TYPE_CHECKING:
    from pxrs.types import Topic


@click.group()
@shared
def topics() -> None:
    """Create, list, describe, redrive and delete topics."""


@topics.command()
@click.argument("name")
@click.option("--partitions", "-p", type=int, required=True, help="How many; fixed for ever.")
@click.option("--retention-time", type=duration, help="Keep this long: 7d, 12h, 90s.")
@click.option("--retention-bytes", type=size, help="Keep this much per partition: 1GB, 64MiB.")
@shared
@click.pass_obj
def create(
    settings: Settings,
    name: str,
    partitions: int,
    retention_time: int | None,
    retention_bytes: int | None,
) -> None:
    """Make topic NAME. One that exists just so is fine.

    Choose as many partitions as the most consumers it will ever have. Without retention,
    messages are kept for ever.
    """
    with settings.create() as px:
        topic = px.create_topic(
            name, partitions, retention_ms=retention_time, retention_bytes=retention_bytes
        )
    if settings.json:
        print_json(topic)
    else:
        click.echo(f"{topic.name}: {count(topic.partitions, 'partition')}, keeps {_keeps(topic)}")


@topics.command("list")
@shared
@click.pass_obj
def list_topics(settings: Settings) -> None:
    """Show all topics."""
    with settings.connect() as px:
        found = px.topics()
        where = public(px.url)
    if settings.json:
        print_json(found)
    elif not found:
        click.echo(f"no topics in {where}", err=True)
    else:
        rows = table("topic", "partitions", "keeps", left=("topic", "keeps"))
        for topic in found:
            rows.add_row(topic.name, f"{topic.partitions:,}", _keeps(topic))
        console().print(rows)


@topics.command()
@click.argument("name")
@shared
@click.pass_obj
def describe(settings: Settings, name: str) -> None:
    """Show what the partitions of topic NAME hold.

    Offsets go from start up to, not including, end.
    """
    with settings.connect() as px:
        info = px.describe_topic(name)
    if settings.json:
        parts = [
            {
                "partition": part.partition,
                "start": part.start,
                "end": part.end,
                "messages": part.end - part.start,
                "bytes": part.size,
            }
            for part in info.partitions
        ]
        print_json(
            {
                "topic": info.topic,
                "messages": info.messages,
                "bytes": info.size,
                "partitions": parts,
            }
        )
        return
    topic = info.topic
    rows = table("partition", "start", "end", "messages", "bytes")
    for part in info.partitions:
        held = part.end - part.start
        rows.add_row(*(f"{n:,}" for n in (part.partition, part.start, part.end, held, part.size)))
    out = console()
    out.print(topic.name, style="bold", end="")
    out.print(
        f": {count(info.messages, 'message')}, {human_size(info.size)}, keeps {_keeps(topic)}"
    )
    out.print(f"id {topic.id}, made {human_time(topic.created_ms)}", style="dim")
    out.print(rows)


@topics.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@shared
@click.pass_obj
def delete(settings: Settings, name: str, yes: bool) -> None:
    """Remove topic NAME and all its messages."""
    with settings.connect() as px:
        if not yes:
            somebody_to_ask()
            held = px.describe_topic(name).messages
            ask(f"Delete {name} and its {count(held, 'message')}?", f"{name} is kept")
        px.delete_topic(name)
    if settings.json:
        print_json({"deleted": name})
    else:
        click.echo(f"{name} deleted")


@topics.command(short_help="Send dead letters of NAME back to where they came from.")
@click.argument("name")
@click.option("--to", metavar="TOPIC", help="Send all of them to TOPIC instead.")
@shared
@click.pass_obj
def redrive(settings: Settings, name: str, to: str | None) -> None:
    """Send the dead letters of topic NAME back to the topics they came from.

    px.run writes dead letters to TOPIC.dlq. They stay there, but each is sent back only once: what
    was is the checkpoint of the group NAME.redrive.
    """
    with settings.connect() as px:
        sent = px.redrive(name, to=to)
    if settings.json:
        print_json({"topic": name, "redriven": sent})
    elif sent:
        for topic, number in sorted(sent.items()):
            click.echo(f"{count(number, 'message')} sent back to {topic}")
    else:
        click.echo(f"nothing in {name} that was not sent back before", err=True)


def _keeps(topic: Topic) -> str:
    kept = []
    if topic.retention_ms is not None:
        kept.append(human_duration(topic.retention_ms))
    if topic.retention_bytes is not None:
        kept.append(f"{human_size(topic.retention_bytes)} per partition")
    return ", ".join(kept) or "everything"
