"""Packs targets and moves into few bytes: names become numbers, partitions become ranges.

    {"orders": {"a": (0, 1, 2, 7)}}  →  {0: {0: "0-2,7"}}

In a group of 200 members and 10,000 partitions, records with names for every partition have each
name thousands of times, and the stores take a megabyte at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Target = dict[str, dict[str, tuple[int, ...]]]
Moves = tuple[tuple[str, int, str | None, str | None], ...]
Subscriptions = dict[str, tuple[str, ...]]


def ranges_of(numbers: Iterable[int]) -> str:
    """Writes numbers as ranges: `0-2,7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def numbers_in(ranges: str) -> tuple[int, ...]:
    """Reads the numbers that `ranges_of` wrote, in order."""
    numbers: list[int] = []
    for run in ranges.split(",") if ranges else ():
        first, _, last = run.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def pack_target(
    target: Target, topics: Sequence[str], members: Sequence[str]
) -> dict[int, dict[int, str]]:
    """Packs a target as topic → member → its partitions."""
    packed: dict[int, dict[int, str]] = {}
    topic_numbers, member_numbers = _numbered(topics), _numbered(members)
    for member, parts in target.items():
        for topic, numbers in parts.items():
            owners = packed.setdefault(topic_numbers[topic], {})
            owners[member_numbers[member]] = ranges_of(numbers)
    return packed


def unpack_target(
    packed: Mapping[int, Mapping[int, str]], topics: Sequence[str], members: Sequence[str]
) -> Target:
    """Reverses `pack_target`. Members without partitions are included."""
    target: Target = {member: {} for member in members}
    for topic, owners in sorted(packed.items()):
        for member, ranges in owners.items():
            target[members[member]][topics[topic]] = numbers_in(ranges)
    return target


def pack_subscriptions(
    subscriptions: Subscriptions, topics: Sequence[str], members: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Groups members by the topics they subscribe to."""
    topic_numbers, member_numbers = _numbered(topics), _numbered(members)
    wanting: dict[tuple[str, ...], list[int]] = {}
    for member, wanted in subscriptions.items():
        wanting.setdefault(wanted, []).append(member_numbers[member])
    return tuple(
        (ranges_of(topic_numbers[topic] for topic in wanted), ranges_of(members))
        for wanted, members in wanting.items()
    )


def unpack_subscriptions(
    packed: Iterable[tuple[str, str]], topics: Sequence[str], members: Sequence[str]
) -> Subscriptions:
    """Reverses `pack_subscriptions`."""
    return {
        members[member]: tuple(topics[topic] for topic in numbers_in(wanted))
        for wanted, wanting in packed
        for member in numbers_in(wanting)
    }


def pack_moves(
    moves: Moves, members: Sequence[str]
) -> dict[str, tuple[tuple[int | None, int | None, str], ...]]:
    """Packs moves as topic → (old owner, new owner, partitions)."""
    numbers = _numbered(members)
    packed: dict[str, dict[tuple[int | None, int | None], list[int]]] = {}
    for topic, partition, before, after in moves:
        hands = packed.setdefault(topic, {})
        pair = (
            None if before is None else numbers[before],
            None if after is None else numbers[after],
        )
        hands.setdefault(pair, []).append(partition)
    return {
        topic: tuple((*hands, ranges_of(parts)) for hands, parts in moved.items())
        for topic, moved in packed.items()
    }


def unpack_moves(
    packed: Mapping[str, Iterable[tuple[int | None, int | None, str]]], members: Sequence[str]
) -> Moves:
    """Reverses `pack_moves`, in the order of the partitions."""
    return tuple(
        sorted(
            (
                (
                    topic,
                    partition,
                    None if before is None else members[before],
                    None if after is None else members[after],
                )
                for topic, moved in packed.items()
                for before, after, ranges in moved
                for partition in numbers_in(ranges)
            ),
            key=lambda move: move[:2],
        )
    )


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}
