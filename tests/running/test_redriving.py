"""`px.topics.dead` and `redrive`: dead letters that are looked at and go back."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from pxrs import JSON, Backoff, DeadLetter, InvalidRequest, Message, Pxrs, TopicNotFound
from pxrs.consuming.consumer import Consumer
from pxrs.running.redriving import Redriving
from pxrs.types import Append, LogPartition
from support.child import PATIENCE
from support.faults import FaultyLog
from support.reading import read_all
from support.running import Running, wait_for_checkpoints

ONCE = Backoff(attempts=1)


def bury(px: Pxrs, count: int, *, partition: int = 0, into: int | None = None) -> None:
    """Dead letters of a partition of `orders`; their keys spread them, or they go `into` one."""
    px.topics.create("orders.dlq", partitions=3)
    with px.producer() as producer:
        for number in range(count):
            headers = [
                ("trace", b"7"),
                ("pxrs-dlq-topic", b"orders"),
                ("pxrs-dlq-partition", str(partition).encode()),
                ("pxrs-dlq-error", b"ValueError: no"),
            ]
            key = f"key-{number}"
            producer.send("orders.dlq", str(number), key, partition=into, headers=headers)


def values(px: Pxrs, topic: str) -> list[int]:
    return sorted(int(message.value) for message in read_all(px, topic))


def test_what_a_run_gave_up_goes_back_as_it_was(px: Pxrs) -> None:
    px.topics.create("orders", partitions=4)
    with px.producer() as producer:
        for number in range(40):
            # Not where its key would lead it.
            producer.send(
                "orders", str(number), f"key-{number}", partition=3, headers=[("trace", b"7")]
            )

    def fail(_: Message) -> None:
        raise ValueError("no")

    running = Running(px, fail, topic="orders", retry=ONCE)
    wait_for_checkpoints(px, 40)
    px.stop()
    running.join()
    assert px.topics.redrive("orders") == 40
    seen = [
        (message.partition, message.key, message.value, message.headers)
        for message in px.reader("orders").read(3, 0)
    ]
    assert len(seen) == 80
    assert sorted(seen[40:]) == sorted(seen[:40])  # letters are in order per key
    assert px.topics.redrive("orders") == 0
    assert px.topics.describe("orders.dlq").messages == 40


def test_only_new_letters_go_back_the_next_time(px: Pxrs) -> None:
    px.topics.create("orders", partitions=2)
    bury(px, 10)
    px.topics.redrive("orders")
    bury(px, 5)
    assert px.topics.redrive("orders") == 5
    assert values(px, "orders") == sorted([*range(10), *range(5)])


def test_one_that_dies_again_at_once_is_not_sent_back_for_ever(
    faulty: Pxrs, log: FaultyLog
) -> None:
    faulty.topics.create("orders", partitions=2)
    bury(faulty, 10, into=0)
    bury(faulty, 1990, into=1)
    orders = faulty.topics.describe("orders").topic.id

    def die_again(appends: Sequence[Append]) -> None:
        for append in appends:
            if append.where.topic_id == orders:
                bury(faulty, append.batch.count, into=0)

    log.after = die_again
    redriving = Redriving(faulty.topics, faulty.groups, "orders.dlq", None)
    # So little ahead that it sees the new letters before it is done with the old ones.
    letters = faulty.consumer("orders.dlq", redriving.group, auto_commit=False, prefetch_bytes=1000)
    with letters, faulty.producer() as producer:
        redriving.run(letters, producer)
    assert redriving.sent == {"orders": 2000}
    log.heal()
    assert faulty.topics.redrive("orders") == 2000


def test_one_that_died_twice_goes_back_one_step(px: Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    px.topics.create("orders.dlq.dlq", partitions=1)
    bury(px, 1)
    [letter] = [each for each in read_all(px, "orders.dlq") if each.value == b"0"]
    again = [*letter.headers, ("pxrs-dlq-topic", b"orders.dlq"), ("pxrs-dlq-partition", b"2")]
    with px.producer() as producer:
        producer.send("orders.dlq.dlq", b"0", letter.key, headers=again)
    assert px.topics.redrive("orders.dlq") == 1
    [back] = px.reader("orders.dlq").read(2, px.reader("orders.dlq").bounds(2).end - 1)
    assert back.headers == letter.headers
    assert px.topics.redrive("orders") == 2
    assert {each.headers for each in read_all(px, "orders")} == {(("trace", b"7"),)}


def test_where_the_partition_is_gone_the_key_decides(px: Pxrs) -> None:
    px.topics.create("orders", partitions=4)
    bury(px, 20, partition=4)
    assert px.topics.redrive("orders") == 20
    with px.producer() as producer:
        for message in read_all(px, "orders"):
            routed = producer.send("orders", b"0", message.key).result()
            assert routed.partition == message.partition


def test_all_to_another_topic(px: Pxrs) -> None:
    px.topics.create("mended", partitions=1)
    bury(px, 10)
    with px.producer() as producer:
        producer.send("orders.dlq", "10")
    assert px.topics.redrive("orders", to="mended") == 11
    assert values(px, "mended") == list(range(11))


def test_what_is_no_letter_is_not_sent_anywhere(px: Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    px.topics.create("orders.dlq", partitions=3)
    with px.producer() as producer:
        producer.send("orders.dlq", "0", headers=[("pxrs-dlq-topic", b"orders")], partition=0)
    bury(px, 5)
    with pytest.raises(
        InvalidRequest, match=r"offset 0 of .orders\.dlq. partition 0 has no origin"
    ):
        px.topics.redrive("orders")
    assert px.topics.redrive("orders", to="orders")


def test_a_topic_that_is_not_there(px: Pxrs) -> None:
    with pytest.raises(TopicNotFound, match="'orders'"):
        px.topics.redrive("orders")
    with pytest.raises(TopicNotFound, match="'failures'"):
        px.topics.redrive(DeadLetter("failures"))
    with pytest.raises(InvalidRequest, match="pass the name of the topic"):
        px.topics.dead(DeadLetter())
    bury(px, 3)
    with pytest.raises(InvalidRequest, match="they come from, 'orders', or DeadLetter"):
        px.topics.dead("orders.dlq")
    with pytest.raises(TopicNotFound, match="orders"):
        px.topics.redrive("orders")
    with pytest.raises(TopicNotFound, match="other"):
        px.topics.redrive("orders", to="other")
    with pytest.raises(InvalidRequest, match="itself"):
        px.topics.redrive("orders", to="orders.dlq")
    px.topics.create("orders", partitions=1)
    assert px.topics.redrive("orders") == 3


def test_letters_that_retention_removes_meanwhile_are_not_waited_for(
    faulty: Pxrs, log: FaultyLog
) -> None:
    faulty.topics.create("orders", partitions=1)
    bury(faulty, 100, into=1)
    bury(faulty, 1, into=2)
    letters = faulty.topics.describe("orders.dlq").topic.id

    def trim() -> None:
        log.fetching = lambda: None
        log.trim(LogPartition(letters, 1), 100)

    log.fetching = trim
    assert faulty.topics.redrive("orders") <= 100
    assert faulty.topics.redrive("orders") == 0


def test_letters_that_are_deleted_meanwhile(faulty: Pxrs, log: FaultyLog) -> None:
    faulty.topics.create("orders", partitions=1)
    bury(faulty, 100)

    def delete() -> None:
        log.fetching = lambda: None
        faulty.topics.delete("orders.dlq")

    log.fetching = delete
    with pytest.raises(TopicNotFound, match=r"orders\.dlq"):
        faulty.topics.redrive("orders")


def test_dead_messages_look_like_dead_items(px: Pxrs) -> None:
    px.topics.create("orders", partitions=2)
    with px.producer() as producer:
        for number, key in enumerate(("ada", "bob")):
            producer.send("orders", str(number), key, partition=number, headers=[("trace", b"7")])
    px.put("orders", "0", key="ada", headers=[("trace", b"7")])

    def fail(*_: object) -> None:
        raise ValueError("no")

    twice = Backoff(first=0.0, attempts=2)
    running = Running(px, fail, topic="orders", retry=twice)
    wait_for_checkpoints(px, 2)
    with px.listen("orders", fail, retry=twice):
        while not px.queues.describe("orders").dead:
            threading.Event().wait(0.01)
    px.stop()
    running.join()
    (item,) = px.queues.dead("orders")
    (message,) = px.topics.dead("orders", key="ada")
    for name in ("headers", "deliveries", "error"):
        assert getattr(message, name) == getattr(item, name), name
    assert (message.key, message.value) == (b"ada", b"0")
    assert (message.topic, message.partition, message.offset) == ("orders", 0, 0)
    assert (message.group, message.timestamp <= message.dead_ms) == ("g", True)
    assert message.traceback.endswith("ValueError: no\n")
    shared = {"value", "headers", "key", "deliveries", "dead_ms", "error", "id"}
    assert shared <= {*item.__struct_fields__} & {*message.__struct_fields__}
    assert [each.key for each in px.topics.dead("orders")] in ([b"ada", b"bob"], [b"bob", b"ada"])
    assert px.topics.dead("orders", ids=[message.id]) == [message]
    assert len(px.topics.dead("orders", 1, error="ValueError")) == 1
    assert px.topics.dead("orders", error="KeyError") == []
    assert px.topics.dead("orders", dead_for=3600) == []
    (read,) = px.topics.dead("orders", key="ada", serde=JSON())
    assert read.value == 0
    assert px.topics.dead(DeadLetter("orders.dlq")) == px.topics.dead("orders")
    assert (px.topics.redrive("orders"), px.queues.redrive("orders")) == (2, 1)
    assert (px.topics.dead("orders"), px.queues.dead("orders")) == ([], [])


def test_letters_in_a_topic_with_a_name_of_its_own(px: Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    with px.producer() as producer:
        producer.send("orders", "0")

    def fail(_: Message) -> None:
        raise ValueError("no")

    failures = DeadLetter("failures")
    running = Running(px, fail, topic="orders", retry=ONCE, on_failure=failures)
    wait_for_checkpoints(px, 1)
    px.stop()
    running.join()
    assert px.topics.dead("orders") == []
    assert [each.topic for each in px.topics.dead(failures)] == ["orders"]
    assert (px.topics.redrive("orders"), px.topics.redrive(failures)) == (0, 1)
    assert values(px, "orders") == [0, 0]


def test_no_letters(px: Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    assert (px.topics.dead("orders"), px.topics.redrive("orders")) == ([], 0)
    px.topics.create("orders.dlq", partitions=3)
    assert px.topics.redrive("orders") == 0
    assert px.groups.list() == []


def test_a_crash_before_the_checkpoint_sends_twice_and_loses_nothing(
    px: Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    px.topics.create("orders", partitions=1)
    bury(px, 10)

    def crash(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(Consumer, "commit", crash)
        px.topics.redrive("orders")
    assert set(values(px, "orders")) <= set(range(10))
    px.topics.redrive("orders")
    assert set(values(px, "orders")) == set(range(10))


def test_two_at_once_share_the_letters(px: Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    bury(px, 3000)
    sent: list[int] = []

    def redrive() -> None:
        sent.append(px.topics.redrive("orders"))

    threads = [threading.Thread(target=redrive) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sum(sent) == 3000
    assert values(px, "orders") == list(range(3000))
