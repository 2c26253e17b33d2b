"""What a node counts, as Prometheus reads it at `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pxrs import metrics as names
from pxrs.aio.app import Pxrs
from pxrs.clock import Clock
from pxrs.errors import PxrsError
from pxrs.metrics import Metric

CONTENT_TYPE = "text/plain"
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Asking the store for every group and queue costs; scrapes within so many seconds share an answer.
_FRESH = 5.0
_MOST_GROUPS = 200


class Metrics:
    """The metrics of one node. Used by one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._made: dict[str, Any] = {}
        self._with_labels: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._asked_at = -_FRESH
        for metric in vars(names).values():
            if isinstance(metric, Metric):
                self._make(metric)

    def _make(self, metric: Metric) -> None:
        kinds: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        options = {"buckets": _BUCKETS} if metric.kind == "histogram" else {}
        self._made[metric.name] = kinds[metric.kind](
            metric.name, metric.help, metric.labels, registry=self._registry, **options
        )

    def count(self, metric: Metric, *labels: str, by: int = 1) -> None:
        """Raise a counter."""
        self._find(metric, labels).inc(by)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge."""
        found = self._made[metric.name]
        (found.labels(*labels) if labels else found).set(value)

    def observe(self, metric: Metric, seconds: float, *labels: str) -> None:
        """Add to a histogram."""
        self._find(metric, labels).observe(seconds)

    def _find(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        """The counter or histogram with these labels; those are never taken away."""
        found = self._with_labels.get((metric.name, labels))
        if found is None:
            made = self._made[metric.name]
            found = made.labels(*labels) if labels else made
            self._with_labels[metric.name, labels] = found
        return found

    @contextmanager
    def timed(self, metric: Metric) -> Iterator[None]:
        """Observe how long the block takes, if it succeeds."""
        began = perf_counter()
        yield
        self.observe(metric, perf_counter() - began)

    async def text(self, px: Pxrs) -> bytes:
        """All of them; groups and queues are looked at anew if that was not done just now."""
        now = self._clock.monotonic()
        if now - self._asked_at >= _FRESH:
            self._asked_at = now
            try:
                await self._look_at_groups(px)
                await self._look_at_queues(px)
            except PxrsError:
                pass  # `pxrs_store_up` says it
        return generate_latest(self._registry)

    async def _look_at_groups(self, px: Pxrs) -> None:
        groups = await px.groups.list()
        for metric in (names.REBALANCES, names.LAG, names.LAG_SECONDS):
            self._made[metric.name].clear()
        for each in groups[:_MOST_GROUPS]:
            self.set(names.REBALANCES, each.generation, each.name)
            shown = await px.groups.describe(each.name)
            self.set(names.LAG, shown.lag, each.name)
            if shown.lag_seconds is not None:
                self.set(names.LAG_SECONDS, shown.lag_seconds, each.name)

    async def _look_at_queues(self, px: Pxrs) -> None:
        queues = await px.queues.list()
        for metric in (names.QUEUE_ITEMS, names.QUEUE_AGE):
            self._made[metric.name].clear()
        for each in queues[:_MOST_GROUPS]:
            for state in ("ready", "delayed", "held", "waiting", "dead"):
                self.set(names.QUEUE_ITEMS, getattr(each, state), each.name, state)
            self.set(names.QUEUE_AGE, each.oldest_age or 0.0, each.name)
