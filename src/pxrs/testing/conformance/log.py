"""Appending to, reading from and trimming a `LogStore`; repeated batches of a producer."""

from __future__ import annotations

from functools import partial

from pxrs.errors import (
    InvalidRequest,
    OffsetOutOfRange,
    PartitionNotFound,
    ProducerFenced,
    PxrsError,
    SequenceGap,
    TopicNotFound,
)
from pxrs.stores.api import LogStore, TellsSizes
from pxrs.testing.conformance.lab import Lab, Violation
from pxrs.testing.conformance.tools import (
    A_LOT,
    append,
    batch,
    close_must_wake,
    must_wake,
    raises,
    require,
    same,
    stored_in,
    together,
    values_in,
)
from pxrs.types import Append, Appended, Batch, Bounds, Fetched, LogPartition

HERE = LogPartition("t-1", 0)
BESIDE = LogPartition("t-1", 1)


def new_log(lab: Lab) -> LogStore:
    """A log with one topic of two empty partitions."""
    log = lab.open().log
    log.create("t-1", 2)
    return log


def check_offsets_are_dense(lab: Lab) -> None:
    """Offsets start at 0 and go on without gaps, in every partition by itself."""
    log = new_log(lab)
    same(append(log, HERE, batch(b"a", b"b"), batch(b"c")), [0, 2], "the bases")
    same(append(log, BESIDE, batch(b"x")), [0], "the base in the other partition")
    same(append(log, HERE, batch(b"d", b"e", b"f")), [3], "the base")
    same(values_in(log, HERE), dict(enumerate([b"a", b"b", b"c", b"d", b"e", b"f"])), "all")
    same(values_in(log, BESIDE), {0: b"x"}, "the other partition")


def check_one_call_fills_several_partitions(lab: Lab) -> None:
    """Batches of one call go where they belong, in order, and are answered in order."""
    log = new_log(lab)
    log.create("t-2", 1)
    elsewhere = LogPartition("t-2", 0)
    outcomes = log.append(
        [
            Append(BESIDE, batch(b"b1", b"b2")),
            Append(HERE, batch(b"a1")),
            Append(elsewhere, batch(b"c1")),
            Append(BESIDE, batch(b"b3")),
            Append(HERE, batch(b"a2")),
        ]
    )
    same(outcomes, [Appended(base) for base in (0, 0, 0, 2, 1)], "the outcomes")
    same(values_in(log, HERE), {0: b"a1", 1: b"a2"}, "the first partition")
    same(values_in(log, BESIDE), {0: b"b1", 1: b"b2", 2: b"b3"}, "the second partition")
    same(values_in(log, elsewhere), {0: b"c1"}, "the other topic")
    same(log.append([]), [], "the outcome of nothing")


def check_data_is_kept(lab: Lab) -> None:
    """A batch is stored byte for byte, only its base offset is filled in; read as `bytes`."""
    log = new_log(lab)
    append(log, HERE, batch(b"first"))
    sent = batch(b"\0\xff" * 50, b"", b"x" * 10_000)
    given = bytes(sent.data)
    append(log, HERE, sent)
    sent.data[:] = bytes(len(sent.data))
    stored = lab.open().log.fetch(HERE, 1, A_LOT).batches[0]
    same(type(stored.data), bytes, "the type of the data")
    same(stored.data[8:], given[8:], "the bytes after the base offset")
    same(int.from_bytes(stored.data[:8], "big"), 1, "the base offset in the data")
    same((stored.base, stored.next), (1, 4), "the place of the batch")


def check_same_batch_twice_is_two(lab: Lab) -> None:
    """Without a producer id no batch counts as a duplicate."""
    log = new_log(lab)
    sent = batch(b"a")
    same(append(log, HERE, sent, sent), [0, 1], "the bases")
    same(append(log, BESIDE, sent), [0], "the base in the other partition")
    same(values_in(log, HERE), {0: b"a", 1: b"a"}, "the messages")


