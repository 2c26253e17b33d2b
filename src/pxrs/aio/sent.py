"""The handles that `send` and `send_many` give out, to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import msgspec

from pxrs.aio.threads import called
from pxrs.producing import handles as blocking
from pxrs.types import Position


class Sent(msgspec.Struct, frozen=True, gc=False):
    """A message that was handed over. `await sent` says where it was written."""

    _sent: blocking.Sent

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._sent.done

    async def result(self, timeout: float | None = None) -> Position:
        """Wait until the message is durable.

        It is committed at once, together with all others that are there by then. Raises what
        kept it from being appended, or `TimeoutError`; then it may still be appended later,
        and so it may after a cancellation.
        """
        if self._sent.done:
            return self._sent.result()
        parcel = self._sent._parcel
        parcel.waiters.append(None)
        try:
            await _settled([self._sent], timeout)
            return self._sent.result()
        finally:
            parcel.waiters.pop()

    def __await__(self) -> Generator[Any, None, Position]:
        return self.result().__await__()


class SentMany(Sequence[Sent]):
    """The handles of a `send_many`, in the order of its messages."""

    __slots__ = ("_many",)

    def __init__(self, many: blocking.SentMany) -> None:
        self._many = many

    def __len__(self) -> int:
        return len(self._many)

    def __getitem__(self, at: Any) -> Any:
        found = self._many[at]
        return SentMany(found) if isinstance(at, slice) else Sent(found)

    def __iter__(self) -> Iterator[Sent]:
        return map(Sent, self._many)

    async def result(self, timeout: float | None = None) -> list[Position]:
        """Wait until all are durable; where each was written."""
        with self._many._waited_for():
            await _settled(self._many, timeout)
            return self._many.result()

    def __await__(self) -> Generator[Any, None, list[Position]]:
        return self.result().__await__()


async def _settled(many: Sequence[blocking.Sent], timeout: float | None) -> None:
    try:
        async with asyncio.timeout(timeout):
            for sent in many:
                if not sent.done:
                    await called(sent._wake)
    except TimeoutError:
        raise TimeoutError(f"not appended within {timeout:g} s; it is still being tried") from None
