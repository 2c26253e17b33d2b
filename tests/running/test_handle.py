"""The handle that `px.run` and `px.listen` return: the same for both, whatever works beneath it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import Backoff, HandlerFailed
from support.child import PATIENCE
from support.seeds import few_are_fast

pytestmark = pytest.mark.engine("sqlite")

ONCE = Backoff(attempts=1)
Start = Callable[..., pxrs.Running]


@pytest.fixture
def px(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pxrs.Pxrs]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db") as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            producer.send("orders", "x").result()
        px.put("orders", "x")
        yield px


@pytest.fixture(params=["run", "listen"])
def start(px: pxrs.Pxrs, request: pytest.FixtureRequest) -> Start:
    def run(handler: Any, **options: Any) -> pxrs.Running:
        return px.run(handler, topic="orders", group="g", **options)

    def listen(handler: Any, **options: Any) -> pxrs.Running:
        return px.listen("orders", handler, **options)

    return run if request.param == "run" else listen


def is_done(px: pxrs.Pxrs, running: pxrs.Running) -> bool:
    """Whether its message or item was handled and committed."""
    if running._work.name == "run:g":
        return px.groups.describe("g").lag == 0
    return px.queues.describe("orders").done == 1


def fail(*_: Any) -> None:
    raise ValueError("no")


def leave(*_: Any) -> None:
    raise SystemExit(3)


def test_it_starts_at_once_and_leaving_finishes_what_is_in_hand(
    px: pxrs.Pxrs, start: Start
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def handle(*_: Any) -> None:
        began.set()
        assert may_end.wait(PATIENCE)

    with start(handle) as running:
        assert began.wait(PATIENCE)
        assert not running.join(0.01)
        assert [each.ok for each in running.health().values()] == [True]
        assert running.health().keys() == px.health().keys()
        threading.Timer(0.05, may_end.set).start()
    assert is_done(px, running)
    assert (running.handled, running.failed, running.health()) == (1, 0, {})
    assert running.join(0)


def test_a_handler_can_stop_it_but_not_wait_for_it(start: Start) -> None:
    started, refused = threading.Event(), threading.Event()

    def handle(*_: Any) -> None:
        assert started.wait(PATIENCE)
        running.stop()
        with pytest.raises(pxrs.InvalidRequest, match="its own end"):
            running.join()
        refused.set()

    running = start(handle)
    started.set()
    assert running.join(PATIENCE)
    assert refused.is_set()


@pytest.mark.parametrize("processes", few_are_fast([0, 1], 1))
def test_stop_ends_it_at_what_fails(px: pxrs.Pxrs, start: Start, processes: int) -> None:
    running = start(fail, retry=ONCE, on_failure=pxrs.Stop(), processes=processes)
    with pytest.raises(HandlerFailed, match="ValueError: no"):
        running.join(PATIENCE)
    assert not is_done(px, running)
    (health,) = running.health().values()
    assert (health.state, health.ok) == ("failed", False)
    assert running.failed == (None if processes else 1)
    assert px.queues.describe("orders").dead == 0
    assert [topic.name for topic in px.topics.list()] == ["orders"]


def test_an_item_that_was_stopped_at_is_delivered_again(px: pxrs.Pxrs) -> None:
    """And stops the next listener at its first failure: its attempts are used up."""
    twice = Backoff(first=0.0, attempts=2)
    for deliveries in (2, 3):
        listener = px.listen("orders", fail, retry=twice, on_failure=pxrs.Stop())
        with pytest.raises(HandlerFailed, match=f"delivery {deliveries}"):
            listener.join(PATIENCE)
    handled = threading.Event()
    with px.listen("orders", lambda item, tx: handled.set(), on_failure=pxrs.Stop()):
        assert handled.wait(PATIENCE)
    assert px.queues.describe("orders").done == 1


def test_stop_counts_items_that_cannot_be_read(px: pxrs.Pxrs) -> None:
    twice = Backoff(first=0.0, attempts=2)
    listener = px.listen(
        "orders", lambda item, tx: None, retry=twice, on_failure=pxrs.Stop(), serde=pxrs.JSON()
    )
    with pytest.raises(HandlerFailed, match="delivery 2"):
        listener.join(PATIENCE)
    assert listener.failed == 2
    assert px.queues.describe("orders").dead == 0


def test_who_wants_to_end_the_program_ends_it(px: pxrs.Pxrs, start: Start) -> None:
    running = start(leave)
    with pytest.raises(HandlerFailed, match="SystemExit") as raised:
        running.join(PATIENCE)
    assert isinstance(raised.value.__cause__, SystemExit)
    assert not is_done(px, running)


def test_the_callers_own_error_is_raised(px: pxrs.Pxrs, start: Start) -> None:
    failed = threading.Event()

    def handle(*_: Any) -> None:
        failed.set()
        raise SystemExit

    with pytest.raises(ZeroDivisionError), start(handle):
        assert failed.wait(PATIENCE)
        raise ZeroDivisionError
    px.close()


def test_closing_tells_what_nobody_was_told(tmp_path: Path) -> None:
    with pytest.raises(HandlerFailed), pxrs.connect(f"sqlite:///{tmp_path}/app.db") as px:
        px.put("orders", "x")
        failed = threading.Event()

        def handle(*_: Any) -> None:
            failed.set()
            raise SystemExit

        px.listen("orders", handle)
        assert failed.wait(PATIENCE)


def test_a_failure_is_in_health_until_it_was_told(px: pxrs.Pxrs) -> None:
    running = px.listen("orders", leave)
    while running.health()["listen:orders"].ok:
        threading.Event().wait(0.01)
    with px.listen("other", fail):
        assert [each.state for each in px.health().values()] == ["failed", "idle"]
    with pytest.raises(HandlerFailed):
        running.join()
    with px.listen("other", fail):
        assert [each.state for each in px.health().values()] == ["idle"]


def test_a_handlers_time_needs_no_deadline(px: pxrs.Pxrs) -> None:
    """Others get the item of one that hangs; its own commit is refused."""
    others = threading.Event()

    def handle(item: pxrs.Item, tx: pxrs.UnitOfWork) -> None:
        if item.deliveries == 1:
            assert others.wait(PATIENCE)
        else:
            others.set()

    with px.listen("orders", handle, workers=2, max_handler_time=0.3) as listener:
        assert others.wait(PATIENCE)
        while listener.failed != 1:
            threading.Event().wait(0.01)
    assert listener.handled == 1
    assert px.queues.describe("orders").done == 1


def test_nobody_waits_for_a_handler_past_its_time(start: Start) -> None:
    began, may_end = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        began.set()
        may_end.wait(PATIENCE)

    running = start(hang, max_handler_time=0.5)
    assert began.wait(PATIENCE)
    running.stop()
    assert running.join(PATIENCE / 2)
    may_end.set()