def check_fetch_finds_the_batch(lab: Lab) -> None:
    """A fetch starts with the batch that holds the offset: its first, a middle or its last."""
    log = new_log(lab)
    append(log, HERE, batch(b"0", b"1", b"2"), batch(b"3"), batch(b"4", b"5"))
    stored = stored_in(log, HERE)
    same([(each.base, each.next) for each in stored], [(0, 3), (3, 4), (4, 6)], "the batches")
    for offset, first in enumerate([0, 0, 0, 1, 2, 2]):
        same(log.fetch(HERE, offset, A_LOT), Fetched(stored[first:], 0, 6), f"from {offset}")
    same(log.fetch(HERE, 6, A_LOT), Fetched([], 0, 6), "a fetch at the end")
    same(log.fetch(BESIDE, 0, A_LOT), Fetched([], 0, 0), "a fetch from an empty partition")


def check_fetch_keeps_to_the_size(lab: Lab) -> None:
    """A fetch returns as many batches as fit, and one if not even one fits."""
    log = new_log(lab)
    append(log, HERE, *(batch(b"x" * 500) for _ in range(4)))
    stored = stored_in(log, HERE)
    size = len(stored[0].data)
    for room, expected in [
        (0, 1),
        (1, 1),
        (size, 1),
        (2 * size - 1, 1),
        (2 * size, 2),
        (3 * size + 1, 3),
        (4 * size, 4),
        (A_LOT, 4),
    ]:
        same(log.fetch(HERE, 0, room).batches, stored[:expected], f"what fits into {room} bytes")


def check_offsets_out_of_range(lab: Lab) -> None:
    """A fetch before the start or past the end raises an error with the bounds."""
    log = new_log(lab)
    append(log, HERE, batch(b"a", b"b"), batch(b"c"))
    log.trim(HERE, 2)
    for offset in (-1, 0, 1, 4, 1000):
        try:
            log.fetch(HERE, offset, A_LOT)
        except OffsetOutOfRange as error:
            same((error.offset, error.start, error.end), (offset, 2, 3), "the error")
        else:
            raise Violation(f"offset {offset} was fetched from a partition that holds 2 only")
    with raises(OffsetOutOfRange):
        log.fetch(BESIDE, 1, A_LOT)


def check_unknown_partitions(lab: Lab) -> None:
    """Reading, trimming or measuring an unknown partition raises."""
    log = new_log(lab)
    for where in (LogPartition("none", 0), LogPartition("t-1", 2), LogPartition("t-1", -1)):
        with raises(TopicNotFound, PartitionNotFound):
            log.fetch(where, 0, A_LOT)
        with raises(TopicNotFound, PartitionNotFound):
            log.size(where)
        with raises(TopicNotFound, PartitionNotFound):
            log.batch_at(where, 0)
        with raises(TopicNotFound, PartitionNotFound):
            log.trim(where, 0)
        with raises(TopicNotFound, PartitionNotFound):
            log.expire(where, 0, 0)
    with raises(TopicNotFound):
        log.bounds("none")


def check_one_bad_batch_fails_alone(lab: Lab) -> None:
    """A batch that can't be appended gets its error; the others of the call get their offset."""
    log = new_log(lab)
    empty = Batch(data=bytearray(61), count=0, max_timestamp=0)
    cut_off = Batch(data=bytearray(10), count=1, max_timestamp=0)
    half_a_producer = batch(b"x", producer=(7, -1, -1))
    outcomes = log.append(
        [
            Append(HERE, batch(b"a")),
            Append(LogPartition("none", 0), batch(b"lost")),
            Append(LogPartition("t-1", 9), batch(b"lost")),
            Append(HERE, empty),
            Append(HERE, cut_off),
            Append(HERE, half_a_producer),
            Append(HERE, batch(b"b")),
            Append(BESIDE, batch(b"c")),
        ]
    )
    same([outcomes[0], *outcomes[6:]], [Appended(0), Appended(1), Appended(0)], "the good ones")
    kinds: list[type[PxrsError]] = [TopicNotFound, InvalidRequest]
    for outcome, kind in zip(outcomes[1:6], kinds + [InvalidRequest] * 3, strict=True):
        require(isinstance(outcome, kind), f"a bad batch was answered with {outcome!r}")
    same(values_in(log, HERE), {0: b"a", 1: b"b"}, "the messages")


