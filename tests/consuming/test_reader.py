"""Reading without a group: by offset, by time, as messages come, and past what is damaged."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pxrs
from pxrs import (
    JSON,
    Closed,
    DamagedBatch,
    Fence,
    OffsetOutOfRange,
    Pxrs,
    PxrsError,
    StoreUnavailable,
)
from pxrs.consuming.reader import Follower
from pxrs.types import LogPartition
from support.child import PATIENCE
from support.faults import FaultyLog

TOPIC = "orders"


def fill(px: Pxrs, batches: int, size: int, partitions: int = 1) -> None:
    """Batches of so many messages, numbered, in each partition."""
    px.topics.create(TOPIC, partitions=partitions)
    with px.producer(linger=600) as producer:
        for partition in range(partitions):
            for batch in range(batches):
                for number in range(batch * size, (batch + 1) * size):
                    producer.send(TOPIC, str(number), partition=partition, timestamp=number * 10)
                producer.flush()


class TestByOffset:
    @pytest.mark.parametrize("max_records", [1, 2, 7, 10, 33, 1000])
    def test_walks_through_batches_of_another_size(self, px: Pxrs, max_records: int) -> None:
        fill(px, batches=4, size=25)
        reader = px.reader(TOPIC)
        offset = 0
        while messages := reader.read(0, offset, max_records):
            assert [message.offset for message in messages] == list(
                range(offset, min(offset + max_records, 100))
            )
            assert all(int(message.value) == message.offset for message in messages)
            offset += len(messages)
        assert offset == 100

    def test_goes_anywhere(self, px: Pxrs) -> None:
        fill(px, batches=4, size=25)
        reader = px.reader(TOPIC)
        for offset in (99, 0, 50, 24, 25, 26, 98, 0):
            assert reader.read(0, offset, 3)[0].offset == offset
        assert reader.read(0, 100) == []

    def test_small_reads_fetch_a_batch_once(self, faulty: Pxrs, log: FaultyLog) -> None:
        fill(faulty, batches=2, size=50)
        reader = faulty.reader(TOPIC)
        for offset in range(100):
            reader.read(0, offset, 1)
        assert log.fetches <= 4

    def test_keeps_partitions_apart(self, px: Pxrs) -> None:
        fill(px, batches=2, size=5, partitions=3)
        reader = px.reader(TOPIC)
        for offset in range(10):
            for partition in range(3):
                (message,) = reader.read(partition, offset, 1)
                assert message.fence == Fence(TOPIC, partition, 0)
                assert (message.topic, message.partition) == (TOPIC, partition)

    def test_what_was_sent_since_is_seen(self, px: Pxrs) -> None:
        fill(px, batches=1, size=5)
        reader = px.reader(TOPIC)
        assert len(reader.read(0, 0)) == 5
        with px.producer() as producer:
            producer.send(TOPIC, "5")
        assert [message.value for message in reader.read(0, 3)] == [b"3", b"4", b"5"]
        assert reader.bounds(0) == (0, 6)

    def test_messages_are_frozen(self, px: Pxrs) -> None:
        fill(px, batches=1, size=1)
        (message,) = px.reader(TOPIC).read(0, 0)
        with pytest.raises(AttributeError):
            message.offset = 5  # type: ignore[misc]


class TestByTime:
    def test_finds_the_first_of_that_time_or_later(self, px: Pxrs) -> None:
        fill(px, batches=4, size=25)
        reader = px.reader(TOPIC)
        assert reader.offset_at(0, 0) == 0
        assert reader.offset_at(0, -(10**30)) == 0
        assert reader.offset_at(0, 250) == 25
        assert reader.offset_at(0, 251) == 26
        assert reader.offset_at(0, 990) == 99
        assert reader.offset_at(0, 991) is None
        assert reader.offset_at(0, 10**30) is None

    def test_of_an_empty_partition_is_nothing(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)
        assert px.reader(TOPIC).offset_at(0, 0) is None

    def test_with_times_out_of_order(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)
        with px.producer() as producer:
            for timestamp in (50, 10, 90, 20):
                producer.send(TOPIC, "v", timestamp=timestamp)
        reader = px.reader(TOPIC)
        assert [reader.offset_at(0, at) for at in (0, 51, 90, 91)] == [0, 2, 2, None]

    def test_looks_again_where_retention_was_faster(
        self, px: Pxrs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(px, batches=3, size=10)
        log = px.stores.log
        reader = px.reader(TOPIC)
        batch_at = log.batch_at

        def then_trim(where: LogPartition, timestamp: int) -> int | None:
            base = batch_at(where, timestamp)
            monkeypatch.undo()
            log.trim(where, 20)
            return base

        monkeypatch.setattr(log, "batch_at", then_trim)
        assert reader.offset_at(0, 0) == 20


class TestSerdes:
    def test_a_message_that_cant_be_decoded_is_named_and_can_be_passed(self, px: Pxrs) -> None:
        """It stands in the middle of a batch: what is before and after it can be read."""
        px.topics.create(TOPIC, partitions=1)
        with px.producer(linger=600) as producer:
            producer.send_many(TOPIC, [(None, text) for text in ("0", "1", "{", "3", "4")])
        reader = px.reader(TOPIC, serde=JSON())
        assert [message.value for message in reader.read(0, 0)] == [0, 1]
        with pytest.raises(msgspec.DecodeError) as caught:
            reader.read(0, 2)
        assert "offset 2 of 'orders' partition 0" in caught.value.__notes__[0]
        assert "read from offset 3" in caught.value.__notes__[0]
        assert [message.value for message in reader.read(0, 3)] == [3, 4]
        follower = reader.follow(start=1)
        assert next(follower).value == 1
        with pytest.raises(msgspec.DecodeError) as caught:
            next(follower)
        assert "read from offset 3" in caught.value.__notes__[0]
        assert next(reader.follow(start=3)).value == 3

    def test_a_follower_stays_at_what_it_cant_decode(self, px: Pxrs) -> None:
        """Whoever takes again gets the error again: nothing twice, nothing passed over."""
        px.topics.create(TOPIC, partitions=1)
        with px.producer(linger=600) as producer:
            producer.send_many(TOPIC, [(None, text) for text in ("0", "1", "{", "3")])
        follower = Follower(px.reader(TOPIC, serde=JSON()), None, "earliest", timeout=0)
        assert [message.value for message in follower.take() or ()] == [0, 1]
        for _ in range(2):
            with pytest.raises(msgspec.DecodeError):
                follower.take()
            follower.interrupt()
            follower.resume()
        follower.interrupt()

    def test_a_type_is_checked(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)
        with px.producer(serde=JSON()) as producer:
            producer.send(TOPIC, {"a": 1})
            producer.send(TOPIC, {"a": "x"})
        reader = px.reader(TOPIC, serde=JSON(dict[str, int]))
        assert reader.read(0, 0)[0].value == {"a": 1}
        with pytest.raises(msgspec.ValidationError):
            reader.read(0, 1)


class TestFollow:
    def test_from_the_earliest_to_a_quiet_end(self, px: Pxrs) -> None:
        fill(px, batches=3, size=10, partitions=2)
        found = list(px.reader(TOPIC).follow(start="earliest", timeout=0))
        for partition in range(2):
            offsets = [message.offset for message in found if message.partition == partition]
            assert offsets == list(range(30))

    def test_named_partitions_only(self, px: Pxrs) -> None:
        fill(px, batches=1, size=2, partitions=3)
        found = px.reader(TOPIC).follow([2, 0], start="earliest", timeout=0)
        assert [(message.partition, message.offset) for message in found] == [
            (2, 0),
            (2, 1),
            (0, 0),
            (0, 1),
        ]

    def test_from_an_offset(self, px: Pxrs) -> None:
        fill(px, batches=2, size=10)
        found = px.reader(TOPIC).follow([0], start=13, timeout=0)
        assert [message.offset for message in found] == list(range(13, 20))

    def test_sees_what_is_sent_after_the_call(self, px: Pxrs) -> None:
        """Not after the first `next`: what is sent in between would be lost."""
        fill(px, batches=1, size=5, partitions=2)
        messages = px.reader(TOPIC).follow()
        with px.producer() as producer:
            producer.send(TOPIC, "new", partition=1)
        assert next(messages).value == b"new"

    def test_blocks_until_something_comes(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=2)
        messages = px.reader(TOPIC).follow()
        found: list[bytes] = []
        came = threading.Event()

        def follow() -> None:
            for message in messages:
                found.append(message.value)
                came.set()
                if len(found) == 3:
                    return

        thread = threading.Thread(target=follow)
        thread.start()
        with px.producer() as producer:
            for number in range(3):
                came.clear()
                producer.send(TOPIC, str(number), partition=number % 2).result()
                assert came.wait(PATIENCE)
        thread.join()
        assert found == [b"0", b"1", b"2"]

    def test_says_when_retention_has_overtaken_it(self, px: Pxrs) -> None:
        """Going on at the new start would lose messages without a word."""
        fill(px, batches=1, size=10)
        topic = px.topics.describe(TOPIC).topic
        messages = px.reader(TOPIC).follow(start="earliest")
        assert next(messages).offset == 0
        with px.producer(linger=600) as producer:
            for _ in range(2):
                producer.send_many(TOPIC, [(None, "v")] * 10).result()
        px.stores.log.trim(LogPartition(topic.id, 0), 20)
        seen = []
        with pytest.raises(OffsetOutOfRange) as caught:
            for message in messages:
                seen.append(message.offset)  # noqa: PERF401 - those before the error are wanted
        assert seen == list(range(1, 10))
        error = caught.value
        assert (error.topic, error.partition, error.offset, error.start) == (TOPIC, 0, 10, 20)
        assert next(px.reader(TOPIC).follow(start=error.start)).offset == 20

    def test_ends_when_the_store_is_closed(self, url: str) -> None:
        px = pxrs.connect(url)
        px.topics.create(TOPIC, partitions=1)
        messages = px.reader(TOPIC).follow()
        waiting = threading.Event()
        errors: list[PxrsError] = []
        watch = px.stores.log.watch

        def noted(*where: LogPartition) -> Any:
            waiting.set()
            return watch(*where)

        px.stores.log.watch = noted  # type: ignore[method-assign]

        def follow() -> None:
            try:
                next(messages)
            except PxrsError as error:
                errors.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        assert waiting.wait(PATIENCE)
        px.close()
        thread.join(PATIENCE)
        assert [type(error) for error in errors] in ([Closed], [StoreUnavailable])

    def test_left_early_stops_watching(self, px: Pxrs) -> None:
        fill(px, batches=1, size=5)
        for _ in range(200):
            assert next(iter(px.reader(TOPIC).follow(start="earliest"))).offset == 0


@pytest.mark.engine("sqlite")
class TestDamaged:
    """Batches 0 to 9, 10 to 19 and 20 to 29; the one in the middle is damaged in the file."""

    @pytest.fixture
    def damaged(self, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
        url = f"sqlite:///{tmp_path}/store.db"
        with pxrs.connect(url) as px:
            fill(px, batches=3, size=10)
        damage = getattr(request, "param", "zeroblob(length(data))")
        connection = sqlite3.connect(tmp_path / "store.db")
        changed = connection.execute(
            f"UPDATE pxrs_log_batches SET data = {damage} WHERE base = 10"
        ).rowcount
        connection.commit()
        connection.close()
        assert changed == 1
        with pxrs.connect(url) as px:
            yield px

    @pytest.mark.parametrize(
        "damaged",
        [
            "zeroblob(length(data))",
            "x''",
            "substr(data, 1, 30)",
            "substr(data, 1, length(data) - 1)",
            "CAST(substr(data, 1, length(data) - 1) || x'ff' AS BLOB)",
            "CAST(substr(data, 1, 70) || x'00ff' || substr(data, 73) AS BLOB)",
            "(SELECT data FROM pxrs_log_batches WHERE base = 0)",
        ],
        indirect=True,
    )
    def test_is_named_and_can_be_passed(self, damaged: Pxrs) -> None:
        reader = damaged.reader(TOPIC)
        with pytest.raises(DamagedBatch, match="'orders' partition 0 is damaged") as caught:
            reader.read(0, 13)
        error = caught.value
        assert (error.topic, error.partition) == (TOPIC, 0)
        assert (error.offset, error.next_offset) == (10, 20)
        assert [message.offset for message in reader.read(0, error.next_offset)] == list(
            range(20, 30)
        )

    def test_does_not_hide_what_lies_before_it(self, damaged: Pxrs) -> None:
        """Else whoever goes on at `next_offset` would lose ten good messages too."""
        reader = damaged.reader(TOPIC)
        assert [message.offset for message in reader.read(0, 0)] == list(range(10))
        assert [message.offset for message in reader.read(0, 5)] == list(range(5, 10))
        with pytest.raises(DamagedBatch):
            reader.read(0, 10)

    def test_ends_a_follower_after_what_lies_before_it(self, damaged: Pxrs) -> None:
        seen = []
        with pytest.raises(DamagedBatch) as caught:
            for message in damaged.reader(TOPIC).follow(start="earliest"):
                seen.append(message.offset)  # noqa: PERF401 - those before the error are wanted
        assert seen == list(range(10))
        found = damaged.reader(TOPIC).follow(start=caught.value.next_offset, timeout=0)
        assert [message.offset for message in found] == list(range(20, 30))

    def test_found_by_time_is_said(self, damaged: Pxrs) -> None:
        reader = damaged.reader(TOPIC)
        with pytest.raises(DamagedBatch):
            reader.offset_at(0, 150)
        assert reader.offset_at(0, 200) == 20
