"""What handlers return: nothing that is still to be run.

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
    """Raise if what a handler returned is work that nobody will do."""
    if found is None:
        return
    if isinstance(found, (GeneratorType, AsyncGeneratorType)):
        raise InvalidRequest(
            f"the handler returned a generator ({_name(found)}), of which nothing has run. "
            "Let it run it to its end: for _ in …"
        )
    if not isinstance(found, Awaitable):
        return
    if isinstance(found, CoroutineType):
        # One that is running elsewhere can't be closed; any other would warn when it is dropped.
        with suppress(ValueError, RuntimeError):
            found.close()
    raise InvalidRequest(
        f"the handler returned something to be awaited ({_name(found)}), and nobody awaits it "
        "here. Make the handler an `async def` and give it to pxrs.aio, or call asyncio.run in it"
    )


def _name(found: Any) -> str:
    return str(getattr(found, "__qualname__", type(found).__qualname__))
