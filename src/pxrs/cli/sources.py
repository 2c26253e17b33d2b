"""`pxrs sources`: attach tables that exist, list, describe, prepare and detach them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pxrs.cli import options
from pxrs.cli.options import Settings, ask, shared, yes_option
from pxrs.cli.show import console, count, human_time, print_json

if TYPE_CHECKING:
    from pxrs.types import Topic


@click.group()
@shared
def sources(_: Settings) -> None:
    """Lay topics over tables that exist."""


@sources.command()
@click.argument("name")
@click.option("--partitions", "-p", type=int, required=True, help="How many; fixed for ever.")
@click.option("--table", metavar="TABLE", help="The table or view.  [default: NAME]")
@click.option("--offset", default="id", show_default=True, help="Its id: unique, and rises.")
@click.option("--key", help="Rows with one key stay in order.")
@click.option("--value", multiple=True, required=True, help="A column; several become JSON.")
@click.option("--timestamp", help="The column with the time of a row.")
@click.option("--partition", help="A column with the partition of a row, if there is one.")
@click.option(
    "--settle",
    type=options.seconds,
    help="Wait so long for a missing id where the database does not tell who writes: 30, 5m.",
)
@click.option("--source-url", help="Where the table is, if it is not in the store's database.")
@shared
def attach(
    settings: Settings,
    name: str,
    partitions: int,
    table: str | None,
    offset: str,
    key: str | None,
    value: tuple[str, ...],
    timestamp: str | None,
    partition: str | None,
    settle: float | None,
    source_url: str | None,
) -> None:
    """Lay topic NAME over a table. Nothing happens if it exists with the same settings.

    Nothing is copied, and producers change nothing. The table is checked first. A password in
    --source-url is not kept: programs bring their own.
    """
    from pxrs.sources import Table

    source = Table(
        table or name,
        offset=offset,
        key=key,
        value=value[0] if len(value) == 1 else value,
        timestamp=timestamp,
        partition=partition,
        settle=settle,
        url=source_url,
    )
    with settings.create() as px:
        topic = px.attach(name, source, partitions=partitions)
    settings.print(
        topic, f"{topic.name}: {count(topic.partitions, 'partition')} over {_over(topic)}"
    )


@sources.command("list")
@shared
def list_sources(settings: Settings) -> None:
    """Show all topics that lie over a source."""
    with settings.connect() as px:
        found = px.sources.list()
    rows = [
        (topic.name, f"{topic.partitions:,}", _over(topic), "yes" if _prepared(topic) else "no")
        for topic in found
    ]
    columns = ("topic", "partitions", "source", "prepared")
    settings.print_list("sources", found, columns, rows, left=("topic", "source", "prepared"))


@sources.command()
@click.argument("name")
@shared
def describe(settings: Settings, name: str) -> None:
    """Show what topic NAME lies over, and where that ends.

    Rows below `final` are all there. Those between it and `end` wait for a transaction that may
    have a lower id.
    """
    with settings.connect() as px:
        info = px.sources.describe(name)
    if settings.json:
        print_json(info)
        return
    out = console()
    out.print(info.topic.name, style="bold", end="")
    out.print(f": {count(info.topic.partitions, 'partition')} over {_over(info.topic)}")
    out.print(f"id {info.topic.id}, created {human_time(info.topic.created_ms)}", style="dim")
    final = "not known yet" if info.final is None else f"{info.final:,}"
    out.print(f"end {info.end:,}, final {final}")
    for setting, value in info.settings.items():
        if setting not in ("kind", "name"):
            out.print(f"  {setting:10} {_text(value)}")


@sources.command(short_help="Print what makes the table of topic NAME cheap to read.")
@click.argument("name")
@click.option("--apply", is_flag=True, help="Execute the statements, too.")
@shared
def prepare(settings: Settings, name: str, apply: bool) -> None:
    """Print the statements that make the table of topic NAME cheaper to read.

    A column with the row's partition and an index: each member then reads only its own rows. On
    PostgreSQL a trigger, too, that tells of new rows. No key moves to another partition.

    Adding the column writes the table anew, and nobody can use it meanwhile.
    """
    with settings.connect() as px:
        statements = px.sources.prepare(name, apply=apply)
    if settings.json:
        print_json({"statements": statements, "applied": apply})
        return
    for statement in statements:
        click.echo(f"{statement};")
    if apply:
        click.echo(f"{name} is prepared; members that run use it within seconds", err=True)
    elif not statements:
        click.echo("nothing is missing; --apply records it with the topic", err=True)
    else:
        click.echo("nothing was changed; --apply executes this", err=True)


@sources.command(short_help="Copy topic SOURCE into TOPIC, each message once.")
@click.argument("source")
@click.argument("topic")
@click.option("--group", "-g", default="relay", show_default=True, help="Whose checkpoint it is.")
@click.option("--timeout", type=options.seconds, help="End when nothing came for so long: 30, 5m.")
@shared
def relay(settings: Settings, source: str, topic: str, group: str, timeout: float | None) -> None:
    """Copy topic SOURCE, which lies over a source, into TOPIC, each message once.

    It goes on until Ctrl-C or SIGTERM: then it commits and leaves the group. Several of these
    share the work. TOPIC must exist.
    """
    with settings.connect() as px, px.relay(source, topic=topic, group=group) as running:
        copied = -1
        while not running.join(timeout) and copied != running.handled:
            copied = running.handled or 0
    settings.print(
        {"copied": running.handled}, f"{count(running.handled or 0, 'message')} copied to {topic}"
    )


@sources.command()
@click.argument("name")
@yes_option
@shared
def detach(settings: Settings, name: str, yes: bool) -> None:
    """Forget topic NAME, and the checkpoints of its groups. The table stays as it is."""
    with settings.connect() as px:
        topic = px.topics.find(name)
        if not yes:
            ask(f"Detach {name} from {_over(topic)}? The checkpoints of its groups go with it.")
        px.sources.detach(name)
    settings.print({"detached": name}, f"{name} detached")


def _over(topic: Topic) -> str:
    source = topic.source or {}
    name = source.get("name") or source.get("path") or source.get("type") or ""
    place = f" in {source['url']}" if "url" in source else ""
    return f"{source.get('kind', 'no source')} {name}{place}".strip()


def _prepared(topic: Topic) -> bool:
    return "prepared" in (topic.source or {})


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
