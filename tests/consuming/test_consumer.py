"""One member of a group: what it is handed, what counts as handled, and where it begins."""

from __future__ import annotations

import re
from typing import Any

import pytest

import pxrs
from pxrs import Message, Pxrs
from pxrs.errors import StoreUnavailable
from pxrs.types import LogPartition
from support.faults import FaultyLog, times

PATIENCE = 30.0


@pytest.fixture
def topic(px: Pxrs) -> Pxrs:
    px.topics.create("t", 2)
    return px


def send(px: Pxrs, number: int, *, topic: str = "t", partition: int = 0, size: int = 1) -> None:
    with px.producer(batch_bytes=1) as producer:
        for _ in range(number):
            producer.send(topic, b"x" * size, partition=partition)


def join(px: Pxrs, topics: Any = "t", **settings: Any) -> pxrs.Consumer:
    defaults = {"debounce": 0.0, "auto_commit_interval": PATIENCE}
    return px.consumer(topics, "g", **defaults | settings)


def take(consumer: pxrs.Consumer, number: int) -> list[Message]:
    """So many messages, in as many polls as it takes. The last poll's are not handled yet."""
    found: list[Message] = []
    while len(found) < number:
        some = consumer.poll(number - len(found), timeout=PATIENCE)
        assert some, f"only {len(found)} of {number} came"
        found += some
    return found


def offsets(messages: list[Message]) -> list[int]:
    return [message.offset for message in messages]


def checkpoint(px: Pxrs, partition: int = 0) -> int | None:
    return px.groups.describe("g").partitions[partition].checkpoint


class TestWhatCountsAsHandled:
    def test_in_a_loop_what_came_before_the_current_message(self, topic: Pxrs) -> None:
        send(topic, 5)
        with join(topic) as consumer:
            for message in consumer:
                if message.offset == 3:
                    break
        assert checkpoint(topic) == 3

    def test_what_the_last_poll_returned_once_there_is_another(self, topic: Pxrs) -> None:
        send(topic, 5)
        with join(topic) as consumer:
            assert offsets(take(consumer, 2)) == [0, 1]
            assert offsets(take(consumer, 2)) == [2, 3]
        assert checkpoint(topic) == 2

    def test_a_batch_is_of_one_partition_and_counts_with_the_next(self, topic: Pxrs) -> None:
        send(topic, 3, partition=0)
        send(topic, 2, partition=1)
        seen: dict[int, list[int]] = {}
        with join(topic) as consumer:
            for batch in consumer.batches():
                (number,) = {message.partition for message in batch}
                seen.setdefault(number, []).extend(offsets(batch))
                if seen == {0: [0, 1, 2], 1: [0, 1]}:
                    break
        last = list(seen)[-1]
        handled = {each: checkpoint(topic, each) for each in seen}
        assert handled[last] in (None, 0)
        assert handled[1 - last] == len(seen[1 - last])

    def test_it_is_committed_in_the_background(self, topic: Pxrs) -> None:
        send(topic, 3)
        with join(topic, auto_commit_interval=0.01) as consumer:
            take(consumer, 3)
            watch = topic.stores.coord.watch("claims/g/")
            assert consumer.poll(timeout=0) == []
            while checkpoint(topic) != 3:
                assert watch.wait(PATIENCE)
            watch.close()

    def test_to_begin_is_no_progress(self, topic: Pxrs) -> None:
        """The background commits gaps of sources; here it comes before the first message."""
        with join(topic, auto_commit=False, auto_commit_interval=1000) as consumer:
            while len(consumer.assignment) < 2:
                assert consumer.poll(timeout=0.05) == []
            assert consumer.poll(timeout=0) == []
            consumer._member.steps.commit_empty()
            assert checkpoint(topic) is None

    def test_without_auto_commit_only_on_demand(self, topic: Pxrs) -> None:
        send(topic, 5)
        with join(topic, auto_commit=False, auto_commit_interval=0.01) as consumer:
            take(consumer, 3)
            take(consumer, 2)
        with join(topic, auto_commit=False) as consumer:
            assert offsets(take(consumer, 3)) == [0, 1, 2]
            assert checkpoint(topic) is None
            consumer.commit()
            assert checkpoint(topic) == 3

    def test_up_to_one_message(self, topic: Pxrs) -> None:
        send(topic, 5)
        with join(topic, auto_commit=False) as consumer:
            messages = take(consumer, 5)
            for number, expected in [(1, 2), (3, 4), (0, 4)]:
                consumer.commit(messages[number])
                assert checkpoint(topic) == expected


