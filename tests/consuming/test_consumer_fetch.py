"""A consumer with few partitions of a large topic asks each for itself: nothing is missed."""

from __future__ import annotations

import pxrs
from pxrs.types import TopicPartition

LARGE = 64


def test_few_partitions_of_a_large_topic(px: pxrs.Pxrs) -> None:
    px.topics.create("orders", partitions=LARGE)
    with (
        px.consumer("orders", group="billing", debounce=0.0) as consumer,
        px.producer() as producer,
    ):
        consumer.pause(*(TopicPartition("orders", number) for number in range(1, LARGE)))
        seen = []
        for number in range(5):
            for partition in (0, 1):
                producer.send("orders", b"%d" % number, partition=partition).result()
            seen += [message.value for message in consumer.poll(timeout=10.0)]
        assert seen == [b"0", b"1", b"2", b"3", b"4"]
        assert consumer.poll(timeout=0.0) == []
        consumer.resume(*(TopicPartition("orders", number) for number in range(1, LARGE)))
        assert [message.partition for message in consumer.poll(timeout=10.0)] == [1] * 5


def test_a_large_topic_goes_while_it_is_read(px: pxrs.Pxrs) -> None:
    px.topics.create("orders", partitions=LARGE)
    with (
        px.consumer("orders", group="billing", debounce=0.0) as consumer,
        px.producer() as producer,
    ):
        consumer.pause(*(TopicPartition("orders", number) for number in range(1, LARGE)))
        producer.send("orders", b"last", partition=0).result()
        assert [message.value for message in consumer.poll(timeout=10.0)] == [b"last"]
        px.topics.delete("orders")
        assert consumer.poll(timeout=0.0) == []
