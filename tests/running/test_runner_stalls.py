"""What must not bring `px.run` to a halt: a poisoned partition, a handler's odd ends, outages."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any, NoReturn

import msgspec
import pytest

import pxrs
from pxrs import Backoff, DeadLetter, Message
from pxrs.core.progress import MOST_BYTES, Progress
from pxrs.core.records import Claim, claim_key, decode, encode
from pxrs.running.dead_letters import DeadLetters
from pxrs.types import Put
from support.child import PATIENCE
from support.faults import FaultyLog
from support.running import Running, checkpoints, wait_for_checkpoints

QUICK = Backoff(first=0.001, longest=0.002, attempts=3)
NEVER_AGAIN = Backoff(first=3600.0, longest=3600.0, jitter=0)


def make(px: pxrs.Pxrs, *partitions: list[str]) -> None:
    """The topic `orders` with these values in its partitions."""
    px.topics.create("orders", partitions=len(partitions))
    with px.producer() as producer:
        for number, values in enumerate(partitions):
            for value in values:
                producer.send("orders", value, key="k", partition=number)


@pytest.mark.parametrize("parallel", ["partition", "key"])
def test_a_partition_that_waits_leaves_room_for_the_others(px: pxrs.Pxrs, parallel: str) -> None:
    """Though more messages stand behind the one that failed than may be in flight at all."""
    make(px, ["poison"] * 50, [])
    failed, others = threading.Event(), threading.Semaphore(0)

    def handle(message: Message) -> None:
        if message.value == b"poison":
            failed.set()
            raise RuntimeError("not now")
        others.release()

    running = Running(
        px, handle, topic="orders", parallel=parallel, retry=NEVER_AGAIN, max_in_flight=10
    )
    assert failed.wait(PATIENCE)
    with px.producer() as producer:
        for number in range(30):
            producer.send("orders", str(number), key="k", partition=1)
    for _ in range(30):
        assert others.acquire(timeout=PATIENCE), "the other partition waits, too"
    px.stop()
    running.join()
    assert running.error is None
    assert checkpoints(px) == 30


def test_a_reset_past_what_waits_takes_effect_at_once(px: pxrs.Pxrs) -> None:
    make(px, ["poison", "good"])
    failed, handled = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.value == b"poison":
            failed.set()
            raise RuntimeError("not now")
        handled.set()

    running = Running(px, handle, topic="orders", retry=NEVER_AGAIN)
    assert failed.wait(PATIENCE)
    px.groups.reset("g", "orders", to=1, force=True)
    assert handled.wait(PATIENCE), "it still waits for the message that was skipped"
    px.stop()
    running.join()


def test_a_reset_while_a_message_is_put_aside_takes_effect_at_once(px: pxrs.Pxrs) -> None:
    """After the handler has failed, before the worker has let go of the message."""
    make(px, ["poison", "good"])
    handled = threading.Event()

    def handle(message: Message) -> None:
        if message.value == b"poison":
            raise RuntimeError("not now")
        handled.set()

    def reset(record: logging.LogRecord) -> bool:
        if "again in" in record.getMessage() and not handled.is_set():
            (begun,) = px._running
            runner: Any = begun._work
            before = runner._seen_version
            px.groups.reset("g", "orders", to=1, force=True)
            with runner._turn:
                runner._turn.wait_for(lambda: runner._seen_version != before, PATIENCE)
        return True

    logger = logging.getLogger("pxrs.run")
    logger.addFilter(reset)
    try:
        running = Running(px, handle, topic="orders", retry=NEVER_AGAIN)
        assert handled.wait(PATIENCE), "it waits for a message that was skipped"
    finally:
        logger.removeFilter(reset)
    px.stop()
    running.join()


def test_attempts_are_counted_anew_once_it_was_handled(px: pxrs.Pxrs) -> None:
    make(px, ["shaky"])
    calls: list[int] = []

    def handle(message: Message) -> None:
        calls.append(len(calls) + 1)
        if len(calls) % 3:
            raise RuntimeError("the third time")

    running = Running(px, handle, topic="orders", retry=QUICK)
    wait_for_checkpoints(px, 1)
    px.groups.reset("g", "orders", to=0, force=True)
    wait_for_checkpoints(px, 1)
    px.stop()
    running.join()
    assert calls == [1, 2, 3, 4, 5, 6]
    assert [topic.name for topic in px.topics.list()] == ["orders"]


def odd() -> NoReturn:
    raise RuntimeError("\ud800 is no text")


def unspeakable() -> NoReturn:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    raise UnspeakableError


@pytest.mark.parametrize("fail", [odd, unspeakable])
def test_an_error_without_words_becomes_a_dead_letter(
    px: pxrs.Pxrs, fail: Callable[[], NoReturn], caplog: pytest.LogCaptureFixture
) -> None:
    # What is captured of such a text can't be sent to the process that reports.
    caplog.set_level(logging.CRITICAL + 1, "pxrs.run")
    make(px, ["bad", "good"])

    def handle(message: Message) -> None:
        if message.value == b"bad":
            fail()

    running = Running(px, handle, topic="orders", retry=QUICK)
    wait_for_checkpoints(px, 2)
    px.stop()
    running.join()
    [letter] = px.reader("orders.dlq").read(0, 0)
    assert letter.value == b"bad"
    assert dict(letter.headers)["pxrs-dlq-error"]


def test_a_message_as_large_as_may_be_becomes_a_dead_letter(px: pxrs.Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    value = bytes(3 * 2**20)
    with px.producer(max_message_bytes=len(value)) as producer:
        producer.send("orders", value)

    def handle(message: Message) -> None:
        raise RuntimeError("too much")

    running = Running(px, handle, topic="orders", retry=QUICK)
    wait_for_checkpoints(px, 1)
    px.stop()
    running.join()
    assert running.error is None
    assert px.reader("orders.dlq").read(0, 0)[0].value == value


@pytest.mark.parametrize("topic", ["orders", ["other", "orders"]])
def test_dead_letters_do_not_go_where_they_come_from(px: pxrs.Pxrs, topic: Any) -> None:
    make(px, [])
    px.topics.create("other", partitions=1)
    with pytest.raises(pxrs.InvalidRequest, match="dead letters"):
        px.run(print, topic=topic, group="g", on_failure=DeadLetter("orders")).join()
    with pytest.raises(pxrs.GroupNotFound):
        px.groups.describe("g")


def test_a_name_too_long_for_its_dead_letters_is_refused(px: pxrs.Pxrs) -> None:
    px.topics.create("x" * 249, partitions=1)
    with pytest.raises(pxrs.InvalidRequest, match="249"):
        px.run(print, topic="x" * 249, group="g").join()


@pytest.mark.parametrize("letters", [DeadLetter(), DeadLetter("orders-dead")])
def test_a_pattern_does_not_match_its_own_dead_letters(px: pxrs.Pxrs, letters: DeadLetter) -> None:
    make(px, ["bad"])
    px.topics.create("orders.end", partitions=1)
    seen: list[str] = []
    ended = threading.Event()

    def handle(message: Message) -> None:
        seen.append(message.topic)
        if message.topic == "orders.end":
            ended.set()
            return
        raise RuntimeError("bad")

    running = Running(px, handle, topic=re.compile("orders.*"), retry=QUICK, on_failure=letters)
    wait_for_checkpoints(px, 1)
    # Whatever is subscribed to on account of the letter is subscribed to before this one.
    px.topics.create("orders.last", partitions=1)
    watch = px.stores.coord.watch("group/g")
    while "orders.last" not in topics_of(px):
        assert watch.wait(PATIENCE)
    assert topics_of(px) == {"orders", "orders.end", "orders.last"}
    px.stop()
    running.join()
    assert running.error is None
    assert seen == ["orders"] * 3


def topics_of(px: pxrs.Pxrs) -> set[str]:
    return {topic for member in px.groups.describe("g").members for topic in member.topics}


def test_a_store_that_is_away_for_a_while_is_waited_for(faulty: pxrs.Pxrs, log: FaultyLog) -> None:
    make(faulty, ["a"])
    failed = threading.Semaphore(0)
    answers = threading.Event()

    def fetching() -> None:
        if not answers.is_set():
            failed.release()
            raise pxrs.StoreUnavailable("the log is away")

    log.fetching = fetching
    running = Running(faulty, lambda message: None, topic="orders")
    for _ in range(2):
        assert failed.acquire(timeout=PATIENCE)
    answers.set()
    wait_for_checkpoints(faulty, 1)
    faulty.stop()
    running.join()
    assert running.error is None


def full_window(px: pxrs.Pxrs) -> int:
    """A partition of which every second message is done, as many as a claim can tell."""
    progress = Progress(0)
    while not progress.full:
        progress.finish(2 * len(progress.ranges) + 1)
    count = 2 * len(progress.ranges) + 1
    make(px, [str(number) for number in range(count)])
    [topic] = px.topics.list()
    claim = Claim(epoch=1, checkpoint=0, done=progress.ranges)
    px.stores.coord.commit((), [Put(claim_key("g", topic.id, 0), encode(claim))])
    return count


def test_an_owner_that_begins_with_a_full_window_goes_on(px: pxrs.Pxrs) -> None:
    count = full_window(px)
    seen: list[int] = []
    running = Running(px, lambda message: seen.append(message.offset), topic="orders")
    wait_for_checkpoints(px, count)
    px.stop()
    running.join()
    assert seen == list(range(0, count, 2))


def test_what_was_rolled_back_under_a_full_window_comes_again(px: pxrs.Pxrs) -> None:
    count = full_window(px)
    with px.consumer("orders", "g") as consumer:
        first = consumer.poll(timeout=PATIENCE)
        with pytest.raises(RuntimeError, match="back"), consumer.transaction():
            raise RuntimeError("back")
        again = consumer.poll(timeout=PATIENCE)
        assert [message.offset for message in again] == [message.offset for message in first]
        assert again[0].offset == 0
        assert len(again) <= count // 2 + 1


def test_closing_the_store_lets_a_run_finish_what_is_in_hand(url: str) -> None:
    at_work, may_end, stopping = threading.Event(), threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        at_work.set()
        assert may_end.wait(PATIENCE)

    with pxrs.connect("memory://closing" if url == "memory://" else url) as px:
        make(px, ["a", "b"])
        with pxrs.connect(px.url) as another:
            running = Running(another, handle, topic="orders")
            assert at_work.wait(PATIENCE)
            stop = another.stop

            def noticed() -> None:
                stop()
                stopping.set()

            another.stop = noticed  # type: ignore[method-assign]
            closer = threading.Thread(target=another.close, daemon=True)
            closer.start()
            assert stopping.wait(PATIENCE)
            may_end.set()
            closer.join(PATIENCE)
        running.join()
        assert running.error is None
        assert checkpoints(px) == 1


def test_a_handler_may_close_the_store(px: pxrs.Pxrs) -> None:
    make(px, ["a"])
    running = Running(px, lambda message: px.close(), topic="orders", retry=QUICK)
    running.join()
    assert running.error is None


def test_a_static_member_that_runs_is_told_that_it_was_displaced(px: pxrs.Pxrs) -> None:
    make(px, ["a"])
    at_work = threading.Event()
    running = Running(px, lambda message: at_work.set(), topic="orders", instance="billing-1")
    assert at_work.wait(PATIENCE)
    with px.consumer("orders", "g", instance="billing-1") as newer:
        running.join()
        assert isinstance(running.error, pxrs.Displaced)
        while not newer.assignment:
            newer.poll(timeout=0.05)


def test_a_pattern_that_matches_nothing_waits_for_a_topic(px: pxrs.Pxrs) -> None:
    handled = threading.Event()
    running = Running(px, lambda message: handled.set(), topic=re.compile("orders"))
    with closing(px.stores.coord.watch("group/g")) as watch:
        while not px.stores.coord.list("members/g/"):
            watch.wait(0.05)
    make(px, ["a"])
    assert handled.wait(PATIENCE)
    px.stop()
    running.join()
    assert running.error is None


def test_what_waits_for_another_attempt_is_handed_over_at_once(px: pxrs.Pxrs) -> None:
    """With what was handled behind it: the next owner does only what is left."""
    px.topics.create("orders", partitions=1)
    with px.producer() as producer:
        for key in ("poison", "a", "b", "poison", "c"):
            producer.send("orders", key, key=key)
    failed, handled = threading.Event(), threading.Semaphore(0)
    first: list[int] = []

    def fail(message: Message) -> None:
        if message.key == b"poison":
            failed.set()
            raise RuntimeError("not here")
        first.append(message.offset)
        handled.release()

    options = {"topic": "orders", "parallel": "key", "revoke_timeout": None, "strategy": "fair"}
    older = Running(px, fail, retry=NEVER_AGAIN, instance="b", **options)
    assert failed.wait(PATIENCE)
    for _ in range(3):
        assert handled.acquire(timeout=PATIENCE)
    second: list[int] = []
    newer = Running(px, lambda message: second.append(message.offset), instance="a", **options)
    wait_for_checkpoints(px, 5)
    px.stop()
    for running in (older, newer):
        running.join()
        assert running.error is None
    assert (sorted(first), second) == ([1, 2, 4], [0, 3])


def test_a_handler_that_fails_because_it_was_fenced_stops_nobody(px: pxrs.Pxrs) -> None:
    make(px, ["a"])
    at_work, fenced, again = threading.Event(), threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if at_work.is_set():
            again.set()
            return
        at_work.set()
        assert fenced.wait(PATIENCE)
        raise RuntimeError("somebody else has written a higher fence")

    running = Running(px, handle, topic="orders", retry=Backoff(attempts=1), on_failure=pxrs.Stop())
    assert at_work.wait(PATIENCE)
    [member] = px.health()
    px.groups.reset("g", "orders", to=0, force=True)
    with closing(px.stores.coord.watch("claims/g/")) as watch:
        while px.groups.describe("g").partitions[0].owner != member:
            watch.wait(0.05)
    fenced.set()
    assert again.wait(PATIENCE)
    px.stop()
    running.join()
    assert running.error is None


def test_a_claim_tells_of_no_more_gaps_than_fit(px: pxrs.Pxrs) -> None:
    """Every second message waits behind one that failed: each of them is a gap."""
    px.topics.create("orders", partitions=2)
    with px.producer() as producer:
        for number in range(1200):
            key = "poison" if number % 2 == 0 else str(number)
            producer.send("orders", "v", key=key, partition=0)
    begun, last = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.key == b"poison":
            raise RuntimeError("not now")
        (last if message.partition else begun).set()

    running = Running(
        px, handle, topic="orders", parallel="key", retry=NEVER_AGAIN, max_in_flight=4000
    )
    assert begun.wait(PATIENCE)
    with px.producer() as producer:
        # One worker takes what is ready in its order: before this, it has been at all the others.
        producer.send("orders", "v", key="last", partition=1)
    assert last.wait(PATIENCE)
    px.stop()
    running.join()
    claims = [decode(record, Claim) for record in px.stores.coord.list("claims/g/")]
    sizes = [len(msgspec.json.encode(claim.done)) for claim in claims]
    assert MOST_BYTES // 2 < max(sizes) <= MOST_BYTES


@pytest.mark.parametrize("unknown", [False, True], ids=["not delivered", "unknown"])
def test_a_dead_letter_outlives_an_outage(
    px: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch, unknown: bool
) -> None:
    """However long the store was away: what its producer gave up is sent again."""
    properly = DeadLetters.bury
    failures: list[pxrs.PxrsError] = []

    def bury(self: DeadLetters, *arguments: Any) -> str:
        if not failures:
            away = pxrs.StoreUnavailable("the log was away for longer than delivery_timeout")
            failures.append(away)
            if unknown:
                raise pxrs.OutcomeUnknown("given up, and it is not known whether it was appended")
            raise pxrs.DeliveryFailed("not appended, and given up") from away
        return properly(self, *arguments)

    monkeypatch.setattr(DeadLetters, "bury", bury)
    make(px, ["poison", "good"])

    def handle(message: Message) -> None:
        if message.value == b"poison":
            raise ValueError("never")

    running = Running(px, handle, topic="orders", retry=QUICK, on_failure=DeadLetter())
    wait_for_checkpoints(px, 2)
    px.stop()
    running.join()
    assert failures
    assert running.error is None
    assert [letter.value for letter in px.topics.dead("orders")] == [b"poison"]


def test_a_dead_letter_that_can_never_be_written_ends_the_run(
    px: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bury(self: DeadLetters, *_: Any) -> str:
        too_large = pxrs.MessageTooLarge("a letter has more headers than its message")
        raise pxrs.DeliveryFailed("not appended, and given up") from too_large

    monkeypatch.setattr(DeadLetters, "bury", bury)
    make(px, ["poison"])

    def handle(message: Message) -> None:
        raise ValueError("never")

    running = Running(px, handle, topic="orders", retry=QUICK, on_failure=DeadLetter())
    running.join()
    assert isinstance(running.error, pxrs.DeliveryFailed)
    assert checkpoints(px) == 0


def test_a_run_that_can_not_start_leaves_nothing_behind(px: pxrs.Pxrs) -> None:
    before = set(threading.enumerate())
    for topic in ("missing", "missing-too"):
        with pytest.raises(pxrs.TopicNotFound):
            px.run(lambda message: None, topic=topic, group="g", on_failure=DeadLetter()).join()
    left = [it for it in set(threading.enumerate()) - before if it.name == "pxrs-producer"]
    assert left == []
    assert px.groups.list() == []


def test_a_run_without_its_threads_leaves_the_group(
    px: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(px, ["a"])
    properly = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "pxrs-worker-1":
            raise RuntimeError("can't start new thread")
        properly(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        px.run(lambda message: None, topic="orders", group="g", workers=2).join()
    monkeypatch.undo()
    assert px.groups.describe("g").members == ()
