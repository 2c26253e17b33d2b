"""The SQLite backend passes every suite, each handle with connections and locks of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pxrs.stores.api import Session, Stores
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.conformance import (
    Rule,
    atomic_checks,
    await_end,
    coord_checks,
    log_checks,
    queue_checks,
    restore_checks,
    wake_checks,
)

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
        stores = SqliteStores(str(self._folder / "lab.db"), use_inotify=self._use_inotify)
        self._opened.append(stores)
        return stores

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
    coord_checks() + log_checks() + queue_checks() + restore_checks() + atomic_checks(),
    ids=lambda check: check.__name__,
)
def test_conforms(check: Rule, lab: SqliteLab) -> None:
    check(lab)


@pytest.mark.parametrize("lab", [False], indirect=True, ids=["polling"])
@pytest.mark.parametrize("check", wake_checks(), ids=lambda check: check.__name__)
def test_conforms_without_inotify(check: Rule, lab: SqliteLab) -> None:
    check(lab)
