"""What `send` promises, from one thread and from many."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import pxrs
from pxrs import (
    JSON,
    BufferFull,
    Closed,
    InvalidRequest,
    MessageTooLarge,
    Position,
    Producer,
    Pxrs,
    StoreBusy,
)
from pxrs.core.routing import xxhash
from pxrs.types import Append, Header
from support.child import PATIENCE
from support.faults import FaultyLog, times
from support.reading import read_all, read_partition, values_by_key

TOPIC = "orders"


def in_threads(number: int, work: Callable[[int], object]) -> None:
    """Run the work in so many threads at once; what one raises comes up here."""
    errors: list[BaseException] = []

    def run(name: int) -> None:
        try:
            work(name)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def held(producer: Producer) -> int:
    """What the buffer believes to hold, with what the threads have not told it yet."""
    outbox = producer._outbox
    return outbox.held + sum(buffer.unreported for buffer in outbox._buffers)


class TestMessages:
    @pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
    def test_come_back_as_they_were_sent(self, px: Pxrs, compression: str) -> None:
        px.topics.create(TOPIC, partitions=1)
        messages: list[tuple[bytes | None, bytes | None, list[Header], int]] = [
            (b"key", b"value", [("a", b"1"), ("a", None), ("ü", b"")], 1_700_000_000_123),
            (b"", b"", [], 0),
            (None, None, [], 2**63 - 1),
            (b"key", None, [("tombstone", b"\0\xff")], 5),
            (None, b"value" * 1000, [], 4),
        ]
        with px.producer(compression=compression) as producer:
            for key, value, headers, timestamp in messages:
                producer.send(TOPIC, value, key, headers=headers, timestamp=timestamp)
        assert [
            (message.key, message.value, list(message.headers), message.timestamp)
            for message in read_partition(px, TOPIC, 0)
        ] == messages

    def test_may_be_text_or_buffers(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)
        with px.producer() as producer:
            producer.send(TOPIC, "wärme", key="ключ")
            producer.send(TOPIC, bytearray(b"v"), key=memoryview(b"k"))  # type: ignore[arg-type]
            pairs: list[Any] = [("ключ", "wärme"), (bytearray(b"k"), memoryview(b"v"))]
            producer.send_many(TOPIC, pairs)
        assert [(message.key, message.value) for message in read_partition(px, TOPIC, 0)] == [
            ("ключ".encode(), "wärme".encode()),
            (b"k", b"v"),
        ] * 2

    def test_without_a_timestamp_get_the_time(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)
        before = time.time_ns() // 1_000_000
        with px.producer() as producer:
            producer.send(TOPIC, "v")
            producer.send_many(TOPIC, [("k", "v")])
        after = time.time_ns() // 1_000_000
        assert all(before <= message.timestamp <= after for message in read_all(px, TOPIC))

    def test_go_where_result_says(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=3)
        with px.producer() as producer:
            sent = {number: producer.send(TOPIC, str(number)) for number in range(500)}
            producer.flush()
            places = {number: one.result() for number, one in sent.items()}
        for message in read_all(px, TOPIC):
            place = Position(TOPIC, message.partition, message.offset)
            assert places[int(message.value)] == place

    @pytest.mark.parametrize("name", ["xxhash", "murmur2", "jump"])
    def test_with_a_key_go_where_the_partitioner_says(self, px: Pxrs, name: str) -> None:
        from pxrs.core.routing import partitioner

        px.topics.create(TOPIC, partitions=7, partitioner=name)
        keys = [b"", *(b"key-%d" % number for number in range(50))]
        with px.producer() as producer:
            for key in keys:
                producer.send(TOPIC, "v", key=key)
            producer.send_many(TOPIC, [(key, "v") for key in keys])
        with px.transaction() as tx:
            for key in keys:
                tx.send(TOPIC, "v", key=key)
        assert len(read_all(px, TOPIC)) == 3 * len(keys)
        for message in read_all(px, TOPIC):
            assert message.partition == partitioner(name)(message.key, 7)

    def test_go_to_the_partition_that_is_named(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=4)
        with px.producer() as producer:
            for number in range(4):
                producer.send(TOPIC, str(number), key="same", partition=number)
        for number in range(4):
            assert [m.value for m in read_partition(px, TOPIC, number)] == [b"%d" % number]

    def test_without_a_key_stick_within_a_batch_and_spread_over_batches(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=4)
        with px.producer(linger=600) as producer:
            for _ in range(8):
                sent = [producer.send(TOPIC, "v") for _ in range(20)]
                producer.flush()
                assert len({one.result().partition for one in sent}) == 1
        sizes = [len(read_partition(px, TOPIC, number)) for number in range(4)]
        assert sizes == [40, 40, 40, 40]

    def test_without_a_key_move_on_when_a_batch_is_full(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=3)
        with px.producer(linger=600, batch_bytes=1000) as producer:
            producer.send_many(TOPIC, [(None, b"x" * 100)] * 30)
            for _ in range(30):
                producer.send(TOPIC, b"x" * 100)
        assert all(len(read_partition(px, TOPIC, number)) >= 16 for number in range(3))

    @pytest.mark.parametrize(
        ("batch_bytes", "message_bytes", "buffer_bytes"),
        [(1, 10, 10), (1000, 10_000, 10_000), (1000, 10_000, 20_000), (2**20, 2**20, 2**20)],
    )
    def test_may_be_as_large_as_the_limit(
        self, px: Pxrs, batch_bytes: int, message_bytes: int, buffer_bytes: int
    ) -> None:
        px.topics.create(TOPIC, partitions=2)
        with px.producer(
            batch_bytes=batch_bytes, max_message_bytes=message_bytes, buffer_bytes=buffer_bytes
        ) as producer:
            largest = bytes(message_bytes - 1)
            for _ in range(12):
                producer.send(TOPIC, largest, key="k")
            with pytest.raises(MessageTooLarge, match="max_message_bytes"):
                producer.send(TOPIC, largest + b"xx", key="k")
            with pytest.raises(MessageTooLarge):
                producer.send(TOPIC, largest, key="k", headers=[("h", b"x")])
            with pytest.raises(MessageTooLarge):
                producer.send_many(TOPIC, [("k", "fits"), ("k", largest + b"xx")])
            producer.flush()
            assert held(producer) == 0
        assert [message.value for message in read_all(px, TOPIC)] == [largest] * 12

    def test_more_batches_of_a_partition_than_a_commit_takes(
        self, faulty: Pxrs, log: FaultyLog
    ) -> None:
        faulty.topics.create(TOPIC, partitions=1)
        with faulty.producer(linger=600, batch_bytes=1) as producer:
            for number in range(23):
                producer.send(TOPIC, str(number), key="k")
            producer.flush()
        assert max(map(len, log.appends)) == 5
        assert values_by_key(faulty, TOPIC) == {b"k": list(range(23))}

    def test_to_thousands_of_partitions_at_once(self, px: Pxrs) -> None:
        """More than the variables one SQL statement can have."""
        px.topics.create(TOPIC, partitions=6000)
        with px.producer(linger=600) as producer:
            sent = [producer.send(TOPIC, "v", partition=number) for number in range(6000)]
            producer.flush()
            assert all(one.result().offset == 0 for one in sent)


class TestSerdes:
    def test_encode_what_is_sent(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)
        with px.producer(serde=JSON(), key_serde=JSON()) as producer:
            producer.send(TOPIC, {"a": [1, None]}, key=7)
            producer.send(TOPIC, None)
            producer.send_many(TOPIC, [(8, [1]), (None, None)])
        reader = px.reader(TOPIC, serde=JSON(), key_serde=JSON())
        assert [(message.key, message.value) for message in reader.read(0, 0)] == [
            (7, {"a": [1, None]}),
            (None, None),
            (8, [1]),
            (None, None),
        ]

    def test_that_fail_send_nothing(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)
        with px.producer(serde=JSON()) as producer:
            with pytest.raises(TypeError):
                producer.send(TOPIC, object())
            with pytest.raises(TypeError):
                producer.send_many(TOPIC, [("k", 1), ("k", object())])
            producer.send(TOPIC, "fine").result()
        assert [message.value for message in read_all(px, TOPIC)] == [b'"fine"']

    @pytest.mark.parametrize("which", ["serde", "key_serde"])
    def test_have_to_make_bytes(self, px: Pxrs, which: str) -> None:
        class Text:
            def encode(self, value: object) -> bytes:
                return 5  # type: ignore[return-value]

            def decode(self, data: bytes) -> object:
                return data

        px.topics.create(TOPIC, partitions=1)
        with px.producer(**{which: Text()}) as producer:  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match=r"serde.*int"):
                producer.send(TOPIC, "v", key="k")
            with pytest.raises(InvalidRequest, match=r"serde.*int"):
                producer.send_many(TOPIC, [("k", "v")])
        assert read_all(px, TOPIC) == []


class TestSendMany:
    def test_takes_lists_tuples_and_iterators(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=2)
        pairs = [(f"k{number % 5}", str(number)) for number in range(9000)]
        with px.producer() as producer:
            for form in (pairs, tuple(pairs), iter(pairs), (pair for pair in pairs)):
                sent = producer.send_many(TOPIC, form)
                assert len(sent) == 9000
                assert sent[17].result() == list(sent)[17].result() == sent[10:20][7].result()
                assert len(sent.result()) == 9000
                assert sent.done()
            assert len(producer.send_many(TOPIC, [])) == 0
            assert producer.send_many(TOPIC, iter([])).result() == []
        for numbers in values_by_key(px, TOPIC).values():
            assert numbers == sorted(numbers[:1800]) * 4

    def test_of_a_list_with_bad_input_sends_nothing(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)
        pairs: list[object] = [("k", "v")] * 5000
        with px.producer() as producer:
            for bad in (("k", 5), (5, "v"), "k", ("k",), ("k", "v", "w"), None):
                with pytest.raises(InvalidRequest):
                    producer.send_many(TOPIC, [*pairs, bad, *pairs])  # type: ignore[list-item]
            producer.flush()
            assert held(producer) == 0
        assert read_all(px, TOPIC) == []

    def test_of_an_iterator_with_bad_input_sends_what_came_before(self, px: Pxrs) -> None:
        """A few thousand at a time: those of earlier portions, whole."""
        px.topics.create(TOPIC, partitions=1)

        def pairs() -> Iterator[tuple[str, object]]:
            yield from (("k", str(number)) for number in range(10_000))
            yield "k", 5

        with px.producer() as producer, pytest.raises(InvalidRequest):
            producer.send_many(TOPIC, pairs())  # type: ignore[arg-type]
        assert values_by_key(px, TOPIC) == {b"k": list(range(8192))}

    def test_of_an_iterator_that_fails_sends_what_came_before(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=1)

        def pairs() -> Iterator[tuple[str, str]]:
            yield from (("k", str(number)) for number in range(5000))
            raise ZeroDivisionError

        with px.producer() as producer, pytest.raises(ZeroDivisionError):
            producer.send_many(TOPIC, pairs())
        assert values_by_key(px, TOPIC) == {b"k": list(range(4096))}

    def test_cut_short_by_a_full_buffer_says_how_many_are_sent(
        self, faulty: Pxrs, log: FaultyLog
    ) -> None:
        faulty.topics.create(TOPIC, partitions=1)
        log.before = times(10**6, StoreBusy("held"))
        with faulty.producer(
            buffer_bytes=50_000, max_message_bytes=1000, max_block=0.0
        ) as producer:
            pairs = [("k", str(number).zfill(100)) for number in range(5000)]
            with pytest.raises(BufferFull) as caught:
                producer.send_many(TOPIC, pairs)
            log.heal()
        (taken,) = values_by_key(faulty, TOPIC).values()
        assert taken == list(range(len(taken)))
        assert f"the first {len(taken)} messages" in caught.value.__notes__[0]

    def test_of_large_messages_passes_the_limit_of_the_buffer_by_little(
        self, faulty: Pxrs, log: FaultyLog
    ) -> None:
        faulty.topics.create(TOPIC, partitions=1)
        log.before = times(10**6, StoreBusy("held"))
        limit, size = 200_000, 10_000
        with faulty.producer(buffer_bytes=limit, max_message_bytes=size, max_block=0.0) as producer:
            with pytest.raises(BufferFull):
                producer.send_many(TOPIC, [(None, b"x" * size)] * 1000)
            # What is reported at the limit, and one step more.
            assert held(producer) < limit + 2 * (64 * 2**10 + size)
            log.heal()


class TestThreads:
    def test_each_keeps_its_order(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=4)
        with px.producer(batch_bytes=2000, linger=0.001) as producer:

            def work(name: int) -> None:
                for number in range(0, 2000, 4):
                    producer.send(TOPIC, str(number), key=f"t{name}")
                    producer.send_many(TOPIC, [(f"t{name}", str(number + more)) for more in (1, 2)])
                    sent = producer.send(TOPIC, str(number + 3), key=f"t{name}")
                    if number % 500 == 0:
                        sent.result()

            in_threads(6, work)
            producer.flush()
            assert held(producer) == 0
        assert values_by_key(px, TOPIC) == {b"t%d" % name: list(range(2000)) for name in range(6)}

    def test_that_come_and_go_leave_nothing_behind(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=2)
        with px.producer(linger=600) as producer:
            for _ in range(20):
                in_threads(20, lambda name: producer.send(TOPIC, "v", key=str(name)))
            producer.flush()
            producer.send(TOPIC, "v", key="k").result()
            producer.send(TOPIC, "v", key="k").result()
            assert len(producer._outbox._buffers) == 1
            assert held(producer) == 0
        assert len(read_all(px, TOPIC)) == 402

    def test_flush_returns_though_others_never_stop(self, faulty: Pxrs, log: FaultyLog) -> None:
        """It waits for what was put before it. Here somebody sends during every commit."""
        faulty.topics.create(TOPIC, partitions=2)
        with faulty.producer(linger=600) as producer:

            def somebody_sends(_: Sequence[Append]) -> None:
                if len(log.appends) < 100:
                    producer.send(TOPIC, "noise", key="n")

            log.after = somebody_sends
            sent = producer.send(TOPIC, "mine", key="k")
            producer.flush()
            assert sent.done()
            assert len(log.appends) < 5
            log.heal()


class TestTheBuffer:
    def test_full_refuses_before_it_takes_and_then_works_again(
        self, faulty: Pxrs, log: FaultyLog
    ) -> None:
        faulty.topics.create(TOPIC, partitions=2)
        log.before = times(10**6, StoreBusy("held"))
        with faulty.producer(
            buffer_bytes=100_000, max_message_bytes=10_000, max_block=0.0
        ) as producer:
            number = 0
            with pytest.raises(BufferFull) as caught:
                while True:
                    producer.send(TOPIC, str(number).zfill(1000), key="k")
                    number += 1
            assert caught.value.retryable
            assert 90 <= number <= 130
            with pytest.raises(BufferFull):
                producer.send(TOPIC, "not this one", key="k")
            with pytest.raises(BufferFull):
                producer.send_many(TOPIC, [("k", "nor this one")])
            log.heal()
            producer.flush()
            producer.send(TOPIC, str(number), key="k").result()
            producer.flush()
            assert held(producer) == 0
        assert values_by_key(faulty, TOPIC) == {b"k": list(range(number + 1))}

    def test_full_lets_those_go_on_who_waited(self, faulty: Pxrs, log: FaultyLog) -> None:
        faulty.topics.create(TOPIC, partitions=2)
        blocked, go_on = threading.Event(), threading.Event()

        def slow(_: Sequence[Append]) -> None:
            blocked.set()
            assert go_on.wait(PATIENCE)

        log.before = slow
        with faulty.producer(
            buffer_bytes=20_000, max_message_bytes=10_000, max_block=PATIENCE
        ) as producer:

            def work(name: int) -> None:
                for number in range(100):
                    producer.send(TOPIC, str(number).zfill(1000), key=f"t{name}")

            def open_the_gate() -> None:
                assert blocked.wait(PATIENCE)
                go_on.set()

            opener = threading.Thread(target=open_the_gate)
            opener.start()
            in_threads(3, work)
            opener.join()
            producer.flush()
            assert held(producer) == 0
        assert values_by_key(faulty, TOPIC) == {b"t%d" % n: list(range(100)) for n in range(3)}

    def test_empty_messages_take_room_too(self, faulty: Pxrs, log: FaultyLog) -> None:
        faulty.topics.create(TOPIC, partitions=1)
        log.before = times(10**6, StoreBusy("held"))
        with faulty.producer(
            buffer_bytes=10_000, max_message_bytes=1000, max_block=0.0
        ) as producer:
            with pytest.raises(BufferFull):
                for _ in range(100_000):
                    producer.send(TOPIC, b"", key=b"")
            log.heal()
        assert len(read_all(faulty, TOPIC)) < 100_000


class TestClosing:
    def test_flushes(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=2)
        producer = px.producer(linger=600)
        sent = producer.send(TOPIC, "v")
        producer.close()
        assert sent.done()
        assert sent.result().offset == 0
        producer.flush()
        producer.close()
        with pytest.raises(Closed):
            producer.send(TOPIC, "w")
        with pytest.raises(Closed):
            producer.send_many(TOPIC, [("k", "w")])
        with pytest.raises(Closed):
            producer.send_many(TOPIC, iter([("k", "w")]))
        assert [message.value for message in read_all(px, TOPIC)] == [b"v"]

    def test_the_store_closes_its_producers(self, url: str) -> None:
        px = pxrs.connect(url)
        px.topics.create(TOPIC, partitions=2)
        producer = px.producer(linger=600)
        sent = producer.send(TOPIC, "v")
        px.close()
        px.close()
        assert sent.result().offset == 0
        for call in (
            lambda: producer.send(TOPIC, "w"),
            lambda: px.topics.create("x", partitions=1),
            lambda: px.reader(TOPIC),
            lambda: px.producer().send(TOPIC, "w"),
            px.topics.list,
        ):
            with pytest.raises(Closed):
                call()

    def test_while_another_is_inside_send_takes_its_message_or_refuses_it(self, px: Pxrs) -> None:
        """The other has looked whether the producer is open, and then takes its time."""
        inside, go_on = threading.Event(), threading.Event()

        class Slow:
            def encode(self, value: str) -> bytes:
                inside.set()
                assert go_on.wait(PATIENCE)
                return value.encode()

            def decode(self, data: bytes) -> str:
                return data.decode()

        px.topics.create(TOPIC, partitions=1)
        producer = px.producer(linger=600, serde=Slow())
        outcome: list[object] = []

        def work() -> None:
            try:
                outcome.append(producer.send(TOPIC, "v"))
            except Closed as error:
                outcome.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(PATIENCE)
        producer.close()
        go_on.set()
        thread.join()
        accepted = not isinstance(outcome[0], Closed)
        assert len(read_all(px, TOPIC)) == accepted

    @pytest.mark.parametrize("round_number", range(10))
    def test_while_others_send_loses_nothing_that_was_accepted(
        self, px: Pxrs, round_number: int
    ) -> None:
        px.topics.create(TOPIC, partitions=2)
        producer = px.producer(linger=0.0 if round_number % 2 else 600, batch_bytes=500)
        started = threading.Barrier(5)
        accepted: Counter[bytes] = Counter()

        def work(name: int) -> None:
            started.wait()
            key = b"t%d" % name
            with pytest.raises(Closed):
                while True:
                    producer.send(TOPIC, str(accepted[key]), key=key)
                    accepted[key] += 1

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        while sum(accepted.values()) < 50 * (round_number + 1):
            pass
        producer.close()
        for thread in threads:
            thread.join()
        found = values_by_key(px, TOPIC)
        assert found == {key: list(range(number)) for key, number in accepted.items() if number}

    def test_by_two_threads_returns_to_both_when_it_is_done(
        self, faulty: Pxrs, log: FaultyLog
    ) -> None:
        faulty.topics.create(TOPIC, partitions=1)
        inside, go_on = threading.Event(), threading.Event()

        def slow(_: Sequence[Append]) -> None:
            inside.set()
            assert go_on.wait(PATIENCE)

        log.before = slow
        producer = faulty.producer(linger=600)
        sent = producer.send(TOPIC, "v")
        first = threading.Thread(target=producer.close)
        first.start()
        assert inside.wait(PATIENCE)
        threading.Timer(0.05, go_on.set).start()
        producer.close()
        assert sent.done()
        first.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_producer_does_not_work_in_a_forked_child(px: Pxrs) -> None:
    px.topics.create(TOPIC, partitions=1)
    producer = px.producer(linger=600)
    sent = producer.send(TOPIC, "v")
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for call in (lambda: producer.send(TOPIC, "w"), producer.flush, sent.result):
            try:
                call()
                said.append("nothing")
            except BaseException as error:  # noqa: BLE001 - told to the parent
                said.append(type(error).__name__)
        producer.close()
        os.write(write_end, " ".join(said).encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    assert os.read(read_end, 1000) == b"Closed Closed Closed"
    os.close(read_end)
    producer.close()
    assert [message.value for message in read_all(px, TOPIC)] == [b"v"]


def test_handles_that_are_kept_keep_no_buffers(px: Pxrs) -> None:
    px.topics.create(TOPIC, partitions=1)
    with px.producer() as producer:
        sent = producer.send(TOPIC, bytes(100_000))
        sent.result()
    assert not hasattr(sent._pending, "builder")
    assert sent._pending.batch is None


def test_keys_hash_as_the_default_says(px: Pxrs) -> None:
    px.topics.create(TOPIC, partitions=16)
    with px.producer() as producer:
        sent = producer.send(TOPIC, "v", key="account-42")
        assert sent.result().partition == xxhash(b"account-42", 16)
