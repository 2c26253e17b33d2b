"""A message that was not delivered: somebody is told, once, whether anybody asked or not."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs import (
    DeliveryFailed,
    OutcomeUnknown,
    Producer,
    Pxrs,
    PxrsError,
    StoreBusy,
    StoreFull,
    TopicNotFound,
)
from pxrs.types import Append
from support.child import PATIENCE
from support.faults import FaultyLog, times
from support.reading import read_all

TOPIC = "orders"


@pytest.fixture(autouse=True)
def topic(faulty: Pxrs) -> None:
    faulty.topics.create(TOPIC, partitions=2)


def always(error: Exception) -> Callable[[Sequence[Append]], None]:
    return times(10**6, error)


def leave(px: Pxrs, producer: Producer) -> None:
    with producer:
        pass


def leave_the_store(px: Pxrs, producer: Producer) -> None:
    with px:
        pass


@pytest.mark.parametrize(
    "end",
    [
        lambda px, producer: producer.flush(),
        lambda px, producer: producer.close(),
        leave,
        lambda px, producer: px.close(),
        leave_the_store,
    ],
    ids=["flush", "close", "with", "px.close", "with px"],
)
@pytest.mark.parametrize("failed_before", [False, True])
def test_who_never_asks_is_told_at_the_end_and_once(
    faulty: Pxrs, log: FaultyLog, end: Callable[[Pxrs, Producer], None], failed_before: bool
) -> None:
    faulty.topics.create("mails", partitions=1)
    log.before = always(StoreFull("no space"))
    producer = faulty.producer(linger=600)
    producer.send("mails", "m")
    sent = producer.send_many(TOPIC, [(f"k{number}", "v") for number in range(20)])
    if failed_before:
        producer._committer.due.set()  # as the background thread does when the linger is over
        while not all(one.done() for one in sent):
            pass
    with pytest.raises(DeliveryFailed) as caught:
        end(faulty, producer)
    assert "1 message to 'mails', 20 to 'orders'" in str(caught.value)
    assert "send again" in str(caught.value)
    assert str(caught.value).endswith("no space")
    assert isinstance(caught.value.__cause__, StoreFull)
    producer.flush()
    producer.close()
    producer.close()
    with pytest.raises(DeliveryFailed):
        sent.result()


def ask_each(producer: Producer) -> None:
    for sent in producer.send_many(TOPIC, [("a", "v"), ("b", "v"), ("c", "v")]):
        with pytest.raises(DeliveryFailed):
            sent.result()


def ask_many(producer: Producer) -> None:
    sent = producer.send_many(TOPIC, [(f"k{number}", "v") for number in range(20)])
    assert len({one._pending.partition for one in sent}) == 2
    with pytest.raises(DeliveryFailed):
        sent.result()


def be_called(producer: Producer) -> None:
    called = threading.Event()
    producer.send(TOPIC, "v").when_done(called.set)
    assert called.wait(PATIENCE)


@pytest.mark.parametrize("ask", [ask_each, ask_many, be_called])
def test_who_asked_is_not_told_again(
    faulty: Pxrs, log: FaultyLog, ask: Callable[[Producer], None]
) -> None:
    log.before = always(StoreFull("no space"))
    with faulty.producer(linger=600) as producer:
        ask(producer)
        producer.flush()
        ask(producer)


def test_what_is_told_is_what_nobody_asked_for(faulty: Pxrs, log: FaultyLog) -> None:
    log.before = always(StoreFull("no space"))
    producer = faulty.producer(linger=600)
    asked = producer.send(TOPIC, "v", partition=0)
    producer.send(TOPIC, "w", partition=1)
    with pytest.raises(DeliveryFailed):
        asked.result()
    log.heal()
    producer.send(TOPIC, "arrives", partition=0)
    with pytest.raises(DeliveryFailed, match="1 message to 'orders'"):
        producer.close()
    assert [message.value for message in read_all(faulty, TOPIC)] == [b"arrives"]


def test_who_gave_up_waiting_is_told_at_the_end(faulty: Pxrs, log: FaultyLog) -> None:
    blocked, go_on = threading.Event(), threading.Event()

    def full(_: Sequence[Append]) -> None:
        blocked.set()
        assert go_on.wait(PATIENCE)
        raise StoreFull("no space")

    log.before = full
    producer = faulty.producer(linger=0)
    sent = producer.send(TOPIC, "v")
    assert blocked.wait(PATIENCE)
    with pytest.raises(TimeoutError):
        sent.result(timeout=0.01)
    go_on.set()
    with pytest.raises(DeliveryFailed, match="no space"):
        producer.close()


def test_of_several_who_close_one_is_told(faulty: Pxrs, log: FaultyLog) -> None:
    log.before = always(StoreFull("no space"))
    producer = faulty.producer(linger=600)
    start = threading.Barrier(4)
    told: list[PxrsError] = []

    def work() -> None:
        start.wait()
        try:
            producer.close()
        except DeliveryFailed as error:
            told.append(error)

    producer.send(TOPIC, "v")
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 1


@pytest.mark.parametrize("whole_store", [False, True])
def test_an_error_on_its_way_is_not_replaced(
    faulty: Pxrs, log: FaultyLog, whole_store: bool
) -> None:
    log.before = always(StoreFull("no space"))
    producer = faulty.producer(linger=600)
    with pytest.raises(ZeroDivisionError) as caught, faulty if whole_store else producer:
        producer.send(TOPIC, "v")
        raise ZeroDivisionError
    (note,) = caught.value.__notes__
    assert "1 message to 'orders'" in note
    producer.close()


@pytest.mark.parametrize("known_too", [False, True])
def test_what_may_be_there_is_not_called_a_failure(
    faulty: Pxrs, log: FaultyLog, known_too: bool
) -> None:
    producer = faulty.producer(linger=600, delivery_timeout=0)
    if known_too:
        log.before = times(1, StoreFull("no space"))
        producer.send(TOPIC, "not there", partition=0)
        producer._committer.run()
    log.after = times(1, OutcomeUnknown("lost"))
    producer.send(TOPIC, "there", partition=1)
    with pytest.raises(
        OutcomeUnknown, match="not known whether delivered: 1 message to 'orders'"
    ) as caught:
        producer.close()
    assert ("not delivered: 1 message" in str(caught.value)) == known_too
    assert "look for them" in str(caught.value)


def test_a_topic_that_is_gone(faulty: Pxrs) -> None:
    producer = faulty.producer(linger=600)
    producer.send(TOPIC, "v")
    faulty.topics.delete(TOPIC)
    with pytest.raises(DeliveryFailed, match="'orders' does not exist") as caught:
        producer.close()
    assert isinstance(caught.value.__cause__, TopicNotFound)


def test_the_log_has_a_line_unless_somebody_waits(
    faulty: Pxrs, log: FaultyLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.before = always(StoreFull("no space"))
    with faulty.producer(linger=600) as producer:
        with pytest.raises(DeliveryFailed):
            producer.send(TOPIC, "v").result()
        ask_many(producer)
        be_called(producer)
        assert caplog.records == []
        producer.send_many(TOPIC, [(f"k{number}", "v") for number in range(20)])
        with pytest.raises(DeliveryFailed):
            producer.flush()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pxrs.producer", "ERROR")
    assert record.getMessage() == "not delivered: 20 messages to 'orders': no space"


def test_who_never_flushes_does_not_fill_the_memory(
    faulty: Pxrs, log: FaultyLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.producing.handles._MOST", 10)
    log.before = always(StoreFull("no space"))
    producer = faulty.producer(linger=600)
    sent = []
    for _ in range(25):
        sent.append(producer.send(TOPIC, "v"))
        producer._committer.run()
    assert len(producer._undelivered._failed) <= 10
    with pytest.raises(DeliveryFailed, match="and others before"):
        producer.close()
    # What was to be written is not kept by the errors that are.
    errors = [one._pending.error for one in sent]
    assert all(error.__cause__.__traceback__ is None for error in errors[1:])


@pytest.mark.engine("sqlite")
def test_a_file_that_another_program_holds(tmp_path: Path) -> None:
    path = tmp_path / "held.db"
    px = pxrs.connect(f"sqlite:///{path}?busy_timeout=0.01")
    px.topics.create(TOPIC, partitions=1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DeliveryFailed) as caught, px.producer(delivery_timeout=0.1) as producer:
            producer.send(TOPIC, "4 apples")
        assert isinstance(caught.value.__cause__, StoreBusy)
        other.execute("ROLLBACK")
    px.close()
