"""Errors as text that every store can keep."""

from __future__ import annotations

from pxrs.redaction import hidden

_LONGEST_ERROR = 2000


def describe(error: BaseException) -> str:
    """Describes an error in text that every store can keep, even if its `__str__` fails."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its own `__str__` fails
        text = type(error).__name__
    return storable(hidden(text))


def storable(text: str) -> str:
    """Escapes what some engine refuses (unpaired surrogates, NUL), and cuts long text."""
    if len(text) > _LONGEST_ERROR:
        text = text[:_LONGEST_ERROR] + " …"
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
