"""`bench engines`: a group's first member, until it owns all of many partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import engines
import pxrs
from bench import postgres
from bench.harness import Check, Options, Say, Section
from bench.members import await_share
from bench.ours import Px

PARTITIONS = 1_000


def on_postgres(options: Options, say: Say) -> Section:
    """Everything on PostgreSQL."""
    with (
        postgres.server() as url,
        postgres.database(url) as place,
        pxrs.connect(place) as px,
    ):
        return _joined("PostgreSQL", px, 2.0, options, say)


def on_etcd(options: Options, say: Say) -> Section:
    """Claims on etcd, messages in a file."""
    with _etcd(options.folder) as px:
        return _joined("etcd", px, 5.0, options, say)


@contextmanager
def _etcd(folder: Path | None) -> Iterator[Px]:
    with (
        engines.start("etcd", durable=True) as engine,
        TemporaryDirectory(dir=folder) as place,
        pxrs.connect(engine.url, log=f"sqlite:///{place}/messages.db") as px,
    ):
        yield px


def _joined(engine: str, px: Px, limit: float, options: Options, say: Say) -> Section:
    took = []
    px.topics.create("wide", partitions=PARTITIONS)
    for number in range(options.rounds):
        say(f"{engine}: {PARTITIONS:,} partitions join, {number + 1}")
        started = perf_counter()
        with px.consumer("wide", group=f"g{number}") as consumer:
            await_share(consumer, PARTITIONS)
            took.append(perf_counter() - started)
    name = f"{engine}: {PARTITIONS:,} partitions join"
    return Section(checks=[Check(name, median(took), limit, " s")])


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    "postgres-joining": on_postgres,
    "etcd-joining": on_etcd,
}
