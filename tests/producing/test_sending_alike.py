"""A producer and a transaction send in one way: what one refuses or encodes, so does the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pxrs import JSON, InvalidRequest, MessageTooLarge, PartitionNotFound, Pxrs, Serde
from support.reading import read_all

TOPIC = "orders"
Send = Callable[..., None]


def by_producer(px: Pxrs, serde: Serde | None, **message: Any) -> None:
    with px.producer(serde=serde) as producer:
        producer.send(TOPIC, **message)


def by_transaction(px: Pxrs, serde: Serde | None, **message: Any) -> None:
    with px.transaction(serde=serde) as tx:
        tx.send(TOPIC, **message)


each_way = pytest.mark.parametrize("send", [by_producer, by_transaction])


@each_way
@pytest.mark.parametrize("partition", [-1, 4, "1", True, 1.0])
def test_what_is_no_partition_is_refused(px: Pxrs, send: Send, partition: Any) -> None:
    px.topics.create(TOPIC, partitions=4)
    with pytest.raises(PartitionNotFound, match="partition must be 0 to 3"):
        send(px, None, value="v", partition=partition)
    assert read_all(px, TOPIC) == []


@each_way
def test_headers_count_for_the_size(px: Pxrs, send: Send) -> None:
    px.topics.create(TOPIC, partitions=1)
    with pytest.raises(MessageTooLarge, match="the limit is 1048576"):
        send(px, None, value="v", headers=[("trace", bytes(2**21))])
    assert read_all(px, TOPIC) == []


@each_way
def test_the_serde_encodes(px: Pxrs, send: Send) -> None:
    px.topics.create(TOPIC, partitions=1)
    send(px, JSON(), value={"amount": 3}, key="k")
    [message] = read_all(px, TOPIC)
    assert (message.key, message.value) == (b"k", b'{"amount":3}')


@each_way
def test_without_a_serde_objects_are_refused(px: Pxrs, send: Send) -> None:
    px.topics.create(TOPIC, partitions=1)
    with pytest.raises(InvalidRequest, match="set a serde"):
        send(px, None, value={"amount": 3})


@pytest.mark.parametrize("partitioner", ["xxhash", "murmur2", "jump"])
def test_a_key_belongs_to_one_partition_whoever_sends(px: Pxrs, partitioner: str) -> None:
    px.topics.create(TOPIC, partitions=6, partitioner=partitioner)
    for number in range(30):
        for send in (by_producer, by_transaction):
            send(px, None, value="v", key=f"account-{number}")
    where: dict[bytes, set[int]] = {}
    for message in read_all(px, TOPIC):
        where.setdefault(message.key, set()).add(message.partition)
    assert len(where) == 30
    assert all(len(partitions) == 1 for partitions in where.values())


def test_the_partitioner_is_the_topics(px: Pxrs) -> None:
    made = px.topics.create(TOPIC, partitions=6, partitioner="murmur2")
    assert px.topics.list() == [made]
    assert made.partitioner == "murmur2"
