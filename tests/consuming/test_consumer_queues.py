"""A consumer's transaction with queues in it: checkpoint, items, messages and SQL together."""

from __future__ import annotations

import pytest

import pxrs


@pytest.fixture
def px(px: pxrs.Pxrs) -> pxrs.Pxrs:
    """With two messages to consume."""
    px.topics.create("orders", partitions=1)
    with px.producer() as producer:
        producer.send("orders", b"one")
        producer.send("orders", b"two")
    return px


def test_items_are_put_and_removed_with_the_checkpoint(px: pxrs.Pxrs) -> None:
    px.put("stock", "a piece")
    with px.consumer("orders", group="g", auto_commit=False) as consumer:
        (message,) = consumer.poll(max_records=1, timeout=10)
        with consumer.transaction() as tx:
            piece = tx.take("stock", timeout=0)
            assert piece is not None
            tx.put("parcels", f"{piece.value!s} for {message.value.decode()}")
    assert px.queues.describe("stock").depth == 0
    assert [item.value for item in px.queues.peek("parcels")] == ["a piece for one"]
    (partition,) = px.groups.describe("g").partitions
    assert partition.checkpoint == 1


def test_an_exception_gives_items_and_messages_back(px: pxrs.Pxrs) -> None:
    px.put("stock", "a piece")
    with px.consumer("orders", group="g", auto_commit=False) as consumer:
        before = consumer.poll(max_records=1, timeout=10)
        with pytest.raises(ZeroDivisionError), consumer.transaction() as tx:
            assert tx.take("stock", timeout=0) is not None
            tx.put("parcels", "never")
            raise ZeroDivisionError
        after = consumer.poll(max_records=1, timeout=10)
        assert [message.offset for message in after] == [message.offset for message in before]
    assert px.queues.describe("stock").ready == 1
    assert [queue.name for queue in px.queues.list()] == ["stock"]


def test_a_lost_item_rolls_the_checkpoint_back_too(px: pxrs.Pxrs) -> None:
    px.put("stock", "a piece")
    with px.consumer("orders", group="g", auto_commit=False) as consumer:
        consumer.poll(max_records=1, timeout=10)
        with pytest.raises(pxrs.Fenced), consumer.transaction() as tx:
            assert tx.take("stock", timeout=0) is not None
            px.queues.delete("stock")
        (partition,) = px.groups.describe("g").partitions
        assert not partition.checkpoint
        assert [message.offset for message in consumer.poll(max_records=1, timeout=10)] == [0]


def test_no_queue_session_is_opened_for_a_checkpoint_alone(px: pxrs.Pxrs) -> None:
    with px.consumer("orders", group="g", auto_commit=False) as consumer:
        consumer.poll(max_records=1, timeout=10)
        with consumer.transaction() as tx:
            assert tx.in_hand == 0
    table = px._context()
    assert table.hold_session._session is None


def test_an_item_that_cannot_be_read_is_not_removed(px: pxrs.Pxrs) -> None:
    px.put("stock", "not json")
    with px.transaction(serde=pxrs.JSON()) as tx:
        with pytest.raises(Exception, match="malformed"):
            tx.take("stock", timeout=0)
        assert tx.in_hand == 0
    with px.transaction() as tx:
        item = tx.take("stock", timeout=10)
        assert item is not None
        assert item.value == "not json"
        assert "malformed" in item.error
