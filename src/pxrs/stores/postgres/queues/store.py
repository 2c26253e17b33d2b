"""QueueStore on PostgreSQL. `sql/queues_*.sql` has what each call does.

A take skips items that other takes have locked, so workers don't wait for each other. The count of
a delivery is committed before the item is handed out. A hold ends with the row of its holder's
session, which `sessions.py` judges, or at its deadline by the server's clock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.core.queue import (
    delay_ms,
    held_in,
    tidy,
    validate_change,
    validate_lock,
    validate_releases,
    validate_restored,
    validate_take,
)
from pxrs.errors import QueueNotFound
from pxrs.stores.postgres.change_listener import ChangeListener
from pxrs.stores.postgres.database import Database, Pg, Row
from pxrs.stores.postgres.queues.admin import QueueUpkeep
from pxrs.stores.postgres.queues.scout import Scout
from pxrs.stores.postgres.queues.statements import (
    LONGEST_INDEXED,
    RESTORE_ITEMS,
    application,
    as_columns,
    names_of,
    numbers,
    only_puts_to,
    plain_put,
)
from pxrs.stores.postgres.sessions import Statement
from pxrs.stores.wakeups import QUEUE, LocalWatch
from pxrs.types import (
    Delivery,
    Held,
    Holder,
    Outcome,
    QueueChange,
    QueueLimits,
    Release,
    StoredItem,
    Taken,
)

LIMITS = QueueLimits(items=10_000, body_bytes=64 * 2**20)
_SWEEP_EVERY = 0.1
_TIDY_EVERY = 60.0
# An item that is due and could not be taken is locked by a transaction that may take long.
_LOCKED = 0.01
_MOST_SESSIONS = 1000
_MOST_QUEUES = 1000
_NUMBERS = 2**63
_BY_PLACE, _BY_RANK = itemgetter(0), itemgetter(5, 1)

_TAKE = """SELECT * FROM @.pxrs_queue_take(%b::text, %b::text, %b::text, %b::text, %b::int8,
    %b::int8, %b::int8, %b::int8, %b::bool, %b::int8[], %b::int8[], %b::int8,
    %b::bool)"""
_EXTEND = """SELECT @.pxrs_queue_extend(%b::text, %b::text, %b::text[], %b::int8[], %b::int8[],
    %b::int8[], %b::int8)"""
_RELEASE = """SELECT @.pxrs_queue_release(%b::text, %b::text, %b::text[], %b::int8[], %b::int8[],
    %b::int8[], %b::int8[], %b::text[], %b::bool[])"""
_OUTCOME = "SELECT @.pxrs_queue_outcome(%b::text, %b::text)"
_GIVE_UP = "SELECT @.pxrs_queue_give_up(%b::text, %b::text)"


class Wanted(NamedTuple):
    """The arguments of a `take`."""

    number: int
    most: int | None
    lock_for: float | None
    suspects: bool


@dataclass(frozen=True)
class Applied:
    """The result of a change: the new items' ids, and which queues have something new."""

    numbers: list[int | None] = field(default_factory=list)
    put_to: frozenset[str] = frozenset()
    # By queue: the lowest item that shows now and did not before.
    shown: dict[str, int] = field(default_factory=dict)


