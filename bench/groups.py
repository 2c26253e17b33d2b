"""`bench groups`: consumer groups on SQLite, alone, in several processes, and while they move."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count, islice, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import pxrs
from bench import many, ours
from bench.harness import Check, Contestant, Options, Sample, Say, Section, compare, scratch
from bench.members import (
    SETTLE_TIMEOUT,
    Load,
    Member,
    Snapshot,
    Watched,
    await_share,
    consume_together,
    turns_in,
    work_together,
)
from bench.ours import Px
from bench.workload import PARTITIONS, TOPIC, rounded
from pxrs.core.group import moves_between
from pxrs.core.records import Head

READER = "reader.read"
WORK_US = 20.0
GROUP = "billing"
MOVING_PARTITIONS = 12
WINDOW = 1.5

_numbers = count(1)


def consuming(options: Options, say: Say) -> Section:
    """Messages per second through a group's only member, against reading without a group."""
    messages = rounded(options.messages)
    with scratch(options) as name, ours.opened(Path(name)) as px:
        say("consuming: filling the log")
        ours.fill(px, messages)
        contestants = [
            Contestant(READER, lambda _: ours.read(px, messages), "no group"),
            Contestant("for message in consumer", lambda _: _loop(px, messages), "auto-commit"),
            Contestant("consumer.poll()", lambda _: _poll(px, messages), "auto-commit, 500 each"),
        ]
        result = compare("consuming", contestants, options.rounds, options, say)
    return Section(
        [result],
        [
            Check(f"{each.name} ÷ {READER}", result.ratio(each.name, READER), 0.6, "", "at least")
            for each in contestants[1:]
        ],
    )


def _joined(px: Px) -> pxrs.Consumer:
    """The only member of a new group, once it owns everything."""
    consumer: pxrs.Consumer = px.consumer(TOPIC, group=f"g{next(_numbers)}")
    await_share(consumer, PARTITIONS)
    return consumer


def _loop(px: Px, messages: int) -> Sample:
    with _joined(px) as consumer:
        started = perf_counter()
        for message in islice(consumer, messages):
            _key, _value, _offset = message.key, message.value, message.offset
        consumer.commit()
        return Sample(messages, perf_counter() - started)


def _poll(px: Px, messages: int) -> Sample:
    with _joined(px) as consumer:
        handled = 0
        started = perf_counter()
        while handled < messages:
            batch = consumer.poll(timeout=SETTLE_TIMEOUT)
            if not batch:
                raise TimeoutError(f"{handled} of {messages} messages came")
            for message in batch:
                _key, _value, _offset = message.key, message.value, message.offset
            handled += len(batch)
        consumer.commit()
        return Sample(messages, perf_counter() - started)


