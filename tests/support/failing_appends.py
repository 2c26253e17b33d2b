"""Appends over a network that fails at a batch, for labs of real servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial

from pxrs.errors import PxrsError
from pxrs.stores.api import LogStore
from pxrs.testing.conformance import FailingAppend
from pxrs.types import Append, Appended
from support.child import PATIENCE
from support.proxy import Proxy


class Fate(Enum):
    """What becomes of a batch on its way."""

    ARRIVES = "its answer is lost"
    LOST = "it is lost, and the connection with it"
    SWALLOWED = "it is lost, and what comes behind it is not"
    LATE = "it comes after its sender was told that nobody knows"


class CutAppends:
    """Ways to append by a proxy that stops at one of the batches."""

    def __init__(self, proxy: Proxy, open_log: Callable[[], LogStore]) -> None:
        self._proxy = proxy
        self._open = open_log

    def ways(self, *fates: tuple[Fate, int]) -> list[FailingAppend]:
        """One for each fate, of the batch of that number, or the last."""
        return [partial(self._append, fate, number) for fate, number in fates]

    def _append(
        self, fate: Fate, number: int, appends: Sequence[Append]
    ) -> list[Appended | PxrsError]:
        proxy, log = self._proxy, self._open()
        # Whatever has to be looked up first.
        for topic in {append.where.topic_id for append in appends}:
            log.bounds(topic)
        # Its records, which no engine changes.
        words = bytes(appends[min(number, len(appends) - 1)].batch.data[61:])
        try:
            self._stop(fate, words)
            with ThreadPoolExecutor(1) as pool:
                outcomes = pool.submit(log.append, appends)
                proxy.await_request()
                if fate is Fate.ARRIVES:
                    proxy.await_answer()
                if fate in (Fate.ARRIVES, Fate.LOST):
                    proxy.refuse()
                return outcomes.result(PATIENCE)
        finally:
            proxy.heal()

    def _stop(self, fate: Fate, words: bytes) -> None:
        if fate is Fate.ARRIVES:
            self._proxy.hold_answers_from(words)
        elif fate is Fate.SWALLOWED:
            self._proxy.lose_requests_with(words)
        else:
            self._proxy.hold_request_with(words)