class TestCommittingInTheBackground:
    def test_it_tells_how_it_went(self, topic: Pxrs) -> None:
        send(topic, 3)
        with join(topic, auto_commit=False) as consumer:
            take(consumer, 2)
            consumer.commit_async().result(PATIENCE)
            assert checkpoint(topic) == 2
            take(consumer, 1)
            topic.groups.reset("g", "t", to="earliest", force=True)
            with pytest.raises(pxrs.Fenced, match="another member owns these now: t/0") as told:
                consumer.commit_async().result(PATIENCE)
            assert told.value.parts == {pxrs.TopicPartition("t", 0)}
            assert checkpoint(topic) == 0

    def test_in_a_loop_it_is_about_all_that_the_loop_has_left_behind(self, topic: Pxrs) -> None:
        send(topic, 1, partition=0)
        send(topic, 1, partition=1)
        with join(topic, auto_commit=False) as consumer:
            messages = iter(consumer)
            first, _ = next(messages), next(messages)
            topic.groups.reset("g", "t", to="earliest", partitions=[first.partition], force=True)
            with pytest.raises(pxrs.Fenced) as told:
                consumer.commit_async().result(PATIENCE)
            assert told.value.parts == {pxrs.TopicPartition("t", first.partition)}
            assert checkpoint(topic, 1 - first.partition) == 1

    def test_closing_does_not_forget_it(self, topic: Pxrs) -> None:
        send(topic, 3)
        for number in range(3):
            with join(topic, auto_commit=False) as consumer:
                assert offsets(take(consumer, 1)) == [number]
                committed = consumer.commit_async()
            assert committed.result(0) is None


class TestAStoreThatIsAway:
    @pytest.fixture
    def px(self, faulty: Pxrs) -> Pxrs:
        faulty.topics.create("t", 1)
        send(faulty, 1)
        return faulty

    def test_a_loop_waits_for_it(self, px: Pxrs, log: FaultyLog, caplog: Any) -> None:
        with join(px) as consumer:
            log.fetching = times(3, StoreUnavailable("away"))
            assert next(iter(consumer)).offset == 0
            assert consumer.health().ok
        told = [record.message for record in caplog.records if "reading the log" in record.message]
        assert [re.sub("[0-9.]+ s", "a while", line) for line in told] == [
            "group 'g', reading the log: trying again until it works: away",
            "group 'g', reading the log: it works again, after a while",
        ]

    def test_a_poll_tells_when_its_time_is_over(self, px: Pxrs, log: FaultyLog) -> None:
        with join(px) as consumer:
            assert offsets(take(consumer, 1)) == [0]
            log.fetching = times(10**6, StoreUnavailable("away"))
            send(px, 1)
            with pytest.raises(StoreUnavailable):
                consumer.poll(timeout=0.1)
            assert consumer.health().state == "lost the store"
            log.fetching = lambda: None
            assert offsets(take(consumer, 1)) == [1]
            assert consumer.health().ok


class TestWithoutACheckpoint:
    def test_earliest_is_the_start_of_the_log(self, topic: Pxrs) -> None:
        send(topic, 2)
        with join(topic) as consumer:
            assert offsets(take(consumer, 2)) == [0, 1]

    def test_latest_is_the_end_when_it_was_first_looked_at(self, topic: Pxrs) -> None:
        """Whoever takes over goes on from there: what came since would be lost."""
        send(topic, 2)
        with join(topic, start="latest", auto_commit=False) as consumer:
            while not consumer.assignment:
                consumer.poll(timeout=0.01)
            assert consumer.poll(timeout=0) == []
            send(topic, 1)
            assert offsets(take(consumer, 1)) == [2]
        send(topic, 1)
        with join(topic, start="latest", auto_commit=False) as consumer:
            assert offsets(take(consumer, 2)) == [2, 3]

    def test_error_tells_until_somebody_says_where(self, topic: Pxrs) -> None:
        send(topic, 2)
        with join(topic, start="error") as consumer:
            for _ in range(2):
                with pytest.raises(pxrs.NoCheckpoint, match="no checkpoint in 't' partition"):
                    consumer.poll(timeout=PATIENCE)
                assert consumer.health().state == "stuck"
            consumer.seek("t", 0, 1)
            consumer.seek("t", 1, 0)
            assert offsets(take(consumer, 1)) == [1]

    def test_a_checkpoint_comes_before_any_policy(self, topic: Pxrs) -> None:
        send(topic, 4)
        with join(topic) as consumer:
            take(consumer, 3)
            consumer.commit()
        for start in ("earliest", "latest"):
            with join(topic, start=start) as consumer:
                assert offsets(take(consumer, 1)) == [3]


