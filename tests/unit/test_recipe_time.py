"""What ends when in queues by the recipe, by a clock that tests turn: evidence and holds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pxrs.stores.memory.stores import MemoryStores
from pxrs.stores.queues_on_coord.layout import COMMITS
from pxrs.stores.queues_on_coord.queues import RecipeQueues
from pxrs.testing.clock import VirtualClock
from pxrs.types import (
    Check,
    Committed,
    Conflict,
    Holder,
    ItemState,
    NewItem,
    Outcome,
    QueueChange,
    Write,
)

_HOUR = 3600.0


def test_evidence_goes_an_hour_after_its_session_was_seen_to_have_ended() -> None:
    clock = VirtualClock()
    stores = MemoryStores(clock=clock)
    queues, sweeper = RecipeQueues(stores.coord, clock), RecipeQueues(stores.coord, clock)
    alive, ended = stores.coord.session(10 * _HOUR), stores.coord.session(10 * _HOUR)
    for session in (alive, ended):
        queues.apply(QueueChange(Holder(session.id, "tx"), (), (), "unit"))
    clock.advance(2 * _HOUR)
    sweeper.reap()
    ended.close()
    clock.advance(2 * _HOUR)
    # Whoever sweeps for the first time does not know for how long it has been over.
    sweeper.reap()
    clock.advance(_HOUR / 2)
    sweeper.reap()
    assert queues.outcome(ended.id, "unit") is Outcome.DONE
    clock.advance(_HOUR)
    sweeper.reap()
    assert queues.outcome(ended.id, "unit") is Outcome.UNKNOWN
    assert queues.outcome(alive.id, "unit") is Outcome.DONE
    assert [each.key.startswith(COMMITS) for each in stores.coord.list(COMMITS)] == [True]


def test_what_will_never_be_done_is_remembered_like_what_was() -> None:
    clock = VirtualClock()
    stores = MemoryStores(clock=clock)
    queues = RecipeQueues(stores.coord, clock)
    session = stores.coord.session(10 * _HOUR)
    assert queues.outcome(session.id, "unit") is Outcome.NEVER
    for _ in range(3):
        clock.advance(_HOUR)
        queues.reap()
    assert queues.outcome(session.id, "unit") is Outcome.NEVER
    assert len(stores.coord.list(COMMITS)) == 1


@pytest.mark.parametrize("verb", ["take", "extend"])
def test_a_hold_that_was_interrupted_ends_in_its_own_time(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that ends it is not used for others, who would keep it alive."""
    clock = VirtualClock()
    stores = MemoryStores(clock=clock)
    queues = RecipeQueues(stores.coord, clock)
    holder = Holder(stores.coord.session(_HOUR).id, "tx")
    new = tuple(NewItem(queue="q", body=body) for body in (b"1", b"2"))
    queues.apply(QueueChange(holder, (), new))
    if verb == "extend":
        (first,) = queues.take("q", holder, 1).items
    commit = stores.coord.commit

    def interrupted(checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        commit(checks, writes)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stores.coord, "commit", interrupted)
        if verb == "extend":
            queues.extend(holder, [first.held], 5.0)
        else:
            queues.take("q", holder, 1, lock_for=5.0)
    clock.advance(4)
    other = Holder(holder.session, "other")
    assert [each.body for each in queues.take("q", other, 1, lock_for=5.0).items] == [b"2"]
    clock.advance(2)
    queues.reap()
    states = {each.body: each.state for each in queues.peek("q")}
    assert states == {b"1": ItemState.READY, b"2": ItemState.HELD}
