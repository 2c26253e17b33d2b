"""A log that answers each batch by itself: what fails in one partition is that one's alone."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from pxrs import (
    DeliveryFailed,
    MessageTooLarge,
    OutcomeUnknown,
    Pxrs,
    PxrsError,
    StoreFull,
    StoreUnavailable,
)
from pxrs.core.retry import Backoff
from pxrs.producing.committer import Committer
from pxrs.producing.handles import PendingBatch, Sent
from pxrs.stores.open import open_stores
from pxrs.types import Append, Appended, Batch, LogPartition
from support.child import PATIENCE
from support.faults import FaultyLog, FaultyStores
from support.reading import read_partition
from support.seeds import few_are_fast

TOPIC = "orders"
Answer = Callable[[Append, Callable[[], Appended | PxrsError]], Appended | PxrsError]
AWAY = StoreUnavailable("its node is down")


def answering(log: FaultyLog, answer: Answer) -> Callable[[Sequence[Append]], list[object]]:
    """Each batch is answered by itself; behind one to be tried again its partition rests."""
    inner = log._inner

    def append(appends: Sequence[Append]) -> list[object]:
        held_up: set[LogPartition] = set()
        outcomes: list[object] = []
        for each in appends:
            outcome: Appended | PxrsError = AWAY
            if each.where not in held_up:
                outcome = answer(each, lambda each=each: inner.append([each])[0])  # type: ignore[misc]
            if isinstance(outcome, OutcomeUnknown | StoreUnavailable):
                held_up.add(each.where)
            outcomes.append(outcome)
        return outcomes

    return append


def values(px: Pxrs, partition: int) -> list[bytes]:
    return [message.value for message in read_partition(px, TOPIC, partition)]


@pytest.mark.parametrize("error", [AWAY, OutcomeUnknown("lost")])
@pytest.mark.parametrize("applied", [False, True])
def test_a_partition_that_is_away_holds_up_nobody_else(
    faulty: Pxrs, log: FaultyLog, error: PxrsError, applied: bool
) -> None:
    faulty.topics.create(TOPIC, partitions=3)
    if applied and not isinstance(error, OutcomeUnknown):
        applied = False
    back = threading.Event()

    def answer(each: Append, do: Callable[[], Appended | PxrsError]) -> Appended | PxrsError:
        if each.where.partition != 0 or back.is_set():
            return do()
        if applied:
            do()
        return error

    log.appending = answering(log, answer)  # type: ignore[assignment]
    with faulty.producer(linger=600, batch_bytes=1) as producer:
        away = [producer.send(TOPIC, b"%d" % number, partition=0) for number in range(7)]
        for number in range(20):
            sent = producer.send(TOPIC, b"%d" % number, partition=1)
            assert sent.result(PATIENCE).offset == number
        assert not any(sent.done() for sent in away)
        with pytest.raises(TimeoutError):
            away[0].result(timeout=0.01)
        back.set()
        assert [sent.result(PATIENCE).offset for sent in away] == list(range(7))
    assert values(faulty, 0) == [b"%d" % number for number in range(7)]


def test_a_batch_that_is_refused_fails_no_successor(faulty: Pxrs, log: FaultyLog) -> None:
    """The successors get other numbers: they are not out of sequence by their own fault."""

    faulty.topics.create(TOPIC, partitions=3)

    def answer(each: Append, do: Callable[[], Appended | PxrsError]) -> Appended | PxrsError:
        return MessageTooLarge("huge") if len(each.batch.data) > 1000 else do()

    log.appending = answering(log, answer)  # type: ignore[assignment]
    with faulty.producer(linger=600, batch_bytes=1, delivery_timeout=0) as producer:
        for _ in range(3):
            sent = [producer.send(TOPIC, value, partition=0) for value in (b"a", b"b")]
            huge = [producer.send(TOPIC, bytes(2000), partition=0) for _ in range(2)]
            sent += [producer.send(TOPIC, value, partition=0) for value in (b"c", b"d", b"e")]
            for one in sent:
                one.result(PATIENCE)
            for one in huge:
                with pytest.raises(MessageTooLarge):
                    one.result(PATIENCE)
    assert values(faulty, 0) == [b"a", b"b", b"c", b"d", b"e"] * 3


def test_what_was_given_up_in_doubt_is_refused_if_it_comes_late(
    faulty: Pxrs, log: FaultyLog
) -> None:
    """The next batch of its partition goes under a higher epoch."""
    faulty.topics.create(TOPIC, partitions=3)
    late: list[Append] = []

    def answer(each: Append, do: Callable[[], Appended | PxrsError]) -> Appended | PxrsError:
        late.append(each)
        return OutcomeUnknown("on its way")

    with faulty.producer(linger=600, delivery_timeout=0) as producer:
        producer.send(TOPIC, b"0", partition=0).result(PATIENCE)
        log.appending = answering(log, answer)  # type: ignore[assignment]
        with pytest.raises(OutcomeUnknown):
            producer.send(TOPIC, b"given up", partition=0).result(PATIENCE)
        log.heal()
        assert producer.send(TOPIC, b"1", partition=0).result(PATIENCE).offset == 1
        for outcome in log._inner.append(late):
            assert isinstance(outcome, PxrsError)
    assert values(faulty, 0) == [b"0", b"1"]


class Chaos:
    """Answers by chance, and lets some batches arrive long after it said that it can't tell."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._late: list[Callable[[], Appended | PxrsError]] = []
        self.calm = False

    def __call__(
        self, each: Append, do: Callable[[], Appended | PxrsError]
    ) -> Appended | PxrsError:
        if self.calm:
            return do()
        if self._late and self._random.random() < 0.3:
            self._late.pop(self._random.randrange(len(self._late)))()
        fate = self._random.choice(["away", "lost", "done", "late", "full", *["fine"] * 6])
        if fate == "away":
            return StoreUnavailable("away")
        if fate == "full":
            return StoreFull("no room")
        if fate == "late":
            self._late.append(do)
        if fate in ("lost", "late"):
            return OutcomeUnknown(fate)
        outcome = do()
        return OutcomeUnknown("done") if fate == "done" and was_appended(outcome) else outcome

    def let_all_arrive(self) -> None:
        while self._late:
            self._late.pop()()


