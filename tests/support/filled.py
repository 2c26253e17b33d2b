"""A store with something of everything in it, to be copied."""

from __future__ import annotations

from contextlib import closing

import pxrs
from pxrs.codec.batches import encode
from pxrs.stores.api import Stores
from pxrs.stores.open import open_stores
from pxrs.types import Append, Batch, Holder, LogPartition, NewItem, QueueChange, Release

GROUP = "billing"
PARTITIONS = 4
BATCHES = 30
TRIMMED = 2


def fill(url: str, *, queues: bool = True) -> None:
    """Topics (one trimmed, one emptied, one new), a group half through, queues in all states."""
    with pxrs.connect(url) as px:
        px.topics.create("orders", PARTITIONS)
        px.topics.create("none", 1, retention=3600)
        px.topics.create("emptied", 1)
        with px.producer(linger=0.0) as producer:
            for number in range(BATCHES):
                for partition in range(PARTITIONS):
                    sent = producer.send(
                        "orders", b"%d-%d" % (partition, number), partition=partition
                    )
                sent.result()
            producer.send("emptied", b"gone", partition=0).result()
        _consume(px, 40)
        if queues:
            fill_queues(px.stores)
    with closing(open_stores(url)) as stores:
        trim(stores)


def send(url: str, count: int) -> None:
    """More messages for every partition of the topic, one batch each."""
    with pxrs.connect(url) as px, px.producer() as producer:
        for number in range(count):
            producer.send("orders", b"more-%d" % number, partition=number % PARTITIONS)


def consume(url: str, count: int) -> list[tuple[int, int]]:
    """Go on with the group: (partition, offset) of the next messages."""
    with pxrs.connect(url) as px:
        return _consume(px, count)


def _consume(px: pxrs.Pxrs, count: int) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    with px.consumer("orders", group=GROUP, auto_commit=False) as consumer:
        while len(seen) < count:
            messages = consumer.poll(max_records=count - len(seen), timeout=30.0)
            assert messages, "nothing more to consume"
            seen += [(message.partition, message.offset) for message in messages]
            consumer.commit()
    return seen


def trim(stores: Stores) -> None:
    """Some partitions do not begin at 0, one is empty and does not either."""
    with_id = {topic.name: topic.id for topic in _topics(stores)}
    for partition in range(TRIMMED):
        where = LogPartition(with_id["orders"], partition)
        held = stores.log.bounds(where.topic_id)[partition]
        stores.log.trim(where, held.start + 3 + partition)
    where = LogPartition(with_id["emptied"], 0)
    stores.log.trim(where, stores.log.bounds(where.topic_id)[0].end)


def _topics(stores: Stores) -> list[pxrs.Topic]:
    with pxrs.connect(stores.url) as px:
        return px.topics.list()


def fill_queues(stores: Stores) -> None:
    """Plain, keyed and fifo items; urgent, delayed, delivered, backing off, dead and large ones."""
    queues, session = stores.queues, stores.coord.session(30.0)
    holder = Holder(session.id, "filling")
    queues.create("fifo", fifo=True)
    put = [NewItem(queue="fifo", body=b"f%d" % number) for number in range(5)]
    put += [NewItem(queue="mixed", body=b"k%d" % number, key="k") for number in range(5)]
    put += [NewItem(queue="mixed", body=b"p%d" % number, priority=number) for number in range(5)]
    put += [NewItem(queue="mixed", body=b"late", delay=3_600.0)]
    put += [NewItem(queue="mixed", body=b"l" * 50_000)]
    put += [NewItem(queue="many", body=b"m%d" % number) for number in range(500)]
    queues.apply(QueueChange(holder, (), tuple(put)))
    (first,) = queues.take("fifo", holder, 1).items
    queues.release(holder, [Release(first.held, delay=3_600.0, error="not now")])
    taken = queues.take("many", holder, 3).items
    dead, again, done = taken
    queues.release(holder, [Release(dead.held, error="hopeless", dead=True)])
    queues.release(holder, [Release(again.held, error="once more")])
    queues.apply(QueueChange(holder, (done.held,), ()))
    session.close()


def filler_batch(text: bytes) -> Batch:
    return encode([(None, text, [], 1_000)])


def append(stores: Stores, topic: str, partition: int, text: bytes) -> None:
    """A batch past any producer, as somebody who uses the target would."""
    (topic_id,) = [each.id for each in _topics(stores) if each.name == topic]
    stores.log.append([Append(LogPartition(topic_id, partition), filler_batch(text))])
