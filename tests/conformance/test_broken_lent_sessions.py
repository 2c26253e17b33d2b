"""Lent sessions with one rule broken each: their suite finds every one of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pxrs.stores.api import Session, Stores
from pxrs.stores.sqlite import lent_sessions, sessions
from pxrs.stores.sqlite.coord import SqliteCoord
from pxrs.stores.sqlite.lent_sessions import LentFile
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.conformance import await_end, lent_session_checks, run_suite

pytestmark = pytest.mark.engine("sqlite")
Break = Callable[[pytest.MonkeyPatch], None]


class Lab:
    """A file in a folder of its own."""

    ttl = 0.5
    patience = 2.0

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pxrs-broken-"))
        self._opened: list[SqliteStores] = []

    def open(self) -> Stores:
        self._opened.append(SqliteStores(str(self._folder / "lab.db")))
        return self._opened[-1]

    def let_expire(self, session: Session) -> None:
        await_end(self.open(), session, self.patience)

    def close(self) -> None:
        for stores in self._opened:
            stores.close()
        shutil.rmtree(self._folder)


def ends_with_its_handle(patch: pytest.MonkeyPatch) -> None:
    lend, close = SqliteCoord.lend, SqliteCoord.close
    opened: dict[SqliteCoord, list[Session]] = {}

    def lend_and_note(self: SqliteCoord, ttl: float) -> Session:
        session = lend(self, ttl)
        opened.setdefault(self, []).append(session)
        return session

    def close_all(self: SqliteCoord) -> None:
        for session in opened.pop(self, []):
            session.close()
        close(self)

    patch.setattr(SqliteCoord, "lend", lend_and_note)
    patch.setattr(SqliteCoord, "close", close_all)


def forgets_who_has_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LentFile, "_is_mine", lambda self, fd: True)


def abandons_in_vain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LentFile, "end_unless_adopted", lambda self: False)


def adopts_in_vain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lent_sessions, "write_stamp", lambda fd, deadline: None)


def adopts_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lent_sessions, "require_lent", lambda name: None)


def never_ends_by_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "read_stamp", lambda fd: 1e9)
    patch.setattr(sessions, "read_ttl", lambda fd: 1e9)


BROKEN: list[tuple[Break, str]] = [
    (ends_with_its_handle, "check_it_outlives_its_handle"),
    (forgets_who_has_it, "check_who_adopted_it_keeps_it"),
    (abandons_in_vain, "check_abandoning_ends_it"),
    (adopts_in_vain, "check_adopting_extends"),
    (adopts_anything, "check_only_lent_ones_are_adopted"),
    (never_ends_by_itself, "check_it_ends_by_its_time"),
]


@pytest.mark.parametrize(("broken", "check"), BROKEN, ids=lambda it: getattr(it, "__name__", it))
def test_is_caught(broken: Break, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [rule for rule in lent_session_checks() if rule.__name__ == check]
    assert run_suite(rules, Lab) == []
    broken(monkeypatch)
    failures = run_suite(rules, Lab)
    assert [failure.check for failure in failures] == [check]
