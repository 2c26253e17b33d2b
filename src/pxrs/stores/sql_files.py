"""Reads the statements of an engine from the `.sql` files beside its modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

_PART = re.compile(r"\{([A-Z_]+)\}")


def statements(package: str, name: str, parts: Mapping[str, object] | None = None) -> Iterator[str]:
    """Yields the statements of `sql/<name>.sql`, without the comments between them.

    A statement ends with a semicolon at the end of a line, outside of a function's body (`$$`).
    `{NAME}` stands for the value of that name in `parts`.
    """
    for statement in _read(package, name):
        yield _PART.sub(lambda found: str((parts or {})[found[1]]), statement)


@cache
def _read(package: str, name: str) -> list[str]:
    text = (files(package) / "sql" / f"{name}.sql").read_text("utf-8")
    found: list[str] = []
    lines: list[str] = []
    in_body = False
    for line in text.splitlines():
        if lines or (line and not line.startswith("--")):
            lines.append(line)
            in_body ^= line.count("$$") % 2 == 1
            if line.endswith(";") and not in_body:
                found.append("\n".join(lines).removesuffix(";"))
                lines.clear()
    return found
