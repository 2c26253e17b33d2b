"""What a consumer's transaction is about: the messages that are with the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pxrs.core.progress import Progress
from pxrs.errors import Fenced
from pxrs.runtime.holdings import Mark
from pxrs.runtime.worker import Run, Worker, names_of
from pxrs.types import TopicPartition


class Handed:
    """See `pxrs.runtime.checkpoint.Work`: the runs that are with the caller."""

    def __init__(self, worker: Worker, on_lost: Callable[[], None]) -> None:
        self._worker = worker
        self._desk = worker.desk
        self._on_lost = on_lost
        self._runs: list[Run] = []

    def marks(self) -> dict[TopicPartition, Mark]:
        with self._desk.lock:
            self._runs = [run for run in self._worker.runs if run.seen]
            stale = self._worker.drop_stale_runs()
            if stale:
                self.rolled_back()
                raise Fenced(f"owned by somebody else since: {names_of(stale)}")
            marks: dict[TopicPartition, Mark] = {}
            for run in self._runs:
                before = run.seat.mark()
                if before is None:
                    continue
                progress = Progress(before.checkpoint, before.done)
                progress.finish(run.messages[0].offset, run.messages[run.seen - 1].offset + 1)
                marks[run.seat.part] = Mark(progress.checkpoint, progress.runs)
            return marks

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None:
        with self._desk.lock:
            for run in self._runs:
                run.count(run.seen)
        self._desk.committed(marks)

    def rolled_back(self) -> None:
        with self._desk.lock:
            self._worker.runs = [run for run in self._worker.runs if run not in self._runs]
            self._desk.rewind(run.seat for run in self._runs)

    def lost(self, parts: frozenset[TopicPartition]) -> None:
        self._desk.gone(parts, lost=True)
        self._on_lost()
