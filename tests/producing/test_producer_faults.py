"""A store that fails in every way it may: each message once, in order, or its owner is told."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pxrs import (
    Closed,
    DeliveryFailed,
    InsideTransaction,
    OutcomeUnknown,
    Producer,
    Pxrs,
    PxrsError,
    StoreBusy,
    StoreFull,
    TopicNotFound,
)
from pxrs.codec.batches import Builder, seal
from pxrs.testing.clock import VirtualClock
from pxrs.types import Append, Batch
from support.child import PATIENCE
from support.faults import FaultyLog, FaultyStores, times
from support.reading import read_all, read_partition, values_by_key
from support.seeds import few_are_fast

TOPIC = "orders"


@pytest.fixture(autouse=True)
def topic(faulty: Pxrs) -> None:
    faulty.topics.create(TOPIC, partitions=2)


def send_numbers(producer: Producer, numbers: range, keys: int = 5) -> None:
    for number in numbers:
        producer.send(TOPIC, str(number), key=f"k{number % keys}")


def assert_each_once_in_order(px: Pxrs, numbers: range, keys: int = 5) -> None:
    assert values_by_key(px, TOPIC) == {
        f"k{key}".encode(): [number for number in numbers if number % keys == key]
        for key in range(keys)
    }


@pytest.mark.parametrize("error", [StoreBusy("held"), OutcomeUnknown("lost")])
@pytest.mark.parametrize("applied", [False, True])
def test_a_failure_that_passes_is_not_felt(
    faulty: Pxrs, log: FaultyLog, error: PxrsError, applied: bool
) -> None:
    with faulty.producer(batch_bytes=200) as producer:
        setattr(log, "after" if applied else "before", times(3, error))
        send_numbers(producer, range(100))
        producer.flush()
        send_numbers(producer, range(100, 200))
    assert_each_once_in_order(faulty, range(200))


@pytest.mark.parametrize("seed", few_are_fast(range(8)))
def test_many_threads_over_a_log_that_keeps_failing(
    faulty: Pxrs, log: FaultyLog, seed: int
) -> None:
    """Applied or not, known or not: every message once and each thread's in order."""
    rng = random.Random(seed)
    lock = threading.Lock()

    def maybe(_: Sequence[Append]) -> None:
        with lock:
            if rng.random() < 0.3:
                raise rng.choice([StoreBusy("held"), OutcomeUnknown("lost")])

    log.before = log.after = maybe
    with faulty.producer(batch_bytes=400, linger=0.0) as producer:

        def work(name: int) -> None:
            for number in range(200):
                sent = producer.send(TOPIC, str(number), key=f"t{name}")
                if number % 50 == 49:
                    sent.result()

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush()
        log.heal()
    assert values_by_key(faulty, TOPIC) == {b"t%d" % name: list(range(200)) for name in range(4)}


def test_a_permanent_failure_reaches_its_owner_and_later_messages_go_on(
    faulty: Pxrs, log: FaultyLog
) -> None:
    with faulty.producer() as producer:
        producer.send(TOPIC, "0", key="k").result()
        log.before = times(1, StoreFull("no space"))
        lost = [producer.send(TOPIC, str(number), key="k") for number in (1, 2)]
        for sent in lost:
            with pytest.raises(DeliveryFailed, match="no space") as caught:
                sent.result()
            assert isinstance(caught.value.__cause__, StoreFull)
        send_numbers(producer, range(10), keys=1)
        producer.send(TOPIC, "3", key="k").result()
    assert values_by_key(faulty, TOPIC) == {b"k": [0, 3], b"k0": list(range(10))}


def test_permanent_failures_can_use_up_the_epochs(faulty: Pxrs, log: FaultyLog) -> None:
    """The epoch has 15 bits; after the last one the producer takes another id."""
    with faulty.producer() as producer:
        producer.send(TOPIC, "0", key="k").result()
        (where,) = producer._committer._sequences
        producer._committer._epochs = {where: 2**15 - 1}
        producer._committer._sequences = {}
        producer.send(TOPIC, "1", key="k").result()
        log.before = times(1, StoreFull("no space"))
        with pytest.raises(DeliveryFailed):
            producer.send(TOPIC, "2", key="k").result()
        producer.send(TOPIC, "3", key="k").result()
    assert values_by_key(faulty, TOPIC) == {b"k": [0, 1, 3]}


def test_an_error_nobody_expected_from_the_store(faulty: Pxrs, log: FaultyLog) -> None:
    with faulty.producer() as producer:
        log.before = times(1, ZeroDivisionError("what?"))
        with pytest.raises(PxrsError, match="what") as caught:
            producer.send(TOPIC, "0", key="k").result()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        producer.send(TOPIC, "1", key="k").result()
    assert values_by_key(faulty, TOPIC) == {b"k": [1]}


