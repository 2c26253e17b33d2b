"""The statistics of a client, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pxrs import metrics as names
from pxrs.client.stats import ClientStats
from pxrs.errors import MissingExtra
from pxrs.metrics import Metric

Value = tuple[tuple[str, ...], float]


def families(stats: ClientStats) -> Iterator[Any]:
    """The statistics as families of prometheus_client; `MissingExtra` if that is not installed."""
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise MissingExtra("metrics of a client", "broker") from None
    kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    for metric, values in _values(stats):
        family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
        for labels, value in values:
            family.add_metric(labels, value)
        yield family


def _values(stats: ClientStats) -> Iterable[tuple[Metric, list[Value]]]:
    router, calls = stats.router, stats.latencies.items()
    return [
        (names.CLIENT_STREAMS, [((), stats.pool.open)]),
        (names.CLIENT_STREAMS_OPENED, [((), stats.pool.opened)]),
        (names.CLIENT_NODES, [((), router.nodes)]),
        (names.CLIENT_EPOCH, [((), stats.topology.epoch)]),
        (
            names.CLIENT_ROUTED,
            [(("leader",), router.to_leader), (("elsewhere",), router.elsewhere)],
        ),
        (names.CLIENT_HINTS, [((), router.hints)]),
        (names.CLIENT_RETRIES, [((), stats.retries.retries)]),
        (names.CLIENT_EXHAUSTED, [((), stats.retries.exhausted)]),
        (names.CLIENT_CALLS, [((method,), it.calls) for method, it in calls]),
        (names.CLIENT_SECONDS, [((method,), it.seconds) for method, it in calls]),
    ]
