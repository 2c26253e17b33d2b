"""Options that every command takes, and the kinds of values that options have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pxrs.config import default_url

if TYPE_CHECKING:
    from pxrs.app import Pxrs

F = TypeVar("F", bound=Callable[..., Any])

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


@dataclass
class Settings:
    """What --url and --json say, wherever they stood."""

    url: str | None = None
    json: bool = False

    def connect(self) -> Pxrs:
        """Open a store that is there: one that only reads, or removes, makes none."""
        from pxrs.stores.open import require_stores

        require_stores(self.place)
        return self.create()

    def create(self) -> Pxrs:
        """Open the store; it is made if need be."""
        from pxrs.app import connect

        return connect(self.place)

    @property
    def place(self) -> str:
        return self.url or default_url()


def shared(command: F) -> F:
    """Gives a command --url and --json; it finds them in its `Settings` object."""
    url = click.option(
        "--url",
        metavar="URL",
        expose_value=False,
        callback=_remember_url,
        help="The store.  [default: $PXRS_URL, else sqlite:///pxrs.db]",
    )
    as_json = click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_remember_json,
        help="JSON on stdout, and nothing else there.",
    )
    return url(as_json(command))


def _remember_url(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    settings = ctx.ensure_object(Settings)
    if value is not None:
        settings.url = value


def _remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    settings = ctx.ensure_object(Settings)
    settings.json = settings.json or value


def _quantity(text: str, units: dict[str, Any]) -> float | None:
    match = _QUANTITY.fullmatch(text.strip())
    unit = match and units.get(match[2].lower())
    return float(match[1]) * unit if match and unit else None


def duration(text: str) -> int:
    """`7d`, `12h`, `90s` → milliseconds."""
    seconds = _quantity(text, _SECONDS)
    if seconds is None:
        raise click.BadParameter(f"{text!r} is not a duration; examples: 7d, 12h, 90s, 500ms")
    return round(seconds * 1000)


def seconds(text: str) -> float:
    """`90`, `1.5`, `90s`, `2h` → seconds."""
    found = _quantity(text, {"": 1, **_SECONDS})
    if found is None:
        raise click.BadParameter(f"{text!r} is not a time; examples: 90, 1.5, 90s, 2h, 7d")
    return found


def size(text: str) -> int:
    """`1GB`, `64MiB`, `4096` → bytes."""
    found = _quantity(text, _BYTES)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a size; examples: 1GB, 64MiB, 4096")
    return round(found)


def offset(text: str) -> int | str:
    """`earliest`, `latest` or a number."""
    if text in ("earliest", "latest"):
        return text
    if not re.fullmatch("[0-9]+", text):
        raise click.BadParameter(f"{text!r} is not an offset; a number, earliest or latest")
    return int(text)


def moment(text: str) -> int:
    """A point in time, or milliseconds since 1970 → milliseconds. Local time if it has no zone."""
    if re.fullmatch("[0-9]+", text):
        return int(text)
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            f"{text!r} is not a time; examples: 2026-01-31T12:00:00, 2026-01-31T12:00:00Z, "
            "1769860800000"
        ) from None


def header(text: str) -> tuple[str, bytes]:
    """`name=value` → a header."""
    name, equals, content = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{text!r} is not a header; write name=value")
    return name, content.encode()
