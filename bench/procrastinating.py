"""procrastinate as a peer: the same items as jobs, on the same server, as its manual has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from bench.harness import Sample
from bench.postgres import database
from bench.queues import VALUES

_BATCH = 100


def put_jobs(url: str, count: int) -> Sample:
    """A hundred at a time: its `batch_defer` is the fastest way in."""
    with _opened(url) as (_, task):
        _defer(task, _BATCH)
        return Sample(count, _defer(task, count))


def take_jobs(url: str, count: int) -> Sample:
    """One worker, which ends when there is nothing left, and deletes what is done."""
    with _opened(url) as (app, task):
        _defer(task, count)
        started = perf_counter()
        app.run_worker(
            wait=False,
            delete_jobs="always",
            listen_notify=False,
            install_signal_handlers=False,
            update_heartbeat_interval=60.0,
        )
        seconds = perf_counter() - started
        if len(_done) != count:
            raise RuntimeError(f"procrastinate handled {len(_done)} jobs of {count}")
    return Sample(count, seconds)


_done: list[str] = []


@contextmanager
def _opened(url: str) -> Iterator[tuple[Any, Any]]:
    import procrastinate

    _done.clear()
    with database(url) as place:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=place))

        @app.task(name="handle")  # type: ignore[misc,unused-ignore]
        def handle(body: str) -> None:
            _done.append(body)

        with app.open():
            app.schema_manager.apply_schema()
            yield app, handle


def _defer(task: Any, count: int) -> float:
    started = perf_counter()
    for start in range(0, count, _BATCH):
        bodies = [VALUES[at % len(VALUES)] for at in range(start, min(count, start + _BATCH))]
        task.batch_defer(*({"body": body.decode()} for body in bodies))
    return perf_counter() - started
