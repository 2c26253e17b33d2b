"""One commit across the stores of a backend."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import cast

from pxrs.errors import (
    CommitConflict,
    Fenced,
    InvalidRequest,
    PartitionNotFound,
    SessionLost,
    TopicNotFound,
)
from pxrs.stores.api import Stores
from pxrs.testing.conformance.lab import Lab, Violation
from pxrs.testing.conformance.log import BESIDE, HERE
from pxrs.testing.conformance.queue_tools import (
    HELD,
    Worker,
    bodies,
    let_time_pass,
    look,
    soon,
    states_of,
)
from pxrs.testing.conformance.tools import (
    LONG,
    append,
    batch,
    must_wake,
    put,
    raises,
    same,
    together,
    value_of,
    values_in,
)
from pxrs.types import (
    Appended,
    Check,
    Delete,
    Held,
    LogPartition,
    NewItem,
    Outcome,
    Put,
    QueueChange,
    Versioned,
)


class ChangedMindError(Exception):
    """Raised by a caller that wants to undo its block."""


def new_stores(lab: Lab) -> Stores:
    """Stores with one topic of two empty partitions."""
    stores = lab.open()
    stores.log.create("t-1", 2)
    return stores


def old_stores(lab: Lab) -> Stores:
    """`new_stores` with the record `k`, whose value is `old`."""
    stores = new_stores(lab)
    put(stores.coord, "k", b"old")
    return stores


def require_untouched(lab: Lab) -> None:
    """Require that only the record `k` with the value `old` exists, and the next offset is 0."""
    stores = lab.open()
    found = [(record.key, record.value) for record in stores.coord.list("")]
    same(found, [("k", b"old")], "the records")
    for where in (HERE, BESIDE):
        same(values_in(stores.log, where), {}, "the messages")
        same(append(stores.log, where, batch(b"later")), [0], "the next base")


def check_everything_is_applied(lab: Lab) -> None:
    """Leaving the block does all of it, and returns versions and offsets."""
    stores, other = new_stores(lab), lab.open()
    version = put(stores.coord, "k", b"old")
    put(stores.coord, "gone")
    append(stores.log, HERE, batch(b"before"))
    with stores.atomic() as tx:
        tx.check(Check("k", version), Check("new", 0))
        tx.write(Put("k", b"new"), Put("new", b"1"))
        tx.append(HERE, batch(b"a", b"b"))
        tx.write(Delete("gone"))
        tx.append(BESIDE, batch(b"c"))
        tx.append(HERE, batch(b"d"))
    same(tx.appended, [Appended(1), Appended(0), Appended(3)], "where the batches are")
    versions = {record.key: record.version for record in other.coord.list("")}
    same(dict(tx.versions), versions, "the versions")
    same(value_of(other.coord, "k"), b"new", "the value")
    same(values_in(other.log, HERE), dict(enumerate([b"before", b"a", b"b", b"d"])), "messages")
    same(values_in(other.log, BESIDE), {0: b"c"}, "the other partition's messages")


def check_parts_may_be_left_out(lab: Lab) -> None:
    """A block may only append, only write, only check or do nothing."""
    stores = new_stores(lab)
    with stores.atomic() as tx:
        tx.append(HERE, batch(b"a"))
    same((dict(tx.versions), tx.appended), ({}, [Appended(0)]), "what an append told")
    with stores.atomic() as tx:
        tx.write(Put("k", b"1"))
    version = tx.versions["k"]
    with stores.atomic() as tx:
        tx.check(Check("k", version))
    with stores.atomic() as tx:
        pass
    same((dict(tx.versions), tx.appended), ({}, []), "what nothing told")


def check_conflict_rolls_back(lab: Lab) -> None:
    """A check that does not hold raises `CommitConflict` with the present record; no effect."""
    stores = new_stores(lab)
    stale = put(stores.coord, "k", b"older")
    put(stores.coord, "k", b"old")
    try:
        with stores.atomic() as tx:
            tx.append(HERE, batch(b"a"))
            tx.check(Check("k", stale))
            tx.write(Put("k", b"new"), Put("new", b"1"))
            tx.append(BESIDE, batch(b"b"))
    except CommitConflict as conflict:
        same(dict(conflict.current), {"k": stores.coord.get("k")}, "what the conflict tells")
    else:
        raise Violation("a block was committed though its check did not hold")
    require_untouched(lab)


def check_conflict_on_an_unwritten_record_rolls_back(lab: Lab) -> None:
    """A check on a record that the block does not write counts too: that is the fence."""
    stores = new_stores(lab)
    stale = put(stores.coord, "k", b"older")
    put(stores.coord, "k", b"old")
    with raises(CommitConflict), stores.atomic() as tx:
        tx.check(Check("k", stale))
        tx.append(HERE, batch(b"a"))
    require_untouched(lab)


def check_exception_rolls_back(lab: Lab) -> None:
    """Leaving the block by an exception does nothing, and the exception goes on."""
    stores = old_stores(lab)
    with raises(ChangedMindError), stores.atomic() as tx:
        tx.write(Put("k", b"new"), Put("new", b"1"))
        tx.append(HERE, batch(b"a"))
        raise ChangedMindError
    same((dict(tx.versions), tx.appended), ({}, []), "what is told of it")
    require_untouched(lab)


def check_a_transaction_ended_inside_applies_nothing(lab: Lab) -> None:
    """A block whose transaction was ended inside applies nothing, even if another has begun."""
    stores = old_stores(lab)
    for end in ("ROLLBACK", "COMMIT"):
        for begins_another in (False, True):
            with stores.atomic() as look:
                if look.connection is None:
                    return  # only the store can end it
            with raises(InvalidRequest), stores.atomic() as tx:
                tx.write(Put("k", b"new"), Put("new", b"1"))
                tx.append(HERE, batch(b"a"))
                tx.connection.execute(end)
                if begins_another:
                    tx.connection.execute("BEGIN")
    require_untouched(lab)


def check_bad_append_rolls_back(lab: Lab) -> None:
    """One append that can't be done undoes the others and the writes."""
    stores = old_stores(lab)
    for where in (LogPartition("none", 0), LogPartition("t-1", 9)):
        with raises(TopicNotFound, PartitionNotFound), stores.atomic() as tx:
            tx.write(Put("k", b"new"), Put("new", b"1"))
            tx.append(HERE, batch(b"a"))
            tx.append(where, batch(b"lost"))
            tx.append(BESIDE, batch(b"b"))
    require_untouched(lab)


