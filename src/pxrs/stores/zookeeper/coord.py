"""CoordStore on ZooKeeper. See `names`, `reading`, `sessions`, `watches` and `commits` for how."""

from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import ServerSettings
from pxrs.errors import PxrsError, SessionLost, StoreError, StoreUnavailable
from pxrs.stores.api import Watch, validate_commit, validate_limit
from pxrs.stores.crowding import Crowding
from pxrs.stores.findings import Finding
from pxrs.stores.zookeeper.commits import Commits, Done, Operation, Refused
from pxrs.stores.zookeeper.failures import DOUBTFUL, came_back_empty, translated, zk
from pxrs.stores.zookeeper.folders import Folders
from pxrs.stores.zookeeper.link import Farewell, Link, time_to_carry
from pxrs.stores.zookeeper.names import folder_of, guard_of, is_guard, is_record, path_of
from pxrs.stores.zookeeper.plans import Plan, Planner
from pxrs.stores.zookeeper.reading import Found, Reading
from pxrs.stores.zookeeper.sessions import Sessions, ZooKeeperSession
from pxrs.stores.zookeeper.sizes import MOST_BYTES, is_refused, size_of, too_large
from pxrs.stores.zookeeper.watches import Watches
from pxrs.types import Check, Committed, Conflict, Delete, Limits, Put, Versioned, Write

# The handle that kazoo logs to does not pass on what it gets.
_LOG = logging.getLogger("pxrs.store")

# ZooKeeper limits a multi by its bytes: 1 MB in all (jute.maxbuffer). This many claims always fit.
_LIMITS = Limits(operations=200, value_bytes=1_000_000)
# A server closes the connection on which a request is too large: after so many it is asked.
_CUT_OFF = 3
_SESSION_TIMEOUT = 10.0
# Two processes that take from one queue without a pause have a quarter of their commits refused,
# four a half, twelve two thirds; and those twelve do less together than the two.
_SAMPLE = 200
_TOO_MANY = 0.6
_WARN_EVERY = 600.0
_MOST_CLEARED = 10_000


