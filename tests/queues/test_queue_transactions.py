"""Units of work over queues: what they refuse, what wakes them, who may use them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy
from sqlalchemy.orm import Session

import pxrs
from pxrs import JSON, ConfigError, Fenced, InvalidRequest, MessageTooLarge, Pxrs
from pxrs.core.retry import Backoff
from pxrs.errors import Closed, InsideTransaction, QueueNotFound, TopicNotFound
from pxrs.queues.hold_session import HoldSession
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.stores.open import open_stores
from pxrs.types import ItemState
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent
from support.queueplace import Place


@pytest.fixture
def place(url: str) -> Iterator[Place]:
    with contextlib.closing(Place(open_stores(url))) as place:
        yield place


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def app(path: Path) -> Iterator[Pxrs]:
    with pxrs.connect(f"sqlite:///{path}") as px:
        yield px


# Bad input


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"value": "x", "delay": -1}, InvalidRequest),
        ({"value": "x", "delay": float("nan")}, InvalidRequest),
        ({"value": "x", "priority": 2**40}, InvalidRequest),
        ({"value": "x", "priority": 1.5}, InvalidRequest),
        ({"value": "x", "priority": "high"}, InvalidRequest),
        ({"value": "x", "key": ""}, InvalidRequest),
        ({"value": "x", "key": "\udc80"}, InvalidRequest),
        ({"value": "x", "key": 7}, InvalidRequest),
        ({"value": "x", "delay": "soon"}, InvalidRequest),
        ({"value": "x", "dedupe": "d", "dedupe_window": 0}, InvalidRequest),
        ({"value": None}, InvalidRequest),
        pytest.param({"value": bytes(64 * 2**20 + 1)}, MessageTooLarge, id="too large"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else value.__name__,
)
def test_bad_puts_are_refused_and_change_nothing(
    px: Pxrs, options: dict[str, Any], error: type[Exception]
) -> None:
    with px.transaction() as tx:
        tx.put("q", "before")
        with pytest.raises(error):
            tx.put("q", **options)
        tx.put("q", "after")
    assert [item.value for item in px.queues.peek("q")] == ["before", "after"]


@pytest.mark.parametrize("name", ["", "a/b", "x" * 300, "\n"])
def test_bad_names_are_refused(px: Pxrs, name: str) -> None:
    with px.begin() as tx:
        with pytest.raises(InvalidRequest):
            tx.put(name, "x")
        with pytest.raises(InvalidRequest):
            tx.take(name, 0)


@pytest.mark.parametrize("number", [0, -1])
def test_no_items_can_t_be_taken(px: Pxrs, number: int) -> None:
    with px.begin() as tx, pytest.raises(InvalidRequest):
        tx.take_many("q", number, 0)


def test_policy_that_is_none_is_refused(px: Pxrs) -> None:
    with px.begin() as tx, pytest.raises(ConfigError):
        tx.take("q", 0, retry=3)  # type: ignore[arg-type]


def test_fifo_refuses_priority_and_delay_when_it_commits(px: Pxrs) -> None:
    px.queues.create("f", fifo=True)
    px.put("in", "item")
    tx = px.begin()
    assert tx.take("in", 0) is not None
    tx.put("f", "x", priority=1)
    with pytest.raises(InvalidRequest, match="fifo"):
        tx.commit()
    tx.rollback()
    assert [item.value for item in px.queues.peek("in")] == ["item"]
    assert len(px.queues.peek("f")) == 0


def test_after_its_end_a_transaction_refuses_everything(px: Pxrs) -> None:
    for end in (UnitOfWork.commit, UnitOfWork.rollback):
        tx = px.begin()
        end(tx)
        calls: list[Callable[[], object]] = [
            lambda tx=tx: tx.take("q", 0),  # type: ignore[misc]
            lambda tx=tx: tx.put("q", "x"),  # type: ignore[misc]
            lambda tx=tx: tx.extend(1.0),  # type: ignore[misc]
            lambda tx=tx: tx.send("t", "x"),  # type: ignore[misc]
            lambda tx=tx: tx.connection,  # type: ignore[misc]
            tx.commit,
        ]
        for call in calls:
            with pytest.raises(InvalidRequest, match="begin another"):
                call()
        tx.rollback()


def test_unknown_queue_is_empty_or_an_error(px: Pxrs) -> None:
    with px.begin() as tx:
        assert tx.take("nowhere", 0) is None
    with px.begin(strict=True) as tx, pytest.raises(QueueNotFound):
        tx.take("nowhere", 0)
    px.put("nowhere", "x")
    with px.begin(strict=True) as tx:
        assert tx.take("nowhere", 0) is not None


@pytest.mark.parametrize("locked", [False, True])
def test_forked_child_may_not_use_it(url: str, locked: bool) -> None:
    """Whatever it tries, also with the lock held by a thread that the child does not have."""
    with pxrs.connect(url) as px:
        px.put("q", "item")
        tx = px.begin()
        assert tx.take("q", 0) is not None
        held, forked = threading.Event(), threading.Event()

        def hold() -> None:
            with tx._lock if locked else contextlib.nullcontext():
                held.set()
                forked.wait(PATIENCE)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(PATIENCE)
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(PATIENCE))
            os._exit(_count_refusals(px, tx))
        forked.set()
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 6
        thread.join()
        tx.commit()
        assert len(px.queues.peek("q")) == 0


def _count_refusals(px: Pxrs, tx: UnitOfWork) -> int:
    calls: list[Callable[[], object]] = [
        lambda: tx.take("q", 0),
        lambda: tx.put("q", "x"),
        lambda: tx.extend(1.0),
        tx.commit,
        tx.rollback,
        lambda: px.begin().take("q", 0),
    ]
    refused = 0
    for call in calls:
        try:
            call()
        except Closed:
            refused += 1
        except BaseException:  # noqa: BLE001 - it must not go on as a second test run
            continue
    return refused


# Waiting


def taking(px: Pxrs, queue: str = "q", **options: Any) -> Future[str]:
    """A thread that waits for an item; it has looked and found nothing."""
    armed = threading.Event()
    queues = px.stores.queues
    watch = queues.watch(queue)
    wait = watch.wait

    def heard(timeout: float | None = None) -> bool:
        armed.set()
        return wait(timeout)

    watch.wait = heard  # type: ignore[method-assign]
    queues.watch = lambda *queues: watch  # type: ignore[method-assign]
    found: Future[str] = Future()

    def run() -> None:
        try:
            with px.transaction() as tx:
                [item] = tx.take_many(queue, 1, PATIENCE, **options)
            found.set_result(str(item.value))
        except BaseException as error:  # noqa: BLE001 - for whoever waits
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    assert armed.wait(PATIENCE)
    del queues.watch
    return found


@pytest.fixture(autouse=True)
def only_events_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this a lost wake-up would only make a test slow."""
    monkeypatch.setattr("pxrs.queues.unit_of_work.CAREFUL_WAIT", 3600.0)


