"""A batch in hand belongs to the epoch under which it was handed out, and to no later one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pxrs
from pxrs.core.records import Claim, decode
from support.child import PATIENCE

pytestmark = pytest.mark.engine("memory")


@pytest.fixture
def px() -> Iterator[pxrs.Pxrs]:
    with pxrs.connect("memory://") as px:
        px.topics.create("orders", partitions=1)
        px.topics.create("invoices", partitions=1)
        with px.producer() as producer:
            producer.send_many("orders", [("k", str(n)) for n in range(10)]).result()
        yield px


def claim_of(px: pxrs.Pxrs) -> Claim:
    (record,) = px.stores.coord.list("claims/billing/")
    return decode(record, Claim)


def lose_and_claim_again(px: pxrs.Pxrs, consumer: pxrs.Consumer) -> None:
    """End the consumer's session; return when it has joined and claimed anew, batch in hand."""
    before = claim_of(px)
    session = consumer._steps.membership.session
    assert session is not None
    watch = px.stores.coord.watch("claims/billing/")
    session.close()
    while claim_of(px).epoch == before.epoch:
        assert watch.wait(PATIENCE)
    watch.close()


def test_a_transaction_of_a_former_epoch_is_refused(px: pxrs.Pxrs) -> None:
    with px.consumer("orders", "billing", auto_commit=False) as consumer:
        assert len(consumer.poll(timeout=PATIENCE)) == 10
        lose_and_claim_again(px, consumer)
        with pytest.raises(pxrs.Fenced), consumer.transaction() as tx:
            tx.send("invoices", "4 apples")
        assert claim_of(px).checkpoint is None
        assert px.topics.describe("invoices").messages == 0
        # Under the new epoch it is handed out again, and then it counts.
        assert len(consumer.poll(timeout=PATIENCE)) == 10
        with consumer.transaction() as tx:
            tx.send("invoices", "4 apples")
        assert claim_of(px).checkpoint == 10
        assert px.topics.describe("invoices").messages == 1


def test_a_commit_of_a_former_epoch_is_told(px: pxrs.Pxrs) -> None:
    with px.consumer("orders", "billing", auto_commit=False) as consumer:
        assert len(consumer.poll(timeout=PATIENCE)) == 10
        lose_and_claim_again(px, consumer)
        with pytest.raises(pxrs.Fenced, match="orders/0"):
            consumer.commit()
        assert claim_of(px).checkpoint is None
        consumer.commit()
        assert claim_of(px).checkpoint is None
        assert len(consumer.poll(timeout=PATIENCE)) == 10
        consumer.commit()
        assert claim_of(px).checkpoint == 10
