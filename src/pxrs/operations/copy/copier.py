"""One run of a copy."""

from __future__ import annotations

import msgspec

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import public
from pxrs.errors import CopyRefused, TopicNotFound
from pxrs.operations.copy.items import (
    copy_queues,
    count_items,
    held_items,
    item_differences,
    queues_of,
    require_restorer,
)
from pxrs.operations.copy.logs import copy_topic, sum_up
from pxrs.operations.copy.records import (
    CLAIMS,
    GROUPS,
    copy_records,
    lasting,
    members,
    record_differences,
    refuse_too_large,
)
from pxrs.operations.copy.report import CopyReport, OnProgress, PartitionSum, Phase, Tally
from pxrs.operations.copy.state import CopyState, read_state, write_state
from pxrs.stores.api import Stores
from pxrs.topics import Topics
from pxrs.types import Topic

_SHOWN = 5


def copy_store(
    source: Stores,
    target: Stores,
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> CopyReport:
    """Copy everything, or the rest of it, and verify. Run it again after whatever stopped it.

    The target has to be empty, or to hold an earlier run's part. With `force` a source is copied
    that is in use: what changes meanwhile is found by the verification, and copied by the next
    run. Producers can't be seen; stop them, too.
    """
    copier = _Copier(source, target, Tally(on_progress), clock)
    state, resumed = copier.begin(force)
    if not state.complete:
        copier.refuse_use_of_target()
        state = copier.copy(state)
    report = copier.verify(state, resumed)
    if report.complete and not state.complete:
        write_state(target.coord, state, msgspec.structs.replace(state, complete=True))
    return report


class _Copier:
    def __init__(self, source: Stores, target: Stores, tally: Tally, clock: Clock) -> None:
        self._source = source
        self._target = target
        self._tally = tally
        self._clock = clock
        self._topics = Topics(source.coord, source.log, clock)

    def begin(self, force: bool) -> tuple[CopyState, bool]:
        """Whose copy the target holds; it becomes ours if it is empty."""
        source, target = self._source, self._target
        if public(source.url) == public(target.url):
            raise CopyRefused(f"{public(source.url)} can't be copied into itself")
        found = read_state(target.coord)
        if found is None:
            self._refuse_occupied()
        elif found.source != public(source.url):
            raise CopyRefused(
                f"the target holds {'a' if found.complete else 'an unfinished'} copy of "
                f"{found.source}; copy into an empty store"
            )
        if found is not None and found.complete:
            return found, True
        if not force:
            self._refuse_use_of_source()
        require_restorer(queues_of(source), queues_of(target))
        refuse_too_large(source.coord, target.coord)
        state = found or CopyState(source=public(source.url))
        write_state(target.coord, found, state)
        return state, found is not None

    def _refuse_occupied(self) -> None:
        target = self._target
        queues = queues_of(target)
        names = [f"queue {queue.name!r}" for queue in (queues.all() if queues else [])]
        found = [f"record {key!r}" for key in lasting(target.coord)] + names
        if found:
            raise CopyRefused(
                f"the target is not empty: it holds {_some(found)}; copy into an empty store"
            )

    def _refuse_use_of_source(self) -> None:
        use = self._use_of_source()
        if use is not None:
            raise CopyRefused(
                f"{use}; stop its consumers, workers and producers, or copy with --force and once "
                "more when they have stopped"
            )

    def _use_of_source(self) -> str | None:
        """Who works on the source, as far as that can be seen."""
        active = members(self._source.coord)
        if active:
            return f"the source is in use: {_some(active)}"
        held = held_items(queues_of(self._source))
        return f"the source is in use, items are held: {_some(held)}" if held else None

    def refuse_use_of_target(self) -> None:
        """Nobody may work on what is not all there."""
        active = members(self._target.coord)
        if active:
            raise CopyRefused(f"the target is in use before it is complete: {_some(active)}")

    def copy(self, state: CopyState) -> CopyState:
        """Do what is missing."""
        source, target, tally = self._source, self._target, self._tally
        topics = self._topics.list()
        for gone in sorted(set(state.topics) - {topic.id for topic in topics}):
            target.log.drop(gone)
        now = msgspec.structs.replace(state, topics=tuple(sorted(topic.id for topic in topics)))
        write_state(target.coord, state, now)
        tally.expect(Phase.MESSAGES, self._missing(topics, state))
        for topic in topics:
            copy_topic(
                source.log, target.log, topic, lambda number: tally.add(Phase.MESSAGES, number)
            )
        queues, others = queues_of(source), queues_of(target)
        tally.expect(Phase.ITEMS, max(0, count_items(queues) - count_items(others)))
        copy_queues(queues, others, lambda number: tally.add(Phase.ITEMS, number), self._clock)
        tally.expect(Phase.RECORDS, len(lasting(source.coord)) - len(lasting(target.coord)))
        copy_records(source.coord, target.coord, lambda number: tally.add(Phase.RECORDS, number))
        return now

    def _missing(self, topics: list[Topic], state: CopyState) -> int:
        total = 0
        for topic in topics:
            wanted = self._source.log.bounds(topic.id)
            self._target.log.create(topic.id, topic.partitions)
            have = self._target.log.bounds(topic.id)
            total += sum(
                held.end - max(held.start, min(have[number].end, held.end))
                for number, held in wanted.items()
            )
        return total

    def verify(self, state: CopyState, resumed: bool) -> CopyReport:
        """Compare everything, down to the bytes of the batches."""
        source, target = self._source, self._target
        topics = self._topics.list()
        bounds = {topic.id: self._topics.bounds(topic) for topic in topics}
        held = sum(part.end - part.start for parts in bounds.values() for part in parts.values())
        self._tally.expect(Phase.VERIFY, held)
        sums: list[PartitionSum] = []
        differences: list[str] = []
        for topic in topics:
            try:
                for number in range(topic.partitions):
                    wanted = sum_up(source.log, topic, number, self._verified)
                    have = sum_up(target.log, topic, number, lambda _: None)
                    sums.append(have)
                    if wanted != have:
                        differences.append(_difference(wanted, have))
            except TopicNotFound:
                differences.append(f"topic {topic.name!r} is not in both stores")
        queues, others = queues_of(source), queues_of(target)
        differences += item_differences(queues, others, self._clock)
        differences += record_differences(source.coord, target.coord)
        if not state.complete and (use := self._use_of_source()) is not None:
            # Equal for now only: it may change at any time.
            differences.append(use)
        records = lasting(target.coord)
        return CopyReport(
            source=state.source,
            target=public(target.url),
            complete=not differences,
            resumed=resumed,
            only_verified=state.complete,
            topics=len(topics),
            groups=sum(key.startswith(GROUPS) for key in records),
            claims=sum(key.startswith(CLAIMS) for key in records),
            records=len(records),
            queues=len(others.all()) if others else 0,
            items=count_items(others),
            copied={
                str(phase): number
                for phase, number in self._tally.done.items()
                if phase is not Phase.VERIFY
            },
            partitions=tuple(sums),
            differences=tuple(differences),
        )

    def _verified(self, number: int) -> None:
        self._tally.add(Phase.VERIFY, number)


def _difference(wanted: PartitionSum, have: PartitionSum) -> str:
    name = f"partition {wanted.partition} of topic {wanted.topic!r}"
    if (wanted.start, wanted.end) != (have.start, have.end):
        return (
            f"{name} holds {wanted.start} to {wanted.end} in the source, "
            f"{have.start} to {have.end} in the target"
        )
    return f"{name}: the batches are not the same"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
