"""Messages out of a stream of lines, a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

BLOCK = 2**18

Pair = tuple[bytes | None, bytes]


def blocks_of_lines(
    stream: BinaryIO, longest: int, on_read: Callable[[int], object] = lambda _: None
) -> Iterator[list[bytes]]:
    """The stream's lines without their newline, as many at once as a read brings.

    A line much over `longest` bytes is handed out cut short, still too long, and is the last:
    a file without newlines must not fill the memory.
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


def split(lines: list[bytes], separator: bytes) -> list[Pair]:
    """Key and value of each line, up to the first that has no separator."""
    pairs: list[Pair] = []
    for line in lines:
        key, found, value = line.partition(separator)
        if not found:
            break
        pairs.append((key, value))
    return pairs


def short_enough(lines: list[bytes], longest: int) -> list[bytes]:
    """The lines up to the first that is longer."""
    if max(map(len, lines)) <= longest:
        return lines
    return lines[: next(at for at, line in enumerate(lines) if len(line) > longest)]
