"""`pxrs store`: create a store's tables, copy everything to another store, remove leftovers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import click

from pxrs.cli.options import FAILED, Settings, shared
from pxrs.cli.show import console, count, human_size, print_json

if TYPE_CHECKING:
    from pxrs.operations.copy import CopyReport, Count
    from pxrs.operations.tidy import Leftovers

_SHOWN = 20
_TITLES = {
    "messages": "copying messages",
    "items": "copying items of queues",
    "records": "copying groups and topics",
    "verify": "comparing both",
}


@click.group()
@shared
def store(_: Settings) -> None:
    """Migrate, copy or tidy a whole store."""


@store.command(short_help="Create the tables of the store, or bring them up to date.")
@click.argument("place", metavar="URL", required=False)
@shared
def migrate(settings: Settings, place: str | None) -> None:
    """Create the tables of the store at URL, or bring them to this version of pxrs.

    Opening a store does this by itself. Run it as a role that may change tables, where the
    roles of your programs may not.
    """
    from pxrs.stores.open import migrate_stores

    done = migrate_stores(place or settings.place)
    if settings.json:
        print_json([each._asdict() for each in done])
        return
    for each in done:
        if each.after is None:
            click.echo("up to date")
        elif each.before == each.after:
            click.echo(f"up to date: version {each.after}")
        else:
            click.echo(f"migrated from version {each.before} to {each.after}")


@store.command(
    short_help="Copy everything to another store, and compare the two.",
    epilog="""\b
Examples:
  pxrs store copy sqlite:///app.db postgresql://app@db/app
  pxrs store copy postgresql://app@db/app 'etcd://host:2379 log=nats://host:4222'""",
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--force", is_flag=True, help="Copy although FROM is in use; run it again after.")
@shared
def copy(settings: Settings, source: str, target: str, force: bool) -> None:
    """Copy topics with their offsets, groups with their checkpoints, and queues.

    TO must be empty, or hold what an earlier run copied: after a crash run the same command
    again, and it goes on. At the end both stores are compared. Stop producers first: pxrs can't
    see them. Exit code 0 means that both stores are equal.
    """
    from pxrs.operations.copy import copy_store
    from pxrs.stores.open import open_stores, require_stores

    require_stores(source)
    with (
        closing(open_stores(source)) as origin,
        closing(open_stores(target)) as place,
        _bars(quiet=settings.json) as on_progress,
    ):
        report = copy_store(origin, place, force=force, on_progress=on_progress)
    if settings.json:
        print_json(report)
    else:
        _show(report)
    if not report.complete:
        raise SystemExit(FAILED)


@store.command(short_help="List what killed programs left in the store, or remove it.")
@click.argument("place", metavar="URL", required=False)
@click.option("--apply", "remove", is_flag=True, help="Remove it.")
@shared
def tidy(settings: Settings, place: str | None, remove: bool) -> None:
    """List logs that no topic names, and topics that were not made to the end, at URL.

    A program that is killed while it creates or deletes a topic leaves them where messages are
    kept apart from the coordination (log=nats://…). Removing them is safe while others use the
    store: who is creating a topic begins anew. What another store keeps there is left alone.
    """
    from pxrs.operations.tidy import find_leftovers, remove_leftovers
    from pxrs.stores.open import open_stores, require_stores

    url = place or settings.place
    require_stores(url)
    with closing(open_stores(url)) as stores:
        found = find_leftovers(stores)
        if remove:
            found = remove_leftovers(stores, found)
    if settings.json:
        print_json({"removed" if remove else "found": _plain(found)})
        return
    for line in _lines(found):
        click.echo(line)
    if not found:
        click.echo("nothing is left behind")
    elif remove:
        click.echo("removed")
    else:
        click.echo("nothing was removed; run it again with --apply")


def _plain(found: Leftovers) -> dict[str, object]:
    unmade = [{"name": each.topic.name, "id": each.topic.id} for each in found.unmade]
    return {"logs": found.logs, "unmade": unmade}


def _lines(found: Leftovers) -> Iterator[str]:
    for log in found.logs:
        yield f"log {log.id}, {count(log.messages, 'message')}: no topic names it"
    for each in found.unmade:
        yield f"topic {each.topic.name!r}, log {each.topic.id}: not made yet, or given up"


@contextmanager
def _bars(*, quiet: bool) -> Iterator[Callable[[Count], None]]:
    """Shows one bar per phase if stderr is a terminal."""
    from rich import progress

    out = console(err=True)
    bars = progress.Progress(
        progress.TextColumn("{task.description:26}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=out,
        disable=quiet or not out.is_terminal,
    )
    tasks: dict[str, progress.TaskID] = {}

    def show(now: Count) -> None:
        if now.phase not in tasks:
            tasks[now.phase] = bars.add_task(_TITLES[now.phase])
        bars.update(tasks[now.phase], completed=now.done, total=max(now.total, now.done))

    with bars:
        yield show


def _show(report: CopyReport) -> None:
    copied = report.copied
    size = sum(part.bytes for part in report.partitions)
    click.echo(
        f"{count(report.topics, 'topic')}, {count(report.messages, 'message')} "
        f"({human_size(size)}), {count(report.groups, 'group')}, "
        f"{count(report.claims, 'checkpoint')}, {count(report.queues, 'queue')}, "
        f"{count(report.items, 'item')}"
    )
    if not report.only_verified:
        click.echo(
            f"this run copied {count(copied['messages'], 'message')}, "
            f"{count(copied['items'], 'item')}, {count(copied['records'], 'record')}"
        )
    if report.complete:
        click.secho(f"verified: {report.target} is equal to {report.source}", fg="green")
        return
    for difference in report.differences[:_SHOWN]:
        click.echo(f"  {difference}")
    if len(report.differences) > _SHOWN:
        click.echo(f"  and {len(report.differences) - _SHOWN} more")
    many = count(len(report.differences), "difference")
    if report.only_verified:
        verdict = f"{many}: this copy was complete once, and one of the two was used since"
    else:
        verdict = f"{many}: {report.source} was in use; stop its users and run the same again"
    click.secho(verdict, fg="red", err=True)
