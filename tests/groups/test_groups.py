"""`px.groups`: what it tells of a group, and how an operator changes one."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.core.records import Claim, claim_key, claims_prefix, decode
from pxrs.groups.admin import Groups
from pxrs.stores.api import CoordStore
from pxrs.topics import Topics
from pxrs.types import Check, Committed, Conflict, LogPartition, TopicPartition, Write

PATIENCE = 30.0


@pytest.fixture
def px(px: pxrs.Pxrs) -> pxrs.Pxrs:
    px.topics.create("orders", 4)
    return px


def produce(px: pxrs.Pxrs, each: int = 10, topic: str = "orders", partitions: int = 4) -> None:
    """So many messages in every partition, sent one second after the other, long ago."""
    with px.producer() as producer:
        for number in range(partitions):
            for at in range(each):
                producer.send(
                    topic, b"%d" % at, partition=number, timestamp=1_700_000_000_000 + 1000 * at
                )


def join(px: pxrs.Pxrs, group: str = "billing", **options: Any) -> pxrs.Consumer:
    return px.consumer("orders", group, debounce=0.0, auto_commit=False, **options)


def consume(consumer: pxrs.Consumer, number: int) -> list[pxrs.Message]:
    """Exactly so many messages, committed."""
    seen: list[pxrs.Message] = []
    while len(seen) < number:
        found = consumer.poll(number - len(seen), timeout=PATIENCE)
        assert found, "nothing came"
        seen += found
    consumer.commit()
    return seen


def visit(px: pxrs.Pxrs, number: int = 20, group: str = "billing") -> None:
    """A member that comes, handles so many messages and leaves."""
    with join(px, group) as consumer:
        consume(consumer, number)


def checkpoints(px: pxrs.Pxrs, group: str = "billing") -> list[int | None]:
    return [part.checkpoint for part in px.groups.describe(group).partitions]


def claim_of(px: pxrs.Pxrs, number: int, group: str = "billing") -> Claim:
    topic = px.topics.describe("orders").topic
    record = px.stores.coord.get(claim_key(group, topic.id, number))
    assert record is not None
    return decode(record, Claim)


def test_there_are_no_groups_at_first(px: pxrs.Pxrs) -> None:
    assert px.groups.list() == []


def test_list_tells_state_and_members(px: pxrs.Pxrs) -> None:
    produce(px)
    visit(px, group="gone")
    with join(px, "there") as consumer:
        consume(consumer, 1)
        gone, there = px.groups.list()
    assert (gone.name, gone.state, gone.members) == ("gone", "EMPTY", 0)
    assert (there.name, there.state, there.members) == ("there", "STABLE", 1)
    assert (there.generation, gone.generation) == (1, 2)


def test_describe_a_group_at_work(px: pxrs.Pxrs) -> None:
    produce(px)
    with join(px, instance="a") as consumer:
        consume(consumer, 40)
        with px.producer() as producer:
            producer.send("orders", b"late", partition=2, timestamp=SYSTEM_CLOCK.wall_ms() - 60_000)
        info = px.groups.describe("billing")
    assert (info.name, info.state, info.generation) == ("billing", "STABLE", 1)
    assert (info.reason, info.coordinator) == ("a joined", "a")
    (member,) = info.members
    assert (member.name, member.topics, member.static) == ("a", ("orders",), True)
    assert re.fullmatch(r".+:\d+", member.client)
    assert member.owned == tuple(TopicPartition("orders", number) for number in range(4))
    assert abs(member.joined_ms - info.at_ms) < PATIENCE * 1000
    assert [(part.owner, part.epoch, part.checkpoint) for part in info.partitions] == (
        [("a", 1, 10)] * 4
    )
    assert [(part.start, part.end, part.lag) for part in info.partitions] == [
        (0, 10, 0), (0, 10, 0), (0, 11, 1), (0, 10, 0),
    ]  # fmt: skip
    ages = [part.lag_seconds for part in info.partitions]
    assert [age for number, age in enumerate(ages) if number != 2] == [0, 0, 0]
    assert ages[2] is not None
    assert 60 <= ages[2] < 60 + PATIENCE
    assert (info.lag, info.lag_seconds) == (1, ages[2])


def test_what_was_never_claimed_counts_from_the_start_of_the_log(px: pxrs.Pxrs) -> None:
    produce(px)
    with join(px, start="error") as consumer:
        with pytest.raises(pxrs.NoCheckpoint):
            consumer.poll(timeout=PATIENCE)
        info = px.groups.describe("billing")
        assert [(part.checkpoint, part.lag) for part in info.partitions] == [(None, 10)] * 4
    px.groups.reset("billing", "orders", to=4, partitions=[1])
    info = px.groups.describe("billing", lag_seconds=False)
    assert [(part.checkpoint, part.lag) for part in info.partitions] == [
        (None, 10), (4, 6), (None, 10), (None, 10),
    ]  # fmt: skip
    assert {part.lag_seconds for part in info.partitions} == {None}
    assert info.lag_seconds is None


def test_an_empty_group_is_described_by_its_checkpoints(px: pxrs.Pxrs) -> None:
    produce(px)
    visit(px)
    info = px.groups.describe("billing")
    assert (info.state, info.members, info.lag) == ("EMPTY", (), 20)
    assert [part.owner for part in info.partitions] == [None] * 4
    assert sum(part.checkpoint or 0 for part in info.partitions) == 20


def test_a_checkpoint_before_the_logs_start_counts_from_the_start(px: pxrs.Pxrs) -> None:
    produce(px)
    visit(px, 1)
    px.groups.reset("billing", "orders", to=0)
    topic = px.topics.describe("orders").topic
    for _ in range(2):
        produce(px, 1)
    start = px.stores.log.trim(LogPartition(topic.id, 0), 11)
    part = px.groups.describe("billing").partitions[0]
    assert (part.checkpoint, part.start, part.end, part.lag) == (0, start, 12, 12 - start)


def test_a_deleted_topic_is_left_out(px: pxrs.Pxrs) -> None:
    produce(px)
    visit(px)
    px.topics.delete("orders")
    assert px.groups.describe("billing").partitions == ()
    px.topics.create("orders", 4)
    assert px.groups.describe("billing").partitions == ()


def test_a_damaged_batch_has_no_age(tmp_path: Path) -> None:
    with pxrs.connect(f"sqlite:///{tmp_path}/damage.db") as px:
        px.topics.create("orders", 4)
        produce(px)
        visit(px, 1)
        with sqlite3.connect(tmp_path / "damage.db") as connection:
            connection.execute(
                "UPDATE pxrs_log_batches "
                "SET data = CAST(substr(data, 1, size - 1) || x'7f' AS BLOB)"
            )
        connection.close()
        info = px.groups.describe("billing")
    assert (info.lag, {part.lag_seconds for part in info.partitions}) == (39, {None})
    assert info.lag_seconds is None


def test_a_static_member_that_is_waited_for_is_named(px: pxrs.Pxrs) -> None:
    first = join(px, instance="a", rejoin_timeout=3600.0)
    while len(first.assignment) < 4:
        first.poll(timeout=0.01)
    assert px.groups.describe("billing").awaited == ()
    first.close()
    assert px.groups.describe("billing").awaited == ()
    with join(px) as second:
        while len(second.assignment) < 2:
            second.poll(timeout=0.01)
        info = px.groups.describe("billing")
        assert [part.owner for part in info.partitions].count(None) == 2
        assert info.awaited == ("a",)
        with join(px, instance="a"):
            assert px.groups.describe("billing").awaited == ()


def test_explain_tells_who_and_why(px: pxrs.Pxrs) -> None:
    produce(px)
    with join(px, instance="a") as first:
        consume(first, 1)
        with px.consumer("orders", "billing", debounce=0.0) as second:
            while not second.assignment:
                first.poll(timeout=0.01)
                second.poll(timeout=0.01)
            name = second.member
        first.seek("orders", min(part for _, part in first.assignment), 2)
    told = px.groups.explain("billing")
    assert told.name == "billing"
    began, joined, left = told.rebalances[:3]
    assert (began.generation, began.reason, began.coordinator) == (1, "a joined", "a")
    assert {(move.before, move.after) for move in began.moves} == {(None, "a")}
    assert len(began.moves) == 4
    assert joined.reason == f"{name} joined"
    assert {(move.before, move.after) for move in joined.moves} == {("a", name)}
    assert (len(joined.moves), joined.members) == (2, tuple(sorted(("a", name))))
    assert (left.reason, left.coordinator) == (f"{name} left", name)
    (seek,) = told.resets
    assert (seek.by, [change.after for change in seek.changes]) == ("a", [2])
    for limit in range(1, len(told.rebalances) + 2):
        newest = px.groups.explain("billing", limit=limit)
        assert len(newest.rebalances) + len(newest.resets) == limit
        assert newest.rebalances == told.rebalances[len(told.rebalances) - len(newest.rebalances) :]
        assert newest.resets in {(), told.resets}
    assert newest == told
    with pytest.raises(pxrs.InvalidRequest):
        px.groups.explain("billing", limit=0)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"to": "earliest"}, [0, 0, 0, 0]),
        ({"to": "latest"}, [10, 10, 10, 10]),
        ({"to": 7}, [7, 7, 7, 7]),
        ({"to": 10, "partitions": [3, 3, 1]}, [5, 10, 5, 10]),
        ({"timestamp_ms": 1_700_000_002_500}, [3, 3, 3, 3]),
        ({"timestamp_ms": 1_800_000_000_000}, [10, 10, 10, 10]),
    ],
)
def test_reset(px: pxrs.Pxrs, target: dict[str, Any], expected: list[int]) -> None:
    produce(px)
    visit(px, 1)
    px.groups.reset("billing", "orders", to=5)
    before = {number: claim_of(px, number).epoch for number in range(4)}
    changes = px.groups.reset("billing", "orders", **target)
    assert checkpoints(px) == expected
    wanted = sorted(set(target.get("partitions", range(4))))
    assert [
        (change.topic, change.partition, change.before, change.after) for change in changes
    ] == [("orders", number, 5, expected[number]) for number in wanted]
    assert all(claim_of(px, number).epoch == before[number] + 1 for number in wanted)
    assert px.groups.explain("billing").resets[-1].changes == changes
    assert len(px.groups.explain("billing").resets) == 2


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (pxrs.InvalidRequest, {}),
        (pxrs.InvalidRequest, {"to": 3, "timestamp_ms": 3}),
        (pxrs.InvalidRequest, {"to": "3"}),
        (pxrs.InvalidRequest, {"to": True}),
        (pxrs.InvalidRequest, {"to": 3, "partitions": []}),
        (pxrs.OffsetOutOfRange, {"to": 11}),
        (pxrs.OffsetOutOfRange, {"to": -1}),
        (pxrs.PartitionNotFound, {"to": 3, "partitions": [0, 4]}),
    ],
)
def test_a_bad_reset_changes_nothing(
    px: pxrs.Pxrs, error: type[pxrs.PxrsError], arguments: dict[str, Any]
) -> None:
    produce(px)
    visit(px)
    before = px.groups.describe("billing", lag_seconds=False)
    with pytest.raises(error):
        px.groups.reset("billing", "orders", **arguments)
    assert px.groups.describe("billing", lag_seconds=False) == before
    assert px.groups.explain("billing").resets == ()


@pytest.mark.parametrize(
    "call",
    [
        lambda groups: groups.describe("nope"),
        lambda groups: groups.explain("nope"),
        lambda groups: groups.reset("nope", "orders", to=0),
        lambda groups: groups.delete("nope", force=True),
    ],
)
def test_an_unknown_group_is_an_error(px: pxrs.Pxrs, call: Callable[[Groups], object]) -> None:
    with pytest.raises(pxrs.GroupNotFound) as caught:
        call(px.groups)
    assert caught.value.group == "nope"


def test_an_unknown_topic_is_an_error(px: pxrs.Pxrs) -> None:
    visit(px, 0)
    with pytest.raises(pxrs.TopicNotFound):
        px.groups.reset("billing", "nope", to=0)


def test_a_group_with_members_is_not_reset_or_deleted(px: pxrs.Pxrs) -> None:
    produce(px)
    with join(px, instance="a") as consumer:
        consume(consumer, 20)
        for attempt in (
            lambda: px.groups.reset("billing", "orders", to="earliest"),
            lambda: px.groups.delete("billing"),
        ):
            with pytest.raises(pxrs.GroupNotEmpty) as caught:
                attempt()
            assert caught.value.members == ("a",)
        consume(consumer, 20)
    assert checkpoints(px) == [10] * 4


def test_a_forced_reset_fences_the_owner_which_goes_on_from_there(px: pxrs.Pxrs) -> None:
    produce(px)
    lost: list[set[TopicPartition]] = []
    with join(px, on_lost=lost.append) as consumer:
        handled = consume(consumer, 40)
        with px.producer() as producer:
            producer.send("orders", b"in hand", partition=0)
        (stale,) = consumer.poll(timeout=PATIENCE)
        px.groups.reset("billing", "orders", to=8, force=True)
        with pytest.raises(pxrs.Fenced):
            consumer.commit(stale)
        again = consume(consumer, 9)
        assert set().union(*lost) == {TopicPartition("orders", number) for number in range(4)}
    assert {message.offset for message in again} == {8, 9, 10}
    assert {message.fence.epoch for message in handled} == {1}
    assert {message.fence.epoch for message in again} == {3}
    assert sorted(checkpoints(px), key=str) == [10, 10, 10, 11]


def test_delete_leaves_the_epochs_and_nothing_else(px: pxrs.Pxrs) -> None:
    produce(px)
    visit(px)
    px.groups.reset("billing", "orders", to=3)
    epochs = [claim_of(px, number).epoch for number in range(4)]
    px.groups.delete("billing")
    assert px.groups.list() == []
    with pytest.raises(pxrs.GroupNotFound):
        px.groups.describe("billing")
    left = [record.key for record in px.stores.coord.list("") if "/billing" in record.key]
    assert len(left) == 4
    for number in range(4):
        claim = claim_of(px, number)
        assert (claim.owner, claim.checkpoint, claim.done, claim.metadata) == (None, None, (), "")
        assert claim.epoch == epochs[number] + 1
    with join(px) as consumer:
        again = consume(consumer, 40)
    assert {message.fence.epoch for message in again} == {epochs[0] + 2}
    told = px.groups.explain("billing")
    assert (told.rebalances[0].generation, told.resets) == (1, ())


def test_a_deleted_group_shows_no_topics_of_its_former_life(px: pxrs.Pxrs) -> None:
    produce(px)
    visit(px)
    px.groups.delete("billing")
    px.topics.create("other", 1)
    with px.consumer("other", "billing", debounce=0.0):
        topics = {part.topic for part in px.groups.describe("billing").partitions}
    assert topics == {"other"}


def test_a_forced_delete_makes_members_start_anew(px: pxrs.Pxrs) -> None:
    produce(px)
    with join(px) as consumer:
        consume(consumer, 40)
        px.groups.delete("billing", force=True)
        again = consume(consumer, 40)
        info = px.groups.describe("billing")
    assert {message.fence.epoch for message in again} == {3}
    assert (info.generation, len(info.members), info.lag) == (1, 1, 0)


class Meddling:
    """A coordination store in which something happens just before a commit."""

    def __init__(self, coord: CoordStore, *meddle: Callable[[], object]) -> None:
        self._coord = coord
        self._meddle = list(meddle)
        self.commits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coord, name)

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        if self._meddle:
            self._meddle.pop(0)()
        self.commits += 1
        return self._coord.commit(checks, writes)


def meddled(px: pxrs.Pxrs, *meddle: Callable[[], object]) -> tuple[Groups, Meddling]:
    coord: Any = Meddling(px.stores.coord, *meddle)
    topics = Topics(px.stores.coord, px.stores.log, SYSTEM_CLOCK)
    return Groups(coord, px.stores.log, topics, SYSTEM_CLOCK), coord


@pytest.mark.parametrize("action", ["reset", "delete"])
def test_who_joins_in_between_stops_it(px: pxrs.Pxrs, action: str) -> None:
    produce(px)
    visit(px)
    before = checkpoints(px)
    joined: list[pxrs.Consumer] = []
    groups, _ = meddled(px, lambda: joined.append(join(px)))
    with pytest.raises(pxrs.GroupNotEmpty):
        if action == "reset":
            groups.reset("billing", "orders", to="earliest")
        else:
            groups.delete("billing")
    joined[0].close()
    assert checkpoints(px) == before


@pytest.mark.parametrize("action", ["reset", "delete"])
def test_what_changes_in_between_is_read_again(px: pxrs.Pxrs, action: str) -> None:
    produce(px)
    visit(px, 1)
    groups, coord = meddled(px, lambda: px.groups.reset("billing", "orders", to=9, partitions=[2]))
    if action == "reset":
        changes = groups.reset("billing", "orders", to="earliest")
        assert [change.before for change in changes if change.partition == 2] == [9]
        assert checkpoints(px) == [0] * 4
    else:
        groups.delete("billing")
        assert claim_of(px, 2).checkpoint is None
        assert px.groups.list() == []
    assert coord.commits == 2


@pytest.mark.parametrize("action", ["reset", "delete"])
def test_a_big_group_is_changed_in_several_commits(px: pxrs.Pxrs, action: str) -> None:
    px.topics.create("wide", 200)
    with px.consumer("wide", "billing", debounce=0.0) as consumer:
        while len(consumer.assignment) < 200:
            consumer.poll(timeout=0.01)
    groups, coord = meddled(px)
    groups.reset("billing", "wide", to=0)
    if action == "delete":
        groups.delete("billing")
    limit = px.stores.coord.limits.operations
    assert (coord.commits > 2) is (limit < 200)
    found = [decode(each, Claim) for each in px.stores.coord.list(claims_prefix("billing"))]
    assert len(found) == 200
    assert {claim.checkpoint for claim in found} == {0 if action == "reset" else None}
    assert {claim.epoch for claim in found} == {3 if action == "reset" else 4}
    if action == "reset":
        (reset,) = px.groups.explain("billing").resets
        assert [change.partition for change in reset.changes] == list(range(200))


def test_what_groups_tells_is_json(px: pxrs.Pxrs) -> None:
    produce(px)
    visit(px)
    for told in (px.groups.list(), px.groups.describe("billing"), px.groups.explain("billing")):
        assert msgspec.json.decode(msgspec.json.encode(told), type=type(told))