def test_put_wakes_who_waits(px: Pxrs) -> None:
    found = taking(px)
    px.put("q", "item")
    assert found.result(PATIENCE) == "item"


def test_release_wakes_who_waits(px: Pxrs) -> None:
    px.put("q", "item")
    tx = px.begin()
    assert tx.take("q", 0) is not None
    found = taking(px)
    tx.rollback()
    assert found.result(PATIENCE) == "item"


def test_the_end_of_one_of_its_key_wakes_who_waits(px: Pxrs) -> None:
    with px.transaction() as tx:
        tx.put("q", "first", key="k")
        tx.put("q", "second", key="k")
    tx = px.begin()
    assert tx.take("q", 0) is not None
    found = taking(px)
    tx.commit()
    assert found.result(PATIENCE) == "second"


def test_end_of_a_session_wakes_who_waits(place: Place) -> None:
    place.fill("q", "item")
    tx = place.px.begin()
    assert tx.take("q", 0) is not None
    found = taking(place.other)
    place.px._context().hold_session.close()
    assert found.result(PATIENCE) == "item"


def test_delayed_item_wakes_who_waits_when_it_is_due(px: Pxrs) -> None:
    px.put("q", "item", delay=0.3)
    found = taking(px)
    assert found.result(PATIENCE) == "item"


def test_item_that_backs_off_wakes_who_waits_when_it_is_due(px: Pxrs) -> None:
    px.put("q", "item")
    tx = px.begin()
    retry = Backoff(first=0.3, growth="constant", jitter=0.0, attempts=5)
    assert tx.take("q", 0, retry=retry) is not None
    found = taking(px)
    tx.rollback()
    assert found.result(PATIENCE) == "item"


def test_item_whose_time_is_over_wakes_who_waits(px: Pxrs) -> None:
    px.put("q", "item")
    tx = px.begin()
    assert tx.take("q", 0, lock_for=0.3) is not None
    assert taking(px).result(PATIENCE) == "item"
    with pytest.raises(Fenced):
        tx.commit()


def hold_and_wait(url: str) -> None:
    px = pxrs.connect(url)
    tx = px.begin()
    say(tx.take("q", PATIENCE) is not None)
    wait_for_parent()
    tx.rollback()


