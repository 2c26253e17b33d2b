"""Hides secrets in all that leaves the process: errors, logs, output, tracebacks.

A secret is known by its value. Code that reads one from a URL or a setting calls `remember`, before
any driver gets it; code that prints calls `hidden`. `PxrsError` does so for every error of pxrs.
"""

from __future__ import annotations

import json
import threading
from urllib.parse import quote, quote_plus

# A shorter one is found in many innocent words.
_LEAST = 6
# Programs that open store after store forget the first ones.
_MOST = 32
HIDDEN = "…"

_lock = threading.Lock()
# The secrets of each URL, in all ways to write them; those that were used last at the end.
_known: dict[tuple[str, ...], tuple[str, ...]] = {}
# The same as one list, longest first: a secret may be part of another one.
_forms: tuple[str, ...] = ()


def remember(*secrets: str | None, shown: str = "") -> None:
    """Hide the secrets of one URL from now on; not those in `shown`, which is printed anyway."""
    global _forms
    kept = tuple(
        dict.fromkeys(
            each
            for each in secrets
            if each is not None and len(each) >= _LEAST
            if each not in shown
        )
    )
    if not kept:
        return
    with _lock:
        for known in _known:
            if set(kept) <= set(known):
                # Used again: the first to be forgotten is another one.
                _known[known] = _known.pop(known)
                return
        _known[kept] = tuple(form for each in kept for form in _written(each))
        while len(_known) > _MOST:
            del _known[next(iter(_known))]
        _forms = tuple(sorted({form for each in _known.values() for form in each}, key=_order))


def hidden(text: str) -> str:
    """The text with … for each secret that is known."""
    for form in _forms:
        text = text.replace(form, HIDDEN)
    return text


def _order(form: str) -> tuple[int, str]:
    return -len(form), form


def _written(secret: str) -> tuple[str, ...]:
    """A secret as drivers and formatters may write it."""
    plain = secret.encode(errors="surrogateescape")
    return (
        secret,
        repr(secret)[1:-1],
        json.dumps(secret)[1:-1],
        quote(plain, safe=""),
        quote(plain),
        quote_plus(plain),
    )
