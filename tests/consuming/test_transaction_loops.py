"""A transaction after some turns of a loop is about all of them, of whatever partition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

import pxrs

pytestmark = pytest.mark.engine("memory")

PATIENCE = 30.0


@pytest.fixture
def px() -> Iterator[pxrs.Pxrs]:
    with pxrs.connect("memory://") as px:
        px.topics.create("orders", partitions=2)
        px.topics.create("invoices", partitions=1)
        with px.producer() as producer:
            for number in range(6):
                producer.send("orders", str(number), partition=number % 2).result()
        yield px


@pytest.fixture
def consumer(px: pxrs.Pxrs) -> Iterator[pxrs.Consumer]:
    with px.consumer("orders", "billing", auto_commit=False) as consumer:
        yield consumer


def turns(loop: Iterator[pxrs.Message], count: int) -> list[str]:
    """So many turns of a loop, which is in the body of the last of them afterwards."""
    return [f"{message.partition}/{message.offset}" for message in islice(loop, count)]


def checkpoints(px: pxrs.Pxrs) -> list[int | None]:
    return [part.checkpoint for part in px.groups.describe("billing").partitions]


def test_all_partitions_are_committed_together(px: pxrs.Pxrs, consumer: pxrs.Consumer) -> None:
    loop = iter(consumer)
    seen = turns(loop, 5)
    with consumer.transaction() as tx:
        tx.send("invoices", "5 apples")
    handled = [sum(each[0] == number for each in seen) for number in "01"]
    assert (checkpoints(px), sorted(handled)) == (handled, [2, 3])
    assert len(turns(loop, 1)) == 1


def test_all_come_again_after_a_rollback(px: pxrs.Pxrs, consumer: pxrs.Consumer) -> None:
    loop = iter(consumer)
    first = turns(loop, 6)
    with pytest.raises(ZeroDivisionError), consumer.transaction():
        _ = 1 // 0
    assert sorted(turns(loop, 6)) == sorted(first)
    with consumer.transaction():
        pass
    assert checkpoints(px) == [3, 3]


def test_one_that_was_lost_on_the_way_fences_all(px: pxrs.Pxrs, consumer: pxrs.Consumer) -> None:
    """What it has handled of that partition would be done by its new owner, too."""
    loop = iter(consumer)
    first = turns(loop, 5)
    # Its messages are all handled, and the loop is at the other one.
    px.groups.reset("billing", "orders", to=0, partitions=[int(first[0][0])], force=True)
    with pytest.raises(pxrs.Fenced), consumer.transaction() as tx:
        tx.send("invoices", "5 apples")
    assert px.topics.describe("invoices").messages == 0
    assert sorted(turns(loop, 6)) == [f"{number}/{offset}" for number in "01" for offset in "012"]
    with consumer.transaction():
        pass
    assert checkpoints(px) == [3, 3]


def test_an_explicit_commit_leaves_nothing_for_it(px: pxrs.Pxrs, consumer: pxrs.Consumer) -> None:
    loop = iter(consumer)
    first = turns(loop, 5)
    consumer.commit()
    last = turns(loop, 1)
    with pytest.raises(ZeroDivisionError), consumer.transaction():
        _ = 1 // 0
    assert turns(loop, 1) == last
    assert last[0] not in first
    consumer.commit()
    assert checkpoints(px) == [3, 3]


def test_messages_that_were_given_back_are_not_tried_again(
    px: pxrs.Pxrs, consumer: pxrs.Consumer
) -> None:
    """They come again: what a second block did about them would be done twice."""
    first = consumer.poll(timeout=PATIENCE)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), consumer.transaction():
            _ = 1 // 0
        with pytest.raises(pxrs.InvalidRequest, match="Poll first"), consumer.transaction() as tx:
            tx.send("invoices", "done")
        assert consumer.poll(timeout=PATIENCE) == first
    with consumer.transaction() as tx:
        tx.send("invoices", "done")
    assert px.topics.describe("invoices").messages == 1
    assert sum(filter(None, checkpoints(px))) == len(first)


def test_nor_those_that_were_lost(px: pxrs.Pxrs, consumer: pxrs.Consumer) -> None:
    consumer.poll(timeout=PATIENCE)
    px.groups.reset("billing", "orders", to=0, force=True)
    with pytest.raises(pxrs.Fenced), consumer.transaction():
        pass
    with pytest.raises(pxrs.InvalidRequest, match="Poll first"), consumer.transaction():
        pass
    loop = iter(consumer)
    assert len(turns(loop, 6)) == 6
    with consumer.transaction():
        pass
    assert checkpoints(px) == [3, 3]


def test_a_loop_goes_on_after_a_rollback(px: pxrs.Pxrs, consumer: pxrs.Consumer) -> None:
    failed: set[str] = set()
    handled: list[str] = []
    for message in consumer:
        what = f"{message.partition}/{message.offset}"
        try:
            with consumer.transaction() as tx:
                tx.send("invoices", what)
                if what not in failed:
                    failed.add(what)
                    raise ZeroDivisionError
        except ZeroDivisionError:
            continue
        handled.append(what)
        if len(handled) == 6:
            break
    assert px.topics.describe("invoices").messages == 6
    assert checkpoints(px) == [3, 3]
    assert sorted(handled) == [f"{number}/{offset}" for number in "01" for offset in "012"]