def was_appended(outcome: object) -> bool:
    return isinstance(outcome, Appended)


def wrong_verdicts(seed: int) -> list[str]:
    """What a producer was told and is not so, over a log that answers by chance."""
    stores = FaultyStores(open_stores("memory://"))
    chaos, rng = Chaos(seed), random.Random(seed)
    sent: list[tuple[int, bytes, Sent]] = []
    with Pxrs(stores) as px:
        px.topics.create(TOPIC, partitions=3)
        stores.log.appending = answering(stores.log, chaos)  # type: ignore[assignment]
        patience = rng.choice([0.0, 0.003, PATIENCE])
        producer = px.producer(linger=600, batch_bytes=1, delivery_timeout=patience)
        producer._committer._backoff = Backoff(first=0.0001, longest=0.001)
        for number in range(40):
            partition = rng.randrange(3)
            value = b"%d" % number
            sent.append((partition, value, producer.send(TOPIC, value, partition=partition)))
            if rng.random() < 0.3:
                with suppress(DeliveryFailed, OutcomeUnknown):
                    producer.flush(PATIENCE)
        chaos.calm = True
        with suppress(DeliveryFailed, OutcomeUnknown):
            producer.close()
        chaos.let_all_arrive()
        return [wrong for part in range(3) for wrong in wrong_in(part, sent, values(px, part))]


def wrong_in(partition: int, sent: list[tuple[int, bytes, Sent]], found: list[bytes]) -> list[str]:
    wrong = [f"{value!r} twice" for value, times in Counter(found).items() if times > 1]
    acknowledged = []
    for where, value, handle in sent:
        if where != partition:
            continue
        try:
            acknowledged.append(handle.result(PATIENCE).offset)
        except OutcomeUnknown:
            continue
        except PxrsError as error:
            wrong += [f"{value!r} is there, and was told: {error!r}"] if value in found else []
            if not isinstance(error, DeliveryFailed):
                wrong.append(f"{value!r} has no fault of its own, and was told: {error!r}")
        else:
            if found[acknowledged[-1]] != value:
                wrong.append(f"{value!r} is not where it was said to be")
    if acknowledged != sorted(acknowledged):
        wrong.append("out of order")
    return wrong


@pytest.mark.engine("memory")
@pytest.mark.parametrize(
    "seeds", few_are_fast(range(at, at + 50) for at in range(0, 300, 50)), ids=str
)
def test_every_verdict_is_true(seeds: range) -> None:
    for seed in seeds:
        assert not wrong_verdicts(seed), f"seed {seed}"


def one_error_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Committer._attempt

    def mutant(
        self: Committer, sealed: list[tuple[PendingBatch, Batch]]
    ) -> list[Appended | Exception]:
        results = attempt(self, sealed)
        errors = [result for result in results if not isinstance(result, Appended)]
        return [errors[0]] * len(results) if errors else results

    monkeypatch.setattr(Committer, "_attempt", mutant)


def no_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Committer._fail

    def mutant(self: Committer, pending: PendingBatch, error: Exception) -> None:
        pending.unsure = False
        fail(self, pending, error)

    monkeypatch.setattr(Committer, "_fail", mutant)


def no_new_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Committer, "_can_renumber", lambda *_: False)


def new_numbers_for_what_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_anew = Committer._begin_anew

    def mutant(self: Committer, where: LogPartition) -> None:
        for pending in self._outbox.unsettled_in(where):
            pending.unsure = False
        begin_anew(self, where)

    monkeypatch.setattr(Committer, "_begin_anew", mutant)


@pytest.mark.engine("memory")
@pytest.mark.parametrize(
    "mutate", [one_error_for_all, no_doubts, no_new_numbers, new_numbers_for_what_may_be_there]
)
@pytest.mark.long
def test_a_broken_rule_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert any(wrong_verdicts(seed) for seed in range(300))
