"""When queues by the recipe forget what became of units, by a clock that tests turn."""

from __future__ import annotations

from pxrs.stores.memory import MemoryStores
from pxrs.stores.recipe.layout import COMMITS
from pxrs.stores.recipe.queues import RecipeQueues
from pxrs.testing.clock import VirtualClock
from pxrs.types import Holder, Outcome, QueueChange

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
