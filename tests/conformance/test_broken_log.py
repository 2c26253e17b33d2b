"""Logs with one rule broken each: the log suite finds every one of them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence

import pytest

from pxrs.codec.batches import set_base_offset
from pxrs.core.sequences import SEQUENCES
from pxrs.errors import (
    OffsetOutOfRange,
    OutcomeUnknown,
    PxrsError,
    StoreUnavailable,
    TopicNotFound,
)
from pxrs.stores.api import Watch
from pxrs.stores.memory.log import Kept, MemoryLog, MemoryPartition
from pxrs.stores.memory.stores import MemoryStores
from pxrs.stores.wakeups import Wakeups
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance import (
    MemoryLab,
    Violation,
    doubt_checks,
    log_checks,
    run_suite,
)
from pxrs.testing.faults import FaultyLog
from pxrs.types import (
    Append,
    Appended,
    Batch,
    Bounds,
    Fetched,
    LogPartition,
    StoredBatch,
)

pytestmark = pytest.mark.engine("memory")


def without_producer(batch: Batch) -> Batch:
    return Batch(batch.data, batch.count, batch.max_timestamp)


class LeavesHoles(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        self.end += 1
        return super().append(batch)


class ReadsWhatFits(MemoryPartition):
    def read(self, offset: int, max_bytes: int) -> list[StoredBatch]:
        found = super().read(offset, max_bytes)
        return found if sum(len(each.data) for each in found) <= max_bytes else []


class ReadsOneTooMany(MemoryPartition):
    def read(self, offset: int, max_bytes: int) -> list[StoredBatch]:
        found = super().read(offset, 1 << 40)
        return found[: len(super().read(offset, max_bytes)) + 1]


class StartsAfterTheOffset(MemoryPartition):
    def read(self, offset: int, max_bytes: int) -> list[StoredBatch]:
        return [each for each in super().read(offset, max_bytes) if each.base >= offset]


class KeepsTheSendersBuffer(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        appended = super().append(batch)
        if not appended.duplicate:
            stored, max_timestamp = self.batches[-1]
            self.batches[-1] = Kept(stored._replace(data=batch.data), max_timestamp)  # type: ignore[arg-type]
        return appended


class LeavesTheBaseOffset(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        appended = super().append(batch)
        if not appended.duplicate:
            stored, max_timestamp = self.batches[-1]
            data = bytearray(stored.data)
            set_base_offset(data, 0)
            self.batches[-1] = Kept(stored._replace(data=bytes(data)), max_timestamp)
        return appended


class StartsAgainWhenEmptied(MemoryPartition):
    def trim(self, before: int) -> None:
        super().trim(before)
        if not self.batches:
            self.end = 0


class CutsBatches(MemoryPartition):
    def bounds(self) -> Bounds:
        start, end = super().bounds()
        return Bounds(max(start, getattr(self, "cut", 0)), end)

    def trim(self, before: int) -> None:
        super().trim(before)
        self.cut = min(before, self.end)


class ExpiresTheNewest(MemoryPartition):
    def expire(self, before_timestamp: int | None, max_bytes: int | None) -> None:
        super().expire(before_timestamp, max_bytes)
        if before_timestamp is not None and self.batches:
            newest = self.batches[-1]
            if newest.max_timestamp < before_timestamp:
                self.trim(newest.stored.next)


class ExpiresInTheMiddle(MemoryPartition):
    def expire(self, before_timestamp: int | None, max_bytes: int | None) -> None:
        super().expire(before_timestamp, max_bytes)
        if before_timestamp is not None:
            self.batches[:-1] = [
                kept for kept in self.batches[:-1] if kept.max_timestamp >= before_timestamp
            ]


class ExpiresOneTooFew(MemoryPartition):
    def expire(self, before_timestamp: int | None, max_bytes: int | None) -> None:
        room = None if max_bytes is None else max_bytes + len(self.batches[0].stored.data)
        super().expire(before_timestamp, room)


class TrustsTimestamps(MemoryPartition):
    def batch_at(self, timestamp: int) -> int | None:
        index = bisect_left(self.batches, timestamp, key=lambda kept: kept.max_timestamp)
        return self.batches[index].stored.base if index < len(self.batches) else None


class TellsNoStart(MemoryPartition):
    def bounds(self) -> Bounds:
        return super().bounds()._replace(start=0)


class OnlyGrows(MemoryPartition):
    def trim(self, before: int) -> None:
        size = self.size
        super().trim(before)
        self.size = size


class TakesDuplicates(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        return super().append(without_producer(batch))


class TellsTheEndOfDuplicates(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        appended = super().append(batch)
        return appended._replace(base=self.end) if appended.duplicate else appended


class IgnoresEpochs(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        if batch.producer_id < 0:
            return super().append(batch)
        return super().append(
            Batch(
                batch.data,
                batch.count,
                batch.max_timestamp,
                batch.producer_id,
                0,
                batch.base_sequence,
            )
        )


class RemembersOneBatch(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        appended = super().append(batch)
        for producer, state in self._producers.items():
            self._producers[producer] = state._replace(batches=state.batches[-1:])
        return appended


class TakesGaps(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        state = self._producers.get(batch.producer_id)
        if state is not None and batch.base_sequence > state.batches[-1].sequence:
            del self._producers[batch.producer_id]
        return super().append(batch)


class NeverWraps(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        appended = super().append(batch)
        for producer, state in self._producers.items():
            last = state.batches[-1]
            if last.sequence + last.length >= SEQUENCES:
                moved = last._replace(sequence=last.sequence - 10)
                self._producers[producer] = state._replace(batches=(moved,))
        return appended


class RefusesLateStarters(MemoryPartition):
    def append(self, batch: Batch) -> Appended:
        if batch.producer_id >= 0 and batch.producer_id not in self._producers:
            batch = Batch(
                batch.data,
                batch.count,
                batch.max_timestamp,
                batch.producer_id,
                batch.producer_epoch,
            )
        return super().append(batch)


class ForgetsWithTheBatches(MemoryPartition):
    def trim(self, before: int) -> None:
        super().trim(before)
        self._producers.clear()


class AppendsWithoutALock(MemoryPartition):
    """Two appends meet between reading the end and writing."""

    def __init__(self) -> None:
        super().__init__()
        self._meeting = threading.Barrier(2)

    def append(self, batch: Batch) -> Appended:
        base = self.end
        try:
            self._meeting.wait(0.1)
        except threading.BrokenBarrierError:
            self._meeting.reset()
        self.end = base
        return super().append(batch)


class Unlocked(MemoryLog):
    def create(self, topic_id: str, partitions: int) -> None:
        self._topics.setdefault(topic_id, [AppendsWithoutALock() for _ in range(partitions)])

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        return [self.find(where).append(batch) for where, batch in appends]


class FailsTogether(MemoryLog):
    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        for where, _ in appends:
            self.find(where)
        return super().append(appends)


class TellsOneErrorToAll(MemoryLog):
    """What was appended is called refused when something else of the call was."""

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        outcomes = super().append(appends)
        errors = [outcome for outcome in outcomes if isinstance(outcome, PxrsError)]
        return [errors[0]] * len(outcomes) if errors else outcomes


class EndsAtTheFirstError(MemoryLog):
    """A refusal is taken for the fate of everything behind it."""

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        outcomes: list[Appended | PxrsError] = []
        for append in appends:
            refused = outcomes and isinstance(outcomes[-1], PxrsError)
            outcomes.append(outcomes[-1] if refused else super().append([append])[0])
        return outcomes


class TakesEmptyBatches(MemoryLog):
    def place(self, where: LogPartition, batch: Batch) -> Appended:
        appended = self.find(where).append(batch)
        self._wakeups.ring((where,))
        return appended


class AnswersOutOfOrder(MemoryLog):
    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        return super().append(sorted(appends, key=lambda each: each.where))


class MixesPartitions(MemoryLog):
    def find(self, where: LogPartition) -> MemoryPartition:
        return super().find(LogPartition(where.topic_id, 0))


class SnapsIntoRange(MemoryLog):
    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        try:
            return super().fetch(where, offset, max_bytes)
        except OffsetOutOfRange as error:
            return super().fetch(where, max(error.start, min(offset, error.end)), max_bytes)


class MakesWhatIsMissing(MemoryLog):
    def fetch(self, where: LogPartition, offset: int, max_bytes: int) -> Fetched:
        try:
            return super().fetch(where, offset, max_bytes)
        except TopicNotFound:
            return Fetched([], 0, 0)


class EmptiesOnCreate(MemoryLog):
    def create(self, topic_id: str, partitions: int) -> None:
        self.drop(topic_id)
        super().create(topic_id, partitions)


class DropsNothing(MemoryLog):
    def drop(self, topic_id: str) -> None:
        pass


class AppendsInSilence(MemoryLog):
    def place(self, where: LogPartition, batch: Batch) -> Appended:
        return self.find(where).append(batch)


class WatchesOnePartition(MemoryLog):
    def watch(self, *where: LogPartition) -> Watch:
        return super().watch(where[0])


class WakesOneWatch(MemoryLog):
    def watch(self, *where: LogPartition) -> Watch:
        self._wakeups = Wakeups(self._lock, settle=lambda: None)
        return super().watch(*where)


def made_of(broken: type[MemoryPartition]) -> type[MemoryLog]:
    class Made(MemoryLog):
        def create(self, topic_id: str, partitions: int) -> None:
            if topic_id not in self._topics:
                super().create(topic_id, partitions)
                self._topics[topic_id] = [broken() for _ in range(partitions)]

    Made.__name__ = broken.__name__
    return Made


BROKEN: list[tuple[type[MemoryLog], str]] = [
    (made_of(LeavesHoles), "check_offsets_are_dense"),
    (made_of(ReadsWhatFits), "check_fetch_keeps_to_the_size"),
    (made_of(ReadsOneTooMany), "check_fetch_keeps_to_the_size"),
    (made_of(StartsAfterTheOffset), "check_fetch_finds_the_batch"),
    (made_of(KeepsTheSendersBuffer), "check_data_is_kept"),
    (made_of(LeavesTheBaseOffset), "check_data_is_kept"),
    (made_of(StartsAgainWhenEmptied), "check_offsets_are_never_given_twice"),
    (made_of(CutsBatches), "check_trim_drops_whole_batches"),
    (made_of(ExpiresTheNewest), "check_newest_batch_never_expires"),
    (made_of(ExpiresInTheMiddle), "check_expire_by_age"),
    (made_of(ExpiresOneTooFew), "check_expire_by_size"),
    (made_of(TrustsTimestamps), "check_batch_at_a_time"),
    (made_of(TellsNoStart), "check_bounds"),
    (made_of(OnlyGrows), "check_size"),
    (made_of(TakesDuplicates), "check_duplicates_are_recognised"),
    (made_of(TakesDuplicates), "check_repeats_race"),
    (made_of(TellsTheEndOfDuplicates), "check_duplicates_are_recognised"),
    (made_of(IgnoresEpochs), "check_old_epochs_are_fenced"),
    (made_of(RemembersOneBatch), "check_five_batches_are_remembered"),
    (made_of(TakesGaps), "check_gaps_are_refused"),
    (made_of(TakesGaps), "check_sequences_within_one_call"),
    (made_of(NeverWraps), "check_sequences_wrap"),
    (made_of(RefusesLateStarters), "check_unknown_producer_starts_anywhere"),
    (made_of(ForgetsWithTheBatches), "check_trimmed_batches_are_remembered"),
    (Unlocked, "check_concurrent_appends_are_all_kept"),
    (FailsTogether, "check_one_bad_batch_fails_alone"),
    (TakesEmptyBatches, "check_one_bad_batch_fails_alone"),
    (AnswersOutOfOrder, "check_one_call_fills_several_partitions"),
    (MixesPartitions, "check_partitions_and_producers_are_apart"),
    (SnapsIntoRange, "check_offsets_out_of_range"),
    (MakesWhatIsMissing, "check_unknown_partitions"),
    (TellsOneErrorToAll, "check_a_refusal_is_said_of_its_batch_only"),
    (EndsAtTheFirstError, "check_a_refusal_is_said_of_its_batch_only"),
    (EmptiesOnCreate, "check_create_again_changes_nothing"),
    (DropsNothing, "check_dropped_topic_is_gone"),
    (AppendsInSilence, "check_appends_wake"),
    (AppendsInSilence, "check_readers_miss_nothing"),
    (WatchesOnePartition, "check_appends_wake"),
    (WakesOneWatch, "check_every_log_watch_wakes"),
]


class GoesOnBehindDoubts(FaultyLog):
    """Each batch by itself, whatever became of the one before it."""

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        return [self._append_one(append) for append in appends]


class GoesOnAndSaysNothingOfIt(FaultyLog):
    """What is behind a batch in doubt is told to wait, and is appended all the same."""

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        outcomes: list[Appended | PxrsError] = []
        waiting: set[LogPartition] = set()
        for append in appends:
            outcome = self._append_one(append)
            if append.where in waiting:
                outcome = StoreUnavailable("it waits for the batch before it")
            elif isinstance(outcome, PxrsError):
                waiting.add(append.where)
            outcomes.append(outcome)
        return outcomes


class GoesOnInOtherCalls(FaultyLog):
    """A batch in doubt ends the producer's sequence: the next one may start anywhere."""

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        outcomes = super().append(appends)
        assert isinstance(self._inner, MemoryLog)
        for (where, batch), outcome in zip(appends, outcomes, strict=True):
            if isinstance(outcome, OutcomeUnknown):
                self._inner.find(where)._producers.pop(batch.producer_id, None)
        return outcomes


