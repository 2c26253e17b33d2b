"""`px.run` in a thread of its own, and how far its group has come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pxrs
from pxrs.core.records import Claim, decode
from support.child import PATIENCE


class Running:
    """`px.run` as group `g` in a thread; `join` waits for its end."""

    def __init__(
        self, px: pxrs.Pxrs, handler: Callable[[pxrs.Message], Any], **options: Any
    ) -> None:
        self.error: BaseException | None = None
        self._px = px
        self._thread = threading.Thread(target=self._run, args=(handler, options), daemon=True)
        self._thread.start()

    def _run(self, handler: Callable[[pxrs.Message], Any], options: dict[str, Any]) -> None:
        try:
            self._px.run(handler, group="g", **options)
        except pxrs.PxrsError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def checkpoints(px: pxrs.Pxrs) -> int:
    """The sum of the group's checkpoints."""
    claims = [decode(record, Claim) for record in px.stores.coord.list("claims/g/")]
    return sum(claim.checkpoint or 0 for claim in claims)


def wait_for_checkpoints(px: pxrs.Pxrs, count: int) -> None:
    """Until the group's checkpoints come to so many."""
    with closing(px.stores.coord.watch("claims/g/")) as watch:
        while checkpoints(px) < count:
            assert watch.wait(PATIENCE), f"the checkpoints stay at {checkpoints(px)}"