def check_dead_session_rolls_back(lab: Lab) -> None:
    """A put with a session that has ended undoes the whole block."""
    stores = old_stores(lab)
    session = stores.coord.session(60.0)
    session.close()
    with raises(SessionLost), stores.atomic() as tx:
        tx.append(HERE, batch(b"a"))
        tx.write(Put("k", b"new"), Put("new", b"1", session.id))
    require_untouched(lab)


def check_impossible_blocks_are_refused(lab: Lab) -> None:
    """The rules of `commit` hold in a block: a key is written once and checked once."""
    stores = new_stores(lab)
    version = put(stores.coord, "k", b"old")
    with raises(InvalidRequest), stores.atomic() as tx:
        tx.append(HERE, batch(b"a"))
        tx.write(Put("k", b"new"))
        tx.write(Put("k", b"newer"))
    with raises(InvalidRequest), stores.atomic() as tx:
        tx.append(HERE, batch(b"a"))
        tx.check(Check("k", version), Check("k", version))
    with raises(InvalidRequest), stores.atomic() as tx:
        tx.append(HERE, batch(b"a"))
        tx.check(Check("none", 0))
    require_untouched(lab)


def check_producer_ids_are_refused(lab: Lab) -> None:
    """A batch with a producer id has no place in a block: a rollback would leave a gap."""
    stores = old_stores(lab)
    with raises(InvalidRequest), stores.atomic() as tx:
        tx.write(Put("k", b"new"))
        tx.append(HERE, batch(b"a"))
        tx.append(HERE, batch(b"b", producer=(7, 0, 0)))
    require_untouched(lab)