@pytest.mark.long
@pytest.mark.engine("sqlite")
def test_death_of_a_process_wakes_who_waits(app: Pxrs) -> None:
    app.put("q", "item")
    with Child(hold_and_wait, app.url) as child:
        assert child.read()
        found = taking(app)
        child.kill()
        assert found.result(PATIENCE) == "item"


# Sharing and forgetting


def test_transaction_that_is_dropped_gives_back(px: Pxrs) -> None:
    px.put("q", "item")
    tx = px.begin()
    assert tx.take("q", 0) is not None
    found = taking(px)
    del tx
    gc.collect()
    assert found.result(PATIENCE) == "item"


@pytest.mark.long
def test_dropped_inside_the_sweeper_itself(px: Pxrs) -> None:
    """The garbage collector strikes in any thread, also inside the lock of a wake-up."""
    context = px._context()
    for number in range(15):
        px.put("q", str(number))
        tx = px.begin()
        assert tx.take("q", PATIENCE) is not None
        tx.itself = tx  # type: ignore[attr-defined]
        del tx
        context.hold_session._tidying.wake()
        gc.collect()
    with px.begin() as tx:
        assert tx.take("q", PATIENCE) is not None


def test_threads_share_a_transaction(px: Pxrs) -> None:
    with px.transaction() as tx:
        for number in range(100):
            tx.put("in", str(number))
    with px.transaction() as tx, ThreadPoolExecutor(8) as pool:

        def move(_: int) -> str:
            item = tx.take("in", PATIENCE)
            assert item is not None
            tx.put("out", item.value)
            return str(item.value)

        moved = list(pool.map(move, range(100)))
    assert sorted(moved, key=int) == [str(number) for number in range(100)]
    assert sorted(item.value for item in px.queues.peek("out", 1000)) == sorted(moved)
    assert len(px.queues.peek("in")) == 0


def test_one_thread_commits_while_others_take(px: Pxrs) -> None:
    """Each item is either in the commit, or was never handed out."""
    with px.transaction() as tx:
        for number in range(60):
            tx.put("in", str(number))
    taken: list[str] = []
    tx = px.begin()
    begun = threading.Barrier(4)

    def take() -> None:
        begun.wait(PATIENCE)
        with contextlib.suppress(InvalidRequest):
            while (item := tx.take("in", 0)) is not None:
                taken.append(str(item.value))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait(PATIENCE)
    tx.commit()
    for thread in threads:
        thread.join(PATIENCE)
    left = [item.value for item in px.queues.peek("in", 1000)]
    assert sorted([*taken, *left]) == sorted(str(number) for number in range(60))
    assert px.stores.queues.peek("in", [ItemState.HELD]) == []


@pytest.mark.engine("sqlite")
def test_renewing_does_not_wait_for_the_writer(path: Path) -> None:
    """Somebody's transaction is longer than the session, and there is something to give back."""
    stores = open_stores(f"sqlite:///{path}")
    with Pxrs(stores, session_ttl=0.5) as px:
        px.put("q", "item")
        px.put("q", "dropped")
        tx = px.begin()
        assert tx.take("q", 0) is not None
        other = px.begin()
        assert other.take("q", 0) is not None
        session = px._context().hold_session.session()
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        del other
        renewed = threading.Event()
        renewals = []
        renew = session.renew

        def counted() -> None:
            renew()
            renewals.append(1)
            if len(renewals) > 8:
                renewed.set()

        session.renew = counted  # type: ignore[method-assign]
        assert renewed.wait(PATIENCE), "twice the session's time has passed, and it was not renewed"
        blocker.execute("ROLLBACK")
        blocker.close()
        tx.commit()


# Together with the caller's own transaction


def test_items_messages_and_rows_commit_together(app: Pxrs) -> None:
    app.topics.create("t", partitions=1)
    app.put("in", "item")
    with app.stores.atomic() as setup:
        setup.connection.execute("CREATE TABLE mine (value TEXT)")
    for fails in (True, False):
        with contextlib.suppress(ZeroDivisionError), app.transaction() as tx:
            item = tx.take("in", 0)
            assert item is not None
            tx.put("out", item.value)
            tx.send("t", item.value, partition=0)
            tx.execute("INSERT INTO mine VALUES (?)", (item.value,))
            if fails:
                raise ZeroDivisionError
        with app.stores.atomic() as look:
            rows = look.connection.execute("SELECT value FROM mine").fetchall()
        expected = [] if fails else ["item"]
        assert [value for (value,) in rows] == expected
        assert [message.value.decode() for message in app.reader("t").read(0, 0)] == expected
        out = app.queues.peek("out") if app.stores.queues.find("out") else ()
        assert [item.value for item in out] == expected
    assert len(app.queues.peek("in")) == 0


