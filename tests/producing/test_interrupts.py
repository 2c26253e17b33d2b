"""Ctrl-C, signal handlers and destructors come at any moment, also in the middle of `send`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count

import pytest

from pxrs import DeliveryFailed, InsideTransaction, Producer, Pxrs, Sent, TopicNotFound
from pxrs.clock import SYSTEM_CLOCK
from pxrs.stores.open import open_stores
from support.child import PATIENCE
from support.interrupts import interrupted_at
from support.reading import read_all

pytestmark = pytest.mark.thorough

TOPIC = "orders"


class Interrupted(BaseException):
    """What a signal handler may raise."""


def strike() -> None:
    raise Interrupted


Taken = list[tuple[bytes, Sent]]


def single(producer: Producer, taken: Taken) -> None:
    for number in range(4):
        value = b"%d" % number
        taken.append((value, producer.send(TOPIC, value, key=b"k")))


def keyless(producer: Producer, taken: Taken) -> None:
    for number in range(4):
        value = b"%d" % number
        taken.append((value, producer.send(TOPIC, value)))


def many(producer: Producer, taken: Taken) -> None:
    values = [b"%d" % number for number in range(4)]
    sent = producer.send_many(TOPIC, [(b"k", value) for value in values])
    taken += zip(values, sent, strict=True)


def flush(producer: Producer, taken: Taken) -> None:
    single(producer, taken)
    producer.flush()


def result(producer: Producer, taken: Taken) -> None:
    single(producer, taken)
    taken[-1][1].result()
    single(producer, taken)
    taken[-1][1].result()


@pytest.mark.parametrize(
    ("batch_bytes", "compression"),
    [(1, "none"), (100, "none"), (2**18, "gzip")],
    ids=["single", "few", "large-gzip"],
)
@pytest.mark.parametrize("work", [single, keyless, many, flush, result])
@pytest.mark.engine("memory")
@pytest.mark.long
def test_an_interrupt_loses_nothing_wherever_it_comes(
    work: Callable[[Producer, Taken], None], batch_bytes: int, compression: str
) -> None:
    """What was handed over is there once and in order or its owner is told; the rest goes on."""
    for point in count():
        with Pxrs(open_stores("memory://")) as px:
            px.topics.create(TOPIC, partitions=2)
            producer = px.producer(linger=600, batch_bytes=batch_bytes, compression=compression)
            taken: Taken = [(b"before", producer.send(TOPIC, b"before", key=b"k"))]
            try:
                reached = interrupted_at(point, partial(work, producer, taken), strike)
            except Interrupted:
                reached = True
            taken.append((b"after", producer.send(TOPIC, b"after", key=b"k")))
            with suppress(DeliveryFailed):
                producer.flush(timeout=PATIENCE)
            assert_nothing_was_lost(px, taken)
            assert producer._outbox.held + unreported(producer) == 0
        if not reached:
            assert point > 20
            return


def unreported(producer: Producer) -> int:
    return sum(buffer.unreported for buffer in producer._outbox._buffers)


def assert_nothing_was_lost(px: Pxrs, taken: Taken) -> None:
    found = {(m.partition, m.offset): m.value for m in read_all(px, TOPIC)}
    places: list[tuple[int, int]] = []
    for value, sent in taken:
        assert sent.done()
        try:
            place = sent.result()[1:]
        except DeliveryFailed:
            continue
        assert found[place] == value
        places.append(place)
    for partition in range(2):
        offsets = [offset for number, offset in places if number == partition]
        assert offsets == sorted(set(offsets))
    assert Counter(found.values())[b"after"] == 1
    assert places[-1] == max(place for place in places if place[0] == places[-1][0])


def test_an_interrupt_between_a_failure_and_its_neighbours(px: Pxrs) -> None:
    """The round is repeated: everybody is told once, and the new epoch starts at its start."""
    px.topics.create("gone", partitions=1)
    px.topics.create(TOPIC, partitions=1)
    told: list[str] = []
    with px.producer(linger=600) as producer:
        producer.send("gone", b"x")
        producer.send(TOPIC, b"0").result()
        lost, kept = producer.send("gone", b"x"), producer.send(TOPIC, b"1")
        px.topics.delete("gone")
        for callback in (lambda: told.append("lost"), strike):
            lost._pending.when_settled(callback)  # the last one is called first
        kept._pending.when_settled(lambda: told.append("kept"))
        with pytest.raises(Interrupted):
            producer.flush()
        assert (lost.done(), kept.done(), told) == (True, False, [])
        assert kept.result(timeout=PATIENCE).offset == 1
        assert told == ["lost", "kept"]
        with pytest.raises(TopicNotFound):
            lost.result()
        assert producer.send(TOPIC, b"2").result(timeout=PATIENCE).offset == 2
    assert [message.value for message in read_all(px, TOPIC)] == [b"0", b"1", b"2"]


class ReentrantClock:
    """Calls something, once, from inside: `send` looks at the clock when it opens a batch."""

    def __init__(self) -> None:
        self.call: Callable[[], object] | None = None
        self.errors: list[BaseException] = []
        self.thread = threading.get_ident()

    def monotonic(self) -> float:
        if self.call is not None and threading.get_ident() == self.thread:
            call, self.call = self.call, None
            try:
                call()
            except Exception as error:  # noqa: BLE001 - a handler's errors are what is looked at
                self.errors.append(error)
        return SYSTEM_CLOCK.monotonic()

    def wall_ms(self) -> int:
        return SYSTEM_CLOCK.wall_ms()


@pytest.fixture
def clock() -> ReentrantClock:
    return ReentrantClock()


@pytest.fixture
def inside(url: str, clock: ReentrantClock) -> Iterator[Pxrs]:
    with Pxrs(open_stores(url), clock) as px:
        px.topics.create(TOPIC, partitions=1)
        yield px


def test_a_handler_may_send_while_its_thread_sends(inside: Pxrs, clock: ReentrantClock) -> None:
    with inside.producer(linger=600) as producer:
        for _ in range(50):
            clock.call = lambda: producer.send(TOPIC, b"inner", key=b"k")
            producer.send(TOPIC, b"outer", key=b"k")
            producer.flush()
        assert len(producer._outbox._buffers) == 2
        assert producer._outbox.held + unreported(producer) == 0
    assert Counter(message.value for message in read_all(inside, TOPIC)) == {
        b"inner": 50,
        b"outer": 50,
    }


def test_a_handler_may_send_while_its_handler_sends(inside: Pxrs, clock: ReentrantClock) -> None:
    def inner() -> None:
        clock.call = lambda: producer.send(TOPIC, b"2", key=b"k")
        producer.send(TOPIC, b"1", key=b"k")

    with inside.producer(linger=600) as producer:
        clock.call = inner
        producer.send(TOPIC, b"0", key=b"k")
    assert {message.value for message in read_all(inside, TOPIC)} == {b"0", b"1", b"2"}


@pytest.mark.parametrize(
    "call",
    [
        lambda producer: producer.flush(),
        lambda producer: producer.send(TOPIC, b"inner").result(),
        lambda producer: producer.close(),
    ],
    ids=["flush", "result", "close"],
)
def test_a_handler_cant_wait_for_the_thread_it_interrupts(
    inside: Pxrs, clock: ReentrantClock, call: Callable[[Producer], None]
) -> None:
    with inside.producer(linger=600, batch_bytes=1) as producer:
        producer.send(TOPIC, b"earlier")
        clock.call = lambda: call(producer)
        producer.send(TOPIC, b"outer")
        assert [type(error) for error in clock.errors] == [InsideTransaction]
        assert "signal handler" in str(clock.errors[0])
        producer.send(TOPIC, b"later").result()
    assert {b"outer", b"later"} <= {message.value for message in read_all(inside, TOPIC)}


@pytest.mark.parametrize("name", ["flush", "close"])
def test_a_handler_cant_wait_for_the_commit_it_interrupts(
    inside: Pxrs, clock: ReentrantClock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[type[Exception]] = []
    append = inside.stores.log.append

    def interrupted(appends: object) -> object:
        monkeypatch.undo()
        try:
            getattr(producer, name)()
        except Exception as error:  # noqa: BLE001 - a handler's errors are what is looked at
            errors.append(type(error))
        return append(appends)  # type: ignore[arg-type]

    with inside.producer(linger=600) as producer:
        sent = producer.send(TOPIC, b"v")
        monkeypatch.setattr(inside.stores.log, "append", interrupted)
        sent.result()
        producer.send(TOPIC, b"w")
    assert errors == [InsideTransaction]
    assert [message.value for message in read_all(inside, TOPIC)] == [b"v", b"w"]
