"""`GroupLab`: what its members suffer, and what it says about it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from pxrs import JSON, InvalidRequest, Message, Position, Transaction
from pxrs.testing import Crash, GroupLab, LabMember
from support.seeds import few_are_fast

pytestmark = pytest.mark.engine("memory")


@pytest.fixture
def lab() -> Iterator[GroupLab]:
    with GroupLab() as lab:
        yield lab


def ignore(message: Message) -> None:
    """A handler that does nothing."""


def send(lab: GroupLab, count: int) -> None:
    for number in range(count):
        lab.send(f"{number}", key=f"key-{number % 7}")


def test_members_share_the_partitions_and_commit(lab: GroupLab) -> None:
    lab.start("a", ignore)
    lab.start("b", ignore)
    send(lab, 30)
    lab.run_until_quiet()
    assert sorted(lab.owners.values(), key=str) == ["a", "a", "b", "b"]
    assert len(lab.handled) == 30
    assert lab.repeated == []
    assert sum(lab.checkpoints.values()) == 30
    assert len(lab.handled_by("a")) + len(lab.handled_by("b")) == 30
    assert sorted(lab.values()) == sorted(str(n).encode() for n in range(30))
    assert lab.quiet
    assert lab.now < 2


def test_a_killed_member_s_messages_come_again(lab: GroupLab) -> None:
    lab.start("a", ignore)
    send(lab, 10)
    lab.run(messages=4)
    before = [each.message for each in lab.handled]
    lab.kill("a")
    lab.start("b", ignore)
    lab.run_until_quiet()
    # Its session of ten seconds had to run out first.
    assert lab.now >= 10
    places = {Position(m.topic, m.partition, m.offset) for m in before}
    assert set(lab.repeated) == places
    lab.assert_nothing_lost()
    lab.assert_in_order()


def test_a_stopped_member_s_messages_do_not_come_again(lab: GroupLab) -> None:
    lab.start("a", ignore)
    send(lab, 10)
    lab.run(messages=4)
    lab.stop("a")
    assert sum(lab.checkpoints.values()) == 4
    assert set(lab.owners.values()) == {None}
    lab.start("b", ignore)
    lab.run_until_quiet()
    assert lab.now < 5
    assert lab.repeated == []


def test_a_name_can_come_back(lab: GroupLab) -> None:
    first = lab.start("a", ignore)
    send(lab, 5)
    lab.run(messages=1)
    lab.kill("a")
    second = lab.start("a", ignore)
    assert lab.member("a") is second is not first
    lab.run_until_quiet()
    assert len(lab.repeated) == 1


def test_a_join_moves_only_what_must_move(lab: GroupLab) -> None:
    lab.start("a", ignore)
    lab.start("b", ignore)
    lab.run_until_quiet()
    before = lab.owners
    lab.start("c", ignore)
    lab.run_until_quiet()
    moved = [number for number in before if before[number] != lab.owners[number]]
    assert len(moved) == 1
    assert lab.member("c").assignment == set(moved)


def test_a_zombie_is_refused(lab: GroupLab) -> None:
    lab.start("a", ignore)
    lab.start("b", ignore)
    send(lab, 40)
    lab.run(messages=4)
    lab.freeze("a")
    in_hand = lab.member("a").in_hand
    assert in_hand
    lab.run_until_quiet()
    assert set(lab.owners.values()) == {"b"}
    lab.wake("a")
    lab.run_until_quiet()
    stale = [each for each in lab.handled if each.stale]
    assert [(each.member, each.message) for each in stale] == [("a", in_hand[0])]
    ((member, partitions, _),) = lab.fenced
    assert (member, in_hand[0].partition in partitions) == ("a", True)
    assert set(lab.owners.values()) == {"a", "b"}
    lab.assert_nothing_lost()
    lab.assert_in_order()


def test_a_short_pause_costs_nothing(lab: GroupLab) -> None:
    lab.start("a", ignore)
    lab.start("b", ignore)
    send(lab, 40)
    lab.run(messages=4)
    before = lab.owners
    lab.freeze("a")
    lab.advance(5)
    assert lab.owners == before
    lab.wake("a")
    lab.run_until_quiet()
    assert (lab.fenced, lab.repeated, lab.owners) == ([], [], before)


def test_time_passes_for_all_who_live(lab: GroupLab) -> None:
    lab.start("a", ignore)
    lab.advance(1000)
    assert lab.now == 1000
    assert set(lab.owners.values()) == {"a"}
    assert lab.fenced == []


def test_a_crash_inside_a_handler(lab: GroupLab) -> None:
    crashes = iter([Crash()])

    def handle(message: Message) -> None:
        try:
            for crash in crashes:
                raise crash
        except Exception:  # noqa: BLE001 - what a power cut does not care for
            raise AssertionError from None

    lab.start("a", handle)
    lab.start("b", handle)
    send(lab, 10)
    lab.run_until_quiet()
    (gone,) = (name for name in "ab" if lab.member(name).state == "killed")
    assert lab.handled_by(gone) == []
    assert len(lab.handled) == 10


def test_what_a_handler_raises_is_the_test_s(lab: GroupLab) -> None:
    failures = iter([ValueError("no")])

    def handle(message: Message) -> None:
        for failure in failures:
            raise failure

    lab.start("a", handle)
    send(lab, 5)
    with pytest.raises(ValueError, match="no"):
        lab.run_until_quiet()
    lab.run_until_quiet()
    assert len(lab.handled) == 5
    lab.assert_in_order()


def test_what_was_handled_before_a_failure_does_not_come_again(lab: GroupLab) -> None:
    """As for a loop over a consumer whose body raises: only that message comes again."""
    failures = iter([ValueError("no")])

    def handle(message: Message) -> None:
        if message.value == b"2":
            for failure in failures:
                raise failure

    lab.start("a", handle)
    for number in range(4):
        lab.send(f"{number}", partition=0)
    with pytest.raises(ValueError, match="no"):
        lab.run_until_quiet()
    lab.run_until_quiet()
    assert lab.values() == [b"0", b"1", b"2", b"3"]


def test_items_stay_with_the_member_that_took_them() -> None:
    """What holds them is renewed as long as the member lives, and ends with it."""

    def handle(message: Message, tx: Transaction) -> None:
        item = tx.take("tasks", 0)
        assert item is not None
        taken.append(item.value)
        if len(taken) == 2:
            raise Crash

    taken: list[Any] = []
    with GroupLab(partitions=1) as lab:
        for number in range(2):
            lab.px.put("tasks", f"{number}")
        lab.start("a", handle, transaction=True)
        lab.send("first")
        lab.run_until_quiet()
        lab.advance(100)
        lab.send("second")
        lab.start("b", handle, transaction=True)
        lab.run_until_quiet()
        assert taken == ["0", "1", "1"]
        assert lab.px.queues.describe("tasks").depth == 0


def copy(message: Message, tx: Transaction) -> None:
    tx.send("copies", message.value)


def copied(lab: GroupLab) -> list[Any]:
    reader = lab.px.reader("copies")
    return sorted(int(message.value) for message in reader.read(0, 0))


def test_a_transaction_counts_once_whatever_happens(lab: GroupLab) -> None:
    lab.px.topics.create("copies", 1)
    lab.start("a", copy, transaction=True)
    lab.start("b", copy, transaction=True)
    send(lab, 30)
    lab.run(messages=5)
    lab.freeze("a")
    lab.run_until_quiet()
    lab.wake("a")
    lab.run_until_quiet()
    assert lab.fenced
    assert copied(lab) == list(range(30))


def test_a_serde_is_applied_both_ways() -> None:
    with GroupLab(serde=JSON(), key_serde=JSON(), partitions=1) as lab:
        lab.start("a", ignore)
        lab.send({"n": 1}, key=[1])
        lab.send(None)
        lab.run_until_quiet()
        assert [(each.message.key, each.message.value) for each in lab.handled] == [
            ([1], {"n": 1}),
            (None, None),
        ]


def test_bad_calls_are_refused(lab: GroupLab) -> None:
    lab.start("a", ignore)
    with pytest.raises(InvalidRequest, match="running already"):
        lab.start("a", ignore)
    with pytest.raises(InvalidRequest, match="no member 'b'"):
        lab.kill("b")
    with pytest.raises(InvalidRequest, match="is running, not frozen"):
        lab.wake("a")
    lab.kill("a")
    with pytest.raises(InvalidRequest, match="is killed"):
        lab.stop("a")


def test_what_can_never_come_is_told(lab: GroupLab) -> None:
    send(lab, 1)
    with pytest.raises(AssertionError, match="no member runs"):
        lab.run_until_quiet()
    lab.start("a", ignore)
    with pytest.raises(AssertionError, match=r"2 more messages handled: not within 600 s\nat 6"):
        lab.run(messages=2)


def test_a_handler_that_feeds_itself_is_stopped(
    lab: GroupLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pxrs.testing.group_lab._MOST_STEPS", 500)
    lab.start("a", lambda message: lab.send("more", key="k"))
    lab.send("first", key="k")
    with pytest.raises(AssertionError, match="no end after 500 steps"):
        lab.run_until_quiet()


def test_the_assertions_find_what_they_are_for(lab: GroupLab) -> None:
    lab.start("a", ignore)
    for _ in range(3):
        lab.send("x", partition=0)
    lab.run_until_quiet()
    second = lab.handled.pop(1)
    with pytest.raises(AssertionError, match="never handled: partition 0 offset 1"):
        lab.assert_nothing_lost()
    with pytest.raises(AssertionError, match="offset 2 of partition 0 before offset 1"):
        lab.assert_in_order()
    lab.handled.append(second)
    lab.assert_nothing_lost()


def misfortune(lab: GroupLab, chance: random.Random, members: list[LabMember]) -> None:
    """Do something to somebody."""
    running = [member.name for member in members if member.state == "running"]
    frozen = [member.name for member in members if member.state == "frozen"]
    what = chance.choice(
        ["send", "run", "kill", "freeze", "wake", "start", "stop", "time", "zombie"]
    )
    if what == "send":
        send(lab, chance.randrange(1, 20))
    elif what == "run" and running:
        seen = {(each.message.partition, each.message.offset) for each in lab.handled}
        lab.run(messages=min(chance.randrange(10), len(lab.sent) - len(seen)))
    elif what == "time":
        lab.advance(chance.choice([0.05, 0.5, 3, 12, 40]))
    elif what == "start" and len(running) + len(frozen) < 5:
        members.append(lab.start(f"m{len(members)}", members[0]._handler, transaction=True))
    elif what == "wake" and frozen:
        lab.wake(chance.choice(frozen))
    elif what == "zombie" and len(running) > 1:
        send(lab, 20)
        lab.run(messages=chance.randrange(1, 20))
        name = chance.choice([name for name in running if lab.member(name).state == "running"])
        lab.freeze(name)
        lab.advance(chance.choice([5, 20]))
        lab.wake(name)
    elif what in ("kill", "freeze", "stop") and len(running) > 1:
        getattr(lab, what)(chance.choice(running))


@pytest.mark.parametrize("seed", few_are_fast(range(25), 5))
def test_whatever_happens_every_message_counts_once(seed: int) -> None:
    chance = random.Random(seed)
    with GroupLab(seed=seed, in_hand=chance.choice([1, 3, 50]), revoke_timeout=5.0) as lab:
        lab.px.topics.create("copies", 1)

        def handle(message: Message, tx: Transaction) -> None:
            if chance.random() < 0.01 and len(lab._running()) > 1:
                raise Crash
            tx.send("copies", f"{message.partition * 1000 + message.offset}")

        members = [lab.start(f"m{n}", handle, transaction=True) for n in range(3)]
        for _ in range(60):
            misfortune(lab, chance, members)
        for member in members:
            if member.state == "frozen":
                lab.wake(member.name)
        lab.run_until_quiet()
        assert copied(lab) == sorted(each.partition * 1000 + each.offset for each in lab.sent)
        lab.assert_nothing_lost()
        lab.assert_in_order()


def course(seed: int | None) -> list[tuple[str, int, int]]:
    with GroupLab(seed=seed) as lab:
        for name in "abc":
            lab.start(name, ignore)
        send(lab, 50)
        lab.run(messages=20)
        lab.kill("b")
        lab.run_until_quiet()
        return [(each.member, each.message.partition, each.message.offset) for each in lab.handled]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_same_calls_give_the_same_course(seed: int | None) -> None:
    assert course(seed) == course(seed)


def test_a_seed_gives_another_course() -> None:
    assert len({tuple(course(seed)) for seed in range(5)}) > 1
