"""Turns checks and writes into the operations of a multi."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pxrs.stores.api import failed_checks, refuse_session_check
from pxrs.stores.zookeeper.commits import Done, Operation
from pxrs.stores.zookeeper.names import folders_above, guard_of, path_of
from pxrs.stores.zookeeper.reading import Known, Reading
from pxrs.stores.zookeeper.sessions import Sessions
from pxrs.types import Check, Committed, Conflict, Put, Write


@dataclass
class Plan:
    """Operations in their order, and the purpose of each."""

    known: dict[str, Known | None]
    # A version that each guard had before this plan is sent.
    guards: dict[str, int | None] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    checked_guards: set[tuple[str, int]] = field(default_factory=set)
    puts: dict[str, tuple[Put, int]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    written_guards: dict[str, int] = field(default_factory=dict)

    def add(self, operation: Operation) -> int:
        """Add an operation; returns the index of its result."""
        self.operations.append(operation)
        return len(self.operations) - 1


class Planner:
    """Plans multis: first from cached records, which are mostly right; then from a fresh read."""

    def __init__(self, root: str, reading: Reading, sessions: Sessions) -> None:
        self._root = root
        self._reading = reading
        self._knowledge = reading.knowledge
        self._sessions = sessions

    def plan(
        self, checks: Sequence[Check], writes: Sequence[Write], *, fresh: bool
    ) -> Plan | Conflict:
        """Plan a multi; returns a conflict if records that were just read are not as expected."""
        paths = {key: path_of(self._root, key) for key, *_ in (*checks, *writes)}
        known = {path: self._knowledge.record(path) for path in paths.values()}
        if fresh or not all(_fits(check, paths, known) for check in checks if check.version):
            fresh = True
            found = self._reading.records(sorted(paths.values()))
            there = [each.record for each in found.values() if each.record is not None]
            failed = failed_checks(checks, {record.key: record for record in there})
            if failed:
                return Conflict(failed)
            known = {path: found[path].known if path in found else None for path in known}
        plan = Plan(known)
        self._check_sessions(plan, writes)
        by_key = {check.key: check for check in checks}
        written = {write.key for write in writes}
        for check in checks:
            self._check(plan, check, paths[check.key], check.key in written, fresh)
        for write in writes:
            self._write(plan, write, paths[write.key], by_key.get(write.key), fresh)
        self._ring(plan, [paths[write.key] for write in writes])
        return plan

    def note_guards(self, plan: Plan) -> None:
        """Note what is known of the guards now: before the plan is sent, and its folders exist."""
        guards = {self._guard(path) for path in plan.known}
        plan.guards = {guard: self._knowledge.guard(guard) for guard in guards}

    def done(self, plan: Plan, outcome: Done) -> Committed:
        """Cache the results of the commit; nothing if its answer was lost."""
        for path in plan.deleted | plan.puts.keys():
            self._knowledge.learn(path, None)
        if outcome.results:
            self._reading.listings.changed(plan.operations, outcome.results)
            for guard, index in plan.written_guards.items():
                plan.guards[guard] = outcome.results[index].version
                self._knowledge.learn_guard(guard, outcome.results[index].version)
            for path, (put, index) in plan.puts.items():
                version = plan.guards[self._guard(path)]
                result = outcome.results[index]
                counter = 0 if isinstance(result, str) else result.version
                if version is not None:
                    self._knowledge.learn(path, Known(outcome.zxid, counter, version, put.session))
        return Committed({put.key: outcome.zxid for put, _ in plan.puts.values()})

    def _check_sessions(self, plan: Plan, writes: Sequence[Write]) -> None:
        for name in sorted({put.session for put in writes if isinstance(put, Put) and put.session}):
            path = self._sessions.path(name)
            plan.sessions.add(path)
            plan.add(Operation("check", path))

    def _check(self, plan: Plan, check: Check, path: str, written: bool, fresh: bool) -> None:
        """Check the guard, and the counter unless the write itself checks that."""
        known = plan.known[path]
        if known is None or not (check.version or fresh):
            return
        refuse_session_check(known.session, check)
        guard = self._guard(path)
        if (guard, known.guard) not in plan.checked_guards:
            # Two records, read at different times, may name two versions of their guard: then the
            # multi fails, and they are read again.
            plan.checked_guards.add((guard, known.guard))
            plan.add(Operation("check", guard, version=known.guard))
        if not written:
            plan.add(Operation("check", path, version=known.counter))

    def _write(self, plan: Plan, write: Write, path: str, check: Check | None, fresh: bool) -> None:
        known = plan.known[path]
        # A record that must be absent is created, unless a fresh read has found one whose session
        # has ended.
        create = known is None or (check is not None and check.version == 0 and not fresh)
        counter = -1 if known is None or create or check is None else known.counter
        if isinstance(write, Put):
            data = (write.session or "").encode() + b"\n" + bytes(write.value)
            kind = "create" if create else "set_data"
            plan.puts[path] = write, plan.add(Operation(kind, path, data, counter))
            return
        plan.deleted.add(path)
        if known is None and fresh:
            # ZooKeeper can't check that a znode is absent; creating and deleting it does.
            plan.add(Operation("create", path))
        plan.add(Operation("delete", path, version=counter))
        guard = self._guard(path)
        if guard not in plan.written_guards:
            plan.written_guards[guard] = plan.add(Operation("set_data", guard))

    def _guard(self, path: str) -> str:
        return guard_of(self._root, path.rpartition("/")[0])

    def _ring(self, plan: Plan, paths: Sequence[str]) -> None:
        folders = {folder for path in paths for folder in folders_above(self._root, path)}
        for folder in sorted(folders):
            plan.add(Operation("set_data", folder))


def _fits(check: Check, paths: dict[str, str], known: dict[str, Known | None]) -> bool:
    record = known[paths[check.key]]
    return record is not None and record.version == check.version
