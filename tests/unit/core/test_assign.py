"""Who gets what: the published tables, and twins that try every possibility."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pxrs.core.assign import ASSIGNORS, Assignor, assignor, fair, range_, sticky
from pxrs.errors import InvalidRequest
from pxrs.types import TopicPartition

K = TypeVar("K")
V = TypeVar("V")
Target = dict[TopicPartition, str]

each_assignor = pytest.mark.parametrize("assign", ASSIGNORS.values(), ids=ASSIGNORS)


def part(number: int, topic: str = "t") -> TopicPartition:
    return TopicPartition(topic, number)


def parts_of(target: Mapping[TopicPartition, str], topic: str = "t") -> dict[str, list[int]]:
    """The target by member, partitions in order."""
    owned: dict[str, list[int]] = {}
    for (name, number), owner in sorted(target.items()):
        if name == topic:
            owned.setdefault(owner, []).append(number)
    return owned


def owners(table: Mapping[str, Sequence[int]], topic: str = "t") -> Target:
    return {part(number, topic): name for name, numbers in table.items() for number in numbers}


def loads(target: Mapping[TopicPartition, str], names: Sequence[str]) -> list[int]:
    counted = Counter(target.values())
    return [counted[name] for name in names]


def moved(before: Mapping[TopicPartition, str], after: Mapping[TopicPartition, str]) -> int:
    """How many partitions are with another member than before."""
    return sum(1 for p, name in before.items() if p in after and after[p] != name)


def same_topic(*names: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names, ("t",))


# Published tables


@pytest.mark.parametrize(
    ("consumers", "expected"),
    [(1, [8]), (2, [4, 4]), (3, [3, 3, 2]), (4, [2, 2, 2, 2]), (5, [2, 2, 2, 1, 1])],
)
@each_assignor
def test_eight_partitions_over_one_to_five_consumers(
    assign: Assignor, consumers: int, expected: list[int]
) -> None:
    names = [f"consumer-{number}" for number in range(consumers)]
    target = assign(same_topic(*names), {"t": 8}, {})
    assert loads(target, names) == expected
    assert sorted(target) == [part(number) for number in range(8)]


def test_range_of_ten_partitions_over_three() -> None:
    target = range_(same_topic("c1", "c2", "c3"), {"t": 10}, {})
    assert parts_of(target) == {"c1": [0, 1, 2, 3], "c2": [4, 5, 6], "c3": [7, 8, 9]}


def test_range_cuts_each_topic_by_itself_and_fair_all_together() -> None:
    both = {"a": ("x", "y"), "b": ("x", "y")}
    by_topic = range_(both, {"x": 3, "y": 3}, {})
    assert parts_of(by_topic, "x") == parts_of(by_topic, "y") == {"a": [0, 1], "b": [2]}
    together = fair(both, {"x": 3, "y": 3}, {})
    assert loads(together, ["a", "b"]) == [3, 3]


STEADY = owners({"A": [0, 1, 2], "B": [3, 4, 5], "C": [6, 7]})


def test_a_crash_moves_only_what_the_dead_one_had() -> None:
    target = sticky(same_topic("A", "C"), {"t": 8}, STEADY)
    assert loads(target, ["A", "C"]) == [4, 4]
    assert {p for p in STEADY if target[p] != STEADY[p]} == {part(3), part(4), part(5)}


def test_whoever_comes_back_gets_a_fair_share_and_nobody_else_moves() -> None:
    without = sticky(same_topic("A", "C"), {"t": 8}, STEADY)
    again = sticky(same_topic("A", "B", "C"), {"t": 8}, without)
    assert sorted(loads(again, ["A", "B", "C"])) == [2, 3, 3]
    assert {again[p] for p in again if again[p] != without[p]} == {"B"}


def test_a_newcomer_takes_one_from_each_and_the_others_keep_the_rest() -> None:
    before = owners({"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]})
    target = sticky(same_topic("a", "b", "c"), {"t": 8}, before)
    assert parts_of(target) == {"a": [0, 1, 2], "b": [4, 5, 6], "c": [3, 7]}


def test_those_who_already_have_more_keep_the_extra_one() -> None:
    before = owners({"a": [0], "b": [1], "c": [2, 3]})
    assert sticky(same_topic("a", "b", "c"), {"t": 4}, before) == before


# Every assignor


names_ = st.sets(st.sampled_from("abcdefg"), max_size=4).map(sorted)
counts_ = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 4), max_size=3)


@st.composite
def any_case(
    draw: st.DrawFn,
) -> tuple[dict[str, tuple[str, ...]], dict[str, int], Target]:
    """Any subscriptions, topics (some that nobody wants or that are missing) and past owners."""
    names = draw(names_)
    counts = draw(counts_)
    subscriptions = {
        name: tuple(draw(st.lists(st.sampled_from("xyz"), max_size=3, unique=True)))
        for name in names
    }
    past = st.dictionaries(
        st.builds(TopicPartition, st.sampled_from("xyz"), st.integers(0, 5)),
        st.sampled_from([*names, "gone"]),
    )
    return subscriptions, counts, draw(past)


@each_assignor
@given(case=any_case())
def test_everything_that_can_be_assigned_is_and_only_to_subscribers(
    assign: Assignor, case: tuple[dict[str, tuple[str, ...]], dict[str, int], Target]
) -> None:
    subscriptions, counts, current = case
    target = assign(subscriptions, counts, current)
    wanted = {topic for topics in subscriptions.values() for topic in topics}
    assert set(target) == {
        part(number, topic)
        for topic, count in counts.items()
        for number in range(count)
        if topic in wanted
    }
    assert all(p.topic in subscriptions[name] for p, name in target.items())


@each_assignor
@given(case=any_case(), rng=st.randoms(use_true_random=False))
def test_no_order_of_anything_matters(
    assign: Assignor,
    case: tuple[dict[str, tuple[str, ...]], dict[str, int], Target],
    rng: Random,
) -> None:
    subscriptions, counts, current = case

    def mixed(items: Mapping[K, V]) -> dict[K, V]:
        pairs = list(items.items())
        rng.shuffle(pairs)
        return dict(pairs)

    again = assign(mixed(subscriptions), mixed(counts), mixed(current))
    assert again == assign(subscriptions, counts, current)


@each_assignor
def test_a_large_group(assign: Assignor) -> None:
    names = [f"m{number:02}" for number in range(50)]
    before = assign(same_topic(*names), {"t": 1000}, {})
    assert set(loads(before, names)) == {20}
    after = assign(same_topic(*names[1:]), {"t": 1000}, before)
    assert set(loads(after, names[1:])) == {20, 21}


def test_assignors_have_names() -> None:
    assert assignor("sticky") is sticky
    assert assignor("range") is range_
    with pytest.raises(InvalidRequest, match="sticky, fair, range; got 'best'"):
        assignor("best")


# Sticky, when all subscribe to the same


@st.composite
def same_case(draw: st.DrawFn) -> tuple[list[str], int, Target]:
    names = draw(st.sets(st.sampled_from("abcd"), min_size=1, max_size=3).map(sorted))
    count = draw(st.integers(0, 6))
    past = st.dictionaries(
        st.integers(0, count + 1).map(part), st.sampled_from([*names, "gone", "dead"])
    )
    return names, count, draw(past)


def every_assignment(
    takers: Mapping[TopicPartition, Sequence[str]],
) -> Iterator[Target]:
    for chosen in product(*takers.values()):
        yield dict(zip(takers, chosen, strict=True))


@given(same_case())
def test_sticky_is_fair_with_the_fewest_moves_of_all_fair_assignments(
    case: tuple[list[str], int, Target],
) -> None:
    names, count, current = case
    target = sticky(same_topic(*names), {"t": count}, current)
    spread = loads(target, names)
    assert max(spread) - min(spread) <= 1
    fewest = min(
        moved(current, other)
        for other in every_assignment({part(number): names for number in range(count)})
        if max(loads(other, names)) - min(loads(other, names)) <= 1
    )
    assert moved(current, target) == fewest


@given(same_case())
def test_sticky_from_nothing_is_the_fair_share(case: tuple[list[str], int, Target]) -> None:
    names, count, _ = case
    members = same_topic(*names)
    assert sticky(members, {"t": count}, {}) == fair(members, {"t": count}, {})


@given(st.integers(1, 5), st.integers(0, 7), st.integers(0, 7))
def test_sticky_from_nothing_is_the_fair_share_over_several_topics(
    members: int, first: int, second: int
) -> None:
    both = {f"m{number}": ("x", "y") for number in range(members)}
    counts = {"x": first, "y": second}
    assert sticky(both, counts, {}) == fair(both, counts, {})


def test_a_topic_that_does_not_exist_yet_makes_no_difference() -> None:
    members = {"a": ("t",), "b": ("t", "later")}
    assert sticky(members, {"t": 5}, {}) == sticky(same_topic("a", "b"), {"t": 5}, {})


@given(any_case())
def test_sticky_leaves_its_own_result_alone(
    case: tuple[dict[str, tuple[str, ...]], dict[str, int], Target],
) -> None:
    subscriptions, counts, current = case
    target = sticky(subscriptions, counts, current)
    assert sticky(subscriptions, counts, target) == target


# Sticky, with different subscriptions


def test_levelling_goes_through_a_third_member() -> None:
    """a and c share no topic; b takes from the one and gives to the other."""
    subscriptions = {"a": ("x",), "b": ("x", "y"), "c": ("y",)}
    current = owners({"a": [0, 1, 2, 3]}, "x") | owners({"b": [0, 1, 2], "c": [3, 4]}, "y")
    target = sticky(subscriptions, {"x": 4, "y": 5}, current)
    assert loads(target, ["a", "b", "c"]) == [3, 3, 3]
    assert moved(current, target) == 2


@settings(max_examples=2 * settings().max_examples)
@given(any_case())
def test_different_subscriptions_are_levelled_as_far_as_possible(
    case: tuple[dict[str, tuple[str, ...]], dict[str, int], Target],
) -> None:
    subscriptions, counts, current = case
    counts = {topic: min(count, 2) for topic, count in counts.items()}
    names = sorted(subscriptions)
    target = sticky(subscriptions, counts, current)
    takers = {p: [name for name in names if p.topic in subscriptions[name]] for p in target}
    best = min(
        (sorted(loads(other, names), reverse=True) for other in every_assignment(takers)),
        default=[],
    )
    assert sorted(loads(target, names), reverse=True) == best


def test_a_large_group_with_different_subscriptions() -> None:
    """A ring: each member shares a topic with the next one only; all starts with the first."""
    size = 50
    topics = {f"t{number:02}": 20 for number in range(size)}
    subscriptions = {
        f"m{number:02}": (f"t{number:02}", f"t{(number + 1) % size:02}") for number in range(size)
    }
    target = sticky(subscriptions, topics, {})
    assert set(loads(target, sorted(subscriptions))) == {20}
    skewed = {p: f"m{int(p.topic[1:]):02}" for p in target}
    without = {name: topics for name, topics in subscriptions.items() if name != "m25"}
    after = sticky(without, topics, skewed)
    assert max(loads(after, sorted(without))) == 21
