"""Trimming, expiring and finding by time in a `LogStore`."""

from __future__ import annotations

from pxrs.stores.api import LogStore
from pxrs.testing.conformance.lab import Lab, Suite
from pxrs.testing.conformance.log import BESIDE, HERE, new_log
from pxrs.testing.conformance.tools import append, batch, same, stored_in, values_in
from pxrs.types import LogPartition

suite = Suite()


def bounds(log: LogStore, where: LogPartition = HERE) -> tuple[int, int]:
    """Start and end of a partition."""
    return log.bounds(where.topic_id)[where.partition]


@suite
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


@suite
def check_offsets_are_never_given_twice(lab: Lab) -> None:
    """An emptied partition goes on where it was."""
    log = new_log(lab)
    append(log, HERE, batch(b"0", b"1"), batch(b"2"))
    same(log.trim(HERE, 1000), 3, "the start of the emptied partition")
    same(bounds(log), (3, 3), "the bounds")
    same(log.fetch(HERE, 3, 0), ([], 3, 3), "a fetch at the end")
    same(append(lab.open().log, HERE, batch(b"3")), [3], "the next base")
    same(values_in(log, HERE), {3: b"3"}, "the messages")


@suite
def check_expire_by_age(lab: Lab) -> None:
    """Batches go while the oldest is wholly older; one with a young message stops it."""
    log = new_log(lab)
    for stamps in ((10, 20), (50, 15), (30, 30), (60, 60)):
        append(log, HERE, batch(b"a", b"b", timestamps=stamps))
    for before, start in [(5, 0), (20, 0), (21, 2), (50, 2), (51, 6), (60, 6)]:
        same(log.expire(HERE, before, None), start, f"the start after expiring before {before}")
        same(bounds(log), (start, 8), "the bounds")
        same(sorted(values_in(log, HERE)), list(range(start, 8)), "the offsets")
    same(log.expire(HERE, None, None), 6, "the start after expiring nothing")


@suite
def check_expire_by_size(lab: Lab) -> None:
    """The oldest batches go until the partition fits into the size."""
    log = new_log(lab)
    append(log, HERE, *(batch(b"x" * 100) for _ in range(5)))
    size = len(stored_in(log, HERE)[0].data)
    for room, start in [(10 * size, 0), (5 * size, 0), (5 * size - 1, 1), (2 * size + 1, 3)]:
        same(log.expire(HERE, None, room), start, f"the start after expiring to {room} bytes")
        same(bounds(log), (start, 5), "the bounds")


@suite
def check_expire_by_either(lab: Lab) -> None:
    """A batch goes if it is too old or too much."""
    log = new_log(lab)
    append(log, HERE, *(batch(b"x" * 100, timestamps=[stamp]) for stamp in (10, 20, 30, 40)))
    size = len(stored_in(log, HERE)[0].data)
    same(log.expire(HERE, 15, 4 * size), 1, "the start after expiring by age")
    same(log.expire(HERE, 15, 2 * size), 2, "the start after expiring by size")


@suite
def check_newest_batch_never_expires(lab: Lab) -> None:
    """The newest batch stays, whatever its age and size."""
    log = new_log(lab)
    same(log.expire(HERE, 1000, 0), 0, "the start of an empty partition")
    append(log, HERE, batch(b"0"), batch(b"1", b"2"))
    for before, room in [(None, 0), (10_000, None), (10_000, 0)]:
        same(log.expire(HERE, before, room), 1, "the start")
        same(values_in(log, HERE), {1: b"1", 2: b"2"}, "the messages")


@suite
def check_batch_at_a_time(lab: Lab) -> None:
    """The first batch that holds a message of that time or later, in whatever order times come."""
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
