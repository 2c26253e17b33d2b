"""The listener container: whatever its handler, its items, its store or its processes do."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import pxrs
from pxrs import JSON, Backoff, ConfigError, HandlerFailed, InvalidRequest, Item, Pxrs
from pxrs.core.retry import AT_ONCE
from pxrs.errors import Fenced, PxrsError, StoreReadOnly, StoreUnavailable
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.running.listener import Listener
from pxrs.stores.open import open_stores
from pxrs.testing.faults import NOTHING, Rates
from pxrs.types import NewItem, QueueChange
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent, wait_until_heard
from support.queueplace import Place


@pytest.fixture
def place(url: str) -> Iterator[Place]:
    with contextlib.closing(Place(open_stores(url))) as place:
        yield place


class Handler:
    """Notes what it is given; `wait` blocks until it has had so many."""

    def __init__(self, act: Callable[[Item, UnitOfWork], object] = lambda item, tx: None) -> None:
        self._act = act
        self._changed = threading.Condition()
        self.values: list[str] = []

    def __call__(self, item: Item, tx: UnitOfWork) -> None:
        with self._changed:
            self.values.append(item.value)
            self._changed.notify_all()
        self._act(item, tx)

    def wait(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.values) >= number, PATIENCE), self.values


def wait_until(px: Pxrs, queue: str, condition: Callable[[], bool]) -> None:
    """Looking whenever the queue changes."""
    watch = px.stores.queues.watch(queue)
    while not condition():
        assert watch.wait(PATIENCE), "nothing happens any more"
    watch.close()


def is_empty(px: Pxrs, queue: str) -> Callable[[], bool]:
    return lambda: px.stores.queues.stats(queue).depth == 0


# Handling


def test_what_the_handler_puts_commits_with_the_item(px: Pxrs) -> None:
    handler = Handler(lambda item, tx: tx.put("out", f"Hello, {item.value}"))
    with px.transaction() as tx:
        for number in range(50):
            tx.put("in", str(number))
    with px.listen("in", handler, workers=4):
        wait_until(px, "in", is_empty(px, "in"))
    assert sorted(handler.values, key=int) == [str(number) for number in range(50)]
    assert len(px.queues.peek("out", 100)) == 50


def test_exception_rolls_back_and_the_policy_decides(px: Pxrs) -> None:
    def fail(item: Item, tx: UnitOfWork) -> None:
        tx.put("out", "never")
        raise ZeroDivisionError(f"no {item.value} today")

    handler = Handler(fail)
    px.put("in", "item")
    with px.listen("in", handler, retry=Backoff(first=0.0, attempts=3)) as running:
        wait_until(px, "in", lambda: px.queues.describe("in").dead == 1)
    assert handler.values == ["item"] * 3
    assert (running.handled, running.failed) == (0, 3)
    [dead] = px.queues.dead("in")
    assert (dead.deliveries, dead.error) == (3, "ZeroDivisionError: no item today")
    assert px.stores.queues.peek("out") == []


class Speechless(Exception):  # noqa: N818 - that is what it is
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("error", [Speechless(), ValueError("\udc80 \0"), OSError("x" * 10**6)])
def test_errors_that_are_hard_to_store_end_no_listener(px: Pxrs, error: Exception) -> None:
    def fail(item: Item, tx: UnitOfWork) -> None:
        raise error

    px.put("in", "item")
    with px.listen("in", Handler(fail), retry=Backoff(first=0.0, attempts=2)):
        wait_until(px, "in", lambda: px.queues.describe("in").dead == 1)
    [dead] = px.queues.dead("in")
    assert dead.error.startswith(type(error).__name__)


def test_commit_that_the_store_refuses_is_the_items_failure(px: Pxrs) -> None:
    """It comes up only when the handler is through: still it is this item's, and others go on."""
    px.queues.create("strict", fifo=True)
    handler = Handler(
        lambda item, tx: tx.put("strict", item.value, priority=1 if item.value == "bad" else 0)
    )
    for value in ("bad", "good"):
        px.put("in", value)
    with px.listen("in", handler, retry=Backoff(first=0.0, attempts=2)):
        wait_until(px, "in", is_empty(px, "in"))
    [dead] = px.queues.dead("in")
    assert dead.value == "bad"
    assert "fifo" in dead.error
    assert [item.value for item in px.queues.peek("strict")] == ["good"]


