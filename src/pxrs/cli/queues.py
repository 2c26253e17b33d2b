"""`pxrs queues`: create, list, describe, put, peek, purge and delete."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import click

from pxrs.cli import show
from pxrs.cli.input import Input, short_enough
from pxrs.cli.options import (
    Settings,
    ask,
    check_output,
    header,
    limit_option,
    seconds,
    shared,
    values_only_option,
    yes_option,
)
from pxrs.cli.show import console, count, human_age, human_time, table
from pxrs.errors import MessageTooLarge
from pxrs.types import ItemState

if TYPE_CHECKING:
    from pxrs.app import Pxrs
    from pxrs.queues.admin import QueueInfo, QueueRates
    from pxrs.queues.item import PutItem
    from pxrs.queues.unit_of_work import UnitOfWork

_STATES = [state.value for state in ItemState]
_COUNTS = ("ready", "delayed", "in flight", "waiting", "dead")
_PUTS_PER_COMMIT = 1000


@click.group()
@shared
def queues(_: Settings) -> None:
    """Put items into work queues, inspect and delete them."""


@queues.command()
@click.argument("name")
@click.option("--fifo", is_flag=True, help="Hand out items strictly one after the other.")
@shared
def create(settings: Settings, name: str, fifo: bool) -> None:
    """Create queue NAME. Nothing happens if it exists with the same order.

    `queues put` creates a queue, too; only a strictly fifo queue must be created first.
    """
    with settings.create() as px:
        queue = px.queues.create(name, fifo=fifo)
    settings.print(queue, f"{queue.name}: {_order(queue.fifo)}")


@queues.command("list")
@shared
def list_queues(settings: Settings) -> None:
    """Show all queues."""
    with settings.connect() as px:
        found = px.queues.list()
    rows = [(queue.name, *_counts(queue), _age(queue)) for queue in found]
    settings.print_list("queues", found, ("queue", *_COUNTS, "oldest"), rows, left=("queue",))


@queues.command()
@click.argument("name")
@click.option("--rates", is_flag=True, help="Also measure items per second …")
@click.option(
    "--seconds", "watched", type=seconds, default="1", show_default=True, help="… for so long."
)
@shared
def describe(settings: Settings, name: str, rates: bool, watched: float) -> None:
    """Show how many items of queue NAME are in which state.

    Ready items can be taken now, delayed ones later. Items in flight are being handled, waiting
    ones are behind another of their key. Dead ones used up their deliveries: see `pxrs dlq`.
    """
    with settings.connect() as px:
        speed = px.queues.rates(name, watched) if rates else None
        info = px.queues.describe(name)
    if settings.json:
        import msgspec

        told = msgspec.to_builtins(info)
        if speed is not None:
            told |= {"put_per_second": speed.put, "done_per_second": speed.done}
        show.print_json(told)
    else:
        _print_queue(info, speed)


def _print_queue(info: QueueInfo, speed: QueueRates | None) -> None:
    out = console()
    out.print(info.name, style="bold", end="")
    oldest = f", the oldest {_age(info)} old" if info.depth else ""
    out.print(f": {count(info.depth, 'item')} to handle{oldest}")
    out.print(
        f"{_order(info.fifo)}, created {human_time(info.created_ms)}; "
        f"{info.put:,} put and {info.done:,} done since",
        style="dim",
    )
    rows = table(*_COUNTS)
    rows.add_row(*_counts(info))
    out.print(rows)
    if speed is not None:
        out.print(f"{speed.put:,.1f}/s put, {speed.done:,.1f}/s done")


@queues.command()
@click.argument("queue")
@click.argument("items", nargs=-1, metavar="[ITEM]...")
@click.option(
    "--file", "-f", type=click.Path(exists=True, dir_okay=False), help="One item per line."
)
@click.option("--key", "-k", help="Items of one key are handled strictly one after the other.")
@click.option("--priority", "-p", type=int, default=0, help="Higher goes first.  [default: 0]")
@click.option("--delay", "-d", type=seconds, default="0", help="Not before: 90, 90s, 2h.")
@click.option("--header", "-H", "headers", type=header, multiple=True, help="name=value.")
@click.option("--dedupe", metavar="TEXT", help="Put nothing if an item was put with this TEXT …")
@click.option(
    "--dedupe-window", type=seconds, default="5m", show_default=True, help="… within this time."
)
@shared
def put(
    settings: Settings,
    queue: str,
    items: tuple[str, ...],
    file: str | None,
    key: str | None,
    priority: int,
    delay: float,
    headers: tuple[tuple[str, bytes], ...],
    dedupe: str | None,
    dedupe_window: float,
) -> None:
    """Put items into QUEUE and return when they are durable.

    Each ITEM is one item. Without any, or with -, every line of stdin is one. UTF-8 is put as
    text, anything else as bytes. The queue is created if it does not exist.
    """

    def put_one(tx: UnitOfWork, value: str | bytes) -> PutItem:
        return tx.put(
            queue, value, priority=priority, delay=delay, key=key, headers=list(headers),
            dedupe=dedupe, dedupe_window=dedupe_window,
        )  # fmt: skip

    given = Input(items, file, "item")
    with settings.create() as px:
        putter = Putter(px, put_one, given.unit, px.stores.queues.limits.body_bytes)
        started = time.monotonic()
        finished = False
        try:
            with given.blocks(putter.longest, quiet=settings.json) as blocks:
                putter.put(blocks if dedupe is None else [_only_one(blocks)])
            finished = True
        finally:
            if finished or putter.done:
                done, took = putter.done, time.monotonic() - started
                unless = ""
                if dedupe is not None:
                    unless = f", unless one was put as {dedupe} within {human_age(dedupe_window)}"
                settings.print(
                    {
                        "queue": queue,
                        "items": done,
                        "last_id": putter.last_id,
                        "seconds": round(took, 6),
                        "items_per_second": show.per_second(done, took),
                    },
                    f"{count(done, 'item')} to {queue}{show.speed(done, took, 'items')}{unless}",
                )


def _only_one(blocks: Iterable[list[bytes]]) -> list[bytes]:
    lines = list(islice((line for block in blocks for line in block), 2))
    if len(lines) > 1:
        raise click.UsageError("--dedupe takes one item: more would be its duplicates")
    return lines


@dataclass
class Putter:
    """Puts blocks of lines, a thousand in each commit, and counts those that are durable."""

    px: Pxrs
    put_one: Callable[[UnitOfWork, str | bytes], PutItem]
    unit: str
    longest: int
    done: int = 0
    last_id: int | None = None

    def put(self, blocks: Iterable[list[bytes]]) -> None:
        """Puts all lines, or those before one that is too long: the error names it."""
        for lines in blocks:
            fitting = short_enough(lines, self.longest)
            for at in range(0, len(fitting), _PUTS_PER_COMMIT):
                self._commit(fitting[at : at + _PUTS_PER_COMMIT])
            if len(fitting) < len(lines):
                raise MessageTooLarge(
                    f"{self.unit} {self.done + 1:,} is too long: the limit for an item is "
                    f"{self.longest:,} bytes; {self._before()}"
                )

    def _commit(self, lines: list[bytes]) -> None:
        try:
            with self.px.transaction() as tx:
                items = [self.put_one(tx, _text_or_bytes(line)) for line in lines]
        except Exception as error:
            if self.done:
                error.add_note(self._before())
            raise
        self.done += len(lines)
        self.last_id = items[-1].id

    def _before(self) -> str:
        return f"the {self.done:,} before it were put" if self.done else "nothing was put"


def _text_or_bytes(line: bytes) -> str | bytes:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line


@queues.command()
@click.argument("name")
@limit_option(10)
@click.option(
    "--state", "states", type=click.Choice(_STATES), multiple=True,
    help="Only this state; may repeat.  [default: all but dead]",
)  # fmt: skip
@click.option("--after", type=int, metavar="ID", help="Start after this item.")
@values_only_option
@shared
def peek(
    settings: Settings,
    name: str,
    limit: int,
    states: tuple[str, ...],
    after: int | None,
    values_only: bool,
) -> None:
    """Show items of queue NAME, oldest first, without taking them."""
    check_output(settings, values_only=values_only)
    with settings.connect() as px:
        found = px.queues.peek(name, limit, states=states, after=after)
    if settings.json:
        show.print_json([show.item_json(item) for item in found])
    elif values_only:
        for item in found:
            sys.stdout.buffer.write(show.value_line(item.value))
    elif found:
        show.print_items(found)
    else:
        click.echo(f"no matching items in {name}", err=True)


@queues.command(short_help="Remove the items of queue NAME that wait.")
@click.argument("name")
@yes_option
@shared
def purge(settings: Settings, name: str, yes: bool) -> None:
    """Remove all items of queue NAME except those in flight and the dead ones."""
    with settings.connect() as px:
        if not yes:
            info = px.queues.describe(name)
            ask(f"Remove {count(info.depth - info.held, 'item')} of {name}?")
        gone = px.queues.purge(name)
    settings.print({"queue": name, "purged": gone}, f"{count(gone, 'item')} of {name} removed")


@queues.command(short_help="Delete queue NAME and all its items.")
@click.argument("name")
@yes_option
@shared
def delete(settings: Settings, name: str, yes: bool) -> None:
    """Delete queue NAME and all its items, including those in flight and the dead ones."""
    with settings.connect() as px:
        if not yes:
            info = px.queues.describe(name)
            ask(f"Delete {name} and its {count(info.depth, 'item')} and {info.dead:,} dead?")
        px.queues.delete(name)
    settings.print({"deleted": name}, f"{name} deleted")


def _counts(info: QueueInfo) -> list[str]:
    return [f"{n:,}" for n in (info.ready, info.delayed, info.held, info.waiting, info.dead)]


def _age(info: QueueInfo) -> str:
    return "-" if info.oldest_age is None else human_age(info.oldest_age)


def _order(fifo: bool) -> str:
    return "strictly fifo" if fifo else "best-effort order"
