"""Idempotent appends to a `LogStore`."""

from __future__ import annotations

from functools import partial

from pxrs.errors import ProducerFenced, PxrsError, SequenceGap, TopicNotFound
from pxrs.stores.api import LogStore
from pxrs.testing.conformance.lab import Lab
from pxrs.testing.conformance.log import BESIDE, HERE, new_log
from pxrs.testing.conformance.tools import append, batch, require, same, together, values_in
from pxrs.types import Append, Appended, LogPartition

PRODUCER = 7


def send(
    log: LogStore, *values: bytes, sequence: int, epoch: int = 0, where: LogPartition = HERE
) -> Appended | PxrsError:
    """Append one batch of the producer; what came of it."""
    sent = batch(*values, producer=(PRODUCER, epoch, sequence))
    return log.append([Append(where, sent)])[0]


def require_kind(outcome: object, kind: type[PxrsError]) -> None:
    """The outcome is an error of this kind."""
    require(isinstance(outcome, kind), f"{outcome!r} instead of {kind.__name__}")


def check_duplicates_are_recognised(lab: Lab) -> None:
    """A batch sent again, through any handle, is not appended again and gets its old offset."""
    here, there = new_log(lab), lab.open().log
    append(here, HERE, batch(b"other"))
    same(send(here, b"a", b"b", sequence=0), Appended(1), "the first batch")
    for log in (here, there):
        same(send(log, b"a", b"b", sequence=0), Appended(1, duplicate=True), "the repeat")
    same(send(there, b"c", sequence=2), Appended(3), "the next batch")
    same(values_in(here, HERE), {0: b"other", 1: b"a", 2: b"b", 3: b"c"}, "the messages")


def check_five_batches_are_remembered(lab: Lab) -> None:
    """Each of the last five batches is recognised; an older one is refused, not appended."""
    log = new_log(lab)
    for sequence in range(7):
        same(send(log, b"%d" % sequence, sequence=sequence), Appended(sequence), "a new batch")
    for sequence in range(2, 7):
        expected = Appended(sequence, duplicate=True)
        same(send(log, b"%d" % sequence, sequence=sequence), expected, "one of the last five")
    require_kind(send(log, b"0", sequence=0), SequenceGap)
    same(len(values_in(log, HERE)), 7, "the number of messages")


def check_gaps_are_refused(lab: Lab) -> None:
    """A batch whose predecessor is missing is refused until that one came."""
    log = new_log(lab)
    send(log, b"a", b"b", sequence=0)
    for sequence in (1, 3, 100):
        require_kind(send(log, b"x", sequence=sequence), SequenceGap)
    require_kind(send(log, b"a", sequence=0), SequenceGap)
    same(send(log, b"c", sequence=2), Appended(2), "the batch that follows")
    same(values_in(log, HERE), {0: b"a", 1: b"b", 2: b"c"}, "the messages")


def check_sequences_within_one_call(lab: Lab) -> None:
    """Batches of one call are judged in order, each on the outcome of those before it."""
    log = new_log(lab)
    sent = [
        batch(value, producer=(PRODUCER, 0, sequence))
        for value, sequence in [(b"a", 0), (b"b", 1), (b"a", 0), (b"x", 3), (b"c", 2), (b"d", 3)]
    ]
    outcomes = log.append([Append(HERE, each) for each in sent])
    require_kind(outcomes.pop(3), SequenceGap)
    expected = [Appended(0), Appended(1), Appended(0, duplicate=True), Appended(2), Appended(3)]
    same(outcomes, expected, "the outcomes")
    same(values_in(log, HERE), dict(enumerate([b"a", b"b", b"c", b"d"])), "the messages")