def check_nothing_is_seen_before_the_end(lab: Lab) -> None:
    """Others see all of a block or nothing: nothing while it is open."""
    stores, other = old_stores(lab), lab.open()
    with stores.atomic() as tx:
        tx.write(Put("k", b"new"))
        tx.append(HERE, batch(b"a"))
        same(value_of(other.coord, "k"), b"old", "the value while the block is open")
        same(values_in(other.log, HERE), {}, "the messages while the block is open")
        same((dict(tx.versions), tx.appended), ({}, []), "what is told while it is open")
    same(value_of(other.coord, "k"), b"new", "the value")
    same(values_in(other.log, HERE), {0: b"a"}, "the messages")


def check_blocks_wake(lab: Lab) -> None:
    """The changes of a block wake their watches."""
    stores, other = new_stores(lab), lab.open()
    records, messages = other.coord.watch("k"), other.log.watch(HERE)
    with stores.atomic() as tx:
        tx.write(Put("k", b"1"))
        tx.append(HERE, batch(b"a"))
    must_wake(lab, records, "a block's write")
    must_wake(lab, messages, "a block's append")
    records.close()
    messages.close()


def check_every_effect_has_its_checkpoint(lab: Lab) -> None:
    """Of blocks that race on one record one is done, with its message; the others leave nothing."""
    handles = [new_stores(lab), lab.open()]
    rounds = 10
    put(handles[0].coord, "n", b"0")

    def advance(stores: Stores, record: Versioned) -> None:
        value = b"%d" % (int(record.value) + 1)
        with suppress(CommitConflict), stores.atomic() as tx:
            tx.check(Check("n", record.version))
            tx.write(Put("n", value))
            tx.append(HERE, batch(value))

    for _ in range(rounds):
        record = cast(Versioned, handles[0].coord.get("n"))
        together(lab, *(partial(advance, handles[number % 2], record) for number in range(3)))
    expected = {number: b"%d" % (number + 1) for number in range(rounds)}
    same(values_in(handles[0].log, HERE), expected, "the messages")
    same(value_of(handles[0].coord, "n"), b"%d" % rounds, "the record")


def change_of(worker: Worker, *remove: Held) -> QueueChange:
    """Remove these, put one item into each of two queues."""
    new = tuple(NewItem(queue=queue, body=b"new") for queue in ("q", "p"))
    return QueueChange(worker.holder, remove, new, "unit")


def worker_with_item(stores: Stores) -> tuple[Worker, Held]:
    """A worker that holds an item of `q`, the only one there is."""
    worker = Worker(stores)
    worker.put(b"work")
    return worker, worker.take_one().held


def require_still_held(lab: Lab, worker: Worker, held: Held) -> None:
    """Require that the queues are unchanged: the item is held, and nothing was put."""
    stores = lab.open()
    same(states_of(stores), {b"work": HELD}, "the items")
    same([queue.name for queue in stores.queues.all()], ["q"], "the queues")
    same(stores.queues.outcome(worker.session.id, "unit"), Outcome.NEVER, "what became of it")
    worker.apply(remove=[held])