def test_unknown_topic_rolls_back_all_of_it(px: Pxrs) -> None:
    px.put("in", "item")
    with pytest.raises(TopicNotFound), px.transaction() as tx:
        assert tx.take("in", 0) is not None
        tx.put("out", "x")
        tx.send("nowhere", "x")
    assert [item.value for item in px.queues.peek("in")] == ["item"]
    assert px.stores.queues.peek("out") == []


@pytest.mark.parametrize("headers", ["ab", {"a": b"x"}, [("a", "text")], [("a",)], [(b"a", b"x")]])
def test_bad_headers_are_told_where_they_are_given(px: Pxrs, headers: Any) -> None:
    px.topics.create("t", 1)
    with px.transaction() as tx:
        tx.send("t", "good", headers=(("trace", b"7"),))
        with pytest.raises(InvalidRequest, match="header"):
            tx.send("t", "bad", headers=headers)
    [message] = px.reader("t").read(0, 0)
    assert (message.value, message.headers) == (b"good", (("trace", b"7"),))


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_put_and_take_inside_the_callers_transaction(app: Pxrs, path: Path, outcome: str) -> None:
    app.put("in", "item")
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (value TEXT)")
    connection.commit()
    tx = app.begin(join=connection)
    item = tx.take("in", 0)
    assert item is not None
    connection.execute("INSERT INTO mine VALUES (?)", (item.value,))
    tx.put("out", item.value)
    tx.commit()
    assert app.stores.queues.peek("out") == []
    getattr(connection, outcome)()
    with app.begin() as look:
        if outcome == "commit":
            assert look.take("out", 0) is not None
            assert look.take("in", 0) is None
        else:
            assert look.take("out", 0) is None
            # The caller's rollback frees what was taken.
            assert look.take("in", PATIENCE) is not None
    connection.close()


@pytest.mark.engine("sqlite")
def test_idle_connection_of_the_caller_is_committed(app: Pxrs, path: Path) -> None:
    app.put("in", "item")
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (value TEXT)")
    connection.commit()
    with app.transaction(commits=connection) as tx:
        item = tx.take("in", 0)
        assert item is not None
        tx.execute("INSERT INTO mine VALUES (?)", (item.value,))
        tx.put("out", item.value)
    assert not connection.in_transaction
    assert connection.execute("SELECT value FROM mine").fetchall() == [("item",)]
    assert [item.value for item in app.queues.peek("out")] == ["item"]
    connection.close()


@pytest.mark.engine("sqlite")
def test_take_says_so_at_once_where_it_would_wait_for_its_own_caller(app: Pxrs, path: Path) -> None:
    app.put("in", "item")
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (value TEXT)")
    connection.execute("BEGIN IMMEDIATE")
    tx = app.begin(join=connection)
    with pytest.raises(InsideTransaction, match="before"):
        tx.take("in", 0)
    connection.rollback()
    assert tx.take("in", 0) is not None
    tx.rollback()
    with app.begin() as own:
        own.execute("CREATE TABLE other (value TEXT)")
        with pytest.raises(InsideTransaction):
            own.take("in", 0)
    connection.close()


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("fails", [False, True])
def test_sqlalchemy_session(app: Pxrs, path: Path, fails: bool) -> None:
    app.put("in", "item")
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    with Session(engine) as session:
        session.execute(sqlalchemy.text("CREATE TABLE mine (value TEXT)"))
        session.commit()
        with contextlib.suppress(ZeroDivisionError), app.transaction(join=session) as tx:
            item = tx.take("in", 0)
            assert item is not None
            session.execute(
                sqlalchemy.text("INSERT INTO mine VALUES (:value)"), {"value": item.value}
            )
            tx.put("out", item.value)
            if fails:
                raise ZeroDivisionError
        # The session had begun before the block could: its transaction is the caller's to end.
        session.rollback() if fails else session.commit()
        with app.begin() as look:
            assert (look.take("out", 0) is None) == fails
            assert (look.take("in", PATIENCE if fails else 0) is None) == (not fails)
    engine.dispose()