class PostgresQueues(QueueUpkeep):
    """See `pxrs.stores.api.QueueStore`."""

    limits = LIMITS

    def __init__(self, database: Database, changes: ChangeListener, clock: Clock) -> None:
        super().__init__(database, changes)
        self._clock = clock
        self._lock = threading.Lock()
        self._scouts: dict[str, Scout] = {}
        # By a queue's name and a session: the id of the queue in which the session is known to hold
        # items. And when each queue is to be swept next.
        self._noted: dict[tuple[str, str], int] = {}
        self._next_sweep: dict[str, float] = {}
        self._next_tidy = 0.0
        # Queues that were put into; false for one that was found to be fifo, or deleted.
        self._plain: dict[str, bool] = {}
        database.origin.on_fork(self._abandon)

    # Taking

    def take(
        self,
        queue: str,
        holder: Holder,
        count: int,
        *,
        most: int | None = None,
        lock_for: float | None = None,
        unit: str = "",
        suspects: bool = True,
    ) -> Taken:
        validate_take(count, most, lock_for)
        number = min(count, LIMITS.items)
        wanted = Wanted(number, most, lock_for, suspects)
        taken = self._take(queue, holder, unit, wanted)
        if not taken.items and self._changes.observation.look_if_due():
            taken = self._take(queue, holder, unit, wanted)
        return taken

    def _take(self, queue: str, holder: Holder, unit: str, wanted: Wanted) -> Taken:
        now = self._clock.monotonic()
        with self._lock:
            if queue not in self._scouts and len(self._scouts) >= _MOST_QUEUES:
                # Nothing but time is lost with them: a new scout searches from the start.
                self._scouts.clear()
            scout = self._scouts.setdefault(queue, Scout())
            plan = scout.plan(now)
        sweep = plan.is_thorough or now >= self._next_sweep.get(queue, 0.0)
        mark = (queue, holder.session)
        told, *rows = self._database.write(
            _TAKE,
            (
                queue,
                *holder,
                unit,
                wanted.number,
                None if wanted.most is None else min(wanted.most, _NUMBERS - 1),
                None if wanted.lock_for is None else delay_ms(wanted.lock_for),
                self._noted.get(mark),
                sweep,
                numbers(plan.ranks),
                numbers(plan.floors),
                plan.after,
                wanted.suspects,
            ),
        )
        rows.sort(key=_BY_PLACE if rows and rows[0][0] is not None else _BY_RANK)
        pages, began_ms, (due, spent, moved) = told[2], told[6], told[9:]
        items = [_delivery(queue, row) for row in rows]
        with self._lock:
            if plan.is_whole:
                scout.searched(now, spent or 0.0, began_ms, pages or 0, len(rows))
            if scout.is_needed:
                scout.found([item for item, row in zip(items, rows, strict=True) if row[8]])
        if sweep:
            if len(self._next_sweep) > _MOST_QUEUES:
                self._next_sweep.clear()
            self._next_sweep[queue] = now + _SWEEP_EVERY
        if items:
            self._note(mark, told[1])
        elif not plan.is_whole:
            rest = scout.rest(now)
            due = rest if due is None else min(due, rest)
        if moved:
            self._changes.ring(QUEUE, [queue])
        return Taken(items, due if due is None else max(due, _LOCKED), bool(told[8]))

    def _note(self, mark: tuple[str, str], queue: int) -> None:
        if len(self._noted) > _MOST_SESSIONS:
            self._noted.clear()
        self._noted[mark] = queue

    def extend(self, holder: Holder, held: Sequence[Held], lock_for: float) -> None:
        validate_lock(lock_for)
        names, places, ids, deliveries = _columns(dict.fromkeys(held))
        sooner = self._database.write(
            _EXTEND,
            (*holder, names, places, ids, deliveries, delay_ms(lock_for)),
        )
        self._changes.ring(QUEUE, [name for (name,) in sooner])

    # Committing

    def apply(self, change: QueueChange) -> list[int | None]:
        validate_change(change, LIMITS)
        applied = self._apply(change, self._database.write)
        self.committed(applied)
        return applied.numbers

    def apply_on(self, connection: Pg, change: QueueChange) -> Applied:
        """`apply` inside a transaction; the caller that commits must call `committed`."""
        return self._apply(change, partial(self._database.run_inside, connection))

    def _apply(self, change: QueueChange, run_it: Statement) -> Applied:
        queue = only_puts_to(change)
        if queue is not None and not change.forget and self._is_known_plain(queue):
            statement, parameters = plain_put(change)
            ((ids,),) = run_it(statement, parameters)
            if ids is not None:
                return Applied(ids, frozenset((queue,)))
            self._plain[queue] = False
        statement, parameters = application(change)
        return _applied(change, run_it(statement, parameters))

    def _is_known_plain(self, queue: str) -> bool:
        """Whether to try the short statement: not at the first put, which may create the queue."""
        if self._database.pooled:
            # Without prepared statements it is planned each time, and costs more than the function.
            return False
        if queue in self._plain:
            return self._plain[queue]
        if len(self._plain) > _MOST_QUEUES:
            self._plain.clear()
        self._plain[queue] = True
        return False

    def committed(self, applied: Applied) -> None:
        """Wake the watches of all processes after a change was committed."""
        with self._lock:
            for queue, lowest in applied.shown.items():
                if queue in self._scouts:
                    self._scouts[queue].shown(lowest)
        news = applied.put_to | applied.shown.keys()
        if news:
            # Without news the notifier's thread would wake for nothing, and take CPU time.
            self._changes.ring(QUEUE, news)

    def outcome(self, session: str, unit: str) -> Outcome:
        ((found,),) = self._database.write(_OUTCOME, (session, unit))
        return Outcome(found)

    def held(self, queue: str, holder: Holder, unit: str) -> list[Delivery]:
        self._database.write(_GIVE_UP, (holder.session, unit))
        return held_in(self, queue, holder)

    def release(self, holder: Holder, releases: Sequence[Release]) -> None:
        validate_releases(releases)
        names, places, ids, deliveries = _columns(release.held for release in releases)
        ((lowest,),) = self._database.write(
            _RELEASE,
            (
                *holder,
                names,
                places,
                ids,
                deliveries,
                [delay_ms(release.delay) for release in releases],
                [tidy(release.error) for release in releases],
                [release.dead for release in releases],
            ),
        )
        shown = _shown(names, lowest)
        self.committed(Applied(put_to=frozenset(names), shown=shown))

    def restore(self, queue: str, items: Sequence[StoredItem]) -> int:
        """See `pxrs.stores.api.ItemRestorer`."""
        validate_restored(items, LIMITS)
        ((added,),) = self._database.write(
            RESTORE_ITEMS, (queue, *as_columns(items, LONGEST_INDEXED))
        )
        if added is None:
            raise QueueNotFound(queue)
        shown = {queue: min(item.id for item in items)} if items else {}
        self.committed(Applied(put_to=frozenset((queue,)), shown=shown))
        return int(added)

    def reap(self) -> float | None:
        self._changes.observation.look_if_due()
        now = self._clock.monotonic()
        ((freed, due),) = self._database.write("SELECT r_freed, r_due FROM @.pxrs_queue_sweep()")
        self._changes.ring(QUEUE, freed)
        if now >= self._next_tidy:
            self._next_tidy = now + _TIDY_EVERY
            self._database.write("SELECT @.pxrs_queue_tidy()")
        return None if due is None else float(due)

    def watch(self, *queues: str) -> LocalWatch:
        return self._changes.watch(QUEUE, queues)

    def close(self) -> None:
        """Do nothing: the connections belong to the `Database`."""

    def _abandon(self) -> None:
        self._lock = threading.Lock()


