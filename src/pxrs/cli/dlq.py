"""`pxrs dlq`: items that used up their deliveries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import click

from pxrs.cli import items
from pxrs.cli.asking import ask, somebody_to_ask
from pxrs.cli.options import Settings, seconds, shared
from pxrs.cli.output import console, count, print_json, table
from pxrs.config import public
from pxrs.errors import InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])


class Filter(TypedDict):
    """Which dead items are meant, as `px.queues` takes it."""

    ids: tuple[int, ...] | None
    key: str | None
    error: str | None
    dead_for: float | None


def filtered(command: F) -> F:
    """Gives a command the options that choose dead items."""
    for option in reversed(
        (
            click.option(
                "--id", "ids", type=int, multiple=True, help="Only this item; may repeat."
            ),
            click.option("--key", "-k", help="Only items of this key."),
            click.option("--error", "-e", metavar="TEXT", help="Only with TEXT in their error."),
            click.option(
                "--older", type=seconds, help="Only those dead for longer: 90, 90s, 2h, 7d."
            ),
        )
    ):
        command = option(command)
    return command


def _chosen(
    ids: tuple[int, ...], key: str | None, error: str | None, older: float | None
) -> Filter:
    return Filter(ids=ids or None, key=key, error=error, dead_for=older)


@click.group()
@shared
def dlq() -> None:
    """Dead letters of queues: items that used up their deliveries.

    Every queue has its own. They stay until they are put back or dropped. Messages that `px.run`
    gave up are in a topic of their own instead: pxrs read orders.dlq shows them, and
    pxrs topics redrive orders.dlq sends them back.
    """


@dlq.command("list", short_help="Show dead items of QUEUE, or how many there are.")
@click.argument("queue", required=False)
@filtered
@click.option(
    "--limit", "-n", type=click.IntRange(min=1), default=100, show_default=True, help="How many."
)
@shared
@click.pass_obj
def list_dead(
    settings: Settings,
    queue: str | None,
    ids: tuple[int, ...],
    key: str | None,
    error: str | None,
    older: float | None,
    limit: int,
) -> None:
    """Show dead items of QUEUE, oldest first; without it, how many each queue has."""
    chosen = _chosen(ids, key, error, older)
    if queue is None:
        if any(given is not None for given in chosen.values()):
            raise click.UsageError("say of which queue")
        _print_totals(settings)
        return
    with settings.connect() as px:
        found = px.queues.dead(queue, limit, **chosen)
        total = px.queues.describe(queue).dead
    if settings.json:
        print_json([items.as_json(item) for item in found])
        return
    if found:
        items.print_dead(found)
    if len(found) == limit and total > limit:
        click.echo(f"… of {total:,}; more with --limit", err=True)
    elif not found:
        click.echo(f"no such dead item in {queue}", err=True)


def _print_totals(settings: Settings) -> None:
    with settings.connect() as px:
        found = [queue for queue in px.queues.list() if queue.dead]
        where = public(px.url)
    if settings.json:
        print_json([{"queue": queue.name, "dead": queue.dead} for queue in found])
    elif not found:
        click.echo(f"no dead items in {where}", err=True)
    else:
        rows = table("queue", "dead", left=("queue",))
        for queue in found:
            rows.add_row(queue.name, f"{queue.dead:,}")
        console().print(rows)


@dlq.command(short_help="Show all of one dead item of QUEUE.")
@click.argument("queue")
@click.argument("number", type=int, metavar="ID")
@shared
@click.pass_obj
def show(settings: Settings, queue: str, number: int) -> None:
    """Show all of one dead item of QUEUE: payload, headers, attempts, times and last error."""
    with settings.connect() as px:
        found = px.queues.dead(queue, 1, ids=[number])
    if not found:
        raise InvalidRequest(
            f"queue {queue!r} has no dead item {number}; see: pxrs dlq list {queue}"
        )
    if settings.json:
        print_json(items.as_json(found[0]))
    else:
        items.print_item(found[0])


@dlq.command(short_help="Put dead items back at the end of QUEUE.")
@click.argument("queue")
@filtered
@shared
@click.pass_obj
def redrive(
    settings: Settings,
    queue: str,
    ids: tuple[int, ...],
    key: str | None,
    error: str | None,
    older: float | None,
) -> None:
    """Put dead items back at the end of QUEUE, with all their deliveries before them."""
    with settings.connect() as px:
        moved = px.queues.redrive(queue, **_chosen(ids, key, error, older))
    if settings.json:
        print_json({"queue": queue, "redriven": moved})
    else:
        click.echo(f"{count(moved, 'item')} put back into {queue}")


@dlq.command()
@click.argument("queue")
@filtered
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@shared
@click.pass_obj
def drop(
    settings: Settings,
    queue: str,
    ids: tuple[int, ...],
    key: str | None,
    error: str | None,
    older: float | None,
    yes: bool,
) -> None:
    """Remove dead items of QUEUE for good."""
    chosen = _chosen(ids, key, error, older)
    with settings.connect() as px:
        if not yes:
            somebody_to_ask()
            meant = len(px.queues.dead(queue, None, **chosen))
            ask(f"Drop {count(meant, 'dead item')} of {queue}?", "they are kept")
        gone = px.queues.drop(queue, **chosen)
    if settings.json:
        print_json({"queue": queue, "dropped": gone})
    else:
        click.echo(f"{count(gone, 'dead item')} of {queue} dropped")
