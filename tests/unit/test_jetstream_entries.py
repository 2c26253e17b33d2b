"""What stands in a batch's headers, and where offsets are: pure parts, against dumb twins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pxrs.core.sequences import ProducerState, Seen
from pxrs.stores.jetstream.entries import (
    INLINE,
    NOTHING,
    PRODUCER_MEMORY_MS,
    Entry,
    Known,
    Producers,
    follow,
    from_headers,
    to_headers,
)
from pxrs.stores.jetstream.topics import Mark, Marks, token

numbers = st.integers(0, 2**62)
states = st.builds(
    ProducerState,
    st.integers(0, 2**15 - 1),
    st.lists(
        st.builds(Seen, st.integers(0, 2**31 - 1), numbers, st.integers(1, 2**31 - 1)),
        min_size=1,
        max_size=5,
    ).map(tuple),
)
knowns = st.builds(Known, states, numbers, numbers)


@given(st.dictionaries(numbers, knowns, max_size=INLINE), st.booleans(), numbers, numbers)
def test_headers_there_and_back(
    known: dict[int, Known], aside: bool, size: int, timestamp: int
) -> None:
    producers = Producers(known, aside)
    entry = follow(NOTHING, "writer", 3, size, timestamp, producers)._replace(seq=17)
    headers = to_headers(entry)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert from_headers(headers, 17) == entry
    again = Producers.of(entry)
    assert [again.get(producer) for producer in known] == list(known.values())
    assert again.aside == aside


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10_000), st.integers(0, 10_000))))
def test_entries_follow_each_other(batches: list[tuple[int, int, int]]) -> None:
    last = NOTHING
    for number, (count, size, timestamp) in enumerate(batches):
        last = follow(last, "w", count, size, timestamp, None)._replace(seq=number + 1)
        done = batches[: number + 1]
        assert last.base == sum(each[0] for each in batches[:number])
        assert last.next == last.base + count
        assert last.total == sum(each[1] for each in done)
        assert last.total_before == last.total - size
        assert last.newest == max(each[2] for each in done)


def state(base: int) -> ProducerState:
    return ProducerState(0, (Seen(0, base, 1),))


def test_the_one_silent_longest_is_put_aside() -> None:
    producers = Producers({}, aside=False)
    for producer in [*range(INLINE), 0]:
        producers = producers.appended(producer, Known(state(0), 1000))
        assert producers.surplus() is None
    producers = producers.appended(77, Known(state(0), 1000))
    surplus = producers.surplus()
    assert surplus is not None
    assert surplus[0] == 1
    left = producers.without(1)
    assert left.aside
    assert left.surplus() is None
    assert left.get(1) is None
    assert left.get(0) is not None


def test_a_week_of_silence_is_forgotten() -> None:
    producers = Producers({1: Known(state(0), 1000), 2: Known(state(0), 5000)}, aside=False)
    later = producers.appended(3, Known(state(9), 1000 + PRODUCER_MEMORY_MS))
    assert later.get(1) is None
    assert later.get(2) is not None


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=2000),
    st.integers(0, 20_000),
)
def test_marks_are_true_however_many_there_are(steps: list[tuple[int, int]], wanted: int) -> None:
    """Against a list of all: nearest marks lie on the right side, and none is made up."""
    marks = Marks()
    everything: dict[int, int] = {}
    offset, seq = 0, 1
    for count, distance in steps:
        marks.add(Mark(offset, seq))
        everything[offset] = seq
        offset, seq = offset + count, seq + distance
    below, above = marks.around(wanted)
    for mark in (below, above):
        assert mark is None or everything[mark.offset] == mark.seq
    assert below is None or below.offset <= wanted
    assert above is None or above.offset > wanted
    at = marks.at(wanted)
    assert at is None or at == Mark(wanted, everything[wanted])
    newest = max(everything)
    assert marks.at(newest) == Mark(newest, everything[newest])


@given(st.text(), st.text())
def test_topic_ids_are_told_apart(one: str, other: str) -> None:
    if one.isprintable() and other.isprintable():
        assert (token(one) == token(other)) == (one == other)
        assert not set(token(one)) & set(" .*>\t/\\")


def test_an_entry_is_what_headers_say() -> None:
    """The format of streams that exist: a change of it needs another schema."""
    headers = {
        "Px-Batch": "w1 10 13 400 9000 1700 1800 1",
        "Px-Producers": "",
        "Nats-Expected-Last-Subject-Sequence": "4",
    }
    assert from_headers(headers, 5) == Entry(5, "w1", 10, 13, 400, 9000, 1700, 1800, True, "", 4)
