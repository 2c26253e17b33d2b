"""Rejects handler results that are work no one would run (coroutines, generators).

A coroutine or a generator means that none of the work was done. To count it as handled would be
to lose the message, so it is a failure of the handler like any other.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from pxrs.errors import InvalidRequest


def refuse_unfinished(found: Any) -> None:
    """Raise if a handler returned work that no one would run."""
    if found is None:
        return
    if isinstance(found, (GeneratorType, AsyncGeneratorType)):
        raise InvalidRequest(
            f"the handler returned a generator ({_name(found)}), and none of its code has run; "
            "run it in the handler: for _ in …"
        )
    if not isinstance(found, Awaitable):
        return
    if isinstance(found, CoroutineType):
        # One that is running elsewhere can't be closed; any other would warn when it is dropped.
        with suppress(ValueError, RuntimeError):
            found.close()
    raise InvalidRequest(
        f"the handler returned an awaitable ({_name(found)}), which is not awaited here; make the "
        "handler an `async def` and use pxrs.aio, or call asyncio.run in it"
    )


def _name(found: Any) -> str:
    return str(getattr(found, "__qualname__", type(found).__qualname__))