def check_bounds(lab: Lab) -> None:
    """`bounds` returns start and end of every partition of the topic and of no other."""
    log = new_log(lab)
    log.create("t-2", 1)
    append(log, LogPartition("t-2", 0), batch(b"x"))
    same(log.bounds("t-1"), {0: Bounds(0, 0), 1: Bounds(0, 0)}, "an empty topic's bounds")
    append(log, BESIDE, batch(b"a", b"b"), batch(b"c"))
    same(log.bounds("t-1"), {0: Bounds(0, 0), 1: Bounds(0, 3)}, "the bounds")
    log.trim(BESIDE, 2)
    same(log.bounds("t-1"), {0: Bounds(0, 0), 1: Bounds(2, 3)}, "the bounds after a trim")


def check_size(lab: Lab) -> None:
    """`size` returns the bytes of a partition's batches, and `sizes` those of all partitions."""
    log = new_log(lab)
    append(log, BESIDE, batch(b"beside"))
    same(log.size(HERE), 0, "the size of an empty partition")
    append(log, HERE, batch(b"a", b"b"), batch(b"c" * 1000))
    sizes = [len(stored.data) for stored in stored_in(log, HERE)]
    same(log.size(HERE), sum(sizes), "the size")
    log.trim(HERE, 2)
    same(log.size(HERE), sizes[1], "the size after a trim")
    log.trim(HERE, 3)
    same(log.size(HERE), 0, "the size of an emptied partition")
    if isinstance(log, TellsSizes):
        same(log.sizes("t-1"), {0: 0, 1: log.size(BESIDE)}, "the sizes of all partitions")
        with raises(TopicNotFound):
            log.sizes("none")


def check_create_again_changes_nothing(lab: Lab) -> None:
    """Making a topic's partitions a second time keeps their batches."""
    log = new_log(lab)
    append(log, HERE, batch(b"a"))
    lab.open().log.create("t-1", 2)
    same(values_in(log, HERE), {0: b"a"}, "the messages")
    same(append(log, HERE, batch(b"b")), [1], "the next base")
    with raises(InvalidRequest):
        log.create("t-0", 0)


def check_dropped_topic_is_gone(lab: Lab) -> None:
    """A dropped topic holds nothing; made again, under any id, it starts at 0 with no past."""
    log = new_log(lab)
    log.create("t-2", 1)
    append(log, LogPartition("t-2", 0), batch(b"kept"))
    append(log, HERE, batch(b"a", b"b", producer=(7, 0, 0)))
    log.drop("t-1")
    log.drop("t-1")
    with raises(TopicNotFound):
        log.fetch(HERE, 0, A_LOT)
    with raises(TopicNotFound):
        log.bounds("t-1")
    outcome = log.append([Append(HERE, batch(b"lost"))])[0]
    require(isinstance(outcome, TopicNotFound), f"a dropped topic answered {outcome!r}")
    for topic in ("t-1", "t-3"):
        log.create(topic, 2)
        again = LogPartition(topic, 0)
        same(log.fetch(again, 0, A_LOT), Fetched([], 0, 0), "the new topic")
        same(append(log, again, batch(b"x", b"y", producer=(7, 0, 0))), [0], "the base")
    same(values_in(log, LogPartition("t-2", 0)), {0: b"kept"}, "the topic that was kept")


def check_concurrent_appends_are_all_kept(lab: Lab) -> None:
    """Many appenders on several handles: no gap, no overlap, no batch lost, torn or misplaced."""
    handles = [new_log(lab), lab.open().log]
    threads, times = 4, 12
    told: dict[int, bytes] = {}

    def write(log: LogStore, name: int) -> None:
        for number in range(times):
            values = [b"%d/%d/%d" % (name, number, part) for part in range(1 + number % 3)]
            (base,) = append(log, HERE, batch(*values))
            told.update(enumerate(values, base))

    together(lab, *(partial(write, handles[name % 2], name) for name in range(threads)))
    found = values_in(handles[0], HERE)
    total = threads * sum(1 + number % 3 for number in range(times))
    same(sorted(found), list(range(total)), "the offsets")
    same(found, told, "what lies where the appenders were told")
    for name in range(threads):
        mine = [value for _, value in sorted(found.items()) if value.startswith(b"%d/" % name)]
        same(mine, sorted(mine, key=_in_order), f"the order of appender {name}")


