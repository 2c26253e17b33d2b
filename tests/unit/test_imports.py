"""Parts do not know their owner: no module imports one that imports it, not even for its types."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pxrs

ROOT = Path(pxrs.__file__).parent


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["pxrs", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: set[str]) -> set[str]:
    """All of them: at the top, inside functions and for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                found.add(inside if inside in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """A way from a module back to itself; empty if there is none."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for following in sorted(graph[name]):
            if found := search(following, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := search(name, []))), [])


@pytest.mark.long
def test_no_module_imports_itself_by_way_of_others() -> None:
    found = modules()
    graph = {name: imports_of(path, set(found)) - {name} for name, path in found.items()}
    assert cycle_in(graph) == []


def test_a_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


# One module for each command, and for each seam and ability that is checked.
WIDE = {"cli", "testing/conformance"}


def test_no_room_is_too_large_to_find_a_line_in() -> None:
    """`__init__` and the file that only holds the version are not counted."""
    rooms: dict[str, int] = {}
    for path in ROOT.rglob("*.py"):
        if path.name not in ("__init__.py", "_version.py"):
            room = path.relative_to(ROOT).parent.as_posix()
            rooms[room] = rooms.get(room, 0) + 1
    assert {room: count for room, count in rooms.items() if count > 16 and room not in WIDE} == {}
