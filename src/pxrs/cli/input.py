"""Reads the values a command writes: its arguments, lines of stdin, or lines of a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import click

from pxrs.cli.show import console

BLOCK = 2**18


class Input:
    """The source of a command's values. `what` names one of them: message, item."""

    def __init__(self, values: tuple[str, ...], file: str | None, what: str) -> None:
        if file is not None and values:
            raise click.UsageError(f"{what}s must come from --file or from arguments, not both")
        self._values = values
        self._file = file
        self._what = what
        self._reads_stdin = file is None and values in ((), ("-",))

    @property
    def unit(self) -> str:
        """The word for one value in errors: `line` where lines are read."""
        return self._what if self._file is None and not self._reads_stdin else "line"

    @contextmanager
    def blocks(self, longest: int, *, quiet: bool) -> Iterator[Iterable[list[bytes]]]:
        """Opens the input and yields its values in blocks; see `blocks_of_lines`."""
        if self._file is not None:
            with open(self._file, "rb") as stream, _progress(stream, quiet) as advance:
                yield blocks_of_lines(stream, longest, advance)
        elif self._reads_stdin:
            if sys.stdin.isatty():
                click.secho(f"type one {self._what} per line; Ctrl-D ends", dim=True, err=True)
            yield blocks_of_lines(sys.stdin.buffer, longest)
        else:
            yield [[os.fsencode(value) for value in self._values]]


@contextmanager
def _progress(stream: BinaryIO, quiet: bool) -> Iterator[Callable[[int], object]]:
    """Shows a bar on stderr while the file is read, if stderr is a terminal."""
    size = os.fstat(stream.fileno()).st_size
    if quiet or not sys.stderr.isatty() or not size:
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


def blocks_of_lines(
    stream: BinaryIO, longest: int, on_read: Callable[[int], object] = lambda _: None
) -> Iterator[list[bytes]]:
    """Yields the stream's lines without their newline, as many at once as a read brings.

    A line much over `longest` bytes is cut short, is still too long, and ends the stream: a file
    without newlines must not fill the memory.
    """
    rest: list[bytes] = []
    held = 0
    while block := stream.read1(BLOCK):  # type: ignore[attr-defined]
        on_read(len(block))
        first, *more = block.split(b"\n")
        rest.append(first)
        held += len(first)
        if more:
            yield [b"".join(rest), *more[:-1]]
            rest = [more[-1]]
            held = len(more[-1])
        elif held > longest:
            break
    if held:
        yield [b"".join(rest)]


def short_enough(lines: list[bytes], longest: int) -> list[bytes]:
    """The lines before the first that is longer."""
    if max(map(len, lines), default=0) <= longest:
        return lines
    return lines[: next(at for at, line in enumerate(lines) if len(line) > longest)]
