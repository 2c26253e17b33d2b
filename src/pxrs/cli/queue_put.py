"""`pxrs queues put`: items from arguments, lines of stdin, or lines of a file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import click

from pxrs.cli.lines import short_enough
from pxrs.cli.options import Settings, header, seconds, shared
from pxrs.cli.output import WORTH_A_RATE, console, count, human_age, print_json
from pxrs.cli.sources import are_lines, one_source, source
from pxrs.errors import MessageTooLarge

if TYPE_CHECKING:
    from pxrs.app import Pxrs
    from pxrs.types import Header

_AT_ONCE = 1000


@dataclass
class Wanted:
    """What all the items have in common."""

    queue: str
    key: str | None
    priority: int
    delay: float
    headers: list[Header]
    dedupe: str | None
    dedupe_window: float


@click.command()
@click.argument("queue")
@click.argument("items", nargs=-1, metavar="[ITEM]...")
@click.option(
    "--file", "-f", type=click.Path(exists=True, dir_okay=False), help="One item per line."
)
@click.option("--key", "-k", help="Handled strictly one after the other with others of this key.")
@click.option("--priority", "-p", type=int, default=0, help="Higher goes first.  [default: 0]")
@click.option("--delay", "-d", type=seconds, default="0", help="Not before: 90, 90s, 2h.")
@click.option("--header", "-H", "headers", type=header, multiple=True, help="name=value.")
@click.option("--dedupe", metavar="TEXT", help="Put it only if none was with this dedupe key …")
@click.option(
    "--dedupe-window", type=seconds, default="5m", show_default=True, help="… for so long."
)
@shared
@click.pass_obj
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

    Each ITEM is one. Without any, or with -, every line of stdin is one. What is UTF-8 is put as
    text, anything else as bytes. The queue is made if it is not there.
    """
    one_source(items, file, "item")
    wanted = Wanted(queue, key, priority, delay, list(headers), dedupe, dedupe_window)
    with settings.create() as px:
        putter = Putter(px, wanted, "line" if are_lines(items, file) else "item")
        started = time.monotonic()
        finished = False
        try:
            with source(items, file, putter.longest, "item", settings) as blocks:
                putter.put(blocks)
            finished = True
        finally:
            if finished or putter.done:
                _show(wanted, putter.done, time.monotonic() - started, as_json=settings.json)


class Putter:
    """Puts blocks of lines, some in each transaction, and knows which line it is at."""

    def __init__(self, px: Pxrs, wanted: Wanted, what: str) -> None:
        self._px = px
        self._wanted = wanted
        self._what = what
        self.longest = px.stores.queues.limits.body_bytes
        self.done = 0

    def put(self, blocks: Iterable[list[bytes]]) -> None:
        """Put all of them, or all up to one that can't be: the error names it."""
        if self._wanted.dedupe is not None:
            blocks = [self._only_one(blocks)]
        for lines in blocks:
            fitting = short_enough(lines, self.longest) if lines else lines
            for some in _chunks(fitting):
                self._put_some(some)
            if len(fitting) < len(lines):
                raise MessageTooLarge(
                    f"{self._what} {self.done + 1:,} is too long: an item may have "
                    f"{self.longest:,} bytes; {self._before()}"
                )

    def _put_some(self, lines: list[bytes]) -> None:
        wanted = self._wanted
        try:
            with self._px.transaction() as tx:
                for line in lines:
                    tx.put(
                        wanted.queue,
                        _text_or_bytes(line),
                        priority=wanted.priority,
                        delay=wanted.delay,
                        key=wanted.key,
                        headers=wanted.headers,
                        dedupe=wanted.dedupe,
                        dedupe_window=wanted.dedupe_window,
                    )
        except Exception as error:
            if self.done:
                error.add_note(self._before())
            raise
        self.done += len(lines)

    def _only_one(self, blocks: Iterable[list[bytes]]) -> list[bytes]:
        lines = list(islice((line for block in blocks for line in block), 2))
        if len(lines) > 1:
            raise click.UsageError("--dedupe is for one item: others would be its duplicates")
        return lines

    def _before(self) -> str:
        return f"the {self.done:,} before it are put" if self.done else "nothing was put"


def _chunks(lines: list[bytes]) -> Iterator[list[bytes]]:
    return (lines[at : at + _AT_ONCE] for at in range(0, len(lines), _AT_ONCE))


def _text_or_bytes(line: bytes) -> str | bytes:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line


def _show(wanted: Wanted, items: int, took: float, *, as_json: bool) -> None:
    rate = items / took if took > 0 else 0.0
    if as_json:
        print_json(
            {
                "queue": wanted.queue,
                "items": items,
                "seconds": round(took, 6),
                "items_per_second": round(rate, 1),
            }
        )
        return
    speed = f" in {took:.2f} s, {rate:,.0f} items/s" if items >= WORTH_A_RATE else ""
    unless = ""
    if wanted.dedupe is not None:
        unless = f", unless one was put as {wanted.dedupe} within {human_age(wanted.dedupe_window)}"
    console().print(f"{count(items, 'item')} to {wanted.queue}{speed}{unless}")
