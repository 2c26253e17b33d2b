"""Changes of a `QueueStore`, and takes, whose answer did not arrive."""

from __future__ import annotations

from pxrs.errors import Fenced
from pxrs.testing.conformance.lab import Lab
from pxrs.testing.conformance.queue_tools import HELD, Q, Worker, bodies, look, states_of
from pxrs.testing.conformance.tools import LONG, raises, same
from pxrs.types import Held, Holder, NewItem, Outcome, QueueChange

DONE, NEVER, UNKNOWN = Outcome.DONE, Outcome.NEVER, Outcome.UNKNOWN
_NEW = (NewItem(queue=Q, body=b"new"),)


def check_units_are_remembered(lab: Lab) -> None:
    """A unit's outcome is known until its committer forgets it, however many units come after."""
    worker, there = Worker(lab.open()), lab.open()
    units = [f"unit-{number}" for number in range(150)]
    for unit in units:
        worker.queues.apply(QueueChange(worker.holder, (), _NEW if unit == units[0] else (), unit))
    found = {there.queues.outcome(worker.session.id, unit) for unit in units}
    same(found, {DONE}, "what became of them")


def check_done_stays_done(lab: Lab) -> None:
    """Asking changes nothing: neither the answer nor what was done."""
    here, there = lab.open(), lab.open()
    worker = Worker(here)
    here.queues.apply(QueueChange(worker.holder, (), _NEW, "unit"))
    found = [stores.queues.outcome(worker.session.id, "unit") for stores in (there, here, there)]
    same(found, [DONE] * 3, "what became of it")
    same(bodies(look(there)), [b"new"], "the items")


def check_never_is_final(lab: Lab) -> None:
    """A unit that was reported as never done is refused when it arrives later."""
    worker, there = Worker(lab.open()), lab.open()
    worker.put(b"work")
    held = worker.take_one().held
    same(there.queues.outcome(worker.session.id, "late"), NEVER, "what became of it")
    for late in (
        QueueChange(worker.holder, (held,), (), "late"),
        QueueChange(worker.holder, (), (NewItem(queue="p", body=b"late"),), "late"),
        QueueChange(worker.holder, (), (), "late"),
        QueueChange(worker.holder, (held,), _NEW, "late"),
    ):
        with raises(Fenced):
            worker.queues.apply(late)
    same(states_of(there), {b"work": HELD}, "the items")
    same(there.queues.find("p"), None, "what a refused unit made")
    same(worker.queues.outcome(worker.session.id, "late"), NEVER, "what became of it, asked again")
    worker.queues.apply(QueueChange(worker.holder, (held,), _NEW, "another try"))
    same(bodies(look(there)), [b"new"], "the items after another try")


def check_never_is_final_for_plain_puts(lab: Lab) -> None:
    """The same if a store has learnt that a queue is simple, and uses a shorter put for it."""
    worker, there = Worker(lab.open()), lab.open()
    for number in range(3):
        worker.queues.apply(QueueChange(worker.holder, (), _NEW, f"early {number}"))
    same(there.queues.outcome(worker.session.id, "late"), NEVER, "what became of it")
    with raises(Fenced):
        worker.queues.apply(QueueChange(worker.holder, (), _NEW, "late"))
    same(len(look(there)), 3, "the number of items")


def check_refused_units_were_never_done(lab: Lab) -> None:
    """A change that was fenced left no evidence behind."""
    worker, there = Worker(lab.open()), lab.open()
    worker.put(b"1")
    with raises(Fenced):
        worker.queues.apply(QueueChange(worker.holder, (Held(Q, 1, 1),), (), "fenced"))
    same(there.queues.outcome(worker.session.id, "fenced"), NEVER, "what became of it")


def check_units_belong_to_their_session(lab: Lab) -> None:
    """Two sessions may use the same name."""
    here, there = lab.open(), lab.open()
    one, other = Worker(here), Worker(here)
    here.queues.apply(QueueChange(one.holder, (), _NEW, "unit"))
    same(there.queues.outcome(other.session.id, "unit"), NEVER, "what became of the other's")
    same(there.queues.outcome(one.session.id, "unit"), DONE, "what became of it")
    with raises(Fenced):
        here.queues.apply(QueueChange(other.holder, (), _NEW, "unit"))


