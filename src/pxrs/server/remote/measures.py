"""Adds the calls of `pxrs://` clients to the node's metrics. Thread-safe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pxrs import metrics as names
from pxrs.core.records import CLAIMS_PREFIX
from pxrs.server.metrics import Metrics
from pxrs.stores.remote.wire import METHODS, WireAtomic
from pxrs.types import Append, Appended, Committed, Fetched

# In the place of an HTTP method, as gRPC has it.
_KIND = "pxrs"


class Measures:
    """Counts the calls, and the messages and checkpoints in them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def done(self, method: str, given: Mapping[str, Any], answer: Any, seconds: float) -> None:
        """Note a call that was made."""
        self._count(method, "OK", seconds)
        if method == "log.append":
            self._note_appends(given["appends"], answer, seconds)
        elif method == "log.fetch":
            self._note_fetch(given, answer)
        elif method == "coord.commit" and isinstance(answer, Committed):
            self._note_checkpoints(given, seconds)
        elif method == "node.atomic":
            atomic: WireAtomic = answer
            self._note_appends(given["appends"], atomic.appended, seconds)
            self._note_checkpoints(given, seconds)

    def failed(self, method: str, code: str, seconds: float) -> None:
        """Note a call that was answered with an error."""
        # Not the name as it was sent: strangers could make up as many labels as they like.
        self._count(method if method in METHODS else "none", code, seconds)

    def _count(self, method: str, status: str, seconds: float) -> None:
        self._metrics.count(names.REQUESTS, _KIND, method, status)
        self._metrics.observe(names.REQUEST_SECONDS, seconds, method)

    def _note_appends(
        self, appends: Sequence[Append], results: Iterable[object], seconds: float
    ) -> None:
        found = [
            (append, result)
            for append, result in zip(appends, results, strict=False)
            if isinstance(result, Appended)
        ]
        if found:
            self._metrics.observe(names.PRODUCE_SECONDS, seconds)
        for append, result in found:
            if not result.duplicate:
                self._metrics.count_of_topic(
                    names.PRODUCED, append.where.topic_id, append.batch.count
                )

    def _note_fetch(self, given: Mapping[str, Any], answer: Fetched) -> None:
        if answer.batches:
            # The first batch may begin before the wanted offset.
            count = answer.batches[-1].next - max(given["offset"], answer.batches[0].base)
            self._metrics.count_of_topic(names.FETCHED, given["where"].topic_id, count)

    def _note_checkpoints(self, given: Mapping[str, Any], seconds: float) -> None:
        if any(write.key.startswith(CLAIMS_PREFIX) for write in given["writes"]):
            self._metrics.observe(names.COMMIT_SECONDS, seconds)
