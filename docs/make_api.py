"""Writes docs/api.md from the docstrings of the public names: `./run docs`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

import msgspec

import pxrs
import pxrs.aio
import pxrs.testing
from pxrs import errors

PAGE = Path(__file__).parent / "api.md"
_INTRODUCTION = """# API reference

Made from docstrings by `./run docs`; `help(pxrs.connect)` shows the same. The guides explain how
things are used together: [producing](producing.md), [consuming](consuming.md), [queues](queues.md).
"""
_MODULES = {
    pxrs: "Everything here is imported from `pxrs`.",
    pxrs.aio: "The same verbs for asyncio, imported from `pxrs.aio`; awaited where they would "
    "block.",
    pxrs.testing: "For tests of your handlers, imported from `pxrs.testing`; see "
    "[testing](testing.md).",
}


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for module, text in _MODULES.items():
        parts.append(f"## {module.__name__}\n\n{text}\n")
        for title, names in _sections(module):
            if title:
                parts.append(f"### {module.__name__}: {title}\n")
            if title == "errors":
                parts.append((errors.__doc__ or "").strip() + "\n")
            parts += [_entry(module, name) for name in names if name != "__version__"]
    return "\n".join(parts)


def _sections(module: ModuleType) -> Iterator[tuple[str, list[str]]]:
    """The names of `__all__` by the comments that stand between them."""
    listed = inspect.getsource(module).partition("__all__ = [")[2]
    for title, names in re.findall(r"(?:# (.*)\n)?((?:\s*\"\w+\",?\s*?)+)", listed):
        yield title, re.findall(r'"(\w+)"', names)


def _entry(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    if isinstance(value, type) and issubclass(value, Exception):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        return f"#### {name}({bases})\n\n{_doc(value)}\n"
    if is_typeddict(value):
        return f"#### {name}\n\n{_doc(value)}\n"
    if isinstance(value, type):
        return "\n".join([f"#### {name}\n", _doc(value) + "\n", *_members(value, _twin(name))])
    if callable(value):
        return f"#### {name}\n\n{_code(name + _signature(value))}\n{_doc(value)}\n"
    return f"#### {name}\n\n`{value!r}`\n"


def _twin(name: str) -> type | None:
    found = getattr(pxrs, name, None)
    return found if isinstance(found, type) else None


def _members(cls: type, twin: type | None) -> Iterator[str]:
    if issubclass(cls, msgspec.Struct):
        yield "".join(f"- `{each}`\n" for each in _fields(cls))
    alike = []
    ours = {
        name for each in cls.__mro__ if each.__module__.startswith("pxrs") for name in vars(each)
    }
    for name in sorted(ours - set(getattr(cls, "__struct_fields__", ()))):
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(cls, name)
        doc = _doc(value)
        if twin not in (None, cls) and doc and doc == _doc(getattr(twin, name, None)):
            alike.append(f"`{name}`")
            continue
        if isinstance(value, property):
            kind = _type(inspect.signature(value.fget).return_annotation) if value.fget else ""
            head = f"{name}: {kind}"
        elif isinstance(value, staticmethod | classmethod):
            head = name + _signature(value.__func__)
        elif callable(value):
            head = "async " * inspect.iscoroutinefunction(value) + name + _signature(value)
        else:
            continue
        yield f"{_code(head)}\n{doc}\n" if doc else _code(head)
    if alike and twin is not None:
        yield f"As in `pxrs.{twin.__name__}`: {', '.join(alike)}.\n"


def _code(head: str) -> str:
    return f"```text\n{head}\n```\n"


def _fields(cls: type[msgspec.Struct]) -> Iterator[str]:
    kinds = dict(_annotations(cls))
    for field in msgspec.structs.fields(cls):
        if field.name.startswith("_"):
            continue
        kind = _type(kinds.get(field.name, field.type))
        default = "" if field.required else " = …"
        if field.default is not msgspec.NODEFAULT:
            default = f" = {field.default!r}"
        yield f"{field.name}: {kind}{default}"


def _annotations(cls: type) -> Iterator[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        found |= inspect.get_annotations(each)
    for name, kind in found.items():
        yield name, getattr(kind, "__forward_arg__", kind)


def _signature(function: Any) -> str:
    """The signature as it is written: annotations without quotes, without `self`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(…)"
    shown, star = [], False
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            shown.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        text = str(each.replace(annotation=each.empty, default=each.empty))
        if each.annotation is not each.empty:
            text += f": {_type(each.annotation)}"
        if each.default is not each.empty:
            default = repr(each.default)
            text += f" = {'…' if ' at 0x' in default else default}"
        shown.append(text)
    returns = signature.return_annotation
    arrow = "" if returns is signature.empty else f" -> {_type(returns)}"
    line = f"({', '.join(shown)}){arrow}"
    if len(line) <= 80:
        return line
    return "".join(["(\n", *(f"    {each},\n" for each in shown), ")", arrow])


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("collections.abc.", "").replace("typing.", "")


def _doc(value: Any) -> str:
    own = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    # Options, each on a line: a list.
    return re.sub(
        r"^([a-z_]+(?:, [a-z_]+)*): ", r"- `\1`: ", inspect.cleandoc(own or ""), flags=re.M
    )


def main() -> int:
    """Write the page; with `--check` only say whether it is current."""
    made = page()
    if "--check" not in sys.argv:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        print("docs/api.md is not current; ./run docs writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
