"""`pxrs dlq`: items of queues that used up their deliveries."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypedDict

import click

from pxrs.cli import show
from pxrs.cli.options import Settings, ask, limit_option, seconds, shared, yes_option
from pxrs.cli.show import count
from pxrs.errors import InvalidRequest


class Filter(TypedDict):
    """Which dead items a command is about, as `px.queues` takes it."""

    ids: tuple[int, ...] | None
    key: str | None
    error: str | None
    dead_for: float | None


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that choose dead items; it gets them as `chosen`."""

    @click.option("--id", "ids", type=int, multiple=True, help="Only this item; may repeat.")
    @click.option("--key", "-k", help="Only items of this key.")
    @click.option("--error", "-e", metavar="TEXT", help="Only with TEXT in their error.")
    @click.option("--older", type=seconds, help="Only those dead for longer: 90, 90s, 2h, 7d.")
    @wraps(command)
    def choose(
        *arguments: Any,
        ids: tuple[int, ...],
        key: str | None,
        error: str | None,
        older: float | None,
        **options: Any,
    ) -> None:
        chosen = Filter(ids=ids or None, key=key, error=error, dead_for=older)
        command(*arguments, chosen=chosen, **options)

    return choose


@click.group()
@shared
def dlq(_: Settings) -> None:
    """Dead letters of queues: items that used up their deliveries.

    Each queue keeps its own until they are put back or dropped. Messages that `px.run` gave up
    on are in a topic instead: pxrs read orders.dlq shows them, and pxrs topics redrive orders.dlq
    sends them back.
    """


@dlq.command("list", short_help="Show dead items of QUEUE, or how many there are.")
@click.argument("queue", required=False)
@filtered
@limit_option(100)
@shared
def list_dead(settings: Settings, queue: str | None, chosen: Filter, limit: int) -> None:
    """Show dead items of QUEUE, oldest first; without QUEUE, how many each queue has."""
    if queue is None:
        if any(given is not None for given in chosen.values()):
            raise click.UsageError("a filter needs a QUEUE")
        _print_totals(settings)
        return
    with settings.connect() as px:
        found = px.queues.dead(queue, limit, **chosen)
        total = px.queues.describe(queue).dead
    if settings.json:
        show.print_json([show.item_json(item) for item in found])
        return
    if found:
        show.print_dead(found)
    if len(found) == limit and total > limit:
        click.echo(f"showed {limit:,}, {queue} has {total:,}; see more with --limit", err=True)
    elif not found:
        click.echo(f"no matching dead items in {queue}", err=True)


def _print_totals(settings: Settings) -> None:
    with settings.connect() as px:
        found = [queue for queue in px.queues.list() if queue.dead]
    settings.print_list(
        "dead items",
        [{"queue": queue.name, "dead": queue.dead} for queue in found],
        ("queue", "dead"),
        [(queue.name, f"{queue.dead:,}") for queue in found],
        left=("queue",),
    )


@dlq.command("show", short_help="Show everything about one dead item of QUEUE.")
@click.argument("queue")
@click.argument("number", type=int, metavar="ID")
@shared
def show_dead(settings: Settings, queue: str, number: int) -> None:
    """Show one dead item of QUEUE: payload, headers, attempts, times and last error."""
    with settings.connect() as px:
        found = px.queues.dead(queue, 1, ids=[number])
    if not found:
        raise InvalidRequest(
            f"queue {queue!r} has no dead item {number}; see: pxrs dlq list {queue}"
        )
    if settings.json:
        show.print_json(show.item_json(found[0]))
    else:
        show.print_item(found[0])


@dlq.command(short_help="Put dead items back at the end of QUEUE.")
@click.argument("queue")
@filtered
@shared
def redrive(settings: Settings, queue: str, chosen: Filter) -> None:
    """Put dead items back at the end of QUEUE, and reset their delivery count."""
    with settings.connect() as px:
        moved = px.queues.redrive(queue, **chosen)
    settings.print(
        {"queue": queue, "redriven": moved}, f"{count(moved, 'item')} put back into {queue}"
    )


@dlq.command()
@click.argument("queue")
@filtered
@yes_option
@shared
def drop(settings: Settings, queue: str, chosen: Filter, yes: bool) -> None:
    """Remove dead items of QUEUE for good."""
    with settings.connect() as px:
        if not yes:
            meant = len(px.queues.dead(queue, None, **chosen))
            ask(f"Drop {count(meant, 'dead item')} of {queue}?")
        gone = px.queues.drop(queue, **chosen)
    settings.print(
        {"queue": queue, "dropped": gone}, f"{count(gone, 'dead item')} of {queue} dropped"
    )
