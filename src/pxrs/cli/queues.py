"""`pxrs queues`: create, list, describe, put, peek, purge and delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pxrs.cli import items
from pxrs.cli.asking import ask, somebody_to_ask
from pxrs.cli.messages import check_output
from pxrs.cli.options import Settings, seconds, shared
from pxrs.cli.output import console, count, human_age, human_time, print_json, table
from pxrs.cli.queue_put import put
from pxrs.config import public
from pxrs.types import ItemState

if TYPE_CHECKING:
    from rich.console import Console

    from pxrs.queues.admin import QueueInfo, QueueRates

_STATES = [state.value for state in ItemState]
_COUNTS = ("ready", "delayed", "in flight", "waiting", "dead")


@click.group()
@shared
def queues() -> None:
    """Look after work queues, and put items into them."""


queues.add_command(put)


@queues.command()
@click.argument("name")
@click.option("--fifo", is_flag=True, help="Strictly one after the other.")
@shared
@click.pass_obj
def create(settings: Settings, name: str, fifo: bool) -> None:
    """Make queue NAME. One that exists just so is fine.

    Putting makes a queue, too; only one that is strictly fifo has to be made.
    """
    with settings.create() as px:
        queue = px.create_queue(name, fifo=fifo)
    if settings.json:
        print_json(queue)
    else:
        click.echo(f"{queue.name}: {_order(queue.fifo)}")


@queues.command("list")
@shared
@click.pass_obj
def list_queues(settings: Settings) -> None:
    """Show all queues."""
    with settings.connect() as px:
        found = px.queues.list()
        where = public(px.url)
    if settings.json:
        print_json(found)
    elif not found:
        click.echo(f"no queues in {where}", err=True)
    else:
        rows = table("queue", *_COUNTS, "oldest", left=("queue",))
        for queue in found:
            rows.add_row(queue.name, *_counts(queue), _age(queue))
        console().print(rows)


@queues.command()
@click.argument("name")
@click.option("--rates", is_flag=True, help="Watch what goes through it, too.")
@click.option(
    "--seconds", "watched", type=seconds, default="1", show_default=True, help="… for so long."
)
@shared
@click.pass_obj
def describe(settings: Settings, name: str, rates: bool, watched: float) -> None:
    """Show how much of what queue NAME holds.

    Ready items can be taken, delayed ones later, those in flight are being handled, waiting ones
    are behind another of their key. Dead ones used up their deliveries: see `pxrs dlq`.
    """
    with settings.connect() as px:
        speed = px.queues.rates(name, watched) if rates else None
        info = px.queues.describe(name)
    if settings.json:
        import msgspec

        told = msgspec.to_builtins(info)
        if speed is not None:
            told |= {"put_per_second": speed.put, "done_per_second": speed.done}
        print_json(told)
    else:
        _print_queue(console(), info, speed)


def _print_queue(out: Console, info: QueueInfo, speed: QueueRates | None) -> None:
    out.print(info.name, style="bold", end="")
    oldest = f", the oldest {_age(info)} old" if info.depth else ""
    out.print(f": {count(info.depth, 'item')} to handle{oldest}")
    out.print(
        f"{_order(info.fifo)}, made {human_time(info.created_ms)}; "
        f"{info.put:,} put and {info.done:,} done since",
        style="dim",
    )
    rows = table(*_COUNTS)
    rows.add_row(*_counts(info))
    out.print(rows)
    if speed is not None:
        out.print(f"{speed.put:,.1f}/s put, {speed.done:,.1f}/s done")


@queues.command()
@click.argument("name")
@click.option(
    "--limit", "-n", type=click.IntRange(min=1), default=10, show_default=True, help="How many."
)
@click.option(
    "--state", "states", type=click.Choice(_STATES), multiple=True,
    help="Only these; may repeat.  [default: all but dead]",
)  # fmt: skip
@click.option("--after", type=int, metavar="ID", help="Go on after this item.")
@click.option("--values-only", is_flag=True, help="Values as they are, a line each.")
@shared
@click.pass_obj
def peek(
    settings: Settings,
    name: str,
    limit: int,
    states: tuple[str, ...],
    after: int | None,
    values_only: bool,
) -> None:
    """Show items of queue NAME, oldest first. Nothing is taken or counted."""
    check_output(settings, values_only=values_only)
    with settings.connect() as px:
        found = px.queues.peek(name, limit, states=states, after=after)
    if settings.json:
        print_json([items.as_json(item) for item in found])
    elif values_only:
        items.print_values(found)
    elif found:
        items.print_items(found)
    else:
        click.echo(f"nothing there in {name}", err=True)


@queues.command(short_help="Remove the items of queue NAME that wait.")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@shared
@click.pass_obj
def purge(settings: Settings, name: str, yes: bool) -> None:
    """Remove all items of queue NAME but those in flight and the dead ones."""
    with settings.connect() as px:
        if not yes:
            somebody_to_ask()
            info = px.queues.describe(name)
            ask(f"Remove {count(info.depth - info.held, 'item')} of {name}?", f"{name} is kept")
        gone = px.queues.purge(name)
    if settings.json:
        print_json({"queue": name, "purged": gone})
    else:
        click.echo(f"{count(gone, 'item')} of {name} removed")


@queues.command(short_help="Remove queue NAME and all its items.")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@shared
@click.pass_obj
def delete(settings: Settings, name: str, yes: bool) -> None:
    """Remove queue NAME and all its items, those in flight and the dead ones, too."""
    with settings.connect() as px:
        if not yes:
            somebody_to_ask()
            info = px.queues.describe(name)
            held = f"{count(info.depth, 'item')} and {info.dead:,} dead"
            ask(f"Delete {name} and its {held}?", f"{name} is kept")
        px.queues.delete(name)
    if settings.json:
        print_json({"deleted": name})
    else:
        click.echo(f"{name} deleted")


def _counts(info: QueueInfo) -> list[str]:
    return [f"{n:,}" for n in (info.ready, info.delayed, info.held, info.waiting, info.dead)]


def _age(info: QueueInfo) -> str:
    return "-" if info.oldest_age is None else human_age(info.oldest_age)


def _order(fifo: bool) -> str:
    return "strictly fifo" if fifo else "best-effort order"