class ZooKeeperCoord:
    """See `pxrs.stores.api.CoordStore`."""

    limits = _LIMITS

    def __init__(self, settings: ServerSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        top = "/" + settings.prefix
        self._clock = clock
        self._deleting = threading.Lock()
        self._crowding = Crowding(
            clock, _warn_of_crowd, sample=_SAMPLE, most=_TOO_MANY, again=_WARN_EVERY
        )
        self._cleared: set[str] = set()
        self._root = f"{top}/records"
        farewell = Farewell(settings.timeout, clock)
        self._link = Link(settings, clock, _SESSION_TIMEOUT, farewell)
        self._sessions = Sessions(settings, clock, f"{top}/sessions", farewell)
        self._reading = Reading(self._link, self._root, self._sessions)
        self._folders = Folders(self._link, self._root, self._reading)
        self._planner = Planner(self._root, self._reading, self._sessions)
        self._commits = Commits(self._link, f"{top}/commits", f"{top}/id")
        self._watches = Watches(self._link, f"{top}/sessions")
        try:
            self._link.make_all(f"{top}/sessions")
            self._folders.open()
            self._commits.open()
        except BaseException:
            self._link.stop()
            raise

    def get(self, key: str) -> Versioned | None:
        path = path_of(self._root, key)
        found = self._reading.records([path]).get(path)
        return None if found is None else found.record

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        validate_limit(limit)
        return self._link.in_one_session(lambda: self._list(prefix, after, limit))

    def _list(self, prefix: str, after: str | None, limit: int | None) -> builtins.list[Versioned]:
        paths = self._reading.walk(folder_of(self._root, prefix), prefix, after)
        records: list[Versioned] = []
        while page := [*islice(paths, limit)]:
            found = self._reading.those(page)
            there = [found[path].record for path in page if path in found]
            records += [record for record in there if record is not None]
            self._sweep({path: each for path, each in found.items() if each.record is None})
            if limit is not None and len(records) >= limit:
                return records[:limit]
        return records

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        validate_commit(checks, writes, self.limits)
        deadline = self._link.deadline()
        if any(isinstance(write, Delete) for write in writes):
            with self._turn(deadline):
                outcome = self._commit(checks, writes, deadline)
        else:
            outcome = self._commit(checks, writes, deadline)
        if isinstance(outcome, Committed):
            self._clear_up(writes)
        return outcome

    @contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """Let one deleting commit of this handle run at a time: each would refuse all the others.

        Such a commit writes the guards of its folders, and every check in these folders names a
        guard.
        """
        left = max(0.0, deadline - self._clock.monotonic())
        if not self._deleting.acquire(timeout=left):
            raise StoreUnavailable(
                f"ZooKeeper has not answered the commits before this one for {left:.0f} s"
            )
        try:
            yield
        finally:
            self._deleting.release()

    def _commit(
        self, checks: Sequence[Check], writes: Sequence[Write], deadline: float
    ) -> Committed | Conflict:
        made: builtins.list[str] = []
        outcome: Committed | Conflict | None = None
        try:
            outcome = self._commit_in(made, checks, writes, deadline)
            return outcome
        finally:
            if not isinstance(outcome, Committed):
                self._folders.drop(made)

    def _commit_in(
        self,
        made: builtins.list[str],
        checks: Sequence[Check],
        writes: Sequence[Write],
        deadline: float,
    ) -> Committed | Conflict:
        """Commit; adds the folders to `made` that were made for it."""
        folders = {path_of(self._root, write.key).rpartition("/")[0] for write in writes}
        fresh = False
        cut_off = 0
        while True:
            plan = self._planner.plan(checks, writes, fresh=fresh)
            if isinstance(plan, Conflict):
                return plan
            size = size_of(plan.operations)
            if size > MOST_BYTES:
                raise too_large(size)
            made += self._folders.require(folders, deadline)
            self._planner.note_guards(plan)
            outcome = self._commits.run(plan.operations, deadline, size)
            self._crowding.note(crowded=isinstance(outcome, Refused))
            if isinstance(outcome, Done):
                return self._planner.done(plan, outcome)
            self._sort_out(plan, outcome, folders)
            if not isinstance(outcome.error, DOUBTFUL):
                # It has to be sent again.
                deadline += time_to_carry(size)
            cut_off = cut_off + 1 if isinstance(outcome.error, zk.ConnectionLoss) else 0
            if cut_off == _CUT_OFF:
                cut_off = 0
                if is_refused(self._link, size):
                    raise too_large(size) from outcome.error
            fresh = True
            if self._clock.monotonic() >= deadline:
                if isinstance(outcome.error, DOUBTFUL):
                    raise translated(outcome.error) from outcome.error
                raise StoreUnavailable("ZooKeeper: the records changed faster than they were read")

    def _clear_up(self, writes: Sequence[Write]) -> None:
        """Remove what ended sessions have left where this handle puts a record of a session.

        Once for each folder: nobody may ever list it, and so each process that comes removes what
        those before it have left. The commit is done, whatever becomes of this.
        """
        folders = {
            put.key.rpartition("/")[0] for put in writes if isinstance(put, Put) and put.session
        }
        new = folders - self._cleared - {""}
        if len(self._cleared) > _MOST_CLEARED:
            self._cleared.clear()
        self._cleared |= new
        for folder in new:
            with suppress(PxrsError):
                self.list(folder + "/")

    def watch(self, *where: str) -> Watch:
        self._link.check_open()
        return self._watches.watch(frozenset(folder_of(self._root, each) for each in where))

    def session(self, ttl: float) -> ZooKeeperSession:
        self._link.check_open()
        return self._sessions.open(ttl)

    def findings(self) -> builtins.list[Finding]:
        """Examine the ensemble for `pxrs doctor`."""
        from pxrs.stores.zookeeper.doctor import findings

        return findings(self._link)

    def close(self) -> None:
        """End the sessions of this handle and give up its connections.

        Not in a forked child: they are its parent's.
        """
        if self._link.origin.is_parent:
            return
        self._sessions.close()
        self._watches.close()
        self._link.stop()

    def _sort_out(self, plan: Plan, refused: Refused, folders: Collection[str]) -> None:
        """Raise the error of a refusal that reading again, or making the folders, can't mend."""
        if refused.operation.path in plan.sessions:
            raise SessionLost(
                f"session {refused.operation.path.rpartition('/')[2]} is over; "
                "open a new one and start again"
            )
        operation = refused.operation
        is_folder = not is_record(operation.path.rpartition("/")[2])
        if isinstance(refused.error, zk.NoNodeError):
            if is_guard(operation.path):
                # Guards stay for good, unless another program removes them.
                raise came_back_empty()
            if is_folder or operation.kind == "create":
                self._folders.forget(folders)
        mendable = (zk.BadVersionError, zk.NoNodeError, zk.NodeExistsError, *DOUBTFUL)
        if not isinstance(refused.error, mendable):
            raise translated(refused.error)

    def _sweep(self, dead: Mapping[str, Found]) -> None:
        """Remove the records of ended sessions. They are invisible already: not worth an error."""
        some = dict(sorted(dead.items())[: _LIMITS.operations // 3])
        guards = {
            (guard_of(self._root, path.rpartition("/")[0]), each.known.guard)
            for path, each in some.items()
        }
        if some:
            with suppress(StoreError):
                self._commits.run(
                    [
                        *(Operation("check", path, version=version) for path, version in guards),
                        *(
                            Operation("delete", path, version=each.known.counter)
                            for path, each in some.items()
                        ),
                        *(Operation("set_data", path) for path in {path for path, _ in guards}),
                    ],
                    self._link.deadline(),
                )


def _warn_of_crowd(share: float) -> None:
    _LOG.warning(
        "%.0f %% of the last %d commits to ZooKeeper were refused because other processes "
        "wrote the same folders first: use fewer workers for a queue, let each take several "
        "items, or use PostgreSQL",
        100 * share,
        _SAMPLE,
    )