@pytest.mark.parametrize("body", [b"b{", b"z?"], ids=["serde", "kind"])
def test_undecodable_item_goes_the_way_of_a_failing_handler(px: Pxrs, body: bytes) -> None:
    holder = px.begin()._held.holder
    px.stores.queues.apply(QueueChange(holder, put=(NewItem(queue="in", body=body),)))
    px.put("in", {"a": 1}, serde=JSON())
    handler: list[Any] = []
    retry = Backoff(first=0.0, attempts=2)
    with px.listen(
        "in",
        lambda item, tx: handler.append(item.value),
        retry=retry,
        serde=JSON() if body[:1] == b"b" else None,
    ) as listener:
        wait_until(px, "in", is_empty(px, "in"))
    assert len(handler) == 1
    assert listener.failed == 2
    [dead] = px.queues.dead("in")
    assert dead.deliveries == 2


def test_handler_that_ends_its_transaction_itself(px: Pxrs) -> None:
    px.put("in", "commit")
    px.put("in", "rollback")
    handler = Handler(lambda item, tx: getattr(tx, item.value)())
    with px.listen("in", handler, retry=Backoff(first=0.0, attempts=2)):
        wait_until(px, "in", is_empty(px, "in"))
    assert sorted(handler.values) == ["commit", "rollback", "rollback"]
    assert [item.value for item in px.queues.dead("in")] == ["rollback"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_ends_a_worker_is_told_to_who_joins(px: Pxrs, error: BaseException) -> None:
    def fail(item: Item, tx: UnitOfWork) -> None:
        raise error

    px.put("in", "item")
    listener = px.listen("in", fail, workers=2)
    with pytest.raises(HandlerFailed, match=type(error).__name__) as raised:
        listener.join(PATIENCE)
    assert raised.value.__cause__ is error
    with px.begin() as tx:
        assert tx.take("in", PATIENCE) is not None
    px._running.clear()


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 1.5},
        {"deadline": 0},
        {"deadline": float("nan")},
        {"max_handler_time": 0},
        {"max_handler_time": "1"},
        {"on_failure": "stop"},
        {"on_failure": pxrs.DeadLetter("letters")},
        {"processes": -1},
        {"retry": 3},
    ],
)
def test_bad_settings_are_refused(px: Pxrs, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        px.listen("in", Handler(), **options)


# The store


def test_store_flaps_are_survived(place: Place) -> None:
    """Whatever fails how: nothing is handled more often than its attempts allow."""
    handler = Handler()
    values = [str(number) for number in range(40)]
    place.faults.rates = Rates(
        unknown_applied=0.1, unknown_lost=0.1, unavailable=0.1, busy=0.1, reads=0.1
    )
    with place.px.listen("in", handler, workers=3, retry=Backoff(first=0.0, attempts=5)):
        place.fill("in", *values)
        wait_until(place.other, "in", is_empty(place.other, "in"))
        place.faults.rates = NOTHING
    stats = place.inner.queues.stats("in")
    assert stats.done + stats.dead == 40
    assert all(handler.values.count(value) <= 5 for value in values)


def test_outage_longer_than_the_session_is_survived(url: str) -> None:
    with contextlib.closing(Place(open_stores(url), 0.4)) as place:
        entered, go_on = threading.Event(), threading.Event()

        def act(item: Item, tx: UnitOfWork) -> None:
            if not go_on.is_set():
                entered.set()
                assert go_on.wait(PATIENCE)

        handler = Handler(act)
        place.fill("in", "item")
        with place.px.listen("in", handler, retry=AT_ONCE):
            assert entered.wait(PATIENCE)
            place.faults.cut_off(None, place.faults.clock.monotonic() + 3600)
            assert place.take_back("in") == "item"
            go_on.set()
            place.faults.heal()
            wait_until(place.other, "in", is_empty(place.other, "in"))
        assert handler.values == ["item", "item"]
        assert place.inner.queues.stats("in").done == 1


def test_store_that_is_away_at_the_commit_costs_no_delivery(place: Place) -> None:
    """The handler has done its work: its item is committed when the store is back."""
    calls = []

    def refuse(what: str) -> None:
        if what == "apply":
            calls.append(what)
            if len(calls) < 4:
                raise StoreUnavailable("away")

    place.fill("in", "item")
    handler = Handler(lambda item, tx: setattr(place, "on_call", refuse))
    with place.px.listen("in", handler, retry=Backoff(attempts=1)):
        wait_until(place.other, "in", is_empty(place.other, "in"))
    assert handler.values == ["item"]
    stats = place.inner.queues.stats("in")
    assert (stats.done, stats.dead) == (1, 0)


def test_store_that_can_t_be_written_any_more_ends_it(place: Place) -> None:
    def refuse(what: str) -> None:
        if what == "take":
            raise StoreReadOnly("the file can't be written")

    place.on_call = refuse
    listener = place.px.listen("in", Handler(), workers=2)
    with pytest.raises(StoreReadOnly):
        listener.join(PATIENCE)
    place.px._running.clear()


# Starting and stopping


def test_stop_join_and_listen_again(px: Pxrs) -> None:
    handler = Handler()
    listener = px.listen("in", handler, workers=2)
    px.put("in", "1")
    handler.wait(1)
    listener.stop()
    listener.stop()
    assert listener.join(PATIENCE)
    assert listener.join()
    assert (listener.handled, listener.failed, listener.health()) == (1, 0, {})
    px.put("in", "2")
    with px.listen("in", handler):
        handler.wait(2)
    assert handler.values == ["1", "2"]


def test_stop_right_after_start(px: Pxrs) -> None:
    for _ in range(20):
        listener = px.listen("in", Handler(), workers=2)
        listener.stop()
        assert listener.join(PATIENCE)


def test_stop_lets_what_is_in_hand_finish(px: Pxrs) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def act(item: Item, tx: UnitOfWork) -> None:
        entered.set()
        assert go_on.wait(PATIENCE)

    for value in ("1", "2"):
        px.put("in", value)
    listener = px.listen("in", handler := Handler(act))
    assert entered.wait(PATIENCE)
    listener.stop()
    assert not listener.join(0.0)
    go_on.set()
    assert listener.join(PATIENCE)
    assert handler.values == ["1"]
    assert [item.value for item in px.queues.peek("in")] == ["2"]


def test_closing_the_store_stops_its_listeners(url: str) -> None:
    px = pxrs.connect(url)
    listener = px.listen("in", Handler(), workers=3)
    px.close()
    assert listener.join(0.0)


# Deadlines


def test_item_is_extended_while_its_handler_lives(px: Pxrs) -> None:
    """Its deadline passes several times over; another worker waits for it all the while."""
    extended = threading.Semaphore(0)

    def act(item: Item, tx: UnitOfWork) -> None:
        extend = tx._keep_hold

        def noted(seconds: float) -> None:
            extend(seconds)
            extended.release()

        tx._keep_hold = noted  # type: ignore[method-assign]
        for _ in range(7):
            assert extended.acquire(timeout=PATIENCE)

    px.put("in", "item")
    handler = Handler(act)
    with px.listen("in", handler, workers=2, deadline=2.0, retry=Backoff(attempts=1)):
        wait_until(px, "in", is_empty(px, "in"))
    assert handler.values == ["item"]
    assert px.queues.describe("in").done == 1


def test_handler_past_its_time_loses_its_item(px: Pxrs) -> None:
    lost, outcome = threading.Event(), []

    def act(item: Item, tx: UnitOfWork) -> None:
        if item.deliveries == 1:
            assert lost.wait(PATIENCE)
            try:
                tx.commit()
            except PxrsError as error:
                outcome.append(type(error))
                raise
        else:
            lost.set()

    px.put("in", "item")
    handler = Handler(act)
    with px.listen(
        "in",
        handler,
        workers=2,
        deadline=0.3,
        max_handler_time=0.3,
        retry=Backoff(first=0.0, attempts=5),
    ):
        wait_until(px, "in", is_empty(px, "in"))
    assert handler.values == ["item", "item"]
    assert outcome == [Fenced]
    assert px.queues.describe("in").done == 1


@pytest.mark.engine("sqlite")
def test_handler_that_holds_the_writer_is_not_made_to_wait_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extending its item needs the writer, too."""
    looked = threading.Semaphore(0)
    may_go_on = Listener._may_go_on

    def noted(self: Listener, since: float) -> bool:
        looked.release()
        return may_go_on(self, since)

    monkeypatch.setattr(Listener, "_may_go_on", noted)
    with contextlib.closing(
        Place(open_stores(f"sqlite:///{tmp_path}/app.db?busy_timeout=0.1"))
    ) as place:
        with place.inner.atomic() as setup:
            setup.connection.execute("CREATE TABLE mine (value TEXT)")
        calls: list[str] = []
        seen: list[tuple[str, ...]] = []

        def act(item: Item, tx: UnitOfWork) -> None:
            tx.execute("INSERT INTO mine VALUES (?)", (item.value,))
            place.on_call = calls.append
            # What was under way when the writer was taken may still be.
            for _ in range(2):
                assert looked.acquire(timeout=PATIENCE)
            calls.clear()
            for _ in range(2):
                assert looked.acquire(timeout=PATIENCE)
            seen.append(tuple(calls))

        place.fill("in", "item")
        with place.px.listen("in", Handler(act), deadline=0.3, retry=AT_ONCE) as listener:
            wait_until(place.other, "in", is_empty(place.other, "in"))
        assert len(seen) == 1
        assert "extend" not in seen[0]
        # It took longer than its deadline, but nobody could take its item from it meanwhile.
        assert (listener.failed, listener.handled) == (0, 1)


# Processes


def listen_until_told(url: str, folder: str) -> None:
    """Until SIGTERM, which comes while an item is being handled."""
    px = pxrs.connect(url)

    def act(item: Item, tx: UnitOfWork) -> None:
        wait_until_heard(signal.SIGTERM)
        say(item.value)
        wait_for_parent()
        assert cast(Listener, listener._work)._stopping.wait(PATIENCE)
        tx.put("out", item.value)

    listener = px.listen("in", act)
    listener.join()
    say("drained")
    px.close()


@pytest.mark.long
@pytest.mark.engine("sqlite")
def test_sigterm_drains(tmp_path: Path) -> None:
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db") as px:
        for value in ("1", "2"):
            px.put("in", value)
        with Child(listen_until_told, px.url, str(tmp_path)) as child:
            assert child.read() == "1"
            child.signal(signal.SIGTERM)
            child.tell()
            assert child.read() == "drained"
            assert child.join() == 0
        assert [item.value for item in px.queues.peek("out")] == ["1"]
        assert [item.value for item in px.queues.peek("in")] == ["2"]


def note_and_die_once(item: Item, tx: UnitOfWork) -> None:
    """In a worker process: note who handles what; the first one to handle `die` is killed."""
    folder = Path(os.environ["PXRS_TEST_FOLDER"])
    with open(folder / "notes", "a") as notes:
        notes.write(f"{item.value} {item.deliveries} {os.getpid()}\n")
    if item.value == "die" and item.deliveries == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tx.put("out", item.value)


@pytest.mark.engine("sqlite")
@pytest.mark.long
def test_process_that_is_killed_is_replaced_and_its_item_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PXRS_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db") as px:
        px.put("in", '"die"')
        with px.transaction() as tx:
            for number in range(20):
                tx.put("in", str(number))
        with px.listen(
            "in",
            note_and_die_once,
            processes=2,
            workers=2,
            retry=Backoff(first=0.0, attempts=3),
            serde=JSON(),
        ) as listener:
            wait_until(px, "in", is_empty(px, "in"))
            listener.stop()
            assert listener.join(PATIENCE)
        notes = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
        assert [note[1] for note in notes if note[0] == "die"] == ["1", "2"]
        assert len(px.queues.peek("out", 100)) == 21
        assert px.queues.describe("in").dead == 0


@pytest.mark.engine("memory")
def test_processes_do_not_share_memory() -> None:
    with pxrs.connect("memory://") as px, pytest.raises(ConfigError, match="memory"):
        px.listen("in", note_and_die_once, processes=2)


def test_what_is_not_handled_is_logged(px: Pxrs, caplog: pytest.LogCaptureFixture) -> None:
    px.put("inbox", "x")

    def fail(item: Item, tx: UnitOfWork) -> None:
        raise ValueError("no such account")

    with px.listen("inbox", fail, retry=Backoff(first=0.0, attempts=1)):
        wait_until(px, "inbox", lambda: px.queues.describe("inbox").dead == 1)
    (record,) = [each for each in caplog.records if each.name == "pxrs.listen"]
    assert "of 'inbox' was not handled, delivery 1: ValueError: no such account" in record.message
    assert record.exc_info is not None


# From inside of a handler


def test_a_handler_may_close_the_store(url: str) -> None:
    """It does not wait for itself; its item is not done, and comes again."""
    px, closed = pxrs.connect(url), threading.Event()

    def close(item: Item, tx: UnitOfWork) -> None:
        px.close()
        closed.set()

    px.put("q", "x")
    listener = px.listen("q", close)
    assert closed.wait(PATIENCE)
    assert listener.join(PATIENCE)
    assert (listener.handled, listener.failed) == (0, 1)
    if url.startswith("sqlite"):
        with pxrs.connect(url) as again:
            assert again.queues.describe("q").depth == 1


def test_another_store_that_a_handler_closes_is_drained(px: Pxrs) -> None:
    handled = Handler()

    def use_another(item: Item, tx: UnitOfWork) -> None:
        with pxrs.connect("memory://") as another:
            another.put("q", "y")
            listener = another.listen("q", slowly)
            assert begun.wait(PATIENCE)
            threading.Timer(0.05, may_end.set).start()
        assert listener.handled == 1

    def slowly(item: Item, tx: UnitOfWork) -> None:
        begun.set()
        assert may_end.wait(PATIENCE)

    begun, may_end = threading.Event(), threading.Event()
    handled._act = use_another
    px.put("q", "x")
    with px.listen("q", handled) as listening:
        handled.wait(1)
        wait_until(px, "q", is_empty(px, "q"))
    assert listening.failed == 0


def test_a_handler_can_not_wait_for_its_own_listener(px: Pxrs) -> None:
    told: list[BaseException] = []
    listening: list[Any] = []
    ready = threading.Event()

    def handle(item: Item, tx: UnitOfWork) -> None:
        assert ready.wait(PATIENCE)
        try:
            listening[0].join()
        except InvalidRequest as error:
            told.append(error)
        listening[0].stop()

    px.put("q", "x")
    listening.append(px.listen("q", handle))
    ready.set()
    assert listening[0].join(PATIENCE)
    assert "only stop() it" in str(told[0])