def _in_order(value: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in value.split(b"/"))


def check_readers_miss_nothing(lab: Lab) -> None:
    """A reader that reads while others append, and waits at the end, sees every batch in order."""
    writer, reader = new_log(lab), lab.open().log
    calls = 25

    def write() -> None:
        for _ in range(calls):
            append(writer, HERE, batch(b"a", b"b"), batch(b"c"))

    def read() -> None:
        watch = reader.watch(HERE)
        offset = 0
        while offset < 3 * calls:
            fetched = reader.fetch(HERE, offset, A_LOT)
            for stored in fetched.batches:
                same(stored.base, offset, "the next batch's base")
                offset = stored.next
            if not fetched.batches:
                must_wake(lab, watch, "an append")
        watch.close()

    together(lab, write, read)


def check_appends_wake(lab: Lab) -> None:
    """A watch is armed on return, wakes on each of its partitions and loses no append."""
    here, there = new_log(lab), lab.open().log
    watch = there.watch(HERE, BESIDE)
    for log, where in [(here, HERE), (there, HERE), (here, BESIDE), (here, HERE)]:
        append(log, where, batch(b"a"))
        must_wake(lab, watch, f"an append to {where}")
        watch.wait(0)
    watch.close()


def check_every_log_watch_wakes(lab: Lab) -> None:
    """One append wakes all watches of its partition; closing one watch leaves the others."""
    here, there = new_log(lab), lab.open().log
    watches = [log.watch(HERE) for log in (here, here, there)]
    append(here, HERE, batch(b"a"))
    for watch in watches:
        must_wake(lab, watch, "an append that all of them watch")
    watches[0].close()
    append(there, HERE, batch(b"b"))
    for watch in watches[1:]:
        must_wake(lab, watch, "an append after the other watch was closed")
        watch.close()


def check_close_wakes_a_log_sleeper(lab: Lab) -> None:
    """Closing a watch ends a wait without a timeout; a closed watch never blocks."""
    close_must_wake(lab, new_log(lab).watch(HERE))


def bounds(log: LogStore, where: LogPartition = HERE) -> tuple[int, int]:
    """Start and end of a partition."""
    return log.bounds(where.topic_id)[where.partition]


def check_trim_drops_whole_batches(lab: Lab) -> None:
    """A trim drops the batches that end at or below the offset and keeps the one that holds it."""
    log = new_log(lab)
    append(log, HERE, batch(b"0", b"1"), batch(b"2"), batch(b"3", b"4", b"5"), batch(b"6"))
    append(log, BESIDE, batch(b"x"))
    for before, start in [(-1, 0), (0, 0), (1, 0), (2, 2), (1, 2), (3, 3), (5, 3), (6, 6)]:
        same(log.trim(HERE, before), start, f"the start after a trim to {before}")
        same(bounds(lab.open().log), (start, 7), "the bounds")
        same(min(values_in(log, HERE)), start, "the first message")
    same(values_in(log, BESIDE), {0: b"x"}, "the other partition")


def check_offsets_are_never_given_twice(lab: Lab) -> None:
    """An emptied partition goes on where it was."""
    log = new_log(lab)
    append(log, HERE, batch(b"0", b"1"), batch(b"2"))
    same(log.trim(HERE, 1000), 3, "the start of the emptied partition")
    same(bounds(log), (3, 3), "the bounds")
    same(log.fetch(HERE, 3, 0), ([], 3, 3), "a fetch at the end")
    same(append(lab.open().log, HERE, batch(b"3")), [3], "the next base")
    same(values_in(log, HERE), {3: b"3"}, "the messages")


def check_expire_by_age(lab: Lab) -> None:
    """Batches are dropped while the oldest is wholly older; one with a young message stops it."""
    log = new_log(lab)
    for stamps in ((10, 20), (50, 15), (30, 30), (60, 60)):
        append(log, HERE, batch(b"a", b"b", timestamps=stamps))
    for before, start in [(5, 0), (20, 0), (21, 2), (50, 2), (51, 6), (60, 6)]:
        same(log.expire(HERE, before, None), start, f"the start after expiring before {before}")
        same(bounds(log), (start, 8), "the bounds")
        same(sorted(values_in(log, HERE)), list(range(start, 8)), "the offsets")
    same(log.expire(HERE, None, None), 6, "the start after expiring nothing")


