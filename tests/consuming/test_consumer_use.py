"""A consumer that is used in ways it is not made for: told, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import pxrs
from pxrs import Consumer, TopicPartition
from support.child import PATIENCE


@pytest.fixture
def topic(px: pxrs.Pxrs) -> pxrs.Pxrs:
    px.topics.create("orders", partitions=1)
    return px


def send(px: pxrs.Pxrs, count: int) -> None:
    with px.producer() as producer:
        producer.send_many("orders", [("k", str(number)) for number in range(count)])


class Polling:
    """`poll` in another thread."""

    def __init__(self, consumer: Consumer) -> None:
        self.found: list[pxrs.Message] = []
        self.error: BaseException | None = None
        self._consumer = consumer
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        # It is there once it has armed its watch, which the background wakes.
        while consumer._member._log_watch._watch is None and self._thread.is_alive():
            self._thread.join(0.01)

    def _poll(self) -> None:
        try:
            self.found = self._consumer.poll(timeout=PATIENCE)
        except pxrs.PxrsError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def test_a_second_thread_is_refused(topic: pxrs.Pxrs) -> None:
    """It would count as handled what the first one works on."""
    with topic.consumer("orders", "g") as consumer:
        waiting = Polling(consumer)
        with pytest.raises(pxrs.InvalidRequest, match="per thread"):
            consumer.poll(timeout=0)
        with pytest.raises(pxrs.InvalidRequest, match="per thread"):
            next(iter(consumer))
        with pytest.raises(pxrs.InvalidRequest, match="per thread"):
            next(consumer.batches())
        send(topic, 1)
        waiting.join()
        assert len(waiting.found) == 1


def test_polling_in_a_callback_is_refused(topic: pxrs.Pxrs) -> None:
    def on_assigned(parts: object) -> None:
        consumer.poll()

    consumer = topic.consumer("orders", "g", on_assigned=on_assigned)
    with consumer, pytest.raises(pxrs.InvalidRequest, match="callback"):
        while True:
            consumer.poll(timeout=PATIENCE)


def test_closing_ends_a_poll_that_waits(topic: pxrs.Pxrs) -> None:
    consumer = topic.consumer("orders", "g")
    waiting = Polling(consumer)
    consumer.close()
    waiting.join()
    assert isinstance(waiting.error, pxrs.Closed)
    watch = consumer._member._log_watch._watch
    assert watch is not None
    assert watch.wait(0), "a watch is open that nobody will close"


def test_closing_from_a_callback(topic: pxrs.Pxrs) -> None:
    told: list[str] = []

    def on_assigned(parts: object) -> None:
        consumer.close()

    def on_revoked(parts: object) -> None:
        told.append("revoked")
        consumer.close()

    consumer = topic.consumer("orders", "g", on_assigned=on_assigned, on_revoked=on_revoked)
    with pytest.raises(pxrs.Closed):
        while True:
            consumer.poll(timeout=PATIENCE)
    assert told == ["revoked"]
    assert topic.stores.coord.list("members/g/") == []


def test_closing_inside_its_own_transaction_is_refused(topic: pxrs.Pxrs) -> None:
    """The thread beside it may wait for the block's end, and closing waits for that thread."""
    send(topic, 1)
    with topic.consumer("orders", "g") as consumer:
        consumer.poll(timeout=PATIENCE)
        with consumer.transaction():
            with pytest.raises(pxrs.InsideTransaction):
                consumer.close()
            assert consumer.assignment
        assert topic.groups.describe("g").lag == 0


@pytest.mark.parametrize("lock", ["table", "owned_claims"])
def test_closing_from_a_signal_handler_never_hangs(topic: pxrs.Pxrs, lock: str) -> None:
    """It may interrupt a call that holds what the thread beside it waits for."""
    heard = threading.Event()
    with topic.consumer("orders", "g") as consumer:

        def interrupted(*_: object) -> None:
            heard.set()
            consumer.close()

        before = signal.signal(signal.SIGUSR1, interrupted)
        try:
            with (
                pytest.raises(pxrs.InsideTransaction, match="signal"),
                getattr(consumer._steps, lock).lock,
            ):
                os.kill(os.getpid(), signal.SIGUSR1)
                assert heard.wait(PATIENCE)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert consumer.poll(timeout=0) == []
    assert topic.stores.coord.list("members/g/") == []