def check_evidence_outlives_the_session(lab: Lab) -> None:
    """A holder that lost its session while waiting for an answer learns the change's outcome.

    Without evidence the outcome is unknown: the evidence may have existed and be gone. A store that
    does know that there was none makes sure that there never is.
    """
    here, there = lab.open(), lab.open()
    for closes in (True, False):
        session = here.coord.session(LONG if closes else lab.ttl)
        worker = Worker(here, session)
        here.queues.apply(QueueChange(worker.holder, (), _NEW, "unit"))
        if closes:
            session.close()
        else:
            lab.let_expire(session)
        there.queues.reap()
        same(there.queues.outcome(session.id, "unit"), DONE, "what became of it")
        if there.queues.outcome(session.id, "another") is not UNKNOWN:
            same(there.queues.outcome(session.id, "another"), NEVER, "what became of another")
            with raises(Fenced):
                here.queues.apply(QueueChange(worker.holder, (), _NEW, "another"))


def check_units_without_a_name_are_counted(lab: Lab) -> None:
    """Changes without a unit are done; their outcome can't be asked for, none blocks another."""
    worker, there = Worker(lab.open()), lab.open()
    for _ in range(3):
        worker.queues.apply(QueueChange(worker.holder, (), _NEW, ""))
    for delivery in worker.take(2):
        worker.queues.apply(QueueChange(worker.holder, (delivery.held,), (), ""))
    with raises(Fenced):
        worker.queues.apply(QueueChange(worker.holder, (delivery.held,), _NEW, ""))
    stats = there.queues.stats(Q)
    same((stats.put, stats.done, stats.depth), (3, 2, 1), "put, done and left")


def check_what_is_forgotten_still_counts(lab: Lab) -> None:
    """Units are forgotten once their committer knows them; their puts and removals still count."""
    worker, there = Worker(lab.open()), lab.open()
    units = [f"unit-{number}" for number in range(20)]
    for unit in units:
        worker.queues.apply(QueueChange(worker.holder, (), _NEW, unit))
    done = [each.held for each in worker.take(5)]
    worker.queues.apply(QueueChange(worker.holder, tuple(done), (), "last", tuple(units)))
    same(there.queues.outcome(worker.session.id, "last"), DONE, "what became of the last one")
    stats = there.queues.stats(Q)
    same((stats.put, stats.done, stats.depth), (20, 5, 15), "put, done and left")


def check_a_lost_take_is_found(lab: Lab) -> None:
    """A worker that got no answer to a take finds what it holds, as it was handed out."""
    here, there = lab.open(), lab.open()
    worker, other = Worker(here), Worker(there)
    worker.put(b"1", b"2", b"3", key="k", priority=1)
    other.put(b"others", queue="p")
    other.take_one("p")
    taken = here.queues.take(Q, worker.holder, 2, unit="take").items
    found = there.queues.held(Q, worker.holder, "take")
    same(sorted(found, key=lambda each: each.held), taken, "what is held")
    same(there.queues.held("p", worker.holder, "take"), [], "what is held of another queue")
    worker.apply(*found)
    same(bodies(look(there)), [b"3"], "what is left")


def check_a_late_take_holds_nothing(lab: Lab) -> None:
    """A take that arrives after its caller called `held` is refused. The next one isn't."""
    worker, there = Worker(lab.open()), lab.open()
    worker.put(b"1", b"2")
    first = worker.queues.take(Q, worker.holder, 1, unit="first").items
    same(worker.queues.held(Q, worker.holder, "late"), first, "what is held")
    with raises(Fenced):
        worker.queues.take(Q, worker.holder, 1, unit="late")
    same(worker.queues.held(Q, worker.holder, "late"), first, "what is held then")
    second = worker.queues.take(Q, worker.holder, 1, unit="second").items
    same(bodies(second), [b"2"], "what the next take gives")
    worker.apply(*first, *second)
    same(look(there), [], "what is left")


def check_a_given_up_take_harms_no_other(lab: Lab) -> None:
    """Units are identified by their names, not by their holders."""
    here = lab.open()
    worker = Worker(here)
    worker.put(b"1")
    held = worker.take_one().held
    here.queues.held(Q, worker.holder, "take")
    stranger = Holder(here.coord.session(LONG).id, "tx")
    same(here.queues.take(Q, stranger, 1, unit="take").items, [], "what a stranger gets")
    here.queues.apply(QueueChange(worker.holder, (held,), (), "unit"))
    same(here.queues.outcome(worker.session.id, "unit"), DONE, "what became of the commit")