def check_expire_by_size(lab: Lab) -> None:
    """The oldest batches are dropped until the partition fits into the size."""
    log = new_log(lab)
    append(log, HERE, *(batch(b"x" * 100) for _ in range(5)))
    size = len(stored_in(log, HERE)[0].data)
    for room, start in [(10 * size, 0), (5 * size, 0), (5 * size - 1, 1), (2 * size + 1, 3)]:
        same(log.expire(HERE, None, room), start, f"the start after expiring to {room} bytes")
        same(bounds(log), (start, 5), "the bounds")


def check_expire_by_either(lab: Lab) -> None:
    """A batch is dropped if it is too old or too much."""
    log = new_log(lab)
    append(log, HERE, *(batch(b"x" * 100, timestamps=[stamp]) for stamp in (10, 20, 30, 40)))
    size = len(stored_in(log, HERE)[0].data)
    same(log.expire(HERE, 15, 4 * size), 1, "the start after expiring by age")
    same(log.expire(HERE, 15, 2 * size), 2, "the start after expiring by size")


def check_newest_batch_never_expires(lab: Lab) -> None:
    """The newest batch stays, whatever its age and size."""
    log = new_log(lab)
    same(log.expire(HERE, 1000, 0), 0, "the start of an empty partition")
    append(log, HERE, batch(b"0"), batch(b"1", b"2"))
    for before, room in [(None, 0), (10_000, None), (10_000, 0)]:
        same(log.expire(HERE, before, room), 1, "the start")
        same(values_in(log, HERE), {1: b"1", 2: b"2"}, "the messages")


def check_batch_at_a_time(lab: Lab) -> None:
    """The first batch that holds a message of that time or later, whatever the order of times."""
    log = new_log(lab)
    same(log.batch_at(HERE, 0), None, "the batch in an empty partition")
    for stamps in ((100, 100), (300, 120), (200, 200), (400, 50)):
        append(log, HERE, batch(b"a", b"b", timestamps=stamps))
    for timestamp, base in [
        (0, 0),
        (100, 0),
        (101, 2),
        (200, 2),
        (300, 2),
        (301, 6),
        (400, 6),
        (401, None),
    ]:
        same(log.batch_at(HERE, timestamp), base, f"the batch at {timestamp}")
    log.trim(HERE, 4)
    same(log.batch_at(HERE, 150), 4, "the batch at 150 after a trim")


PRODUCER = 7


def send(
    log: LogStore, *values: bytes, sequence: int, epoch: int = 0, where: LogPartition = HERE
) -> Appended | PxrsError:
    """Append one batch of the producer; returns its outcome."""
    sent = batch(*values, producer=(PRODUCER, epoch, sequence))
    return log.append([Append(where, sent)])[0]


def require_kind(outcome: object, kind: type[PxrsError]) -> None:
    """Require that the outcome is an error of this kind."""
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
    """Batches of one call are checked in order, each after the outcome of those before it."""
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

    Sent again, the call gets the same answers: appended batches are known, refused ones are not.
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
    """A higher epoch starts at 0 and fences the older ones; an equal sequence is no repeat."""
    log = new_log(lab)
    send(log, b"a", sequence=0, epoch=1)
    require_kind(send(log, b"x", sequence=1, epoch=2), SequenceGap)
    same(send(log, b"b", sequence=0, epoch=2), Appended(1), "the new epoch's first batch")
    for sequence in (0, 1):
        require_kind(send(log, b"x", sequence=sequence, epoch=1), ProducerFenced)
    same(send(log, b"c", sequence=1, epoch=2), Appended(2), "the new epoch's next batch")
    same(values_in(log, HERE), {0: b"a", 1: b"b", 2: b"c"}, "the messages")


def check_unknown_producer_starts_anywhere(lab: Lab) -> None:
    """The first batch of a producer may have any sequence: its past may have been forgotten."""
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
