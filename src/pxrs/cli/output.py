"""How things are shown to people and to programs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Wider than any line: a pipe is not a place to wrap or cut.
_PIPE_WIDTH = 100_000
# Fewer say more about starting up than about writing.
WORTH_A_RATE = 1000


def console(*, err: bool = False) -> Console:
    """Styled on a terminal, plain and unwrapped elsewhere."""
    from rich.console import Console

    made = Console(stderr=err, highlight=False, emoji=False, markup=False)
    return (
        made
        if made.is_terminal
        else Console(stderr=err, highlight=False, emoji=False, markup=False, width=_PIPE_WIDTH)
    )


def json_text(document: Any) -> str:
    return msgspec.json.encode(document).decode()


def print_json(document: Any) -> None:
    """One document on one line of stdout."""
    click.echo(json_text(document))


def table(*columns: str, left: tuple[str, ...] = ()) -> Table:
    """A bare table; columns are numbers unless they are named in `left`."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return made


def human_size(size: float) -> str:
    """`12.3 MB`: decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def human_duration(milliseconds: int) -> str:
    """`7d`, `12h`, `90s`: the largest unit that needs no fraction."""
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds % length == 0:
            return f"{milliseconds // length}{unit}"
    return f"{milliseconds}ms"


def human_time(milliseconds: int) -> str:
    """Local time, to the millisecond."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"


def human_age(seconds: float | None) -> str:
    """`0 s`, `3.2 s`, `5m 12s`, `3d 4h`; `?` where nobody knows."""
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds else "0 s"
    left, shown = round(seconds), []
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= length:
            shown.append(f"{left // length}{unit}")
            left %= length
    return " ".join(shown[:2])


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7`."""
    shown: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if shown and shown[-1][1] == number - 1:
            shown[-1] = (shown[-1][0], number)
        else:
            shown.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in shown)


def count(number: int, what: str) -> str:
    """`1 message`, `2,000 messages`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def readable(data: bytes) -> str:
    """Text on one line that can't steer a terminal; what is not text is shown in escapes."""
    text = data.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
