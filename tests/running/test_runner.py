"""`px.run`: workers, order per key, retries, dead letters, and stopping."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import Backoff, Message
from pxrs.testing.clock import VirtualClock
from support.child import PATIENCE, Child
from support.inside import say
from support.running import Running, checkpoints, wait_for_checkpoints

QUICK = Backoff(first=0.001, longest=0.002, attempts=3)


def _send(px: pxrs.Pxrs, count: int, keys: int) -> None:
    px.topics.create("orders", partitions=4)
    with px.producer() as producer:
        producer.send_many("orders", [(f"key-{n % keys}", str(n)) for n in range(count)])


@pytest.mark.parametrize("parallel", ["partition", "key"])
def test_every_message_once_and_each_key_in_order(px: pxrs.Pxrs, parallel: str) -> None:
    _send(px, 400, keys=20)
    seen: defaultdict[bytes, list[int]] = defaultdict(list)
    busy: set[bytes] = set()
    lock, finished = threading.Lock(), threading.Event()

    def handle(message: Message) -> None:
        with lock:
            assert message.key not in busy
            busy.add(message.key)
        with lock:
            seen[message.key].append(int(message.value))
            busy.discard(message.key)
            if sum(map(len, seen.values())) == 400:
                finished.set()

    running = Running(px, handle, topic="orders", workers=4, parallel=parallel)
    assert finished.wait(PATIENCE)
    px.stop()
    running.join()
    assert running.error is None
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert checkpoints(px) == 400


def test_a_failing_key_waits_alone(px: pxrs.Pxrs) -> None:
    _send(px, 100, keys=10)
    others, allowed = threading.Event(), threading.Event()
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        if message.key == b"key-3" and not allowed.is_set():
            raise ValueError("not yet")
        handled.append(message.key)
        if sum(key != b"key-3" for key in handled) == 90:
            others.set()

    forever = Backoff(first=0.001, longest=0.01)
    running = Running(px, handle, topic="orders", workers=3, parallel="key", retry=forever)
    assert others.wait(PATIENCE), "a failing key held up the others"
    allowed.set()
    wait_for_checkpoints(px, 100)
    px.stop()
    running.join()
    assert handled.count(b"key-3") == 10


@pytest.mark.parametrize("parallel", ["partition", "key"])
def test_a_due_retry_goes_before_what_was_fetched_and_not_begun(
    px: pxrs.Pxrs, parallel: str
) -> None:
    clock = VirtualClock()
    partitions = 1 if parallel == "key" else 20
    with pxrs.Pxrs(px.stores, clock) as moving:
        moving.topics.create("fetched", partitions=partitions)
        with moving.producer() as producer:
            for number in range(20):
                producer.send("fetched", "v", f"k{number}", partition=number % partitions)
        handled: list[bytes | None] = []

        def handle(message: Message) -> None:
            handled.append(message.key)
            if len(handled) == 1:
                raise ValueError("again")
            if len(handled) == 2:
                clock.advance(0.1)  # it takes as long as the first one has to wait
            if len(handled) == 3:
                moving.stop()

        moving.run(  # type: ignore[call-overload]
            handle,
            topic="fetched",
            group="g",
            parallel=parallel,
            retry=Backoff(first=0.1, jitter=0.0, attempts=2),
            session_ttl=3600.0,
            debounce=0.0,
        ).join()
        assert handled[2] == handled[0] != handled[1]


def test_a_poisoned_message_becomes_a_dead_letter(px: pxrs.Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    with px.producer() as producer:
        for value in ("good", "poison", "good too"):
            producer.send("orders", value, key="k", headers=[("trace", b"7")])
    attempts: list[bytes] = []

    def handle(message: Message) -> None:
        attempts.append(message.value)
        if message.value == b"poison":
            raise RuntimeError("can't be handled")

    running = Running(px, handle, topic="orders", retry=QUICK)
    wait_for_checkpoints(px, 3)
    px.stop()
    running.join()
    assert attempts == [b"good", b"poison", b"poison", b"poison", b"good too"]
    [letter] = px.reader("orders.dlq").read(0, 0)
    headers = dict(letter.headers)
    assert (letter.key, letter.value, headers["trace"]) == (b"k", b"poison", b"7")
    assert headers["pxrs-dlq-offset"] == b"1"
    assert headers["pxrs-dlq-attempts"] == b"3"
    assert headers["pxrs-dlq-error"] == b"RuntimeError: can't be handled"
    assert b"Traceback" in (headers["pxrs-dlq-traceback"] or b"")


def test_or_the_group_stops_there(px: pxrs.Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    with px.producer() as producer:
        producer.send_many("orders", [("k", str(n)) for n in range(10)])

    def handle(message: Message) -> None:
        if message.offset == 4:
            raise RuntimeError("stop here")

    running = Running(px, handle, topic="orders", retry=QUICK, on_failure=pxrs.Stop())
    running.join()
    assert isinstance(running.error, pxrs.HandlerFailed)
    assert isinstance(running.error.__cause__, RuntimeError)
    assert checkpoints(px) == 4


def test_a_serde_that_fails_is_a_handler_that_fails(px: pxrs.Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    with px.producer() as producer:
        producer.send("orders", b"{broken", key="k")
        producer.send("orders", b'{"total": 3}', key="k")
    seen: list[Any] = []
    running = Running(
        px, lambda message: seen.append(message.value), topic="orders", retry=QUICK,
        serde=pxrs.JSON(),
    )  # fmt: skip
    wait_for_checkpoints(px, 2)
    px.stop()
    running.join()
    assert seen == [{"total": 3}]
    assert px.reader("orders.dlq").read(0, 0)[0].value == b"{broken"


def handle_in_a_process(message: Message) -> None:
    say([message.partition, message.offset])


def run_until_told(url: str) -> None:
    with pxrs.connect(url) as px:
        say("ready")
        px.run(handle_in_a_process, topic="orders", group="g").join()
        say("left")


@pytest.mark.engine("sqlite")
def test_sigterm_drains_commits_and_leaves(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    with pxrs.connect(url) as px:
        _send(px, 50, keys=5)
        with Child(run_until_told, url) as child:
            assert child.read() == "ready"
            handled = [child.read() for _ in range(50)]
            child.signal(15)
            assert child.read() == "left"
            assert child.join() == 0
        assert len({tuple(place) for place in handled}) == 50
        assert checkpoints(px) == 50
        assert px.stores.coord.list("members/g/") == []
