"""What is in hand when a worker process dies; here nobody does, and the boards are looked at."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import pxrs
from pxrs import Message, Position
from pxrs.running.suspect_messages import SuspectMessages
from support.child import PATIENCE
from support.running import wait_for_checkpoints

# Long enough for a thread that is not held back.
_A_MOMENT = 0.3


def message(offset: int) -> Message:
    return Message(pxrs.Fence("bestellungen-für-ada", 3, 1), offset, 0, None, b"", ())


def place(offset: int) -> Position:
    return Position("bestellungen-für-ada", 3, offset)


@pytest.fixture
def suspects() -> SuspectMessages:
    return SuspectMessages(multiprocessing.get_context("spawn"), 2, 3)


def die_of(suspects: SuspectMessages, *offsets: int) -> None:
    """As if the process had ended with these in hand."""
    both = threading.Barrier(len(offsets) + 1)
    watched = suspects.watched(0, lambda message: [both.wait(PATIENCE) for _ in range(2)])
    with ThreadPoolExecutor() as threads:
        handling = [threads.submit(watched, message(offset)) for offset in offsets]
        both.wait(PATIENCE)
        assert sorted(suspects.count(0)) == [place(offset) for offset in sorted(offsets)]
        both.wait(PATIENCE)
        for each in handling:
            each.result()
    assert suspects.count(0) == []


def test_after_so_many_deaths_it_is_not_handled_any_more(suspects: SuspectMessages) -> None:
    for _ in range(2):
        die_of(suspects, 7)
    assert suspects.watched(0, lambda message: "handled")(message(7)) == "handled"
    die_of(suspects, 7)
    watched = suspects.watched(0, lambda message: "handled")
    with pytest.raises(pxrs.HandlerFailed, match="3 worker processes have died"):
        watched(message(7))
    assert watched(message(8)) == "handled"


def test_who_was_beside_others_is_not_blamed(suspects: SuspectMessages) -> None:
    """Several processes die with both in hand before they hear of each other."""
    both = threading.Barrier(2 * 5 + 1)
    siblings = [
        suspects.watched(number, lambda message: [both.wait(PATIENCE) for _ in range(2)])
        for number in range(5)
    ]
    with ThreadPoolExecutor(2 * 5) as threads:
        handling = [threads.submit(each, message(offset)) for each in siblings for offset in (7, 8)]
        both.wait(PATIENCE)
        for number in range(5):
            assert sorted(suspects.count(number)) == [place(7), place(8)]
        both.wait(PATIENCE)
        for waiting in handling:
            waiting.result()
    for _ in range(3):
        die_of(suspects, 7)
    watched = suspects.watched(0, lambda message: "handled")
    with pytest.raises(pxrs.HandlerFailed, match="3 worker processes have died"):
        watched(message(7))
    assert watched(message(8)) == "handled"


def test_processes_that_live_hear_of_deaths(suspects: SuspectMessages) -> None:
    sibling = suspects.watched(1, lambda message: "handled")
    for _ in range(3):
        assert sibling(message(7)) == "handled"
        die_of(suspects, 7)
    with pytest.raises(pxrs.HandlerFailed, match="3 worker processes have died"):
        sibling(message(7))


def test_who_has_missed_many_deaths_hears_of_the_latest(suspects: SuspectMessages) -> None:
    sibling = suspects.watched(1, lambda message: "handled")
    for offset in range(200):
        die_of(suspects, offset)
    for _ in range(2):
        die_of(suspects, 199)
    with pytest.raises(pxrs.HandlerFailed, match="3 worker processes have died"):
        sibling(message(199))
    assert sibling(message(0)) == "handled"


def test_a_handler_that_raises_has_nothing_in_hand(suspects: SuspectMessages) -> None:
    with pytest.raises(ZeroDivisionError):
        suspects.watched(0, lambda message: 1 // 0)(message(7))
    assert suspects.count(0) == []


def test_one_that_may_kill_is_handled_alone(suspects: SuspectMessages) -> None:
    die_of(suspects, 7, 8)
    began = {offset: threading.Event() for offset in range(10)}
    beside: dict[int, list[Position]] = {}

    def handle(message: Message) -> None:
        began[message.offset].set()
        # Whoever may begin beside this one has the time to.
        began[7 if message.offset == 1 else 2].wait(_A_MOMENT)
        beside[message.offset] = suspects._boards[0].in_hand()

    watched = suspects.watched(0, handle)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(watched, message(1))
        assert began[1].wait(PATIENCE)
        suspect = threads.submit(watched, message(7))
        first.result()
        assert began[7].wait(PATIENCE)
        for each in (suspect, threads.submit(watched, message(2))):
            each.result()
    assert beside == {offset: [place(offset)] for offset in (1, 7, 2)}


def test_the_wait_for_a_turn_is_no_time_of_the_handler(suspects: SuspectMessages) -> None:
    """What `max_handler_time` of a run counts from."""
    die_of(suspects, 7, 8)
    first_is_in, let_go = threading.Event(), threading.Event()
    order: list[str] = []

    def handle(message: Message) -> None:
        order.append(f"begins {message.offset}")
        if message.offset == 1:
            first_is_in.set()
            assert let_go.wait(PATIENCE)
            order.append("ends 1")

    watched = suspects.watched(0, handle)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(watched, message(1))
        assert first_is_in.wait(PATIENCE)
        watched.turn_came = lambda: order.append("turn")
        second = threads.submit(watched, message(7))
        let_go.set()
        first.result()
        second.result()
    assert order == ["begins 1", "ends 1", "turn", "begins 7"]


class Patient:
    """As the handler of a worker process, which makes suspects wait for others."""

    turn_came: Callable[[], None]

    def __init__(self, began: Callable[[], float]) -> None:
        self.times: list[float] = []
        self._began = began

    def __call__(self, message: Message) -> None:
        self.times.append(self._began())
        self.turn_came()
        self.times.append(self._began())


def test_a_run_counts_the_time_of_a_handler_from_its_turn() -> None:
    with pxrs.connect("memory://") as px:
        px.topics.create("t", partitions=1)
        with px.producer() as producer:
            producer.send("t", b"x")

        def began() -> float:
            [member] = px._run_members
            return member.steps.working_since[threading.get_ident()]

        handler = Patient(began)
        handler.turn_came = lambda: None
        running = px.run(handler, topic="t", group="g")
        wait_for_checkpoints(px, 1)
        running.stop()
        running.join(PATIENCE)
    waited, begun = handler.times
    assert waited < begun
