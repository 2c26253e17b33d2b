"""The desk alone: what a partition is served after it was to go and stays."""

from __future__ import annotations

from pxrs.consuming.partition_table import Change, ConsumerDesk
from pxrs.core.claims import Holding
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
        progress.finish(2 * len(progress.runs) + 1)
    desk = ConsumerDesk(in_hand=lambda seat: False, commits_handled=True, most_out=2)
    claim = Claim(owner="me", name="me", epoch=1, checkpoint=0, done=progress.runs)
    desk.claimed([Holding(PART, "claims/g/id/0", 1, claim)], {"orders": GroupTopic("id", 1)})
    [seat] = desk.hungry()
    desk.start(seat, 0)
    assert desk.fill(seat, seat.turn, [message(offset) for offset in (0, 2, 4)], 5)
    [(_, out)] = desk.hand_out(10)
    assert [each.offset for each in out] == [0, 2]
    assert desk.hand_out(10) == []
    desk.leaving(frozenset([PART]))
    for _ in out:
        desk.came_back(seat)
    desk.leaving(frozenset())
    assert desk.hungry() == [seat]


def test_of_one_that_was_to_go_and_stays_nothing_is_told() -> None:
    desk = ConsumerDesk(in_hand=lambda seat: False, commits_handled=True, asks_before_release=True)
    claim = Claim(owner="me", name="me", epoch=1, checkpoint=0)
    desk.claimed([Holding(PART, "claims/g/id/0", 1, claim)], {"orders": GroupTopic("id", 1)})
    assert desk.next_change() == Change("assigned", {PART: 0})
    desk.leaving(frozenset([PART]))
    desk.leaving(frozenset())
    assert desk.next_change() is None