CALLS: dict[str, Callable[[Consumer], Any]] = {
    "poll": lambda consumer: consumer.poll(timeout=0),
    "iterate": lambda consumer: next(iter(consumer)),
    "batches": lambda consumer: next(consumer.batches()),
    "commit": lambda consumer: consumer.commit(),
    "commit_async": lambda consumer: consumer.commit_async(),
    "seek": lambda consumer: consumer.seek("orders", 0, 0),
    "seek_to_time": lambda consumer: consumer.seek_to_time(0),
    "transaction": lambda consumer: consumer.transaction(),
    "run_transaction": lambda consumer: consumer.run_transaction(lambda tx: None),
}


def test_after_it_was_closed(topic: pxrs.Pxrs) -> None:
    consumer = topic.consumer("orders", "g")
    consumer.close()
    for name, call in CALLS.items():
        with pytest.raises(pxrs.Closed):
            assert not call(consumer), name


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_inside_its_own_transaction(topic: pxrs.Pxrs, call: Callable[[Consumer], Any]) -> None:
    """A seek would be undone by the block's end; a commit would keep what the block rolls back."""
    send(topic, 10)
    with topic.consumer("orders", "g", auto_commit=False) as consumer:
        consumer.poll(4, timeout=PATIENCE)
        with pytest.raises(pxrs.InsideTransaction), consumer.transaction():
            call(consumer)
        again = consumer.poll(4, timeout=PATIENCE)
        assert [message.offset for message in again] == [0, 1, 2, 3]
        begun = consumer.transaction()
        with consumer.transaction():
            with pytest.raises(pxrs.InsideTransaction), begun:
                pass
            with pytest.raises(pxrs.InsideTransaction):
                call(consumer)
        assert topic.groups.describe("g").partitions[0].checkpoint == 4
        assert consumer.poll(1, timeout=PATIENCE)[0].offset == 4


@pytest.mark.parametrize("spoil", [list.clear, list.reverse, lambda got: got.insert(0, got.pop())])
def test_a_list_of_messages_is_the_callers_own(
    topic: pxrs.Pxrs, spoil: Callable[[list[pxrs.Message]], None]
) -> None:
    send(topic, 10)
    with topic.consumer("orders", "g") as consumer:
        spoil(consumer.poll(3, timeout=PATIENCE))
        spoil(consumer.poll(3, timeout=PATIENCE))
        consumer.commit()
        assert topic.groups.describe("g").partitions[0].checkpoint == 6
        batches = consumer.batches(2)
        spoil(next(batches))
        spoil(next(batches))
        consumer.commit()
        assert topic.groups.describe("g").partitions[0].checkpoint == 10


def test_groups_of_odd_names(topic: pxrs.Pxrs) -> None:
    names: list[Any] = ["", "x" * 250, "a/b", "a b", ".", "ä", 5, b"g"]
    for name in names:
        with pytest.raises(pxrs.InvalidRequest):
            topic.consumer("orders", name)
        with pytest.raises(pxrs.InvalidRequest):
            topic.run(print, topic="orders", group=name).join()
        with pytest.raises(pxrs.InvalidRequest):
            topic.consumer("orders", "g", instance=name)
        with pytest.raises(pxrs.InvalidRequest):
            topic.groups.describe(name)
    assert topic.stores.coord.list("group/") == []


def test_a_fork_can_not_use_it(topic: pxrs.Pxrs) -> None:
    """The child has the parent's buffers, but neither its session nor its threads."""
    send(topic, 10)
    with topic.consumer("orders", "g") as consumer:
        assert len(consumer.poll(1, timeout=PATIENCE)) == 1
        assert consumer._steps.table.has_messages
        read_end, write_end = os.pipe()
        if (pid := os.fork()) == 0:
            refused = 0
            try:
                for call in CALLS.values():
                    try:
                        call(consumer)
                    except pxrs.Closed:
                        refused += 1
                consumer.close()
            finally:
                os.write(write_end, bytes([refused]))
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read_end, 1) == bytes([len(CALLS)])
        os.close(read_end)
        os.close(write_end)
        assert len(consumer.poll(timeout=PATIENCE)) == 9
        assert consumer.assignment == {TopicPartition("orders", 0)}
