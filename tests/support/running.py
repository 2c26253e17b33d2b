"""`px.run` as group `g`, and how far its group has come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pxrs
from pxrs.core.records import Claim, decode
from support.child import PATIENCE


class Running:
    """`px.run` as group `g`; `join` waits for its end, and keeps what ended it."""

    def __init__(
        self, px: pxrs.Pxrs, handler: Callable[[pxrs.Message], Any], **options: Any
    ) -> None:
        self.error: BaseException | None = None
        self._running = px.run(handler, group="g", **options)

    def join(self) -> None:
        try:
            assert self._running.join(PATIENCE)
        except pxrs.PxrsError as error:
            self.error = error


def checkpoints(px: pxrs.Pxrs) -> int:
    """The sum of the group's checkpoints."""
    claims = [decode(record, Claim) for record in px.stores.coord.list("claims/g/")]
    return sum(claim.checkpoint or 0 for claim in claims)


def wait_for_checkpoints(px: pxrs.Pxrs, count: int) -> None:
    """Until the group's checkpoints come to so many."""
    with closing(px.stores.coord.watch("claims/g/")) as watch:
        while checkpoints(px) < count:
            assert watch.wait(PATIENCE), f"the checkpoints stay at {checkpoints(px)}"
