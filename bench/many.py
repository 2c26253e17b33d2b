"""Groups with many members and partitions: targets, rebalances and commits, counted and timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import pxrs
from bench.harness import Check, Options, Say, Section, scratch
from bench.ours import Px, url
from bench.workload import TOPIC
from pxrs.clock import SYSTEM_CLOCK
from pxrs.consuming.partition_table import PartitionTable
from pxrs.core.assign import assignor
from pxrs.core.group import Rules, View, next_head
from pxrs.core.records import GroupTopic, Head, MemberRecord, claims_prefix
from pxrs.groups.membership import MemberSettings, Membership
from pxrs.groups.owned_claims import Mark, OwnedClaims
from pxrs.topics import Topics
from pxrs.types import Check as VersionCheck
from pxrs.types import Committed, Conflict, Write

PARTITIONS = 1_000
MEMBERS = 50
GROUP = "many"
COMMIT_SIZES = (1, 8, PARTITIONS)
_SETTLE_TIMEOUT = 60.0


class CountingCoord:
    """A store that remembers which keys each commit wrote."""

    def __init__(self, coord: Any) -> None:
        self._coord = coord
        self.commits: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coord, name)

    def commit(
        self, checks: Sequence[VersionCheck], writes: Sequence[Write]
    ) -> Committed | Conflict:
        outcome: Committed | Conflict = self._coord.commit(checks, writes)
        if isinstance(outcome, Committed):
            self.commits.append([write.key for write in writes])
        return outcome


class Bystander:
    """A member without threads: it looks when it is told to."""

    def __init__(self, px: Px, coord: Any, number: int) -> None:
        self.name = f"member-{number:02}"
        self.owned_claims = OwnedClaims(coord, SYSTEM_CLOCK)
        self.membership = Membership(
            MemberSettings(
                group=GROUP,
                name=self.name,
                topics=lambda: (TOPIC,),
                rules=Rules(0.0, None, assignor("sticky")),
                ttl=600.0,
            ),
            coord,
            Topics(coord, px.stores.log, SYSTEM_CLOCK),
            SYSTEM_CLOCK,
            self.owned_claims,
            PartitionTable(commits_handled=True),
        )
        self.membership.join()

    def look(self) -> float:
        """One look; the seconds it took."""
        started = perf_counter()
        self.membership.look()
        return perf_counter() - started

    def crash(self) -> None:
        """Its session ends and takes its record with it; its claims stay."""
        assert self.membership.session is not None
        self.membership.session.close()


def many(options: Options, say: Say) -> Section:
    """1,000 partitions: the target for 50 members, a crash among them, and commits."""
    section = Section()
    say(f"many: targets for {MEMBERS} members")
    _targets(section, options)
    with scratch(options) as name, pxrs.connect(url(Path(name))) as px:
        px.topics.create(TOPIC, partitions=PARTITIONS)
        say(f"many: {MEMBERS} members join, one crashes")
        _crash(section, px)
    with scratch(options) as name, pxrs.connect(url(Path(name))) as px:
        px.topics.create(TOPIC, partitions=PARTITIONS)
        say("many: commits")
        _commits(section, px, options)
    return section


def _targets(section: Section, options: Options) -> None:
    full = _target(Head(), MEMBERS)
    cases = {
        "from nothing": (Head(), MEMBERS),
        "after a crash": (full, MEMBERS - 1),
        "after a join": (full, MEMBERS + 1),
    }
    times: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(4 * options.rounds):
        for case, (head, members) in cases.items():
            started = perf_counter()
            _target(head, members)
            times[case].append(1000 * (perf_counter() - started))
    for case, taken in times.items():
        section.checks.append(Check(f"target {case}", median(taken), 50, "ms"))
    section.figures["targets, ms"] = times


def _target(head: Head, members: int) -> Head:
    names = [f"member-{number:02}" for number in range(members)]
    records = {name: MemberRecord(id=name, topics=(TOPIC,)) for name in names}
    view = View(head, records, {TOPIC: GroupTopic("t", PARTITIONS)}, {})
    subscriptions = dict.fromkeys(names, (TOPIC,))
    return next_head(view, subscriptions, names[0], assignor("sticky"))


def _crash(section: Section, px: Px) -> None:
    coord = CountingCoord(px.stores.coord)
    members = [Bystander(px, coord, number) for number in range(MEMBERS)]
    _settle(members)
    dead, living = members[7], members[:7] + members[8:]
    its_claims = {
        holding.key for part in dead.owned_claims.parts if (holding := dead.owned_claims.get(part))
    }
    coord.commits.clear()
    dead.crash()
    looks = _settle(living)
    touched = [
        key for commit in coord.commits for key in commit if key.startswith(claims_prefix(GROUP))
    ]
    others = len(set(touched) - its_claims)
    twice = len(touched) - len(set(touched))
    section.checks.append(Check("crash: other members' claims written", others, 0, ""))
    section.checks.append(Check("crash: claims written more than once", twice, 0, ""))
    section.notes.append(
        f"the dead one of {MEMBERS} members owned {len(its_claims)} of {PARTITIONS} partitions; "
        f"{len(set(touched))} claims were written in {len(coord.commits)} commits; a look took "
        f"{1000 * median(looks):.1f} ms, at most {1000 * max(looks):.1f}"
    )
    section.figures["looks after a crash, ms"] = [1000 * look for look in looks]


def _settle(members: Sequence[Bystander]) -> list[float]:
    """Let all look in turn until together they hold everything; how long each look took."""
    looks: list[float] = []
    deadline = monotonic() + _SETTLE_TIMEOUT
    while monotonic() < deadline:
        looks += [member.look() for member in members]
        if sum(len(member.owned_claims.parts) for member in members) == PARTITIONS:
            return looks
    raise TimeoutError(f"{len(members)} members did not settle in {_SETTLE_TIMEOUT:g} s")


def _commits(section: Section, px: Px, options: Options) -> None:
    coord = CountingCoord(px.stores.coord)
    member = Bystander(px, coord, 0)
    _settle([member])
    parts = sorted(member.owned_claims.parts)
    times: dict[int, list[float]] = {size: [] for size in COMMIT_SIZES}
    counts: dict[int, list[int]] = {size: [] for size in COMMIT_SIZES}
    for number in range(1, 4 * options.rounds + 2):
        for size in COMMIT_SIZES:
            marks = {part: Mark(10 * number + size) for part in parts[:size]}
            before = len(coord.commits)
            started = perf_counter()
            member.owned_claims.commit(marks)
            times[size].append(1000 * (perf_counter() - started))
            counts[size].append(len(coord.commits) - before)
    for size in COMMIT_SIZES:
        name = f"transactions of a commit of {size:,} partition{'s' if size > 1 else ''}"
        section.checks.append(Check(name, max(counts[size]), 1, ""))
    taken = " · ".join(f"{size:,}: {median(times[size][1:]):.2f} ms" for size in COMMIT_SIZES)
    section.notes.append(f"a commit of so many partitions takes  {taken}")
    section.figures["commits, ms"] = {str(size): found[1:] for size, found in times.items()}
