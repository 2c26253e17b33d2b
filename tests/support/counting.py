"""Load on a coordination store whose outcome can be checked: every thread counts upwards."""

from __future__ import annotations

import threading
from types import TracebackType

from pxrs.errors import OutcomeUnknown, StoreError
from pxrs.stores.api import CoordStore
from pxrs.types import Check, Committed, Put

PATIENCE = 60.0


class Counting:
    """Each thread writes 1, 2, 3 … to a record of its own, each write on top of the last one.

    It is the only writer: whatever else it finds was lost or came from a copy of a commit that
    was reported not to have happened. At the end of the block what was acknowledged is compared
    with what is there.
    """

    def __init__(self, coord: CoordStore, threads: int = 3) -> None:
        self.coord = coord
        self.acknowledged = [0] * threads
        self.wrong: list[str] = []
        self.unknown = 0
        self._progress = threading.Condition()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._count, args=(number,), daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def await_more(self, count: int) -> None:
        """Block until every thread has had so many more writes acknowledged."""
        with self._progress:
            goals = [number + count for number in self.acknowledged]
            done = self._progress.wait_for(
                lambda: (
                    bool(self.wrong)
                    or all(now >= goal for now, goal in zip(self.acknowledged, goals, strict=True))
                ),
                PATIENCE,
            )
        assert done, f"no progress: {self.acknowledged}, {goals} were to be reached"
        assert not self.wrong, self.wrong

    def __enter__(self) -> Counting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if error is None:
            self._compare()

    def _compare(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not self.wrong, self.wrong
        for number, acknowledged in enumerate(self.acknowledged):
            record = self.coord.get(f"count/{number}")
            assert record is not None
            assert int(record.value) == acknowledged

    def _count(self, number: int) -> None:
        key, value, version = f"count/{number}", 0, 0
        while not self._stop.is_set():
            try:
                outcome = self.coord.commit([Check(key, version)], [Put(key, b"%d" % (value + 1))])
            except OutcomeUnknown:
                self.unknown += 1
                value, version = self._read_back(key, value)
            except StoreError:
                continue
            else:
                if not isinstance(outcome, Committed):
                    self.wrong.append(f"{key}: {outcome} instead of {value + 1}")
                    return
                value, version = value + 1, outcome.versions[key]
            with self._progress:
                self.acknowledged[number] = value
                self._progress.notify_all()

    def _read_back(self, key: str, value: int) -> tuple[int, int]:
        while True:
            try:
                record = self.coord.get(key)
            except StoreError:
                if self._stop.is_set():
                    return value, 0
                continue
            if record is None:
                return 0, 0
            if int(record.value) not in (value, value + 1):
                self.wrong.append(f"{key}: {record.value!r} after {value}")
            return int(record.value), record.version