DOUBTFUL: list[tuple[type[FaultyLog], str]] = [
    (GoesOnBehindDoubts, "check_nothing_is_appended_behind_a_batch_in_doubt"),
    (GoesOnAndSaysNothingOfIt, "check_nothing_is_appended_behind_a_batch_in_doubt"),
    (GoesOnInOtherCalls, "check_a_later_call_overtakes_no_batch_in_doubt"),
]


@pytest.mark.parametrize(
    ("broken", "check"), DOUBTFUL, ids=lambda each: getattr(each, "__name__", each)
)
def test_what_goes_on_behind_a_doubt_is_caught(broken: type[FaultyLog], check: str) -> None:
    failures = run_suite(
        [*log_checks(), *doubt_checks()], lambda: MemoryLab(failing=broken, patience=0.3)
    )
    found = {failure.check for failure in failures}
    assert check in found
    assert found <= {rule.__name__ for rule in doubt_checks()}
    if broken is not GoesOnInOtherCalls:
        assert found == {check}


def test_a_lab_that_lets_nothing_fail_is_told() -> None:
    calm = MemoryLab(failing=lambda log, _: log)
    for rule in doubt_checks():
        with pytest.raises(Violation, match="left a batch in doubt"):
            rule(calm)
        calm = MemoryLab(failing=lambda log, _: log)


def lab_of(broken: Callable[[threading.RLock], MemoryLog]) -> MemoryLab:
    class BrokenStores(MemoryStores):
        def __init__(self, clock: VirtualClock) -> None:
            super().__init__(clock=clock)
            self.log = broken(self.lock)

    return MemoryLab(BrokenStores, patience=0.3)


def name_of(parameter: type[MemoryLog] | str) -> str:
    return parameter if isinstance(parameter, str) else parameter.__name__


@pytest.mark.parametrize(("broken", "check"), BROKEN, ids=name_of)
def test_is_caught(broken: type[MemoryLog], check: str) -> None:
    rules = [rule for rule in log_checks() if rule.__name__ == check]
    failures = run_suite(rules, lambda: lab_of(broken))
    assert [failure.check for failure in failures] == [check]
