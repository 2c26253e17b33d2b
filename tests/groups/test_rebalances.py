"""Members come, go, die and come back: who is handed what from where, and who is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import Pxrs, TopicPartition
from pxrs.core.records import Head, decode
from support.child import PATIENCE, Child
from support.inside import say, wait_for_parent

PARTITIONS = 8


class Team:
    """Members of one group in this process. Nothing but what is under test moves partitions."""

    def __init__(self, px: Pxrs, ending: ExitStack) -> None:
        self.px = px
        self._ending = ending
        self.members: list[pxrs.Consumer] = []
        # What everybody was handed while the group settled.
        self.seen: list[pxrs.Message] = []

    def join(self, **settings: Any) -> pxrs.Consumer:
        patient = {"session_ttl": 60.0, "revoke_timeout": None, "auto_commit_interval": PATIENCE}
        consumer = self.px.consumer("t", "g", **{"debounce": 0.0, **patient, **settings})
        self._ending.callback(consumer.close)
        self.members.append(consumer)
        return consumer

    def leave(self, consumer: pxrs.Consumer) -> None:
        self.members.remove(consumer)
        consumer.close()

    def settle(self, *members: pxrs.Consumer) -> None:
        """Until these members have all partitions, in fair shares; everybody polls meanwhile."""

        def settled() -> bool:
            shares = [len(member.assignment) for member in members or self.members]
            return sum(shares) == PARTITIONS and max(shares) - min(shares) <= 1

        self.until(settled)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "the group came to a halt"
            for member in self.members:
                self.seen += member.poll(timeout=0.01)

    def generation(self) -> int:
        return self.px.groups.describe("g").generation


@pytest.fixture
def team(px: Pxrs) -> Iterator[Team]:
    px.topics.create("t", PARTITIONS)
    with ExitStack() as ending:
        yield Team(px, ending)


def send(px: Pxrs, number: int) -> None:
    """So many messages to each partition."""
    with px.producer() as producer:
        for partition in range(PARTITIONS):
            for _ in range(number):
                producer.send("t", b"", partition=partition)


class Told:
    """What a member's callbacks were told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    @property
    def callbacks(self) -> dict[str, Any]:
        return {
            "on_assigned": lambda parts: self.events.append(("assigned", dict(parts))),
            "on_revoked": lambda parts: self.events.append(("revoked", set(parts))),
            "on_lost": lambda parts: self.events.append(("lost", set(parts))),
        }


def test_a_join_takes_over_at_the_checkpoints_and_everybody_is_told(team: Team) -> None:
    told_a, told_b = Told(), Told()
    a = team.join(**told_a.callbacks)
    team.settle()
    send(team.px, 3)
    handled = 0
    while handled < 3 * PARTITIONS:
        handled += len(a.poll(timeout=PATIENCE))
    before = a.assignment
    b = team.join(**told_b.callbacks)
    team.settle()
    assert b.poll(timeout=0) == []
    moved = b.assignment
    assert len(moved) == PARTITIONS // 2
    assert a.assignment == before - moved
    assert [kind for kind, _ in told_a.events] == ["assigned", "revoked"]
    assert told_a.events[1][1] == moved
    # All of it had been handled when it was given away, at once or a part after the other.
    assert {kind for kind, _ in told_b.events} == {"assigned"}
    assert sum(len(parts) for _, parts in told_b.events) == len(moved)
    assert {part: at for _, parts in told_b.events for part, at in parts.items()} == (
        dict.fromkeys(moved, 3)
    )


def test_a_leave_hands_over_at_once(team: Team) -> None:
    """No lease has to end and no deadline has to pass: both are too long to wait for here."""
    a, b, c = team.join(), team.join(), team.join()
    team.settle()
    kept = {each: each.assignment for each in (a, c)}
    team.leave(b)
    team.settle()
    assert all(each.assignment > kept[each] for each in (a, c))


def test_what_is_in_hand_is_finished_first(team: Team) -> None:
    a = team.join()
    team.settle()
    send(team.px, 1)
    in_hand = a.poll(timeout=PATIENCE)
    team.members.remove(a)
    b = team.join()
    held = {TopicPartition(message.topic, message.partition) for message in in_hand}
    team.until(lambda: team.generation() == 2)
    target = _target(team.px, b)
    team.until(lambda: b.assignment == target - held)
    assert held & target <= _owned_by(team.px, a)
    team.members.append(a)
    team.settle()
    assert b.assignment == target
    checkpoints = {
        part.partition: part.checkpoint for part in team.px.groups.describe("g").partitions
    }
    assert all(checkpoints[part.partition] == 1 for part in held & target)


def test_only_what_moves_stops(team: Team) -> None:
    a = team.join()
    team.settle()
    send(team.px, 1)
    b = team.join()
    team.settle()
    epochs = {part.partition: part.epoch for part in team.px.groups.describe("g").partitions}
    moved = {part.partition for part in b.assignment}
    assert {number for number, epoch in epochs.items() if epoch > 1} == moved
    assert {number for number, epoch in epochs.items() if epoch == 1} == {
        part.partition for part in a.assignment
    }


