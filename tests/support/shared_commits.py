"""Counts the commits that concurrent writes of keys share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pxrs.core import kv
from pxrs.server.keys import Together
from pxrs.stores.api import CoordStore
from pxrs.types import Check, Committed, Conflict, Write
from support.child import PATIENCE


def count_arrivals(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The requests that came to a node's keys so far; all but those under way wait there."""
    arrived: list[object] = []
    call = Together.__call__

    async def arrive(self: Together[Any, Any], work: object) -> object:
        arrived.append(work)
        return await call(self, work)

    monkeypatch.setattr(Together, "__call__", arrive)
    return arrived


class SharedCommits:
    """The number of keys that each commit of a store writes, in order.

    The first commit goes on when `all_wait`, so those that are not in it are in the second one.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, coord: CoordStore, all_wait: Callable[[], bool]
    ) -> None:
        self.sizes: list[int] = []
        self._all_wait = all_wait
        self._first = True
        self._inner = coord.commit
        monkeypatch.setattr(coord, "commit", self._commit)

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        size = sum(write.key.startswith(kv.RECORDS) for write in writes)
        if size and self._first:
            self._first = False
            ends = time.monotonic() + PATIENCE
            while not self._all_wait() and time.monotonic() < ends:
                threading.Event().wait(0.001)
        answer = self._inner(checks, writes)
        if size and isinstance(answer, Committed):
            self.sizes.append(size)
        return answer
