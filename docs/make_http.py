"""Writes docs/http.md from the routes of a node and their OpenAPI document: `./run docs`."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from pxrs.server.node import Node
from pxrs.server.rest.openapi import openapi
from pxrs.server.rest.routes import JSON, Route
from pxrs.server.settings import ServeSettings

PAGE = Path(__file__).parent / "http.md"
_INTRODUCTION = """# HTTP API

All routes of a node, made from them by `./run docs`. [serving.md](serving.md) shows how they are
used together.

- Each request needs a token if the node asks for one, unless its route is open:
  [security](serving.md#security).
- An answer that is not a success is a [problem](#problems).
- `GET /openapi.json` describes the same for programs.
"""
# What begins the paths of each section.
_SECTIONS = {
    "Topics and messages": ("/v1/topics",),
    "Groups": ("/v1/groups",),
    "Work queues": ("/v1/queues", "/v1/leases"),
    "Keys and values": ("/v1/kv",),
    "Nodes": ("/v1/cluster", "/health", "/metrics", "/openapi.json"),
    "DMQ: groups as its document describes them": (
        "/api/v1/metadata/consumer-groups",
        "/api/v1/consumer-group/",
    ),
    "DMQ: what its existing client sends": ("/api/v1/",),
}
_REQUEST = ("name", "in", "type", "default")
_ANSWER = ("field", "type")
_WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false"}

_POWERS: dict[float, str] = {2**31 - 1: "2^31 - 1", 2**62: "2^62", 2**63 - 1: "2^63 - 1"}

Schema = Mapping[str, Any]


def routes() -> tuple[Route, ...]:
    """The routes that a node serves."""
    return asyncio.run(_routes())


async def _routes() -> tuple[Route, ...]:
    node = Node(ServeSettings(store="memory://", listen="127.0.0.1:0"))
    await node.serve(lambda endpoint: node.stop())
    return node.routes


def page() -> str:
    """The whole page."""
    left = routes()
    book = _Book(openapi(left))
    parts = [_INTRODUCTION]
    for title, starts in _SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [book.entry(route) for route in left if route.path.startswith(starts)]
        left = tuple(route for route in left if not route.path.startswith(starts))
    if left:
        raise ValueError(f"these routes are in no section: {[route.path for route in left]}")
    parts.append("## Problems\n")
    parts.append(book.problem())
    return "\n".join(parts)


class _Book:
    """Shows routes, with their fields as the OpenAPI document has them."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._paths = document["paths"]
        self._schemas = document["components"]["schemas"]

    def entry(self, route: Route) -> str:
        operation = self._paths[route.path][route.method.lower()]
        who = "Open: it needs no token." if route.open else ""
        who = "A token that has expired will do." if route.late else who
        parts = [
            f"### {route.method} {route.path}\n",
            _sentences(f"{route.summary}.", who, _doc(route.query), _doc(route.body)),
        ]
        rows = [
            [f"`{each['name']}`", each["in"], self._kind(each["schema"]), _default(each)]
            for each in operation["parameters"]
        ]
        for kind, schema in _contents(operation.get("requestBody", {})):
            rows += [
                [f"`{name}`", "body", self._kind(field), _default(field, needed=needed)]
                for name, field, needed in self._fields(schema)
            ] or [["", "body", f"`{kind}`", "required"]]
        if rows:
            parts.append(_table(_REQUEST, rows))
        parts.append(self._answer(route, operation["responses"][str(route.status)]))
        return "\n".join(parts)

    def _answer(self, route: Route, answer: Schema) -> str:
        begin = f"Answer: {route.status}"
        for kind, schema in _contents(answer):
            rows = [[f"`{name}`", self._kind(field)] for name, field, _ in self._fields(schema)]
            if rows:
                return f"{_sentences(f'{begin}.', _doc(route.answer))}\n{_table(_ANSWER, rows)}"
            return f"{begin}, {self._kind(schema) if schema and kind == JSON else f'`{kind}`'}.\n"
        return f"{begin}, without a body.\n"

    def problem(self) -> str:
        """What every other answer has."""
        problem = self._schemas["Problem"]
        rows = [[f"`{name}`", self._kind(field)] for name, field, _ in self._fields(problem)]
        text = "`application/problem+json`: `code` is for programs, `detail` for people."
        return f"{text}\n\n{_table(_ANSWER, rows)}"

    def _fields(self, schema: Schema, before: str = "") -> Iterator[tuple[str, Schema, bool]]:
        """The fields of a body, those of inner objects after the field that has them."""
        found = self._inner(schema)
        needed = found.get("required", ())
        for name, field in found.get("properties", {}).items():
            yield f"{before}{name}", field, name in needed
            yield from self._fields(field, f"{before}{name}{_step(field)}.")

    def _inner(self, schema: Schema) -> Schema:
        """The object that this is, or holds."""
        if "$ref" in schema:
            found: Schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            return found
        if "anyOf" in schema:
            return next((it for each in schema["anyOf"] if (it := self._inner(each))), {})
        if isinstance(schema.get("items"), dict):
            return self._inner(schema["items"])
        return schema if "properties" in schema else {}

    def _kind(self, schema: Schema) -> str:
        """A type in words, with its limits."""
        if "$ref" in schema:
            return "object"
        if "anyOf" in schema:
            return " or ".join(self._kind(each) for each in schema["anyOf"])
        kind = schema.get("type", "anything")
        if kind == "array":
            if "prefixItems" in schema:
                return f"[{', '.join(map(self._kind, schema['prefixItems']))}]"
            count = _between(schema.get("minItems") or None, schema.get("maxItems"))
            items = schema.get("items") or {}
            return f"list of {f'{count} × ' if count else ''}{self._kind(items)}"
        if kind == "object":
            values = schema.get("additionalProperties")
            return f"map to {self._kind(values)}" if values else "object"
        if "contentEncoding" in schema:
            return "base64"
        if "enum" in schema:
            return ", ".join(f"`{each}`" for each in schema["enum"])
        least = schema.get("minimum", schema.get("minLength"))
        most = schema.get("maximum", schema.get("maxLength"))
        limits = _between(least, most)
        unit = " characters" if kind == "string" and limits else ""
        return f"{_WORDS.get(kind, kind)}{f', {limits}{unit}' if limits else ''}"


def _contents(of: Schema) -> list[tuple[str, Schema]]:
    return [(kind, each["schema"]) for kind, each in of.get("content", {}).items()]


def _step(field: Schema) -> str:
    kinds = [each.get("type") for each in (field, *field.get("anyOf", ()))]
    return "[]" if "array" in kinds else ""


def _default(of: Schema, *, needed: bool | None = None) -> str:
    schema = of.get("schema", of)
    if of.get("required") is True or needed:
        return "required"
    return f"`{json.dumps(schema['default'])}`" if schema.get("default") is not None else ""


def _between(least: float | None, most: float | None) -> str:
    shown = [None if each is None else _POWERS.get(each, f"{each:,}") for each in (least, most)]
    if shown[1] is None:
        return "" if shown[0] is None else f"at least {shown[0]}"
    return f"up to {shown[1]}" if shown[0] is None else f"{shown[0]} to {shown[1]}"


def _doc(kind: Any) -> str:
    """What a struct says about itself; it inherits the words of its base."""
    own = kind.__dict__.get("__doc__") if isinstance(kind, type) and kind is not bytes else None
    return re.sub(r"\s+", " ", own or "").strip()


def _sentences(*texts: str) -> str:
    return "\n".join(wrap(" ".join(text for text in texts if text), 112)) + "\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Write the page; with `--check` only say whether it is current."""
    made = page()
    if "--check" not in sys.argv:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        print("docs/http.md is not current; ./run docs writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
