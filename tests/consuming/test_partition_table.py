"""The table alone: what a partition is served after it was to go and stays."""

from __future__ import annotations

from pxrs.consuming.partition_table import Change, PartitionTable
from pxrs.core.claims import OwnedClaim
from pxrs.core.progress import Progress
from pxrs.core.records import Claim, GroupTopic
from pxrs.types import Fence, Message, TopicPartition

PART = TopicPartition("orders", 0)


def message(offset: int) -> Message:
    return Message(Fence(*PART, 1), offset, 0, None, b"", ())


def test_one_that_stays_is_served_though_its_gaps_were_too_many() -> None:
    """Nothing of it is out any more that could come back and say so."""
    progress = Progress(0)
    while not progress.full:
        progress.finish(2 * len(progress.ranges) + 1)
    table = PartitionTable(commits_handled=True, most_out=2)
    claim = Claim(owner="me", name="me", epoch=1, checkpoint=0, done=progress.ranges)
    table.claimed([OwnedClaim(PART, "claims/g/id/0", 1, claim)], {"orders": GroupTopic("id", 1)})
    [owned] = table.hungry()
    table.start(owned, 0)
    assert table.fill(owned, owned.turn, [message(offset) for offset in (0, 2, 4)], 5)
    [flight] = table.hand_out(10)
    assert [each.offset for each in flight.messages] == [0, 2]
    assert table.hand_out(10) == []
    table.leaving(frozenset([PART]))
    for _ in flight.messages:
        table.came_back(owned)
    table.leaving(frozenset())
    assert table.hungry() == [owned]


def test_of_one_that_was_to_go_and_stays_nothing_is_told() -> None:
    table = PartitionTable(commits_handled=True, asks_before_release=True)
    claim = Claim(owner="me", name="me", epoch=1, checkpoint=0)
    table.claimed([OwnedClaim(PART, "claims/g/id/0", 1, claim)], {"orders": GroupTopic("id", 1)})
    assert table.next_change() == Change("assigned", {PART: 0})
    table.leaving(frozenset([PART]))
    table.leaving(frozenset())
    assert table.next_change() is None