def _delivery(queue: str, row: Row) -> Delivery:
    _, number, delivery, body, key, rank, put_ms, error = row[:8]
    return Delivery(
        held=Held(queue, number, delivery),
        body=body,
        key=key,
        priority=-rank,
        put_ms=put_ms,
        error=error,
    )


def _columns(held: Iterable[Held]) -> tuple[list[str], list[int], list[int], list[int]]:
    """Return the queues, and for each item its queue's index in them, its id and its delivery."""
    items = list(held)
    names = sorted({each.queue for each in items})
    return names, *_places({name: at for at, name in enumerate(names, 1)}, items)


def _places(place: dict[str, int], held: Sequence[Held]) -> tuple[list[int], list[int], list[int]]:
    return (
        [place[each.queue] for each in held],
        [each.id for each in held],
        [each.delivery for each in held],
    )


def _shown(names: Sequence[str], lowest: Sequence[int | None] | None) -> dict[str, int]:
    if lowest is None:
        return {}
    return {name: low for name, low in zip(names, lowest, strict=True) if low is not None}


def _applied(change: QueueChange, rows: list[Row]) -> Applied:
    ((numbers, lowest),) = rows
    return Applied(
        numbers=numbers or [],
        put_to=frozenset(item.queue for item in change.put),
        shown=_shown(names_of(change), lowest),
    )