@pytest.mark.parametrize("error", [ZeroDivisionError("what?"), OutcomeUnknown("lost")])
def test_what_may_have_been_appended_is_not_called_a_failure(
    faulty: Pxrs, log: FaultyLog, error: Exception
) -> None:
    """`DeliveryFailed` says that the message is not there; that must be known, not guessed."""
    with faulty.producer(delivery_timeout=0) as producer:
        log.after = times(1, error)
        with pytest.raises(OutcomeUnknown):
            producer.send(TOPIC, "0", key="k").result()
        producer.send(TOPIC, "1", key="k").result()
    assert values_by_key(faulty, TOPIC) == {b"k": [0, 1]}


def test_once_unknown_a_later_known_failure_does_not_settle_it(
    faulty: Pxrs, log: FaultyLog
) -> None:
    def full_after_lost(_: Sequence[Append]) -> None:
        log.before = times(1, StoreFull("no space"))
        log.after = lambda _: None
        raise OutcomeUnknown("lost")

    with faulty.producer() as producer:
        log.after = full_after_lost
        with pytest.raises(OutcomeUnknown):
            producer.send(TOPIC, "0", key="k").result()
    assert values_by_key(faulty, TOPIC) == {b"k": [0]}


def test_delivery_timeout(faulty: Pxrs, log: FaultyLog) -> None:
    with faulty.producer(delivery_timeout=0.05) as producer:
        log.before = times(10**6, StoreBusy("held by pid 7"))
        sent = producer.send(TOPIC, "0", key="k")
        with pytest.raises(DeliveryFailed, match="held by pid 7"):
            sent.result()
        assert sent.done()
        log.heal()
        producer.send(TOPIC, "1", key="k").result()
    assert values_by_key(faulty, TOPIC) == {b"k": [1]}


def test_one_bad_batch_fails_alone(faulty: Pxrs) -> None:
    faulty.topics.create("gone", partitions=1)
    with faulty.producer(linger=60) as producer:
        before = producer.send(TOPIC, "0", key="k")
        doomed = producer.send("gone", "x")
        after = producer.send(TOPIC, "1", key="k")
        faulty.topics.delete("gone")
        with pytest.raises(TopicNotFound, match="'gone'"):
            doomed.result()
        before.result()
        after.result()
        producer.send(TOPIC, "2", key="k").result()
    assert values_by_key(faulty, TOPIC) == {b"k": [0, 1, 2]}


def test_an_error_is_raised_afresh_for_every_message(faulty: Pxrs, log: FaultyLog) -> None:
    """The messages of a batch share their error: its traceback must not grow with each."""
    with faulty.producer() as producer:
        log.before = times(1, StoreFull("no space"))
        sent = producer.send_many(TOPIC, [("k", "v")] * 50)
        lengths = set()
        for one in sent:
            with pytest.raises(DeliveryFailed) as caught:
                one.result()
            lengths.add(len(caught.traceback))
    assert len(lengths) <= 2


def test_a_failed_round_is_tried_again_whatever_the_linger(faulty: Pxrs, log: FaultyLog) -> None:
    """Nobody waits for the message: the background thread alone has to get it there."""
    done = threading.Event()
    fail = times(2, StoreBusy("held"))

    def hook(_: Sequence[Append]) -> None:
        fail(_)
        done.set()

    log.before = hook
    producer = faulty.producer(linger=600, buffer_bytes=2**20)
    send_numbers(producer, range(3))
    producer._committer.due.set()
    assert done.wait(PATIENCE)
    producer.close()


