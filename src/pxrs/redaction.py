"""Hides secrets in what leaves the process: errors, logs, output, tracebacks.

A secret is known by its value. Whoever reads one from a URL or a setting calls `remember`, before
any driver gets it; whatever prints calls `hidden`. `PxrsError` does so for every error of pxrs.
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
_known: dict[str, tuple[str, ...]] = {}
# The same as one list, longest first: a secret may be part of another one.
_forms: tuple[str, ...] = ()


def remember(secret: str | None, shown: str = "") -> None:
    """Hide this from now on; not if `shown`, which is printed anyway, contains it."""
    global _forms
    if secret is None or len(secret) < _LEAST or secret in shown or secret in _known:
        return
    with _lock:
        _known[secret] = _written(secret)
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