class TestWhatRetentionRemoved:
    @pytest.fixture
    def px(self, px: Pxrs) -> Pxrs:
        """Checkpoint 2 of ten messages."""
        px.topics.create("t", 1)
        send(px, 10)
        with join(px) as consumer:
            take(consumer, 2)
            consumer.commit()
        return px

    @staticmethod
    def trim(px: Pxrs, before: int) -> None:
        (topic,) = px.topics.list()
        px.stores.log.trim(LogPartition(topic.id, 0), before)

    def test_is_an_error_by_default_until_somebody_says_where(self, px: Pxrs) -> None:
        self.trim(px, 6)
        with join(px) as consumer:
            for _ in range(2):
                with pytest.raises(pxrs.OffsetOutOfRange, match=r"offset 2 is before .* of 't'"):
                    consumer.poll(timeout=PATIENCE)
            consumer.seek("t", 0, 7)
            assert offsets(take(consumer, 3)) == [7, 8, 9]

    @pytest.mark.parametrize(("policy", "first"), [("earliest", 6), ("latest", 10)])
    def test_or_it_is_passed_over_and_recorded(self, px: Pxrs, policy: str, first: int) -> None:
        self.trim(px, 6)
        with join(px, on_trimmed=policy, auto_commit=False) as consumer:
            found: list[Message] = []
            while checkpoint(px) != first:
                found += consumer.poll(timeout=0.01)
            send(px, 1)
            found += take(consumer, 11 - first - len(found))
            assert offsets(found) == list(range(first, 11))
            (reset,) = px.groups.explain("g").resets
            assert (reset.by, reset.why) == (
                consumer.member,
                f"on_trimmed={policy!r}, offset 2 is gone",
            )
            assert [(change.before, change.after) for change in reset.changes] == [(2, first)]

    def test_it_can_happen_to_a_consumer_at_work(self, px: Pxrs) -> None:
        with join(px, prefetch_bytes=1) as slow, pytest.raises(pxrs.OffsetOutOfRange) as told:
            assert offsets(take(slow, 1)) == [2]
            self.trim(px, 6)
            slow.poll(timeout=PATIENCE)
        assert (told.value.topic, told.value.offset, told.value.start) == ("t", 3, 6)
        with join(px, prefetch_bytes=1, on_trimmed="earliest") as slow:
            assert offsets(take(slow, 1)) == [6]
            self.trim(px, 8)
            assert offsets(take(slow, 2)) == [8, 9]


class TestSeeking:
    def test_by_time(self, topic: Pxrs) -> None:
        with topic.producer() as producer:
            for at in (1000, 2000, 3000):
                producer.send("t", b"", partition=0, timestamp=at)
        with join(topic) as consumer:
            take(consumer, 3)
            consumer.seek_to_time(1500)
            assert offsets(take(consumer, 2)) == [1, 2]
            consumer.seek_to_time(9000)
            assert consumer.poll(timeout=0) == []
            assert [checkpoint(topic, each) for each in (0, 1)] == [3, 0]

    def test_when_it_is_assigned(self, topic: Pxrs) -> None:
        """Where a program keeps its places elsewhere."""
        send(topic, 3)

        def go_to_the_second(parts: dict[pxrs.TopicPartition, int | None]) -> None:
            if pxrs.TopicPartition("t", 0) in parts:
                consumer.seek("t", 0, 1)

        with join(topic, on_assigned=go_to_the_second) as consumer:
            assert offsets(take(consumer, 2)) == [1, 2]

    def test_what_was_fetched_meanwhile_is_void(self, faulty: Pxrs, log: FaultyLog) -> None:
        faulty.topics.create("t", 1)
        send(faulty, 5)
        with join(faulty, prefetch_bytes=1) as consumer:
            assert offsets(take(consumer, 2)) == [0, 1]

            def seek() -> None:
                log.fetching = lambda: None
                consumer.seek("t", 0, 0)

            log.fetching = seek
            assert offsets(take(consumer, 3)) == [0, 1, 2]