def sharing(options: Options, say: Say) -> Section:
    """Two processes against one, each message worth some work.

    The same work without messages stands beside it: what this machine has to give.
    """
    messages = rounded(options.messages // 5)
    turns = turns_in(WORK_US)
    cpu: dict[int, list[float]] = {1: [], 2: []}
    with scratch(options) as name, ours.opened(Path(name)) as px:
        ours.fill(px, messages)

        def together(processes: int) -> Sample:
            group = f"g{next(_numbers)}"
            done = consume_together(px, group, processes, messages, turns)
            cpu[processes].append(1e6 * done.cpu / messages)
            return Sample(messages, done.seconds)

        def alone(processes: int) -> Sample:
            return Sample(messages, work_together(processes, messages, turns))

        note = f"{WORK_US:g} µs of work each"
        contestants = [
            Contestant("one process", lambda _: together(1), note),
            Contestant("two processes", lambda _: together(2), note),
            Contestant("one, work alone", lambda _: alone(1), "no messages"),
            Contestant("two, work alone", lambda _: alone(2), "no messages"),
        ]
        result = compare("sharing a topic", contestants, options.rounds, options, say)
    ratio = result.ratio("two processes", "one process")
    part = None
    if not result.failures:
        each = [result.rates[contestant.name] for contestant in contestants]
        rounds = zip(*each, strict=True)
        part = median(two * bare_one / (one * bare_two) for one, two, bare_one, bare_two in rounds)
    return Section(
        [result],
        [
            Check("two processes ÷ one", ratio, 1.6, "", "at least"),
            Check("two processes ÷ one, over that of the work alone", part, 0.8, "", "at least"),
        ],
        [f"CPU per message: {median(cpu[1]):.1f} µs in one process, {median(cpu[2]):.1f} in two"],
        {"CPU µs per message": {str(processes): found for processes, found in cpu.items()}},
    )


class _Moves(NamedTuple):
    """What one round of joining, leaving and killing showed. Milliseconds."""

    moved_by_join: int
    needed_by_join: int
    normal_gap: float
    gap: float
    added_gap: float
    killed: float
    left: float


def moving(options: Options, say: Say) -> Section:
    """Members join, leave and are killed under a steady light load."""
    rounds: list[_Moves] = []
    for number in range(1, options.rounds + 1):
        say(f"moving: round {number}/{options.rounds}")
        with scratch(options) as name, ExitStack() as stack:
            px = stack.enter_context(pxrs.connect(ours.url(Path(name))))
            px.topics.create(TOPIC, partitions=MOVING_PARTITIONS)
            rounds.append(_move(px, stack))
    too_many = sum(each.moved_by_join - each.needed_by_join for each in rounds)
    killed = [each.killed for each in rounds]
    left = [each.left for each in rounds]
    normal, gaps = [each.normal_gap for each in rounds], [each.gap for each in rounds]
    added = [each.added_gap for each in rounds]
    return Section(
        checks=[
            Check("SIGKILL: all its partitions go on elsewhere", median(killed), 1_000, "ms"),
            Check("leave: all its partitions go on elsewhere", median(left), 100, "ms"),
            Check("join: partitions moved beyond those that must", too_many, 0, ""),
            Check("join: longest gap where nothing moves, above normal", median(added), 50, "ms"),
        ],
        notes=[
            f"{MOVING_PARTITIONS} partitions; 3 members, then 4, 3 and 2; a message each in 5 ms",
            f"after SIGKILL {_list(killed)} ms; after a leave {_list(left)} ms",
            f"longest gaps where nothing moves: {_list(normal)} ms, with a join {_list(gaps)} ms",
        ],
        figures={"rounds": [each._asdict() for each in rounds]},
    )


def _move(px: Px, stack: ExitStack) -> _Moves:
    members = [Member(stack, px.url, GROUP) for _ in range(4)]
    for member in members:
        member.ready()
    group = Watched(px, GROUP)
    with Load(px, MOVING_PARTITIONS):
        for member in members[:3]:
            member.join()
        before = group.settle(3)
        time.sleep(WINDOW)
        joined_at = members[3].join()
        after = group.settle(4)
        time.sleep(max(0.0, WINDOW - (time.monotonic_ns() - joined_at) / 1e9))
        killed_at = members[0].kill()
        rest = group.settle(3)
        time.sleep(WINDOW / 5)
        leaver = members[1].leave()
        group.settle(2)
        time.sleep(WINDOW / 5)
        seen = [each for member in members[2:] for each in member.leave().seen] + leaver.seen
    gaps = _gaps(before, after, seen, joined_at, silent=members[0].name)
    return _Moves(
        moved_by_join=len(moves_between(before, after).moves),
        needed_by_join=MOVING_PARTITIONS // len(members),
        normal_gap=max(normal for normal, _ in gaps),
        gap=max(around for _, around in gaps),
        added_gap=max(around - normal for normal, around in gaps),
        killed=_taken_over(_owned(after, members[0]), seen, killed_at),
        left=_taken_over(_owned(rest, members[1]), seen, leaver.at),
    )


def _owned(head: Head, member: Member) -> set[int]:
    return {part.partition for part in head.target_of(member.name)}


def _gaps(
    before: Head, after: Head, seen: list[Snapshot], joined: int, silent: str
) -> list[tuple[float, float]]:
    """The longest gap of each partition that stayed: in the window before the join and after.

    Of all members but the one that could not tell.
    """
    new = after.owner_of()
    stayed = {
        part.partition for part, owner in before.owner_of().items() if new[part] == owner != silent
    }
    window = round(1e9 * WINDOW)
    times: defaultdict[int, list[int]] = defaultdict(list)
    for each in seen:
        times[each.partition].append(each.at)
    return [
        (
            _longest(at for at in times[partition] if joined - window <= at <= joined),
            _longest(at for at in times[partition] if joined <= at <= joined + window),
        )
        for partition in stayed
    ]


def _longest(times: Iterable[int]) -> float:
    """The longest time between two of these, in milliseconds."""
    return max((later - sooner) / 1e6 for sooner, later in pairwise(sorted(times)))


def _taken_over(partitions: set[int], seen: list[Snapshot], since: int) -> float:
    """Milliseconds until others had handled a message of each of these partitions."""
    first = {
        partition: min(each.at for each in seen if each.partition == partition and each.at > since)
        for partition in partitions
    }
    return (max(first.values()) - since) / 1e6


def _list(values: Iterable[float]) -> str:
    return " · ".join(f"{value:.0f}" for value in values)


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    "consuming": consuming,
    "sharing": sharing,
    "moving": moving,
    "many": many.many,
}
