"""The metrics of a node, as Prometheus reads them at `/metrics`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pxrs import metrics as names
from pxrs.aio.app import Pxrs
from pxrs.clock import Clock
from pxrs.core.group import kinds_of_reason
from pxrs.core.records import HISTORY_LENGTH
from pxrs.errors import PxrsError
from pxrs.metrics import Metric

CONTENT_TYPE = "text/plain"
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Asking the store for every group and queue costs: scrapes within these seconds share an answer.
_FRESH = 5.0
_MOST_SHOWN = 200
# How long a scrape waits for that; Prometheus waits 10 s for the scrape.
_PATIENCE = 5.0
_LOG = logging.getLogger("pxrs.serve")


class Metrics:
    """The metrics of one node. Used by one event loop; any thread may count and observe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._made: dict[str, Any] = {}
        self._with_labels: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._asked_at = -_FRESH
        self._looking: asyncio.Task[None] | None = None
        # Of each group when it was looked at last.
        self._generations: dict[str, int] | None = None
        # By the id of their log, and what was counted of topics whose name is not known yet.
        self._topic_names: dict[str, str] = {}
        self._unnamed: Tally[tuple[Metric, str]] = Tally()
        self._lock = threading.Lock()
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

    def count_of_topic(self, metric: Metric, topic_id: str, by: int) -> None:
        """Raise a counter of the topic that has this log; the next look finds out its name."""
        name = self._topic_names.get(topic_id)
        if name is not None:
            # Clients say how many messages their batches have.
            self.count(metric, name, by=max(0, by))
            return
        with self._lock:
            self._unnamed[metric, topic_id] += max(0, by)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge."""
        found = self._made[metric.name]
        (found.labels(*labels) if labels else found).set(value)

    def observe(self, metric: Metric, seconds: float, *labels: str) -> None:
        """Add to a histogram."""
        self._find(metric, labels).observe(seconds)

    def _find(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        """The counter or histogram with these labels; labels are never removed."""
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
        stale = self._clock.monotonic() - self._asked_at >= _FRESH
        if stale and self._looking is None:
            self._looking = asyncio.create_task(self._look(px))
        if self._looking is not None:
            # Scrapes that come during a look share it. What they saw before has to do if it takes
            # long: while the store is away, `pxrs_store_up` must be readable.
            await asyncio.wait({self._looking}, timeout=_PATIENCE)
        return generate_latest(self._registry)

    async def _look(self, px: Pxrs) -> None:
        try:
            await self._name_topics(px)
            await self._look_at_groups(px)
            await self._look_at_queues(px)
        except PxrsError:
            pass  # `pxrs_store_up` says it
        except Exception:  # noqa: BLE001 - whoever scrapes would not be told
            _LOG.exception("the look at groups and queues for /metrics failed")
        finally:
            self._asked_at = self._clock.monotonic()
            self._looking = None

    async def _name_topics(self, px: Pxrs) -> None:
        """Counts what waits for the name of its topic; of one that was deleted it is dropped."""
        with self._lock:
            if not self._unnamed:
                return
            unnamed, self._unnamed = self._unnamed, Tally()
        try:
            self._topic_names = {topic.id: topic.name for topic in await px.topics.list()}
        except BaseException:
            with self._lock:
                self._unnamed.update(unnamed)
            raise
        for (metric, topic_id), by in unnamed.items():
            if (name := self._topic_names.get(topic_id)) is not None:
                self.count(metric, name, by=by)

    async def _look_at_groups(self, px: Pxrs) -> None:
        groups = await px.groups.list()
        gauges = _Gauges(names.GENERATION, names.LAG, names.LAG_SECONDS)
        for each in groups[:_MOST_SHOWN]:
            try:
                shown = await px.groups.describe(each.name)
            except PxrsError as error:
                if error.retryable:
                    raise
                # Deleted since it was listed, or damaged: that is no reason to hide the others.
                continue
            gauges.set(names.GENERATION, each.generation, each.name)
            gauges.set(names.LAG, shown.lag, each.name)
            if shown.lag_seconds is not None:
                gauges.set(names.LAG_SECONDS, shown.lag_seconds, each.name)
        self._show(gauges)
        self.set(names.NOT_SHOWN, max(0, len(groups) - _MOST_SHOWN), "groups")
        await self._count_rebalances(px, {each.name: each.generation for each in groups})

    async def _count_rebalances(self, px: Pxrs, now: dict[str, int]) -> None:
        """Counts the generations that groups have had since the last look, from their history."""
        known = self._generations
        if known is None:
            self._generations = dict(now)  # what happened before is not counted
            return
        for gone in known.keys() - now.keys():
            del known[gone]
        for group, generation in now.items():
            last = known.get(group, 0)
            if last > generation:
                last = 0  # it was deleted and made again
            if generation > last:
                try:
                    # All: as many resets are kept, and the limit counts them, too.
                    history = await px.groups.explain(group, 2 * HISTORY_LENGTH)
                except PxrsError as error:
                    if error.retryable:
                        raise  # this group and the rest are counted by the next look
                else:
                    self._count(
                        each.reason
                        for each in history.rebalances
                        if last < each.generation <= generation
                    )
            known[group] = generation

    def _count(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            for kind in kinds_of_reason(reason):
                self.count(names.REBALANCES, kind)

    async def _look_at_queues(self, px: Pxrs) -> None:
        queues = await px.queues.list()
        gauges = _Gauges(names.QUEUE_ITEMS, names.QUEUE_AGE)
        for each in queues[:_MOST_SHOWN]:
            for state in ("ready", "delayed", "held", "waiting", "dead"):
                gauges.set(names.QUEUE_ITEMS, getattr(each, state), each.name, state)
            gauges.set(names.QUEUE_AGE, each.oldest_age or 0.0, each.name)
        self._show(gauges)
        self.set(names.NOT_SHOWN, max(0, len(queues) - _MOST_SHOWN), "queues")

    def _show(self, gauges: _Gauges) -> None:
        """Replace these gauges, without anything awaited in between."""
        for metric in gauges.metrics:
            self._made[metric.name].clear()
        for metric, value, labels in gauges.values:
            self.set(metric, value, *labels)


class _Gauges:
    """Collects the values that one look finds, until it is complete."""

    def __init__(self, *metrics: Metric) -> None:
        self.metrics = metrics
        self.values: list[tuple[Metric, float, tuple[str, ...]]] = []

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        self.values.append((metric, value, labels))