def check_queues_change_with_the_rest(lab: Lab) -> None:
    """A block removes and puts items together with its writes and messages, and returns the ids."""
    stores, other = new_stores(lab), lab.open()
    worker, held = worker_with_item(stores)
    version = put(stores.coord, "k", b"old")
    with stores.atomic() as tx:
        tx.queue(change_of(worker, held))
        tx.check(Check("k", version))
        tx.write(Put("k", b"new"))
        tx.append(HERE, batch(b"a"))
        same(states_of(other), {b"work": HELD}, "the items while the block is open")
        same(tx.queued, [], "what is told while it is open")
    found = [item.id for queue in ("q", "p") for item in look(other, queue)]
    same(tx.queued, found, "the ids")
    same([bodies(look(other, queue)) for queue in ("q", "p")], [[b"new"], [b"new"]], "the items")
    same((value_of(other.coord, "k"), values_in(other.log, HERE)), (b"new", {0: b"a"}), "the rest")
    same(other.queues.stats("q").done, 1, "what is done")
    same(other.queues.outcome(worker.session.id, "unit"), Outcome.DONE, "what became of it")


def check_conflict_leaves_queues_alone(lab: Lab) -> None:
    """A check that does not hold, or an append that can't be done, keeps queues as they were."""
    stores = new_stores(lab)
    worker, held = worker_with_item(stores)
    stale = put(stores.coord, "k", b"older")
    put(stores.coord, "k", b"old")
    with raises(CommitConflict), stores.atomic() as tx:
        tx.check(Check("k", stale))
        tx.queue(change_of(worker, held))
        tx.append(HERE, batch(b"a"))
    with raises(PartitionNotFound), stores.atomic() as tx:
        tx.queue(change_of(worker, held))
        tx.append(LogPartition("t-1", 9), batch(b"a"))
    with raises(ChangedMindError), stores.atomic() as tx:
        tx.queue(change_of(worker, held))
        raise ChangedMindError
    require_still_held(lab, worker, held)
    require_untouched(lab)


def check_lost_item_rolls_back(lab: Lab) -> None:
    """An item that is not held any more, or a session that is over, undoes the whole block."""
    stores = old_stores(lab)
    worker, held = worker_with_item(stores)
    ended = Worker(stores)
    ended.session.close()
    for change, error in (
        (change_of(worker, held._replace(delivery=held.delivery + 1)), Fenced),
        (change_of(Worker(stores), held), Fenced),
        (change_of(ended, held), SessionLost),
    ):
        with raises(error), stores.atomic() as tx:
            tx.write(Put("k", b"new"), Put("new", b"1"))
            tx.append(HERE, batch(b"a"))
            tx.queue(change)
    require_still_held(lab, worker, held)
    require_untouched(lab)


def check_holds_are_extended_beside_a_block(lab: Lab) -> None:
    """A long block keeps no holder from extending, unless it keeps all writers from everything."""
    stores = new_stores(lab)
    worker = Worker(stores)
    worker.put(b"old")
    # Long enough to be extended in time on a busy machine.
    held = worker.take_one(lock_for=4 * soon(lab))
    with stores.atomic() as tx:
        if not tx.is_exclusive:
            worker.extend(held, lock_for=LONG)
            for _ in range(3):
                let_time_pass(lab, lab.open())
        tx.queue(change_of(worker, held.held))
    same(look(stores, "q")[0].body, b"new", "what is there instead of it")


def check_a_block_changes_queues_once(lab: Lab) -> None:
    """A second change of queues in one block, and a bad one, is refused; nothing is done."""
    stores = old_stores(lab)
    worker, held = worker_with_item(stores)
    with raises(InvalidRequest), stores.atomic() as tx:
        tx.write(Put("k", b"new"))
        tx.queue(change_of(worker, held))
        tx.queue(change_of(Worker(stores)))
    with raises(InvalidRequest), stores.atomic() as tx:
        tx.write(Put("k", b"new"))
        tx.queue(change_of(worker, held, held))
    require_still_held(lab, worker, held)
    require_untouched(lab)


def check_blocks_wake_takers(lab: Lab) -> None:
    """Items put by a block wake the workers that wait for them."""
    stores, other = new_stores(lab), lab.open()
    watch = other.queues.watch("p")
    with stores.atomic() as tx:
        tx.queue(change_of(Worker(stores)))
    must_wake(lab, watch, "a block's put")
    watch.close()
