"""A simulated process that takes and puts: real transactions and their session, in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random

from pxrs.clock import Clock
from pxrs.errors import (
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    SessionLost,
    StoreError,
    TransactionConflict,
)
from pxrs.queues.held_items import Context
from pxrs.queues.item import Item
from pxrs.queues.unit_of_work import UnitOfWork
from pxrs.stores.api import Stores
from pxrs.testing.clock import ShiftedClock
from pxrs.testing.faults import Interrupted
from pxrs.topics import Topics
from simulator.queues.judge import Judge
from simulator.queues.plan import Plan
from simulator.stage import Died, Process, SteppedKeeper

_MOST_OPEN = 3


class Job:
    """A transaction and what it has in hand."""

    def __init__(self, work: UnitOfWork) -> None:
        self.work = work
        # Its session begins with it, as for one that takes at once.
        self.transaction = work._held.holder.transaction
        self.items: list[Item] = []
        self.puts = 0
        self.ended = False


class Worker:
    """One process, from its start to its end."""

    def __init__(
        self,
        who: str,
        stores: Stores,
        clock: Clock,
        plan: Plan,
        judge: Judge,
        rng: Random,
        say: Callable[[str], None],
        wait: Callable[[Process], None],
    ) -> None:
        self.who = who
        self._plan = plan
        self._judge = judge
        self._rng = rng
        self._say = say
        own = ShiftedClock(clock, rng.uniform(0, 1000))
        self.hold_session = SteppedKeeper(stores, own, plan.ttl, lambda: wait(self))
        topics = Topics(stores.coord, stores.log, own)
        self._context = Context(stores, topics, own, self.hold_session, Random(rng.random()))
        self.alive = True
        self.frozen = False
        self.thaw_at = 0.0
        # What its threads are at right now, further down the stack.
        self.busy = self.renewing = False
        self.jobs: list[Job] = []
        # Nothing is dropped by chance: the garbage collector has no seed.
        self._kept: list[UnitOfWork] = []

    def take(self, queue: str, count: int) -> None:
        plan = self._plan.queues[queue]
        with self._tolerating(f"take from {queue}"):
            job = self._some_job()
            items = job.work.take_many(queue, count, 0, retry=plan.retry, lock_for=plan.lock_for)
            if items:
                names = ", ".join(f"{item.value}/{item.deliveries}" for item in items)
                self._say(f"{self.who} takes {names}")
            self._judge.handed(items)
            job.items += items

    def put(self, queue: str, value: str, key: str | None, priority: int, delay: float) -> None:
        with self._tolerating(f"put {value}"):
            job = self._some_job()
            job.work.put(queue, value, key=key, priority=priority, delay=delay)
            job.puts += 1

    def commit(self, job: Job) -> bool:
        """Whether it returned. After an error that may pass the transaction goes on."""
        try:
            job.work.commit()
        except OutcomeUnknown:
            self._end(job)
            self._say(f"{self.who} does not know whether it committed")
            job.work.rollback()
            return False
        except Interrupted:
            # Whether it was done is asked when it is committed again; other work may come first.
            self._say(f"{self.who} is interrupted while it commits")
            return False
        except (StoreError, TransactionConflict, Fenced, SessionLost) as error:
            self._say(f"{self.who} can't commit: {type(error).__name__}")
            self._judge.not_committed(job.transaction)
            if not job.work.is_open:
                self._end(job)
            return False
        self._say(f"{self.who} commits {', '.join(item.value for item in job.items) or 'nothing'}")
        self._judge.committed(job.transaction, empty=not job.items and not job.puts)
        self._end(job)
        return True

    def end_one(self) -> None:
        """One of its transactions ends in one of the ways there are."""
        if not self.jobs:
            return
        job = self._rng.choice(self.jobs)
        with self._tolerating("end"):
            chance = self._rng.random()
            if chance < 0.6:
                self.commit(job)
            elif chance < 0.9:
                self._say(f"{self.who} rolls back {', '.join(item.value for item in job.items)}")
                self._end(job)
                self._roll_back(job, "the handler failed")
            else:
                self._say(f"{self.who} drops {', '.join(item.value for item in job.items)}")
                self._end(job)
                if (dropped := job.work._drop) is not None:
                    dropped()

    def _roll_back(self, job: Job, error: str = "") -> None:
        interrupted, unit = job.work._in_doubt, job.work._sent.unit
        job.work.rollback(error)
        if not interrupted:
            self._judge.not_committed(job.transaction)
        elif not job.work._in_doubt:
            # It was done before, or will never be.
            self._judge.settled(unit)

    def finish(self, job: Job) -> None:
        """Commit, or let go of what can't be committed."""
        with self._tolerating("finish"):
            if not self.commit(job) and not job.ended:
                self._end(job)
                job.work.rollback()

    def extend(self) -> None:
        if self.jobs:
            job = self._rng.choice(self.jobs)
            with self._tolerating("extend"):
                job.work.extend(1.0)

    def renew(self) -> None:
        """The hold session's thread, which is not the one that works."""
        if not self.renewing:
            self.renewing = True
            with self._tolerating("renew"):
                self.hold_session.renew()
            self.renewing = False

    def tidy(self) -> None:
        with self._tolerating("tidy"):
            self.hold_session.tidy()

    def end(self) -> None:
        """The process is gone."""
        self.alive = False
        self.jobs = []

    def _some_job(self) -> Job:
        if self.jobs and (len(self.jobs) >= _MOST_OPEN or self._rng.random() < 0.5):
            return self._rng.choice(self.jobs)
        job = Job(UnitOfWork(self._context, commit_on_exit=False))
        self._kept.append(job.work)
        self.jobs.append(job)
        return job

    def _end(self, job: Job) -> None:
        job.ended = True
        if job in self.jobs:
            self.jobs.remove(job)

    @contextmanager
    def _tolerating(self, what: str) -> Iterator[None]:
        """Errors that a caller has to expect; anything else is a bug."""
        try:
            yield
        except (StoreError, TransactionConflict, Fenced, SessionLost) as error:
            self._say(f"{self.who} {what}: {type(error).__name__}: {error}")
            if isinstance(error, SessionLost):
                self._forget_lost()
        except InvalidRequest as error:
            # It was committed when it was interrupted, and more was asked of it.
            self._say(f"{self.who} {what}: {error}")
            self._forget_ended()
        except Interrupted:
            self._say(f"{self.who} is interrupted ({what})")
        except Died:
            self._say(f"{self.who} died in {what}")
            self.end()
        except PxrsError as error:
            raise AssertionError(f"{self.who} {what}: {type(error).__name__}: {error}") from error

    def _forget_ended(self) -> None:
        for job in list(self.jobs):
            if not job.work.is_open:
                self._judge.committed(job.transaction, empty=not job.items and not job.puts)
                self._end(job)

    def _forget_lost(self) -> None:
        for job in list(self.jobs):
            if job.work._held.is_lost:
                self._end(job)
                with suppress(OutcomeUnknown):
                    job.work.rollback()
