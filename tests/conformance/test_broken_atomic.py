"""Atomic blocks with one rule broken each: the atomic suite finds every one of them."""

from __future__ import annotations

from types import TracebackType

import pytest

from pxrs.errors import CommitConflict, PartitionNotFound, PxrsError
from pxrs.stores.memory.stores import MemoryAtomic, MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance import MemoryLab, atomic_checks, run_suite
from pxrs.types import Append, Batch, Check, LogPartition, Put, QueueChange, Write

pytestmark = pytest.mark.engine("memory")


class AppendsDespiteAConflict(MemoryAtomic):
    def _apply(self) -> None:
        try:
            super()._apply()
        except CommitConflict:
            self._log.append(self._appends)
            raise


class WritesDespiteABadAppend(MemoryAtomic):
    def _apply(self) -> None:
        try:
            super()._apply()
        except CommitConflict:
            raise
        except PxrsError:
            self._coord.apply(self._writes)
            raise


class AppliesDespiteAnException(MemoryAtomic):
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._apply()


class SwallowsConflicts(MemoryAtomic):
    def _apply(self) -> None:
        try:
            super()._apply()
        except CommitConflict:
            return


class SkipsUnwrittenKeys(MemoryAtomic):
    def _apply(self) -> None:
        written = {write.key for write in self._writes}
        self._checks = [check for check in self._checks if check.key in written]
        super()._apply()


class SkipsChecks(MemoryAtomic):
    def check(self, *checks: Check) -> None:
        pass


class TakesAnything:
    """A connection, as far as a block can tell."""

    def execute(self, statement: str) -> None:
        pass


class NeverNoticesAnEnd(MemoryAtomic):
    connection = TakesAnything()  # type: ignore[assignment]


class TakesProducerIds(MemoryAtomic):
    def append(self, where: LogPartition, batch: Batch) -> None:
        self._appends.append(Append(where, batch))


class LetsTheDeadWrite(MemoryAtomic):
    def write(self, *writes: Write) -> None:
        super().write(
            *(Put(each.key, each.value) if isinstance(each, Put) else each for each in writes)
        )


class WritesAtOnce(MemoryAtomic):
    def write(self, *writes: Write) -> None:
        self._coord.commit((), writes)


class AppendsAtOnce(MemoryAtomic):
    def append(self, where: LogPartition, batch: Batch) -> None:
        super().append(where, batch)
        self._log.append([self._appends.pop()])


class TakesTheLastWrite(MemoryAtomic):
    def _apply(self) -> None:
        self._writes = list({write.key: write for write in self._writes}.values())
        super()._apply()


class TellsNothing(MemoryAtomic):
    def _apply(self) -> None:
        super()._apply()
        self.versions = {}


class WorksInSilence(MemoryAtomic):
    def _apply(self) -> None:
        coord, log = self._coord._wakeups, self._log._wakeups
        watches = dict(coord._watches), dict(log._watches)
        coord._watches.clear()
        log._watches.clear()
        super()._apply()
        coord._watches.update(watches[0])
        log._watches.update(watches[1])


class ChangesQueuesDespiteAConflict(MemoryAtomic):
    def _apply(self) -> None:
        try:
            super()._apply()
        except CommitConflict:
            assert self._change is not None
            self._queues.apply(self._change)
            raise


class ChangesQueuesDespiteABadAppend(MemoryAtomic):
    def _apply(self) -> None:
        try:
            super()._apply()
        except PartitionNotFound:
            assert self._change is not None
            self._queues.apply(self._change)
            raise


class ChangesQueuesAtOnce(MemoryAtomic):
    def queue(self, change: QueueChange) -> None:
        self.queued = self._queues.apply(change)


class ChangesQueuesAfterwards(MemoryAtomic):
    """Commits the rest first, and learns then that an item was lost."""

    def _apply(self) -> None:
        change, self._change = self._change, None
        super()._apply()
        if change is not None:
            self.queued = self._queues.apply(change)


class JudgesHoldsAsTheyWere(MemoryAtomic):
    """Sees the deadlines of when it began, as a plain read in an old snapshot would."""

    def __enter__(self) -> MemoryAtomic:
        queues = self._queues._queues.values()
        self._seen = [(item, item.lock_until) for queue in queues for item in queue.items.values()]
        return super().__enter__()

    def _apply(self) -> None:
        for item, lock_until in self._seen:
            item.lock_until = lock_until
        super()._apply()


class TakesTheLastChange(MemoryAtomic):
    def queue(self, change: QueueChange) -> None:
        self._change = None
        super().queue(change)


class ForgetsTheQueues(MemoryAtomic):
    def queue(self, change: QueueChange) -> None:
        pass


BROKEN: list[tuple[type[MemoryAtomic], str]] = [
    (AppendsDespiteAConflict, "check_conflict_rolls_back"),
    (AppendsDespiteAConflict, "check_every_effect_has_its_checkpoint"),
    (WritesDespiteABadAppend, "check_bad_append_rolls_back"),
    (AppliesDespiteAnException, "check_exception_rolls_back"),
    (SwallowsConflicts, "check_conflict_rolls_back"),
    (NeverNoticesAnEnd, "check_a_transaction_ended_inside_applies_nothing"),
    (SkipsUnwrittenKeys, "check_conflict_on_an_unwritten_record_rolls_back"),
    (SkipsChecks, "check_conflict_rolls_back"),
    (TakesProducerIds, "check_producer_ids_are_refused"),
    (LetsTheDeadWrite, "check_dead_session_rolls_back"),
    (WritesAtOnce, "check_nothing_is_seen_before_the_end"),
    (AppendsAtOnce, "check_nothing_is_seen_before_the_end"),
    (TakesTheLastWrite, "check_impossible_blocks_are_refused"),
    (TellsNothing, "check_everything_is_applied"),
    (TellsNothing, "check_parts_may_be_left_out"),
    (WorksInSilence, "check_blocks_wake"),
    (ChangesQueuesDespiteAConflict, "check_conflict_leaves_queues_alone"),
    (ChangesQueuesDespiteABadAppend, "check_conflict_leaves_queues_alone"),
    (ChangesQueuesAtOnce, "check_queues_change_with_the_rest"),
    (ChangesQueuesAtOnce, "check_conflict_leaves_queues_alone"),
    (ChangesQueuesAfterwards, "check_lost_item_rolls_back"),
    (JudgesHoldsAsTheyWere, "check_holds_are_extended_beside_a_block"),
    (TakesTheLastChange, "check_a_block_changes_queues_once"),
    (ForgetsTheQueues, "check_queues_change_with_the_rest"),
    (ForgetsTheQueues, "check_blocks_wake_takers"),
]


def lab_of(broken: type[MemoryAtomic]) -> MemoryLab:
    class BrokenStores(MemoryStores):
        def __init__(self, clock: VirtualClock) -> None:
            super().__init__(clock=clock)

        def atomic(self, connection: object = None) -> MemoryAtomic:
            return broken(self)

    return MemoryLab(BrokenStores, patience=0.3)


def name_of(parameter: type[MemoryAtomic] | str) -> str:
    return parameter if isinstance(parameter, str) else parameter.__name__


@pytest.mark.parametrize(("broken", "check"), BROKEN, ids=name_of)
def test_is_caught(broken: type[MemoryAtomic], check: str) -> None:
    rules = [rule for rule in atomic_checks() if rule.__name__ == check]
    failures = run_suite(rules, lambda: lab_of(broken))
    assert [failure.check for failure in failures] == [check]
