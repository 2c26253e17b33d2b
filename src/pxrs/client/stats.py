"""The statistics of a client, as `px.client.stats()` returns them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

# Upper ends of the classes of latencies, in seconds.
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0)


class PoolStats(NamedTuple):
    """Streams that are open, that were opened so far, and that broke."""

    open: int
    opened: int
    broken: int


class RouterStats(NamedTuple):
    """How many nodes and shards are known, and how requests for keys went.

    `to_leader`: sent to the node that leads the key. `elsewhere`: to another node, as the leader
    is not known or does not answer. `hints`: a node named the leader.
    """

    nodes: int
    shards: int
    to_leader: int
    elsewhere: int
    hints: int


class TopologyStats(NamedTuple):
    """The epoch of the view, how many leaders of slots are known, and how often it changed."""

    epoch: int
    leaders: int
    changes: int


class RetryStats(NamedTuple):
    """Attempts beyond the first one, and calls that were given up."""

    retries: int
    exhausted: int


class LatencyStats(NamedTuple):
    """Seconds from call to answer: how many, and below which bound half and 99 % of them were."""

    calls: int
    seconds: float
    p50: float
    p99: float


class ClientStats(NamedTuple):
    """See `px.client.stats`. `latencies` is by method, such as `kv.write`."""

    router: RouterStats
    pool: PoolStats
    topology: TopologyStats
    retries: RetryStats
    latencies: dict[str, LatencyStats]


class Latencies:
    """Counts calls by how long they took. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._classes: dict[str, list[int]] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, method: str, seconds: float) -> None:
        """Note one call."""
        index = bisect_left(_BOUNDS, seconds)
        with self._lock:
            classes = self._classes.setdefault(method, [0] * (len(_BOUNDS) + 1))
            classes[index] += 1
            self._seconds[method] += seconds

    @property
    def stats(self) -> dict[str, LatencyStats]:
        """The latencies by method."""
        with self._lock:
            return {
                method: LatencyStats(
                    sum(classes), self._seconds[method], _below(classes, 0.5), _below(classes, 0.99)
                )
                for method, classes in self._classes.items()
            }


def _below(classes: list[int], share: float) -> float:
    """The bound below which this share of the calls lies."""
    wanted, seen = share * sum(classes), 0
    for count, bound in zip(classes, (*_BOUNDS, float("inf")), strict=True):
        seen += count
        if seen >= wanted:
            return bound
    return float("inf")
