"""Assignment strategies: members × partitions × current owners → target. Pure, deterministic.

- `fair`: all partitions in order, cut into equal pieces; the first members in sorted order get
  one more. Ignores who owns what now.
- `range`: the same, for each topic by itself.
- `sticky` (the default): fair to within one partition, and nothing moves that need not.

A member gets partitions only of topics that it subscribes to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from pxrs.errors import InvalidRequest, quoted
from pxrs.types import TopicPartition

Subscriptions = Mapping[str, Sequence[str]]
Owners = Mapping[TopicPartition, str]
Assignor = Callable[[Subscriptions, Mapping[str, int], Owners], dict[TopicPartition, str]]


def fair(
    subscriptions: Subscriptions, partitions: Mapping[str, int], current: Owners
) -> dict[TopicPartition, str]:
    """Contiguous equal shares over all partitions."""
    return _by_subscribers(subscriptions, partitions, _share_out)


def range_(
    subscriptions: Subscriptions, partitions: Mapping[str, int], current: Owners
) -> dict[TopicPartition, str]:
    """Contiguous equal shares of each topic."""
    target: dict[TopicPartition, str] = {}
    for topic in sorted(partitions):
        target |= _by_subscribers(subscriptions, {topic: partitions[topic]}, _share_out)
    return target


def sticky(
    subscriptions: Subscriptions, partitions: Mapping[str, int], current: Owners
) -> dict[TopicPartition, str]:
    """Fair to within one partition with the fewest moves.

    Where members subscribe to different topics, it is as level as their topics allow.
    """
    if len({frozenset(partitions.keys() & topics) for topics in subscriptions.values()}) <= 1:
        return _by_subscribers(
            subscriptions, partitions, lambda parts, names: _keep_and_fill(parts, names, current)
        )
    return _level(subscriptions, partitions, current)


ASSIGNORS: dict[str, Assignor] = {"sticky": sticky, "fair": fair, "range": range_}


def assignor(name: str) -> Assignor:
    """Returns the assignor of this name."""
    try:
        return ASSIGNORS[name]
    except KeyError:
        raise InvalidRequest(
            f"strategy must be one of {', '.join(ASSIGNORS)}; got {quoted(name)}"
        ) from None


def _by_subscribers(
    subscriptions: Subscriptions,
    partitions: Mapping[str, int],
    share: Callable[[list[TopicPartition], list[str]], dict[TopicPartition, str]],
) -> dict[TopicPartition, str]:
    """Share out the topics that have the same subscribers together."""
    pools: defaultdict[tuple[str, ...], list[TopicPartition]] = defaultdict(list)
    for topic in sorted(partitions):
        names = tuple(sorted(name for name, topics in subscriptions.items() if topic in topics))
        pools[names] += [TopicPartition(topic, number) for number in range(partitions[topic])]
    target: dict[TopicPartition, str] = {}
    for names, parts in pools.items():
        if names:
            target |= share(parts, list(names))
    return target


def _quotas(count: int, names: Sequence[str]) -> dict[str, int]:
    """`count ÷ members` each, and one more for the first ones."""
    base, extra = divmod(count, len(names))
    return {name: base + (place < extra) for place, name in enumerate(names)}


def _share_out(parts: list[TopicPartition], names: list[str]) -> dict[TopicPartition, str]:
    owners = (name for name, quota in _quotas(len(parts), names).items() for _ in range(quota))
    return dict(zip(parts, owners, strict=True))


def _keep_and_fill(
    parts: list[TopicPartition], names: list[str], current: Owners
) -> dict[TopicPartition, str]:
    """Members keep partitions up to their quota; those with the most get the larger quotas."""
    held: dict[str, list[TopicPartition]] = {name: [] for name in names}
    for part in parts:
        owner = current.get(part)
        if owner in held:
            held[owner].append(part)
    quotas = _quotas(len(parts), sorted(names, key=lambda name: (-len(held[name]), name)))
    target = {part: name for name in names for part in held[name][: quotas[name]]}
    free = (part for part in parts if part not in target)
    for name in names:
        for _ in range(quotas[name] - len(held[name])):
            target[next(free)] = name
    return target


def _level(
    subscriptions: Subscriptions, partitions: Mapping[str, int], current: Owners
) -> dict[TopicPartition, str]:
    """Keep, give partitions without owner to the least loaded, then move while that levels."""
    takers = {
        topic: [name for name in sorted(subscriptions) if topic in subscriptions[name]]
        for topic in sorted(partitions)
    }
    held: dict[str, set[TopicPartition]] = {name: set() for name in sorted(subscriptions)}
    free: list[TopicPartition] = []
    for topic, names in takers.items():
        for number in range(partitions[topic] if names else 0):
            part = TopicPartition(topic, number)
            owner = current.get(part)
            if owner in names:
                held[owner].add(part)
            else:
                free.append(part)
    for part in free:
        held[min(takers[part.topic], key=lambda name: (len(held[name]), name))].add(part)
    while moves := _levelling_moves(held, takers):
        for part, giver, taker in moves:
            held[giver].discard(part)
            held[taker].add(part)
    return {part: name for name, parts in held.items() for part in parts}


def _levelling_moves(
    held: Mapping[str, set[TopicPartition]], takers: Mapping[str, Sequence[str]]
) -> list[tuple[TopicPartition, str, str]]:
    """Finds the shortest chain of moves from a member to one that has at least two less.

    A chain, because the two need not share a topic: a third member may take from the one and
    give to the other. When there is no such chain, no assignment is more level.
    """
    by_load = sorted(held, key=lambda name: (len(held[name]), name))
    place = {name: number for number, name in enumerate(by_load)}
    for giver in reversed(by_load):
        came: dict[str, tuple[TopicPartition, str]] = {}
        reached = [giver]
        for name in reached:
            if len(held[giver]) - len(held[name]) >= 2:
                return _chain(came, giver, name)
            last = {part.topic: part for part in sorted(held[name])}
            nearer = {taker: part for part in last.values() for taker in takers[part.topic]}
            for taker in sorted(nearer, key=place.__getitem__):
                if taker != giver and taker not in came:
                    came[taker] = (nearer[taker], name)
                    reached.append(taker)
    return []


def _chain(
    came: Mapping[str, tuple[TopicPartition, str]], giver: str, taker: str
) -> list[tuple[TopicPartition, str, str]]:
    moves = []
    while taker != giver:
        part, before = came[taker]
        moves.append((part, before, taker))
        taker = before
    return moves