def test_a_paused_partition_stays_paused_wherever_it_goes_meanwhile(team: Team) -> None:
    a = team.join()
    team.settle()
    part = TopicPartition("t", PARTITIONS - 1)
    a.pause(*a.assignment)
    b = team.join()
    team.settle()
    assert part in b.assignment
    team.leave(b)
    team.settle()
    send(team.px, 1)
    assert a.poll(timeout=0) == []
    a.resume(part)
    assert [message.partition for message in a.poll(timeout=PATIENCE)] == [part.partition]
    assert a.poll(timeout=0) == []


LOOPS: list[Callable[[pxrs.Consumer], Iterator[Any]]] = [iter, pxrs.Consumer.batches]


@pytest.mark.parametrize("loop", LOOPS, ids=["messages", "batches"])
def test_what_a_loop_has_not_come_to_is_given_away_at_once(
    team: Team, loop: Callable[[pxrs.Consumer], Iterator[Any]]
) -> None:
    """Nobody works on it: neither it nor its next owner waits for another partition's handler."""
    send(team.px, 3)
    a = team.join()
    team.until(lambda: len(a.assignment) == PARTITIONS)
    a.seek_to_time(0)
    messages = loop(a)
    next(messages)
    b = team.join()
    team.members = [b]
    team.until(lambda: len(b.assignment) == PARTITIONS // 2)
    assert len(a.assignment) == PARTITIONS // 2


@pytest.mark.parametrize("loop", LOOPS, ids=["messages", "batches"])
def test_a_loop_hears_that_a_partition_goes_after_the_message_it_is_at(
    team: Team, loop: Callable[[pxrs.Consumer], Iterator[Any]]
) -> None:
    send(team.px, 3)
    told: list[set[TopicPartition]] = []
    a = team.join(on_revoked=told.append)
    messages = loop(a)
    next(messages)
    while len(a.assignment) < PARTITIONS:
        next(messages)
    next(messages)
    b = team.join()
    team.members = [b]
    team.until(
        lambda: any(owned.state == "leaving" for owned in a._steps.table.partitions.values())
    )
    assert told == []
    next(messages)
    assert len(told) == 1
    team.until(lambda: b.assignment == told[0])


@pytest.mark.parametrize("loop", LOOPS, ids=["messages", "batches"])
def test_a_loop_lets_go_of_what_it_was_at_before_it_goes_on(
    team: Team, loop: Callable[[pxrs.Consumer], Iterator[Any]]
) -> None:
    send(team.px, 3)
    a = team.join(instance="b", strategy="fair")
    team.until(lambda: len(a.assignment) == PARTITIONS)
    a.seek_to_time(0)
    messages = loop(a)
    next(messages)
    [at] = {each.owned for each in a._steps.table.in_flight if each.seen}
    first = at.part.partition < PARTITIONS // 2
    b = team.join(instance="a" if first else "c", strategy="fair")
    team.members = [b]
    team.until(lambda: at.state == "leaving")
    next(messages)
    assert at.part not in a._steps.table.partitions


def test_committing_when_a_partition_goes(team: Team) -> None:
    """The last chance of those who commit themselves."""
    send(team.px, 1)
    gone: set[TopicPartition] = set()

    def commit(parts: set[TopicPartition]) -> None:
        gone.update(parts)
        a.commit()

    a = team.join(auto_commit=False, on_revoked=commit)
    handled = 0
    while handled < PARTITIONS:
        handled += len(a.poll(timeout=PATIENCE))
    b = team.join(auto_commit=False)
    team.settle()
    assert gone == b.assignment
    assert b.poll(timeout=0) == []
    assert {part.checkpoint for part in team.px.groups.describe("g").partitions} == {1}


def test_seeking_in_what_is_about_to_go(team: Team) -> None:
    """It is owned still: refused, what was to be handled again would be given away as handled."""
    send(team.px, 4)

    def back(parts: set[TopicPartition]) -> None:
        for part in parts:
            a.seek(*part, 1)

    a = team.join(on_revoked=back)
    handled = 0
    while handled < PARTITIONS * 4:
        handled += len(a.poll(timeout=PATIENCE))
    b = team.join()
    got: list[pxrs.Message] = []
    while len(got) < PARTITIONS // 2 * 3:
        got += b.poll(timeout=0.01)
        assert a.poll(timeout=0.01) == []
    assert {message.offset for message in got} == {1, 2, 3}


def test_what_a_callback_raises_is_told_to_whoever_polls(team: Team) -> None:
    def fail(parts: object) -> None:
        raise KeyError("of the caller's own")

    a = team.join(on_assigned=fail)
    with pytest.raises(KeyError, match="of the caller's own"):
        while True:
            a.poll(timeout=PATIENCE)
    send(team.px, 1)
    assert a.poll(timeout=PATIENCE)


def test_a_forced_reset_is_a_loss(team: Team) -> None:
    told = Told()
    a = team.join(**told.callbacks)
    part = TopicPartition("t", 0)
    a.pause(part)
    team.until(lambda: bool(told.events))
    send(team.px, 3)
    team.px.groups.reset("g", "t", to=2, partitions=[0], force=True)
    team.until(lambda: len(told.events) >= 3)
    assert told.events[1:3] == [("lost", {part}), ("assigned", {part: 2})]
    a.resume(part)
    while len(team.seen) < 3 * (PARTITIONS - 1) + 1:
        team.seen += a.poll(timeout=PATIENCE)
    assert [message.offset for message in team.seen if message.partition == 0] == [2]


def _target(px: Pxrs, member: pxrs.Consumer) -> set[TopicPartition]:
    record = px.stores.coord.get("group/g")
    assert record is not None
    return set(decode(record, Head).target_of(member.member))


def _owned_by(px: Pxrs, member: pxrs.Consumer) -> set[TopicPartition]:
    parts = px.groups.describe("g").partitions
    return {
        TopicPartition(each.topic, each.partition) for each in parts if each.owner == member.member
    }


class TestStaticMembers:
    def test_a_restart_moves_nothing(self, team: Team) -> None:
        a = team.join(instance="billing-1")
        b = team.join(instance="billing-2")
        team.settle()
        mine, theirs = a.assignment, b.assignment
        before = team.generation()
        team.leave(a)
        again = team.join(instance="billing-1")
        team.settle()
        assert (again.assignment, b.assignment) == (mine, theirs)
        assert team.generation() == before

    def test_who_does_not_come_back_is_given_up(self, team: Team) -> None:
        a = team.join(instance="billing-1", rejoin_timeout=0.2)
        b = team.join(instance="billing-2")
        team.settle()
        team.leave(a)
        team.settle(b)
        assert len(b.assignment) == PARTITIONS


# The published scenario, with processes


def work(url: str, name: str) -> None:
    """Say what was handled, partition and offset, and commit it when told to."""
    px = pxrs.connect(url)
    consumer = px.consumer("t", "g", auto_commit=False, session_ttl=60.0)
    say(consumer.member)
    while True:
        messages = consumer.poll(timeout=0.2)
        if messages:
            say([[message.partition, message.offset] for message in messages])
            wait_for_parent()
            consumer.commit()
            say("committed")


@pytest.mark.engine("sqlite")
@pytest.mark.long
def test_the_published_crash(tmp_path: Path) -> None:
    """A owns three, B three, C two; B is killed with messages in hand."""
    url = f"sqlite:///{tmp_path}/crash.db"
    with pxrs.connect(url) as px, ExitStack() as ending:
        px.topics.create("t", PARTITIONS)
        children = {}
        for name in "ABC":
            child = ending.enter_context(Child(work, url, name))
            children[child.read()] = child
        watch = px.stores.coord.watch("claims/g/", "members/g/", "group/g")
        owned = _owned(px, watch, 3)
        assert sorted(map(len, owned.values())) == [2, 3, 3]

        # Everything of the first half is handled and committed, of the second nothing.
        _feed(px, range(PARTITIONS), 5)
        for name, child in children.items():
            _handle(child, owned[name], range(5))
        victim = max(owned, key=lambda name: (len(owned[name]), name))
        _feed(px, owned[victim], 5)
        assert children[victim].read()
        children.pop(victim).kill()

        after = _owned(px, watch, 2)
        assert [len(parts) for parts in after.values()] == [4, 4]
        for name, child in children.items():
            assert after[name] >= owned[name], "a partition moved that need not have"
            inherited = after[name] - owned[name]
            _handle(child, inherited, range(5, 10))
        assert [part.checkpoint for part in px.groups.describe("g").partitions] == [
            10 if number in owned[victim] else 5 for number in range(PARTITIONS)
        ]
        watch.close()


def _feed(px: Pxrs, partitions: Any, number: int) -> None:
    with px.producer() as producer:
        for partition in partitions:
            for _ in range(number):
                producer.send("t", b"", partition=partition)


def _handle(child: Child, partitions: set[int], offsets: range) -> None:
    """The child reports just these offsets of these partitions, in order, and commits them."""
    seen: dict[int, list[int]] = {number: [] for number in partitions}
    while any(len(found) < len(offsets) for found in seen.values()):
        for partition, offset in child.read():
            seen[partition].append(offset)
        child.tell()
        assert child.read() == "committed"
    assert all(found == list(offsets) for found in seen.values())


def _owned(px: Pxrs, watch: Any, members: int) -> dict[str, set[int]]:
    """Who owns what, once so many members share everything."""
    while True:
        info = px.groups.describe("g")
        if info.state == "STABLE" and len(info.members) == members:
            return {each.name: {part.partition for part in each.owned} for each in info.members}
        assert watch.wait(PATIENCE), "the group came to a halt"
