"""Appends to a `LogStore` that fail, or are not answered: the batches behind them have to wait.

A producer sends several batches of a partition at once, and relies on this: a batch in doubt is
sent again, and batches that were appended ahead of it would be out of order, or it would be refused
for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pxrs.errors import OutcomeUnknown, PxrsError, SequenceGap
from pxrs.stores.api import LogStore
from pxrs.testing.conformance.lab import FailingAppend, FailingLab, Lab, Violation
from pxrs.testing.conformance.log import BESIDE, HERE, new_log
from pxrs.testing.conformance.tools import ATTEMPTS, batch, require, same, values_in
from pxrs.types import Append, Appended, LogPartition

_FIRST_PRODUCER = 100


def in_doubt(outcome: Appended | PxrsError) -> bool:
    """Whether the batch should be sent again, before those that follow it."""
    return isinstance(outcome, OutcomeUnknown) or getattr(outcome, "retryable", False)


def ways_of(lab: Lab) -> Sequence[FailingAppend]:
    if not isinstance(lab, FailingLab):
        raise Violation("the lab has no `failing_appends`, which these checks need")
    return lab.failing_appends


def tried(way: FailingAppend, sent: Sequence[Append]) -> list[Appended | PxrsError]:
    """The outcome of each batch; an exception is the outcome of all."""
    try:
        outcomes = way(sent)
    except PxrsError as error:
        return [error] * len(sent)
    same(len(outcomes), len(sent), "the number of outcomes")
    return outcomes


def send_until_known(log: LogStore, sent: Sequence[Append]) -> None:
    """Send the same batches, in the same order, until all are in the log."""
    for _ in range(ATTEMPTS):
        outcomes = log.append(sent)
        if not any(map(in_doubt, outcomes)):
            break
    for outcome in outcomes:
        require(isinstance(outcome, Appended), f"a batch sent again was refused: {outcome!r}")


def values_of(sent: Sequence[Append], where: LogPartition, producer: int) -> list[bytes]:
    """The messages sent to a partition: one per batch, named by sender and number."""
    number = sum(1 for append in sent if append.where == where)
    return [_value(producer, where, sequence) for sequence in range(number)]


def _value(producer: int, where: LogPartition, sequence: int) -> bytes:
    return b"producer %d, partition %d, batch %d;" % (producer, where.partition, sequence)


def _append(producer: int, where: LogPartition, sequence: int) -> Append:
    value = _value(producer, where, sequence)
    return Append(where, batch(value, producer=(producer, 0, sequence)))


def _found(log: LogStore, where: LogPartition, producer: int) -> list[bytes]:
    start = b"producer %d," % producer
    return [value for value in values_in(log, where).values() if value.startswith(start)]


def _producers(lab: Lab) -> Iterator[tuple[int, FailingAppend]]:
    """Each way to fail, with a producer that the log has never seen."""
    return enumerate(ways_of(lab), _FIRST_PRODUCER)


def check_nothing_is_appended_behind_a_batch_in_doubt(lab: Lab) -> None:
    """Behind a batch that is unknown or to be tried again, its partition's later ones are not
    appended by the same call: sent again, all are there once, and in order.

    The log does not know the producer, so no sequence could show it that one is missing.
    """
    log = new_log(lab)
    doubts = 0
    for producer, way in _producers(lab):
        sent = [
            _append(producer, where, sequence)
            for where, sequence in [(HERE, 0), (BESIDE, 0), (HERE, 1), (BESIDE, 1), (HERE, 2)]
        ]
        outcomes = tried(way, sent)
        for where in (HERE, BESIDE):
            doubtful = False
            for append, outcome in zip(sent, outcomes, strict=True):
                if append.where == where:
                    told = isinstance(outcome, Appended)
                    require(not (doubtful and told), f"{outcome!r} behind a batch in doubt")
                    doubtful = doubtful or in_doubt(outcome)
            doubts += doubtful
            values = values_of(sent, where, producer)
            found = _found(log, where, producer)
            same(found, values[: len(found)], "what is there, first of all what was sent first")
        send_until_known(log, sent)
        for where in (HERE, BESIDE):
            values = values_of(sent, where, producer)
            same(_found(log, where, producer), values, "what was sent again")
    require(doubts > 0, "none of the lab's failing appends left a batch in doubt")


def check_a_later_call_overtakes_no_batch_in_doubt(lab: Lab) -> None:
    """A batch after one in doubt is refused by later calls, through any handle, until that
    one is there."""
    log = new_log(lab)
    doubts = 0
    for producer, way in _producers(lab):
        first, second, third = (_append(producer, HERE, sequence) for sequence in range(3))
        send_until_known(log, [first])
        doubts += in_doubt(tried(way, [second])[0])
        (outcome,) = log.append([third])
        values = values_of([first, second, third], HERE, producer)
        if isinstance(outcome, Appended):
            same(_found(log, HERE, producer), values, "what is there with the last one")
        else:
            require(isinstance(outcome, SequenceGap), f"{outcome!r} where one is missing")
        send_until_known(log, [second, third])
        same(_found(log, HERE, producer), values, "what was sent again")
    require(doubts > 0, "none of the lab's failing appends left a batch in doubt")