def check_a_refusal_is_said_of_its_batch_only(lab: Lab) -> None:
    """A refusal is reported for its batch only, not for other partitions, producers, or batches.

    Sent again, the call is answered alike: what was appended is known, what was refused is not.
    """
    log = new_log(lab)
    send(log, b"old", sequence=0, epoch=3)
    sent = [
        Append(HERE, batch(b"x", producer=(PRODUCER, 3, 9))),
        Append(BESIDE, batch(b"a", producer=(PRODUCER, 3, 0))),
        Append(HERE, batch(b"b", producer=(PRODUCER, 4, 0))),
        Append(LogPartition("none", 0), batch(b"x", producer=(PRODUCER, 3, 0))),
        Append(HERE, batch(b"c", producer=(8, 0, 0))),
        Append(HERE, batch(b"x", producer=(PRODUCER, 3, 1))),
        Append(BESIDE, batch(b"d", producer=(PRODUCER, 3, 1))),
    ]
    for repeated, gap in [(False, SequenceGap), (True, ProducerFenced)]:
        outcomes = log.append(sent)
        for number, kind in [(5, ProducerFenced), (3, TopicNotFound), (0, gap)]:
            require_kind(outcomes.pop(number), kind)
        bases = [Appended(base, duplicate=repeated) for base in (0, 1, 2, 1)]
        same(outcomes, bases, "the outcomes of the others")
    same(values_in(log, HERE), {0: b"old", 1: b"b", 2: b"c"}, "the messages here")
    same(values_in(log, BESIDE), {0: b"a", 1: b"d"}, "the messages beside")


def check_old_epochs_are_fenced(lab: Lab) -> None:
    """A higher epoch starts at 0 and shuts the older ones out; an equal sequence is no repeat."""
    log = new_log(lab)
    send(log, b"a", sequence=0, epoch=1)
    require_kind(send(log, b"x", sequence=1, epoch=2), SequenceGap)
    same(send(log, b"b", sequence=0, epoch=2), Appended(1), "the new epoch's first batch")
    for sequence in (0, 1):
        require_kind(send(log, b"x", sequence=sequence, epoch=1), ProducerFenced)
    same(send(log, b"c", sequence=1, epoch=2), Appended(2), "the new epoch's next batch")
    same(values_in(log, HERE), {0: b"a", 1: b"b", 2: b"c"}, "the messages")


def check_unknown_producer_starts_anywhere(lab: Lab) -> None:
    """The first batch of a producer is taken at any sequence: its past may have been forgotten."""
    log = new_log(lab)
    same(send(log, b"a", sequence=41, epoch=3), Appended(0), "the first batch")
    same(send(log, b"b", sequence=42, epoch=3), Appended(1), "the second batch")


def check_sequences_wrap(lab: Lab) -> None:
    """After sequence 2^31 - 1 comes 0, inside a batch too."""
    log = new_log(lab)
    last = 2**31 - 1
    same(send(log, b"a", sequence=last), Appended(0), "the last sequence")
    same(send(log, b"b", sequence=0), Appended(1), "the sequence after it")
    same(send(log, b"c", b"d", b"e", where=BESIDE, sequence=last - 1), Appended(0), "across")
    same(send(log, b"f", where=BESIDE, sequence=1), Appended(3), "after it")
    repeat = send(log, b"c", b"d", b"e", where=BESIDE, sequence=last - 1)
    same(repeat, Appended(0, duplicate=True), "the repeat")


def check_partitions_and_producers_are_apart(lab: Lab) -> None:
    """Every producer has a sequence of its own in every partition."""
    log = new_log(lab)
    same(send(log, b"a", sequence=0), Appended(0), "here")
    same(send(log, b"a", where=BESIDE, sequence=0), Appended(0), "beside")
    same(append(log, HERE, batch(b"b", producer=(8, 0, 0))), [1], "another producer")
    same(append(log, HERE, batch(b"c", producer=(0, 0, 0))), [2], "producer 0")
    same(send(log, b"d", sequence=1), Appended(3), "here again")


def check_trimmed_batches_are_remembered(lab: Lab) -> None:
    """A repeat is recognised after its batch was trimmed away."""
    log = new_log(lab)
    send(log, b"a", sequence=0)
    log.trim(HERE, 1)
    same(send(log, b"a", sequence=0), Appended(0, duplicate=True), "the repeat")
    same(values_in(log, HERE), {}, "the messages")


def check_repeats_race(lab: Lab) -> None:
    """The same batch sent by many at once is appended once."""
    handles = [new_log(lab), lab.open().log]
    for sequence in range(10):
        outcomes: list[object] = []

        def repeat(
            log: LogStore, sequence: int = sequence, outcomes: list[object] = outcomes
        ) -> None:
            outcomes.append(send(log, b"x", sequence=sequence))

        together(lab, *(partial(repeat, handles[number % 2]) for number in range(4)))
        repeats = outcomes.count(Appended(sequence, duplicate=True))
        same((outcomes.count(Appended(sequence)), repeats), (1, 3), "news and repeats")
