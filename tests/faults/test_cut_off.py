"""A consumer that is cut off from coordination stops by itself; the others go on."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import pxrs
from support.child import Child
from support.inside import say
from support.site import Site

PARTITIONS = 4
TTL = 2.0
PATIENCE = 60.0


class Member:
    """A consumer in a thread, and when it was handed what."""

    def __init__(self, log: str, coord: str) -> None:
        self.px = pxrs.connect(log, coord=coord)
        self.handed: list[tuple[float, int, int]] = []
        self.changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._consume)
        self._thread.start()

    def await_partitions(self, count: int) -> None:
        """Block until messages of so many partitions have come."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: len({partition for _, partition, _ in self.handed}) >= count, PATIENCE
            ), f"only {sorted({partition for _, partition, _ in self.handed})} came"

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        self.px.close()

    def _consume(self) -> None:
        consumer = self.px.consumer("t", "g", session_ttl=TTL, auto_commit_interval=0.1)
        with consumer:
            while not self._stop.is_set():
                try:
                    messages = consumer.poll(max_records=5, timeout=0.1)
                except pxrs.StoreError:
                    continue
                now = time.monotonic()
                with self.changed:
                    self.handed += [(now, each.partition, each.offset) for each in messages]
                    self.changed.notify_all()


@pytest.fixture
def log(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'log.db'}"


class Load:
    """Messages to every partition until it is stopped."""

    def __init__(self, log: str, coord: str) -> None:
        self._px = pxrs.connect(log, coord=coord)
        self._px.topics.create("t", partitions=PARTITIONS)
        self.sent = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def stop(self) -> int:
        self._stop.set()
        self._thread.join(PATIENCE)
        self._px.close()
        return self.sent

    def _send(self) -> None:
        with self._px.producer() as producer:
            while not self._stop.wait(0.01):
                producer.send("t", b"x", key=b"%d" % self.sent).result()
                self.sent += 1


@pytest.fixture
def load(log: str, site: Site) -> Iterator[Load]:
    load = Load(log, site.url)
    yield load
    load.stop()


def test_a_consumer_that_is_cut_off_stops_before_another_one_begins(
    site: Site, log: str, load: Load
) -> None:
    lonely = Member(log, site.proxied)
    lonely.await_partitions(PARTITIONS)
    site.proxy.cut()
    other = Member(log, site.url)
    other.await_partitions(PARTITIONS)
    began: dict[int, float] = {}
    for now, partition, _ in other.handed:
        began.setdefault(partition, now)
    ended: defaultdict[int, float] = defaultdict(float)
    for now, partition, _ in list(lonely.handed):
        ended[partition] = now
    assert all(ended[partition] < began[partition] for partition in range(PARTITIONS))
    site.proxy.reset()
    site.proxy.heal()
    lonely.close()
    other.close()


def consume(log: str, coord: str) -> None:
    """Say what comes, then commit its checkpoint."""
    with pxrs.connect(log, coord=coord) as px:
        consumer = px.consumer("t", "g", session_ttl=TTL, auto_commit=False)
        say("joined")
        while True:
            messages = consumer.poll(max_records=20, timeout=0.5)
            if messages:
                say([[each.partition, each.offset] for each in messages])
            with suppress(pxrs.Fenced, pxrs.StoreError):
                consumer.commit()


def test_a_killed_process_is_replaced_and_nothing_is_lost(site: Site, log: str, load: Load) -> None:
    with Child(consume, log, site.url) as first, Child(consume, log, site.url) as second:
        assert first.read() == second.read() == "joined"
        seen = {tuple(place) for place in first.read()} | {tuple(place) for place in second.read()}
        first.kill()
        seen |= {tuple(place) for word in first.rest() for place in word}
        sent = load.stop()
        with pxrs.connect(log, coord=site.url) as px:
            ends = {each.partition: each.end for each in px.topics.describe("t").partitions}
            assert sum(ends.values()) == sent
            every = {(partition, n) for partition, end in ends.items() for n in range(end)}
            while not every <= seen:
                seen |= {tuple(place) for place in second.read()}
            watch = px.stores.coord.watch("")
            while committed(px) != {partition: end for partition, end in ends.items() if end}:
                assert watch.wait(PATIENCE)
            watch.close()


def committed(px: pxrs.Pxrs) -> dict[int, int]:
    return {
        each.partition: each.checkpoint
        for each in px.groups.describe("g").partitions
        if each.checkpoint
    }