@pytest.mark.engine("sqlite")
def test_rollback_succeeds_whatever_has_become_of_the_callers_session(
    app: Pxrs, path: Path
) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")

    def put_inside_its_block(session: Session) -> None:
        with session.begin(), app.transaction(commits=session) as tx:
            tx.put("out", "never")

    def close_it(session: Session) -> None:
        tx = app.begin(join=session)
        assert tx.take("in", PATIENCE) is not None
        session.execute(sqlalchemy.text("CREATE TABLE mine (value TEXT)"))
        session.close()
        tx.rollback()
        raise InvalidRequest

    def break_it(session: Session) -> None:
        with app.begin(join=session) as tx:
            assert tx.take("in", PATIENCE) is not None
            session.execute(sqlalchemy.text("INSERT INTO nowhere VALUES (1)"))

    app.put("in", "item")
    for abuse, error in (
        (put_inside_its_block, InvalidRequest),
        (close_it, InvalidRequest),
        (break_it, sqlalchemy.exc.OperationalError),
    ):
        with Session(engine) as session, pytest.raises(error):
            abuse(session)
        with app.begin() as look:
            assert look.take("in", PATIENCE) is not None
            assert look.take("out", 0) is None
    engine.dispose()


@pytest.mark.engine("sqlite")
def test_rollback_after_the_callers_connection_was_closed(app: Pxrs, path: Path) -> None:
    app.put("in", "item")
    connection = sqlite3.connect(path)
    tx = app.begin(join=connection)
    assert tx.take("in", PATIENCE) is not None
    connection.close()
    tx.rollback()
    with app.begin() as look:
        assert look.take("in", PATIENCE) is not None


def test_memory_has_no_connections() -> None:
    with pxrs.connect("memory://") as px, sqlite3.connect(":memory:") as connection:
        px.put("in", "item")
        with pytest.raises(pxrs.NotAtomic), px.transaction(join=connection) as tx:
            assert tx.take("in", 0) is not None
        with px.begin() as look:
            assert look.take("in", PATIENCE) is not None
    connection.close()


# Serde


def test_undecodable_item_is_given_back_with_its_error(px: Pxrs) -> None:
    px.put("q", "{")
    for _ in range(2):
        with pytest.raises(msgspec.DecodeError) as info, px.begin(serde=JSON()) as tx:
            tx.take("q", PATIENCE, retry=Backoff(first=0.0, attempts=2))
        assert "item 1 of queue 'q'" in "".join(info.value.__notes__)
    watch = px.stores.queues.watch("q")
    while not (found := px.queues.dead("q")):
        assert watch.wait(PATIENCE)
    watch.close()
    [dead] = found
    assert (dead.deliveries, dead.value) == (2, "{")
    assert "Error" in dead.error


def test_keeper_of_a_closed_store_says_so(px: Pxrs) -> None:
    px.put("q", "x")
    hold_session: HoldSession = px._context().hold_session
    px.close()
    with pytest.raises(Closed):
        hold_session.session()


def put_of_which_one_is_bad(px: Pxrs, key: str | None = None) -> None:
    for text in ("1", "{", "3", "4"):
        if key is None:
            px.put("q", text)
        else:
            px.put("q", text, key=key)


def test_items_beside_an_undecodable_one_are_handed_out(
    px: Pxrs, caplog: pytest.LogCaptureFixture
) -> None:
    put_of_which_one_is_bad(px)
    with px.transaction(serde=JSON()) as tx:
        items = tx.take_many("q", 9, PATIENCE, retry=Backoff(attempts=1))
    assert [item.value for item in items] == [1, 3, 4]
    assert "an item was not handed out" in caplog.text
    watch = px.stores.queues.watch("q")
    while not (found := px.queues.dead("q")):
        assert watch.wait(PATIENCE)
    watch.close()
    assert [(dead.value, dead.deliveries) for dead in found] == [("{", 1)]
    assert px.queues.describe("q").depth == 0


@pytest.mark.parametrize("fifo", [False, True])
def test_items_behind_an_undecodable_one_in_its_order_wait_for_it(px: Pxrs, fifo: bool) -> None:
    px.queues.create("q", fifo=fifo)
    put_of_which_one_is_bad(px, None if fifo else "k")
    if fifo:
        px.put("q", "5")
    else:
        px.put("q", "5", key="other")
    retry = Backoff(first=0.0, attempts=2)
    with px.transaction(serde=JSON()) as tx:
        items = tx.take_many("q", 9, PATIENCE, retry=retry)
        assert [item.value for item in items] in ([[1]] if fifo else [[1, 5], [1]])


def test_if_no_item_can_be_decoded_the_first_error_is_raised(px: Pxrs) -> None:
    px.put_many("q", ["{", "["])
    with pytest.raises(msgspec.DecodeError) as info, px.begin(serde=JSON()) as tx:
        tx.take_many("q", 9, PATIENCE)
    assert "item 1 of queue 'q'" in "".join(info.value.__notes__)
