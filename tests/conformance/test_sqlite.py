"""The SQLite backend passes every suite, each handle with connections and locks of its own."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from pxrs.errors import PxrsError
from pxrs.stores.api import Session, Stores
from pxrs.stores.sqlite.database import Turn
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.conformance import (
    FailingAppend,
    Rule,
    atomic_checks,
    await_end,
    coord_checks,
    doubt_checks,
    lent_session_checks,
    log_checks,
    queue_checks,
    restore_checks,
    wake_checks,
)
from pxrs.types import Append, Appended

pytestmark = pytest.mark.engine("sqlite")


class SqliteLab:
    """A file in a folder of its own; every handle is opened as another process would."""

    ttl = 0.5
    patience = 10.0

    def __init__(self, *, use_inotify: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pxrs-lab-"))
        self._use_inotify = use_inotify
        self._opened: list[SqliteStores] = []

    def open(self) -> Stores:
        return self._opened_anew()

    def _opened_anew(self, busy_timeout: float = 10.0) -> SqliteStores:
        stores = SqliteStores(
            str(self._folder / "lab.db"),
            busy_timeout=busy_timeout,
            use_inotify=self._use_inotify,
        )
        self._opened.append(stores)
        return stores

    @property
    def failing_appends(self) -> list[FailingAppend]:
        return [
            self._append_while_another_writes,
            partial(self._append_to_a_bad_disk, comes_to_light=False),
            partial(self._append_to_a_bad_disk, comes_to_light=True),
        ]

    def _append_while_another_writes(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        writing = threading.Event()
        done = threading.Event()

        def write() -> None:
            with self.open().atomic():
                writing.set()
                done.wait(self.patience)

        other = threading.Thread(target=write)
        other.start()
        writing.wait(self.patience)
        try:
            return self._opened_anew(busy_timeout=0.05).log.append(appends)
        finally:
            done.set()
            other.join()

    def _append_to_a_bad_disk(
        self, appends: Sequence[Append], *, comes_to_light: bool
    ) -> list[Appended | PxrsError]:
        """The sync fails. What it was about may be in the log all the same."""
        stores = self._opened_anew()
        make_durable = stores.database._make_durable

        def fail(turn: Turn, ending: Callable[[], object] | None) -> None:
            if comes_to_light:
                make_durable(turn, ending)
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

        stores.database._make_durable = fail  # type: ignore[method-assign]
        return stores.log.append(appends)

    def let_expire(self, session: Session) -> None:
        await_end(self.open(), session, self.patience)

    def close(self) -> None:
        for stores in self._opened:
            stores.close()
        shutil.rmtree(self._folder)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[SqliteLab]:
    lab = SqliteLab(use_inotify=getattr(request, "param", True))
    yield lab
    lab.close()


@pytest.mark.parametrize(
    "check",
    coord_checks()
    + lent_session_checks()
    + log_checks()
    + doubt_checks()
    + queue_checks()
    + restore_checks()
    + atomic_checks(),
    ids=lambda check: check.__name__,
)
def test_conforms(check: Rule, lab: SqliteLab) -> None:
    check(lab)


@pytest.mark.parametrize("lab", [False], indirect=True, ids=["polling"])
@pytest.mark.parametrize("check", wake_checks(), ids=lambda check: check.__name__)
def test_conforms_without_inotify(check: Rule, lab: SqliteLab) -> None:
    check(lab)