class TestPrefetching:
    def test_is_bounded_over_all_partitions(self, px: Pxrs) -> None:
        px.topics.create("t", 8)
        for number in range(8):
            send(px, 3, partition=number, size=10_000)
        with join(px, prefetch_bytes=25_000) as consumer:
            for _ in range(24):
                take(consumer, 1)
                waiting = sum(owned.waiting for owned in consumer._steps.table.partitions.values())
                assert waiting <= 3, "two of one partition, and the one that came over the limit"

    def test_is_bounded_over_what_is_paused_too(self, px: Pxrs) -> None:
        px.topics.create("t", 8)
        for number in range(8):
            send(px, 3, partition=number, size=10_000)
        with join(px, prefetch_bytes=25_000) as consumer:
            for _ in range(8):
                (message,) = take(consumer, 1)
                consumer.pause(pxrs.TopicPartition("t", message.partition))
                waiting = sum(owned.waiting for owned in consumer._steps.table.partitions.values())
                assert waiting <= 6, "what is ready, and as much of what is paused"
            consumer.resume(*consumer.assignment)
            rest = take(consumer, 16)
        found = sorted((message.partition, message.offset) for message in rest)
        assert found == [(number, offset) for number in range(8) for offset in (1, 2)]

    def test_counts_bytes_that_are_decompressed(self, topic: Pxrs) -> None:
        """50 batches of 100 KB each are 10 KB in the log."""
        with topic.producer(batch_bytes=1, compression="zstd") as producer:
            for _ in range(50):
                producer.send("t", bytes(100_000), partition=0)
        with join(topic, prefetch_bytes=250_000) as consumer:
            for number in range(50):
                assert offsets(take(consumer, 1)) == [number]
                (owned,) = (each for each in consumer._steps.table.partitions.values() if each.size)
                assert owned.waiting <= 2, "and the one that was taken, which came over the limit"

    def test_counts_what_small_messages_take_in_memory(self, px: Pxrs) -> None:
        """10 batches of 1000 messages each are 8 KB each, and 130 KB as messages."""
        px.topics.create("small", 1)
        with px.producer(compression="none") as producer:
            for _ in range(10):
                producer.send_many("small", [(None, b"")] * 1000)
                producer.flush()
        with join(px, "small", prefetch_bytes=300_000) as consumer:
            taken = 0
            while taken < 10_000:
                taken += len(consumer.poll(100, timeout=PATIENCE))
                waiting = [owned.waiting for owned in consumer._steps.table.partitions.values()]
                # 300 KB of them, and the batch that came over the limit.
                assert sum(waiting) <= 300_000 // 130 + 1000

    def test_everybody_has_a_turn(self, px: Pxrs) -> None:
        px.topics.create("t", 4)
        for number in range(4):
            send(px, 5, partition=number, size=1000)
        with join(px, prefetch_bytes=1) as consumer:
            while len(consumer.assignment) < 4:
                consumer.poll(1, timeout=0.01)
            consumer.seek_to_time(0)
            assert {message.partition for message in take(consumer, 4)} == {0, 1, 2, 3}


class TestTopics:
    def test_several(self, topic: Pxrs) -> None:
        topic.topics.create("u", 1)
        send(topic, 2)
        send(topic, 1, topic="u")
        with join(topic, ["t", "u"]) as consumer:
            found = {(message.topic, message.offset) for message in take(consumer, 3)}
        assert found == {("t", 0), ("t", 1), ("u", 0)}

    def test_a_pattern_finds_those_that_are_made_later(self, topic: Pxrs) -> None:
        send(topic, 1)
        with join(topic, re.compile("orders-.*")) as consumer:
            assert consumer.poll(timeout=0) == []
            for name in ("orders-eu", "orders-us", "other"):
                topic.topics.create(name, 1)
                send(topic, 1, topic=name)
            assert {message.topic for message in take(consumer, 2)} == {"orders-eu", "orders-us"}
            assert consumer.poll(timeout=0) == []

    def test_a_pattern_leaves_out_the_dead_letters_of_what_it_matches(self, topic: Pxrs) -> None:
        for name in ("orders-eu", "orders-eu.dlq", "orders-x.dlq.dlq", "orders-us"):
            topic.topics.create(name, 1)
        for pattern, expected in (
            ("orders-.*", {"orders-eu", "orders-us"}),
            (r"orders-.*\.dlq", {"orders-eu.dlq"}),
            (r"orders-.*\.dlq\.dlq", {"orders-x.dlq.dlq"}),
        ):
            with join(topic, re.compile(pattern)) as consumer:
                consumer.poll(timeout=0)
                members = topic.groups.describe("g").members
                assert {name for member in members for name in member.topics} == expected


class TestFences:
    def test_they_rise_from_owner_to_owner(self, topic: Pxrs) -> None:
        send(topic, 2)
        epochs = []
        for _ in range(3):
            with join(topic, auto_commit=False) as consumer:
                fence = take(consumer, 1)[0].fence
                assert (fence.topic, fence.partition) == ("t", 0)
                epochs.append(fence.epoch)
        assert epochs == sorted(set(epochs))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"group": ""}, "1 to"),
        ({"group": "g" * 1000}, "got 1000"),
        ({"group": "a b"}, "a group name must"),
        ({"start": "lastest"}, "start"),
        ({"on_trimmed": "skip"}, "on_trimmed"),
        ({"prefetch_bytes": 0}, "prefetch_bytes must be .*, got 0"),
        ({"session_ttl": 0}, "session_ttl must be .*, got 0"),
        ({"strategy": "best"}, "strategy"),
        ({"instance": ""}, "1 to"),
        ({"topics": "nothing-of-this-name"}, "nothing-of-this-name"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_and_nobody_joins(
    topic: Pxrs, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(pxrs.PxrsError, match=told):
        topic.consumer(**{"topics": "t", "group": "g", **settings})
    assert topic.groups.list() == []
