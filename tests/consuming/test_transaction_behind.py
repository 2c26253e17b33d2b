"""A write of the consumer's own, of which it has not heard, has changed its claim."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

import pxrs
from pxrs import Pxrs, TopicPartition
from pxrs.clock import SYSTEM_CLOCK
from pxrs.consuming.transactions import Transaction
from pxrs.core import claims
from pxrs.core.claims import OwnedClaim, Stamp
from pxrs.core.records import Claim, decode
from pxrs.errors import TransactionConflict
from pxrs.stores.open import open_stores
from pxrs.testing.faults import NOTHING, Faults, FaultyStores, Rates
from pxrs.types import Committed, Versioned

PATIENCE = 30.0
PART = TopicPartition("t", 0)


@pytest.fixture
def px(engine_url: str) -> Iterator[Pxrs]:
    with pxrs.connect(engine_url) as px:
        yield filled(px)


def filled(px: Pxrs) -> Pxrs:
    px.topics.create("t", 1)
    px.topics.create("out", 1)
    with px.producer() as producer:
        producer.send_many("t", [(None, str(number)) for number in range(6)])
    return px


def join(px: Pxrs) -> pxrs.Consumer:
    return px.consumer("t", "g", debounce=0.0, auto_commit=False)


def take(consumer: pxrs.Consumer, number: int) -> list[int]:
    found: list[int] = []
    while len(found) < number:
        some = consumer.poll(number - len(found), timeout=PATIENCE)
        assert some, f"only {found} came"
        found += [message.offset for message in some]
    return found


def effects(px: Pxrs) -> list[str]:
    return [message.value.decode() for message in px.reader("out").read(0, 0)]


def claim(px: Pxrs) -> Versioned:
    (found,) = px.stores.coord.list("claims/g/")
    return found


def arrive(px: Pxrs, checkpoint: int) -> None:
    """A commit of the owner's arrives that it has given up; or a server has lost the last ones."""
    found = claim(px)
    owned_claim = OwnedClaim(PART, found.key, found.version, decode(found, Claim))
    stamp = Stamp(owned_claim.claim.owner or "", owned_claim.claim.name or "", "late", 0)
    step = claims.seek(owned_claim, checkpoint, stamp)
    assert isinstance(px.stores.coord.commit([step.check], [step.put]), Committed)


class TestAWriteThatChangesNothing:
    def test_the_next_try_succeeds(self, px: Pxrs) -> None:
        with join(px) as consumer:
            take(consumer, 2)
            consumer.commit()
            assert take(consumer, 2) == [2, 3]
            arrive(px, 2)
            with pytest.raises(TransactionConflict), consumer.transaction() as tx:
                tx.send("out", "first")
            assert take(consumer, 2) == [2, 3]
            with consumer.transaction() as tx:
                tx.send("out", "second")
            assert decode(claim(px), Claim).checkpoint == 4
        assert effects(px) == ["second"]

    def test_what_is_run_again_succeeds(self, px: Pxrs) -> None:
        with join(px) as consumer:
            take(consumer, 2)
            consumer.commit()
            take(consumer, 2)
            arrive(px, 2)
            consumer.run_transaction(lambda tx: tx.send("out", "effect"), attempts=2)
            assert decode(claim(px), Claim).checkpoint == 4
        assert effects(px) == ["effect"]


class TestAWriteThatHasMovedTheCheckpoint:
    def test_what_it_passed_is_not_handled_twice(self, px: Pxrs) -> None:
        with join(px) as consumer:
            take(consumer, 2)
            arrive(px, 4)
            tries: list[Transaction] = []

            def work(tx: Transaction) -> None:
                tries.append(tx)
                tx.send("out", "twice")

            with pytest.raises(TransactionConflict, match="poll"):
                consumer.run_transaction(work)
            assert len(tries) == 1
            assert take(consumer, 2) == [4, 5]
            consumer.run_transaction(lambda tx: tx.send("out", "once"))
            assert decode(claim(px), Claim).checkpoint == 6
        assert effects(px) == ["once"]

    def test_what_the_server_has_lost_is_handled_again(self, px: Pxrs) -> None:
        with join(px) as consumer:
            for offsets in [0, 1], [2, 3]:
                assert take(consumer, 2) == offsets
                with consumer.transaction() as tx:
                    tx.send("out", str(offsets))
            arrive(px, 2)
            assert take(consumer, 2) == [4, 5]
            with pytest.raises(TransactionConflict), consumer.transaction() as tx:
                tx.send("out", "[4, 5]")
            assert take(consumer, 4) == [2, 3, 4, 5]
            with consumer.transaction() as tx:
                tx.send("out", "again")
            assert decode(claim(px), Claim).checkpoint == 6
        assert effects(px) == ["[0, 1]", "[2, 3]", "again"]


@pytest.mark.engine("postgres")
def test_a_transaction_that_is_called_off_does_not_land_later(postgres_url: str) -> None:
    faults = Faults(Random(1), SYSTEM_CLOCK)
    with Pxrs(FaultyStores(open_stores(postgres_url), faults)) as px, join(filled(px)) as consumer:
        assert take(consumer, 2) == [0, 1]
        with pytest.raises(TransactionConflict), consumer.transaction() as tx:
            tx.send("out", "late")
            # From here on: its commit has not reached the server yet.
            faults.rates = Rates(unknown_late=1, unlocked=1, longest_delay=1e6)
            tx.connection.execute("SELECT 1")
            faults.before_call = lambda who, what: _heal_after_the_transaction(faults, what)
        faults.heal()
        assert effects(px) == []
        assert take(consumer, 2) == [0, 1]
        with consumer.transaction() as tx:
            tx.send("out", "in time")
        assert effects(px) == ["in time"]


def _heal_after_the_transaction(faults: Faults, what: str) -> None:
    if what == "commit":
        faults.rates = NOTHING
