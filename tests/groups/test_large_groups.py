"""Groups of many members and partitions: their records stay small enough for every store."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pxrs.core.assign import assignor
from pxrs.core.group import View, moves_between, next_head
from pxrs.core.records import (
    GroupTopic,
    Head,
    MemberRecord,
    Move,
    decode,
    encode,
    head_key,
    history_key,
    history_prefix,
)
from pxrs.groups.admin import Groups
from pxrs.stores.open import open_stores
from pxrs.types import Committed, Put, Versioned
from support.stepping import Group

pytestmark = pytest.mark.long

MEMBERS, PARTITIONS = 200, 10_000
# What a request may carry as a whole: ZooKeeper's default, below etcd's 1.5 MB.
MOST = 1_000_000


def names(number: int, what: str = "a-member-on-some-host") -> list[str]:
    return [f"{what}-{each:04}-".ljust(60, "x") for each in range(number)]


def after(head: Head, members: list[str], topics: dict[str, GroupTopic]) -> Head:
    """The next generation, with these members, all of which want all topics."""
    wanted = tuple(sorted(topics))
    view = View(head, {name: MemberRecord(id=name, topics=wanted) for name in members}, topics, {})
    return next_head(view, dict.fromkeys(members, wanted), members[0], assignor("sticky"))


def generations(topics: dict[str, GroupTopic]) -> list[tuple[Head, Move]]:
    """A group begins, loses half of its members, and gets others: everything is scattered."""
    everybody = names(MEMBERS)
    heads = [Head()]
    for members in everybody, everybody[::2], everybody[::2] + names(MEMBERS // 2, "new"):
        heads.append(after(heads[-1], members, topics))
    return [(new, moves_between(old, new)) for old, new in pairwise(heads)]


TOPICS = {
    "one topic": {"t": GroupTopic("id", PARTITIONS)},
    "a long name": {"t" * 200: GroupTopic("id", PARTITIONS)},
    "many topics": {
        f"{number:03}".ljust(200, "t"): GroupTopic(f"id{number}", PARTITIONS // 500)
        for number in range(500)
    },
}


@pytest.mark.parametrize("topics", TOPICS.values(), ids=TOPICS)
def test_the_records_stay_below_what_a_store_takes(topics: dict[str, GroupTopic]) -> None:
    for head, move in generations(topics):
        written = encode(head), encode(move)
        assert sum(map(len, written)) < MOST
        assert decode(Versioned("head", written[0], 1), Head) == head
        assert decode(Versioned("move", written[1], 1), Move) == move


@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=pytest.mark.engine(name)) for name in ("etcd", "zookeeper")],
)
def test_stores_take_them(engine: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(f"{engine}_url")
    coord = open_stores("memory://", coord=url).coord
    for head, move in generations(TOPICS["many topics"]):
        key = history_key("g", head.generation)
        puts = [Put(head_key("g"), encode(head)), Put(key, encode(move))]
        assert isinstance(coord.commit([], puts), Committed)
        found = coord.get(head_key("g")), coord.get(key)
        assert found[0] is not None
        assert found[1] is not None
        assert (decode(found[0], Head), decode(found[1], Move)) == (head, move)
    coord.close()


@pytest.mark.engine("memory")
@pytest.mark.thorough
def test_ten_thousand_partitions_and_two_hundred_members() -> None:
    group = Group()
    topic = "orders".ljust(150, "x")
    group.topics.create(topic, PARTITIONS)
    workers = [group.member(name, names=lambda: (topic,)) for name in names(MEMBERS)]
    workers[0].membership.look()
    group.clock.advance(1.0)
    for member in workers:
        member.membership.look()
    assert {len(member.owned_claims.parts) for member in workers} == {PARTITIONS // MEMBERS}
    groups = Groups(group.stores.coord, group.stores.log, group.topics, group.clock)
    assert groups.describe("g").state == "STABLE"
    (rebalance,) = groups.explain("g").rebalances
    assert len(rebalance.moves) == PARTITIONS
    assert len(group.stores.coord.list(history_prefix("g"))) == 1