def test_a_thread_is_not_starved_by_another_that_fills_every_commit(
    faulty: Pxrs, log: FaultyLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit takes five batches of a partition: first come, first served."""
    monkeypatch.setattr(Producer, "_run", lambda self: None)  # only the rounds below
    with faulty.producer(linger=600, batch_bytes=1) as producer:
        for number in range(5):
            producer.send(TOPIC, str(number), partition=0)

        def put() -> None:
            producer.send(TOPIC, "mine", partition=0)

        thread = threading.Thread(target=put)
        thread.start()
        thread.join()
        next_number = iter(range(5, 10**6))

        def refill(appends: Sequence[Append]) -> None:
            for _ in appends:
                producer.send(TOPIC, str(next(next_number)), partition=0)

        log.before = refill
        for _ in range(10):
            producer._committer.run()
        log.heal()
        assert b"mine" in [message.value for message in read_partition(faulty, TOPIC, 0)]


def test_result_of_a_message_whose_round_another_thread_runs(faulty: Pxrs, log: FaultyLog) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(_: Sequence[Append]) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    log.before = slow
    with faulty.producer(linger=600) as producer:
        sent = producer.send(TOPIC, "0", key="k")
        other = threading.Thread(target=producer.flush)
        other.start()
        assert inside.wait(PATIENCE)
        with pytest.raises(TimeoutError):
            sent.result(timeout=0.01)
        with pytest.raises(TimeoutError):
            producer.flush(timeout=0.01)
        assert not sent.done()
        go_on.set()
        log.before = lambda _: None
        assert sent.result(timeout=PATIENCE).offset == 0
        other.join()


def test_the_timeout_of_many_is_for_all_of_them(
    stores: FaultyStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three commits of a second each: two fit into a timeout of one and a half."""
    clock = VirtualClock()
    monkeypatch.setattr("pxrs.producing.handles.SYSTEM_CLOCK", clock)
    monkeypatch.setattr(Producer, "_run", lambda self: None)
    with Pxrs(stores, clock) as px, px.producer(linger=600, batch_bytes=1) as producer:
        px.topics.create(TOPIC, partitions=2)
        stores.log.after = lambda _: clock.advance(1)
        sent = producer.send_many(TOPIC, [("k", str(number)) for number in range(15)])
        with pytest.raises(TimeoutError):
            sent.result(timeout=1.5)
        assert [one.done() for one in sent] == [True] * 10 + [False] * 5
        assert [position.offset for position in sent.result(timeout=1.5)] == list(range(15))


def test_a_store_closed_under_the_producer(faulty: Pxrs, stores: FaultyStores) -> None:
    producer = faulty.producer(linger=600)
    sent = producer.send(TOPIC, "0", key="k")
    stores.close()
    with pytest.raises(DeliveryFailed, match="closed") as caught:
        sent.result()
    assert isinstance(caught.value.__cause__, Closed)
    producer.close()


def test_retention_that_fails_does_not_stop_the_producer(faulty: Pxrs, log: FaultyLog) -> None:
    tried = threading.Event()

    def fail() -> None:
        tried.set()
        raise ZeroDivisionError("what?")

    log.expiring = fail
    faulty.topics.create("short", partitions=1, retention=1)
    with faulty.producer(linger=0.001) as producer:
        producer.send("short", "0").result()
        assert tried.wait(PATIENCE)
        arrived = threading.Event()
        log.after = lambda _: arrived.set()
        producer.send("short", "1")
        assert arrived.wait(PATIENCE)


def test_a_batch_that_cant_be_sealed_fails_alone(
    faulty: Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = [MemoryError("no memory to compress")]

    def failing_seal(builder: Builder, producer_id: int, epoch: int, sequence: int) -> Batch:
        if fail:
            raise fail.pop()
        return seal(builder, producer_id, epoch, sequence)

    with faulty.producer(linger=600) as producer:
        monkeypatch.setattr("pxrs.producing.committer.seal", failing_seal)
        bad, good = producer.send(TOPIC, "0", partition=0), producer.send(TOPIC, "1", partition=1)
        with pytest.raises(PxrsError, match="no memory"):
            bad.result(timeout=PATIENCE)
        good.result(timeout=PATIENCE)
        producer.send(TOPIC, "2", partition=0).result(timeout=PATIENCE)
    assert [message.value for message in read_all(faulty, TOPIC)] == [b"2", b"1"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_producer_whose_thread_ended_refuses_but_loses_nothing(
    faulty: Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error nobody thought of. Silence until the buffer is full would be worse."""
    producer = faulty.producer(linger=0.0)
    thread = producer._thread

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(producer._outbox, "take", fail)
    sent = producer.send(TOPIC, "0", key="k")
    thread.join(PATIENCE)
    assert not thread.is_alive()
    monkeypatch.undo()
    with pytest.raises(Closed, match="ended by an error"):
        producer.send(TOPIC, "1", key="k")
    with pytest.raises(Closed, match="ended by an error"):
        sent.when_done(lambda: None)  # nobody else would get on with it
    producer.close()
    assert values_by_key(faulty, TOPIC) == {b"k": [0]}


@pytest.mark.engine("sqlite")
class TestInsideATransaction:
    """`result()` where the calling thread holds the store's only writer."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"

    @pytest.mark.parametrize("wait", [lambda p, s: s.result(), lambda p, s: p.flush()])
    def test_is_refused_and_the_message_arrives_later(
        self, faulty: Pxrs, wait: Callable[[Producer, object], None]
    ) -> None:
        with faulty.producer(linger=600) as producer:
            sent = producer.send(TOPIC, "0", key="k")
            with faulty.stores.atomic(), pytest.raises(InsideTransaction):
                wait(producer, sent)
            assert sent.result(timeout=PATIENCE).offset == 0
        assert values_by_key(faulty, TOPIC) == {b"k": [0]}

    def test_a_producer_that_could_not_be_closed_inside_is_closed_outside(
        self, faulty: Pxrs
    ) -> None:
        producer = faulty.producer(linger=600)
        producer.send(TOPIC, "0", key="k")
        with faulty.stores.atomic(), pytest.raises(InsideTransaction):
            producer.close()
        producer.close()
        assert values_by_key(faulty, TOPIC) == {b"k": [0]}
