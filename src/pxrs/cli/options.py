"""Options that commands share, the values they take, questions, errors and exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pxrs.cli.show import console, json_text, print_json, table
from pxrs.config import default_url
from pxrs.errors import GroupNotEmpty, PxrsError, QueueNotFound, TopicNotFound, quoted
from pxrs.redaction import hidden
from pxrs.urls import public

if TYPE_CHECKING:
    from pxrs.app import Pxrs

F = TypeVar("F", bound=Callable[..., Any])

FAILED = 1
INTERRUPTED = 130
# Shells report a program that a signal ended as this plus the signal's number.
SIGNALLED = 128
# Shells report this for a program that SIGPIPE ended.
PIPE_CLOSED = 141

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


@dataclass
class Settings:
    """The values of --url and --json, wherever they stood on the command line."""

    url: str | None = field(default=None, repr=False)
    json: bool = False

    @property
    def place(self) -> str:
        return self.url or default_url()

    def connect(self) -> Pxrs:
        """Opens a store that exists: a command that reads or removes must not create one."""
        from pxrs.stores.open import require_stores

        require_stores(self.place)
        return self.create()

    def create(self) -> Pxrs:
        """Opens the store, and creates it if it does not exist."""
        from pxrs.app import connect

        return connect(self.place)

    def print(self, document: Any, text: str) -> None:
        """Prints the document if --json is set, else the text."""
        if self.json:
            print_json(document)
        else:
            click.echo(text)

    def print_list(
        self, what: str, document: Any, columns: Sequence[str], rows: Sequence[Sequence[str]],
        left: tuple[str, ...],
    ) -> None:  # fmt: skip
        """Prints the document if --json is set, else a table; an empty one is said on stderr."""
        if self.json:
            print_json(document)
        elif not rows:
            click.echo(f"no {what} in {public(self.place)}", err=True)
        else:
            shown = table(*columns, left=left)
            for row in rows:
                shown.add_row(*row)
            console().print(shown)


# Options


def shared(command: F) -> F:
    """Gives a command --url and --json, and passes its `Settings` as the first argument."""
    url = click.option(
        "--url",
        metavar="URL",
        expose_value=False,
        callback=_remember,
        help="The store.  [default: $PXRS_URL, else sqlite:///pxrs.db]",
    )
    as_json = click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_remember,
        help="Print JSON on stdout, and nothing else there.",
    )
    passed: Any = click.pass_obj(command)
    return url(as_json(passed))  # type: ignore[no-any-return]


def _remember(ctx: click.Context, option: click.Parameter, value: str | bool | None) -> None:
    settings = ctx.ensure_object(Settings)
    if value:
        setattr(settings, str(option.name), value)


def limit_option(default: int) -> Callable[[F], F]:
    return click.option(
        "--limit", "-n", type=click.IntRange(min=1), default=default, show_default=True,
        help="Show at most this many.",
    )  # fmt: skip


max_option = click.option(
    "--max", "-n", "most", type=click.IntRange(min=1), help="Stop after this many."
)
values_only_option = click.option(
    "--values-only", is_flag=True, help="Print only the values, one per line."
)


def check_output(settings: Settings, *, values_only: bool) -> None:
    """Refuses two outputs at once, before a store is opened."""
    if values_only and settings.json:
        raise click.UsageError("use --values-only or --json, not both")


def _require_terminal(_: click.Context, __: click.Parameter, yes: bool) -> bool:
    # A script would hang on the question, or answer it by accident.
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("stdin is not a terminal, so the command can't ask; add --yes")
    return yes


# For commands that destroy something; they call `ask` unless it is given.
yes_option = click.option(
    "--yes", "-y", is_flag=True, callback=_require_terminal, help="Do not ask."
)


def ask(question: str) -> None:
    """Ends the command unless the user answers yes."""
    if not click.confirm(question, err=True):
        click.echo("nothing was changed", err=True)
        sys.exit(FAILED)


# Values of options


def _quantity(text: str, units: Mapping[str, float], what: str, examples: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    unit = match and units.get(match[2].lower())
    if not match or not unit:
        raise click.BadParameter(f"must be a {what} such as {examples}, got {quoted(text)}")
    return float(match[1]) * unit


def duration(text: str) -> int:
    """`7d`, `12h`, `90s` → milliseconds."""
    return round(_quantity(text, _SECONDS, "duration", "7d, 12h, 90s or 500ms") * 1000)


def seconds(text: str) -> float:
    """`90`, `1.5`, `90s`, `2h` → seconds."""
    return _quantity(text, {"": 1, **_SECONDS}, "duration", "90, 1.5, 90s, 2h or 7d")


def size(text: str) -> int:
    """`1GB`, `64MiB`, `4096` → bytes."""
    return round(_quantity(text, _BYTES, "size", "1GB, 64MiB or 4096"))


def offset(text: str) -> int | str:
    """`earliest`, `latest` or a number."""
    if text in ("earliest", "latest"):
        return text
    if not re.fullmatch("[0-9]+", text):
        raise click.BadParameter(f"must be a number, earliest or latest, got {quoted(text)}")
    return int(text)


def moment(text: str) -> int:
    """A time, or milliseconds since 1970 → milliseconds. A time without a zone is local."""
    if re.fullmatch("[0-9]+", text):
        return int(text)
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(
            "must be a time such as 2026-01-31T12:00:00, 2026-01-31T12:00:00Z or 1769860800000, "
            f"got {quoted(text)}"
        ) from None


def header(text: str) -> tuple[str, bytes]:
    """`name=value` → a header."""
    name, equals, content = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"must be name=value, got {quoted(text)}")
    return name, content.encode()


# Errors


def exit_code(error: BaseException, *, as_json: bool) -> int | None:
    """Reports the error and returns the exit code for it; None for an error that is a bug."""
    if isinstance(error, PxrsError):
        _report(error, as_json=as_json)
        return FAILED
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _discard_stdout()
        return PIPE_CLOSED
    return None


def _report(error: PxrsError, *, as_json: bool) -> None:
    """Prints one line on stderr."""
    text = hidden(_advice(error))
    if as_json:
        shown = {"type": type(error).__name__, "message": text, "retryable": error.retryable}
        click.echo(json_text({"error": shown}), err=True)
    else:
        click.secho(f"error: {text}", fg="red", err=True)


def _advice(error: PxrsError) -> str:
    """The error's text, with the command that mends it where there is one."""
    if isinstance(error, TopicNotFound):
        return (
            f"topic {error.topic!r} does not exist; "
            f"create it with: pxrs topics create {error.topic} --partitions 8, "
            f"or lay it over a table with: pxrs sources attach {error.topic} --partitions 8"
        )
    if isinstance(error, QueueNotFound):
        return (
            f"queue {error.queue!r} does not exist; put an item into it, "
            f"or create it with: pxrs queues create {error.queue}"
        )
    if isinstance(error, GroupNotEmpty):
        return (
            f"group {error.group!r} has members: {', '.join(error.members)}; "
            "stop them first, or fence them with --force"
        )
    return ", ".join([str(error), *getattr(error, "__notes__", ())])


def _discard_stdout() -> None:
    """Sends the rest of stdout nowhere: its reader is gone, and Python would complain at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
