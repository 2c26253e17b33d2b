"""`pxrs kv`: get, put, delete, scan and watch keys."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from pxrs.cli.options import Settings, limit_option, seconds, shared
from pxrs.cli.show import console, print_json, table
from pxrs.errors import InvalidRequest, quoted

if TYPE_CHECKING:
    from pxrs.types import Entry, Version

_CONSISTENCIES = ("lease", "linearizable", "stale_ok")


def version(text: str) -> Version:
    """`1.42` → a version."""
    from pxrs.types import Version

    term, dot, index = text.partition(".")
    if not (dot and term.isdecimal() and index.isdecimal()):
        raise click.BadParameter(f"a version is term.index, such as 1.42, got {quoted(text)}")
    return Version(int(term), int(index))


_if_match = click.option(
    "--if-match", type=version, help="Only if the key has this version, such as 1.42."
)
_once = click.option(
    "--idempotency-key", help="Another write with the same one is answered as the first."
)


@click.group()
@shared
def kv(_: Settings) -> None:
    """Get, put, delete, scan and watch keys and their values."""


@kv.command()
@click.argument("key")
@click.option(
    "--consistency", type=click.Choice(_CONSISTENCIES), default="lease", show_default=True
)
@shared
def get(settings: Settings, key: str, consistency: str) -> None:
    """Print the value of KEY, and nothing else. Exit code 1 if there is no such key."""
    with settings.connect() as px:
        found = px.kv.get(key, consistency=consistency)
    if found is None:
        raise InvalidRequest(f"key {quoted(key)} does not exist")
    if settings.json:
        print_json(_as_json(found))
        return
    sys.stdout.buffer.write(found.value)
    if sys.stdout.isatty():
        sys.stdout.buffer.write(b"\n")


@kv.command()
@click.argument("key")
@click.argument("value")
@_if_match
@click.option("--create", is_flag=True, help="Only if there is no such key.")
@click.option("--ttl", type=seconds, help="Let it expire after this: 90s, 12h.")
@_once
@shared
def put(
    settings: Settings,
    key: str,
    value: str,
    if_match: Version | None,
    create: bool,
    ttl: float | None,
    idempotency_key: str | None,
) -> None:
    """Write VALUE under KEY; "-" reads it from standard input."""
    from pxrs.types import ABSENT

    if create and if_match is not None:
        raise click.UsageError("--create and --if-match exclude each other")
    data = sys.stdin.buffer.read() if value == "-" else value.encode()
    with settings.create() as px:
        written = px.kv.put(
            key,
            data,
            if_match=ABSENT if create else if_match,
            ttl=ttl,
            idempotency_key=idempotency_key,
        )
    settings.print({"key": key, "version": _dotted(written)}, _dotted(written))


@kv.command()
@click.argument("key")
@_if_match
@_once
@shared
def delete(
    settings: Settings, key: str, if_match: Version | None, idempotency_key: str | None
) -> None:
    """Remove KEY, if it is there."""
    with settings.connect() as px:
        existed = px.kv.delete(key, if_match=if_match, idempotency_key=idempotency_key)
    text = f"{key} deleted" if existed else f"there was no {key}"
    settings.print({"key": key, "deleted": existed}, text)


@kv.command()
@click.argument("prefix", default="")
@click.option("--after", help="Begin behind this key.")
@limit_option(100)
@shared
def scan(settings: Settings, prefix: str, after: str | None, limit: int) -> None:
    """Show the keys that begin with PREFIX, in order."""
    with settings.connect() as px:
        found = list(px.kv.scan(prefix, after=after, limit=limit))
    if settings.json:
        print_json([_as_json(entry) for entry in found])
        return
    rows = table("key", "version", "value", left=("key", "value"))
    for entry in found:
        rows.add_row(_text(entry.key), _dotted(entry.version), _text(entry.value)[:200])
    console().print(rows)


@kv.command(short_help="Show the keys that begin with PREFIX, then changes.")
@click.argument("prefix", default="")
@click.option("--timeout", type=seconds, help="Stop when nothing changed for so long.")
@shared
def watch(settings: Settings, prefix: str, timeout: float | None) -> None:
    """Show the keys that begin with PREFIX, and what they become, until interrupted."""
    with settings.connect() as px, px.kv.watch(prefix) as changes:
        while True:
            found = changes.wait(timeout)
            if not found and timeout is not None:
                return
            for entry in found:
                _print_change(settings, entry)
            sys.stdout.flush()


def _print_change(settings: Settings, entry: Entry) -> None:
    if settings.json:
        print_json(_as_json(entry))
    elif entry.version.index:
        print(f"{_text(entry.key)} {_dotted(entry.version)} {_text(entry.value)}")
    else:
        print(f"{_text(entry.key)} deleted")


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "key": _text(entry.key),
        "version": _dotted(entry.version) if entry.version.index else None,
        "value": _text(entry.value) if entry.version.index else None,
    }


def _dotted(version: Version) -> str:
    return f"{version.term}.{version.index}"


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
