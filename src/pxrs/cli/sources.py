"""Where input comes from: arguments, lines of stdin, or lines of a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import click

from pxrs.cli.lines import blocks_of_lines
from pxrs.cli.options import Settings
from pxrs.cli.output import console

_STDIN = ((), ("-",))


def one_source(arguments: tuple[str, ...], file: str | None, what: str) -> None:
    """Refuse two of them, before anything is opened."""
    if file is not None and arguments:
        raise click.UsageError(f"{what}s come from --file or from the command line, not both")


def are_lines(arguments: tuple[str, ...], file: str | None) -> bool:
    """Whether it is lines that are read."""
    return file is not None or arguments in _STDIN


@contextmanager
def source(
    arguments: tuple[str, ...], file: str | None, longest: int, what: str, settings: Settings
) -> Iterator[Iterable[list[bytes]]]:
    """What there is, in blocks."""
    if file is not None:
        with open(file, "rb") as stream, _progress(stream, settings) as advance:
            yield blocks_of_lines(stream, longest, advance)
    elif arguments in _STDIN:
        if sys.stdin.isatty():
            click.secho(f"one {what} per line; Ctrl-D ends", dim=True, err=True)
        yield blocks_of_lines(sys.stdin.buffer, longest)
    else:
        yield [[os.fsencode(argument) for argument in arguments]]


@contextmanager
def _progress(stream: BinaryIO, settings: Settings) -> Iterator[Callable[[int], object]]:
    """A bar on stderr while the file is read, if somebody can see it."""
    size = os.fstat(stream.fileno()).st_size
    if settings.json or not sys.stderr.isatty() or not size:
        yield lambda _: None
        return
    from rich import progress

    columns = (
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console(err=True), transient=True) as bar:
        task = bar.add_task("", total=size)
        yield lambda read: bar.advance(task, read)
