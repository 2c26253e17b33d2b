"""The real engines that tests, benchmarks and the demo run on, as child processes on loopback.

    with engines.start("etcd", nodes=3) as etcd:
        pxrs.connect("sqlite:///app.db", coord=etcd.url)

Each keeps its data in a temp folder and dies with this process. Nothing has to be installed by
hand: see `engines.sources`. Not part of the package that users install.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from engines.engine import Engine
from engines.sources import Missing

__all__ = ["NAMES", "Engine", "Missing", "build", "start"]

NAMES = ("postgres", "mariadb", "etcd", "zookeeper", "nats", "valkey")
# These stand in front of another one, and have to be told which.
IN_FRONT = ("pgbouncer",)


def build(name: str, **options: Any) -> Engine:
    """An engine that is not started yet; raises `Missing` where it can't be had."""
    if name not in NAMES + IN_FRONT:
        raise ValueError(f"no engine {name!r}; there are {', '.join(NAMES + IN_FRONT)}")
    engine: Engine = import_module(f"engines.{name}").build(**options)
    return engine


def start(name: str, **options: Any) -> Engine:
    """A running engine; `close` it, or use it as a context manager."""
    engine = build(name, **options)
    engine.start()
    return engine
