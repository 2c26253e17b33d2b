"""How a queue's items are shown: for people, as JSON, or just their values."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from pxrs.cli.messages import content, headers_content
from pxrs.cli.output import console, human_age, human_time, readable, table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from pxrs.queues.admin import ItemInfo
    from pxrs.types import Header


def as_json(item: ItemInfo) -> dict[str, Any]:
    """For one line of JSON."""
    return {
        "queue": item.queue,
        "id": item.id,
        "state": item.state.value,
        **content("value", data(item)),
        "headers": headers_content(item.headers),
        "key": item.key,
        "priority": item.priority,
        "deliveries": item.deliveries,
        "put_ms": item.put_ms,
        "taken_ms": item.taken_ms,
        "visible_ms": item.visible_ms,
        "dead_ms": item.dead_ms,
        "error": item.error,
    }


def data(item: ItemInfo) -> bytes:
    """Its value as bytes, whichever it was put as."""
    value: str | bytes = item.value
    return value.encode() if isinstance(value, str) else value


def print_values(items: Sequence[ItemInfo]) -> None:
    """As they are, a line each; on a terminal nothing that could steer it."""
    for item in items:
        if sys.stdout.isatty():
            click.echo(readable(data(item)))
        else:
            click.echo(data(item))


def print_items(items: Sequence[ItemInfo]) -> None:
    """Items that are to be handled, a row each. Keys and values give way to a narrow terminal."""
    rows = table("id", "state", "age", "tried", "prio", left=("state",))
    _add_loose_columns(rows, "key", "value")
    for item in items:
        rows.add_row(
            str(item.id),
            item.state.value,
            _ago(item.put_ms),
            str(item.deliveries),
            str(item.priority),
            _cut(_key(item)),
            _cut(_value(item)),
        )
    console().print(rows)


def print_dead(items: Sequence[ItemInfo]) -> None:
    """Dead items, a row each, with what killed them."""
    rows = table("id", "dead for", "tried")
    _add_loose_columns(rows, "key", "error", "value")
    for item in items:
        rows.add_row(
            str(item.id),
            _ago(item.dead_ms or 0),
            str(item.deliveries),
            _cut(_key(item)),
            _cut(readable(item.error.encode()) or "-"),
            _cut(_value(item)),
        )
    console().print(rows)


def print_item(item: ItemInfo) -> None:
    """Everything about one item; nothing is cut."""
    facts = [
        ("state", item.state.value),
        ("put", human_time(item.put_ms)),
        ("last taken", _moment(item.taken_ms)),
        ("visible from", _moment(item.visible_ms)),
        ("died", _moment(item.dead_ms)),
        ("deliveries", f"{item.deliveries:,}"),
        ("priority", str(item.priority)),
        ("key", "" if item.key is None else readable(item.key.encode())),
        ("error", readable(item.error.encode())),
        *(
            (f"header {readable(name.encode())}", readable(text or b""))
            for name, text in item.headers
        ),
    ]
    out = console()
    out.print(f"{item.queue} {item.id}", style="bold")
    width = max(len(name) for name, _ in facts)
    for name, fact in facts:
        if fact:
            out.print(f"{name.ljust(width)}  ", style="dim", end="")
            out.print(fact, soft_wrap=True)
    out.print()
    out.print("\n".join(readable(line) for line in data(item).split(b"\n")), soft_wrap=True)


def _add_loose_columns(rows: Table, *names: str) -> None:
    for name in names:
        rows.add_column(name)


def _cut(text: str) -> Text:
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")


def _value(item: ItemInfo) -> str:
    return "  ".join([readable(data(item)), *_headers(item.headers)])


def _headers(headers: Iterable[Header]) -> list[str]:
    return [f"{readable(name.encode())}={readable(text or b'')}" for name, text in headers]


def _key(item: ItemInfo) -> str:
    return "-" if item.key is None else readable(item.key.encode())


def _ago(milliseconds: int) -> str:
    return human_age(max(0.0, time.time() - milliseconds / 1000))


def _moment(milliseconds: int | None) -> str:
    return "" if milliseconds is None else human_time(milliseconds)
