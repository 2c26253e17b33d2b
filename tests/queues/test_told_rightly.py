"""What callers are told of a commit, a take or a rollback when something goes wrong beside it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.errors import (
    InvalidRequest,
    OutcomeUnknown,
    StoreUnavailable,
    TransactionConflict,
)
from pxrs.stores.memory.stores import MemoryStores
from pxrs.stores.queues_on_coord.queues import RecipeQueues
from pxrs.stores.sqlite.database import Database, Turn
from pxrs.testing.conformance.queue_tools import bodies
from pxrs.types import Holder, NewItem, QueueChange
from support.child import PATIENCE

sqlite = pytest.mark.engine("sqlite")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "app.db")


@pytest.fixture
def px(path: str) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(f"sqlite:///{path}") as px:
        px.queues.create("q")
        yield px


@pytest.fixture
def mine(path: str, px: pxrs.Pxrs) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE rows_of_mine (n)")
    connection.commit()
    yield connection
    connection.close()


def values(px: pxrs.Pxrs) -> list[Any]:
    return [item.value for item in px.queues.peek("q", limit=100)]


def fail_one_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    make_durable = Database._make_durable
    failed: list[bool] = []

    def once(self: Database, turn: Turn, ending: Any) -> None:
        if not failed:
            failed.append(True)
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = 10
            raise error
        make_durable(self, turn, ending)

    monkeypatch.setattr(Database, "_make_durable", once)


@sqlite
def test_a_callers_statements_are_not_left_out_of_a_second_commit(
    px: pxrs.Pxrs, mine: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were rolled back with the first: what is left of the unit must not commit alone."""
    with px.begin(commits=mine) as tx:
        mine.execute("INSERT INTO rows_of_mine VALUES (1)")
        tx.put("q", "for row 1")
        fail_one_sync(monkeypatch)
        with pytest.raises(TransactionConflict):
            tx.commit()
        with pytest.raises(InvalidRequest, match="rolled back"):
            tx.commit()
    assert (values(px), mine.execute("SELECT * FROM rows_of_mine").fetchall()) == ([], [])


class CallsBack(sqlite3.Connection):
    """Calls something of its owner's after each commit, as a session's listeners are."""

    def commit(self) -> None:
        super().commit()
        raise TransactionConflict("said of something else")


@sqlite
def test_an_error_after_the_commit_is_not_said_of_the_commit(px: pxrs.Pxrs, path: str) -> None:
    mine = sqlite3.connect(path, factory=CallsBack)
    with px.begin(commits=mine) as tx:
        tx.put("q", "once")
        tx.commit()
    mine.close()
    assert values(px) == ["once"]


@sqlite
def test_a_rollback_that_can_not_settle_an_interrupted_commit_says_so(
    px: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = px.stores.queues
    apply = queues.apply

    def interrupted(change: QueueChange) -> list[int | None]:
        apply(change)
        raise KeyboardInterrupt

    def away(session: str, unit: str) -> None:
        raise StoreUnavailable("down")

    tx = px.begin()
    tx.put("q", "perhaps")
    monkeypatch.setattr(queues, "apply", interrupted)
    monkeypatch.setattr(queues, "outcome", away)
    with pytest.raises(KeyboardInterrupt):
        tx.commit()
    with pytest.raises(OutcomeUnknown, match="look before"):
        tx.rollback()
    monkeypatch.undo()
    assert values(px) == ["perhaps"]


@sqlite
def test_a_rollback_beside_a_block_of_the_same_thread_ends_nobodys_session(px: pxrs.Pxrs) -> None:
    """It can't write while the thread holds the writer: somebody else does it then."""
    for number in range(3):
        px.put("q", str(number))
    one, block, other = px.begin(), px.begin(), px.begin()
    for tx in (one, block, other):
        assert tx.take("q", PATIENCE) is not None
    block.execute("CREATE TABLE t (n)")
    one.rollback()
    block.commit()
    assert not other._held.is_lost
    other.commit()
    with px.begin() as again:
        item = again.take("q", PATIENCE)
        assert item is not None
        assert item.value == "0"


@sqlite
def test_what_was_written_into_a_callers_transaction_is_not_written_again(
    px: pxrs.Pxrs, mine: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_session = px._context().hold_session

    def interrupted(given: object) -> None:
        raise KeyboardInterrupt

    px.put("work", "taken")
    tx = px.begin(join=mine)
    assert tx.take("work", PATIENCE) is not None
    mine.execute("INSERT INTO rows_of_mine VALUES (1)")
    tx.put("q", "once")
    monkeypatch.setattr(hold_session, "release_unless_removed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tx.commit()
    with pytest.raises(InvalidRequest, match="begin another"):
        tx.commit()
    mine.commit()
    assert values(px) == ["once"]


@sqlite
def test_short_programs_leave_little_evidence_behind(path: str) -> None:
    for _ in range(5):
        with pxrs.connect(f"sqlite:///{path}") as px:
            for number in range(10):
                px.put("q", str(number))
    connection = sqlite3.connect(path)
    ((units,),) = connection.execute("SELECT count(*) FROM pxrs_queue_units")
    connection.close()
    assert units <= 5


class Unreadable:
    """A coordination store that can't be read for a while, from one commit on."""

    def __init__(self, inner: Any, *, answers: bool) -> None:
        self._inner = inner
        self._answers = answers
        self.armed = self.away = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, key: str) -> Any:
        if self.away:
            raise StoreUnavailable("down")
        return self._inner.get(key)

    def commit(self, checks: Any, writes: Any) -> Any:
        outcome = self._inner.commit(checks, writes)
        if self.armed and any("lock" in write.key for write in writes):
            self.armed, self.away = False, True
            if not self._answers:
                raise OutcomeUnknown("no answer")
        return outcome


@pytest.mark.engine("memory")
@pytest.mark.parametrize("answers", [True, False], ids=["it is held", "nobody knows"])
def test_a_take_that_holds_something_is_not_told_as_failed(answers: bool) -> None:
    """The recipe reads what it hands out after the hold: if it can't, it is held all the same."""
    memory = MemoryStores()
    coord = Unreadable(memory.coord, answers=answers)
    queues = RecipeQueues(coord)
    queues.apply(QueueChange(Holder("s", "t"), (), (NewItem(queue="q", body=b"1"),)))
    session = memory.coord.session(60.0)
    holder = Holder(session.id, "tx")
    coord.armed = True
    with pytest.raises(OutcomeUnknown):
        queues.take("q", holder, 1, unit="take")
    coord.away = False
    assert bodies(queues.held("q", holder, "take")) == [b"1"]
