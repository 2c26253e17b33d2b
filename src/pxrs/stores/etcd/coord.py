"""CoordStore on etcd. A record's version is the revision at which it was written.

Revisions belong to the whole cluster and only rise, so the version of a record that was deleted
and made again is always higher: a check of an old one never holds.

Records are kept under `<prefix>/records/`, readable with etcdctl.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import ServerSettings
from pxrs.errors import Closed, SessionLost, StoreError
from pxrs.stores.api import Watch, failed_checks, validate_commit, validate_limit
from pxrs.stores.etcd.commits import Commits
from pxrs.stores.etcd.history import History
from pxrs.stores.etcd.lent_sessions import LentEtcdSession, LentSessions
from pxrs.stores.etcd.nodes import Nodes
from pxrs.stores.etcd.sessions import EtcdSession, lease_of, open_session, session_id
from pxrs.stores.etcd.watches import Watches
from pxrs.stores.etcd.wire import (
    after_prefix,
    delete_op,
    first_kv,
    get_op,
    put_op,
    rpc,
    unbound,
    unchanged,
)
from pxrs.stores.findings import Finding
from pxrs.types import Check, Committed, Conflict, Limits, Put, Versioned, Write

# etcd takes 128 comparisons and 128 writes (--max-txn-ops); each commit adds two comparisons and a
# write of its own, and at least one of the caller's operations is a write. It takes 1.5 MB in all
# (--max-request-bytes): etcd itself refuses several values that are larger together.
_OPERATIONS = 127
_LIMITS = Limits(operations=_OPERATIONS, value_bytes=1_100_000)
# The most records that are read at once, and about how many bytes: a link may be slow. How many are
# read at first, until it is known how large they are, and how many times fewer after a try without
# an answer.
_PAGE = 2000
_PAGE_BYTES = 256_000
_FIRST = 8
_FEWER = 8
_FOLDERS_KNOWN = 10_000


class EtcdCoord:
    """See `pxrs.stores.api.CoordStore`."""

    limits = _LIMITS

    def __init__(self, settings: ServerSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._folder = f"{settings.prefix}/records/".encode()
        self._nodes = Nodes(settings, clock)
        self._history = History(self._nodes, f"{settings.prefix}/history".encode(), self._lose)
        self._commits = Commits(
            self._nodes, self._history, f"{settings.prefix}/commits/".encode(), clock
        )
        self._watches = Watches(self._nodes, clock, self._folder, self._history.check)
        self._sessions: set[EtcdSession] = set()
        # By folder, how many of its records are read at once.
        self._page_sizes: dict[str, int] = {}
        self._lent = LentSessions(self._nodes, clock, f"{settings.prefix}/lent/".encode())
        try:
            self._history.check()
        except BaseException:
            self._nodes.close()
            raise

    def get(self, key: str) -> Versioned | None:
        found = self._range(rpc.RangeRequest(key=self._stored(key))).kvs
        return self._record(found[0]) if found else None

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        validate_limit(limit)
        start, end = self._stored(prefix), after_prefix(self._stored(prefix))
        if after is not None:
            start = max(start, self._stored(after) + b"\0")
        found: list[Versioned] = []
        size = self._page_sizes.get(prefix, _FIRST)
        while start < end:
            page, size = self._page(
                start, end, size if limit is None else min(size, limit - len(found))
            )
            found += [self._record(kv) for kv in page.kvs]
            self._page_sizes[prefix] = size
            if len(self._page_sizes) > _FOLDERS_KNOWN:
                self._page_sizes.clear()
            if not page.more or len(found) == limit:
                break
            start = page.kvs[-1].key + b"\0"
        return found

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        validate_commit(checks, writes, self.limits)
        if not writes:
            return self._look(checks)
        bound = any(isinstance(write, Put) and write.session is not None for write in writes)
        outcome = self._commits.run(
            self._compares(checks),
            [self._operation(write) for write in writes],
            [get_op(self._stored(check.key)) for check in checks],
            bound=bound,
        )
        if outcome.revision is None:
            return self._conflict(checks, outcome.reads)
        puts = (write.key for write in writes if isinstance(write, Put))
        return Committed(dict.fromkeys(puts, outcome.revision))

    def watch(self, *where: str) -> Watch:
        self._nodes.check_open()
        return self._watches.watch([self._stored(each) for each in where])

    def session(self, ttl: float) -> EtcdSession:
        session = open_session(self._nodes, self._clock, ttl, self._sessions.discard)
        self._sessions.add(session)
        return session

    def lend(self, ttl: float) -> LentEtcdSession:
        """See `pxrs.stores.api.LendsSessions`."""
        return self._lent.lend(ttl)

    def adopt(self, session: str) -> LentEtcdSession:
        """See `pxrs.stores.api.LendsSessions`."""
        return self._lent.adopt(session)

    def findings(self) -> builtins.list[Finding]:
        """Examine the cluster for `pxrs doctor`."""
        from pxrs.stores.etcd.doctor import findings

        return findings(self._nodes)

    def close(self) -> None:
        """End the sessions of this handle and give up its connections.

        Does nothing in a forked child: all of it is the parent's, and gRPC can't be used there.
        """
        if self._nodes.origin.is_parent:
            return
        with suppress(Closed):
            for session in list(self._sessions):
                with suppress(StoreError):
                    session.close()
            with suppress(StoreError, SessionLost):
                self._commits.close()
        self._watches.close()
        self._nodes.close()

    def _lose(self) -> None:
        """Wake all waiting threads: the events that they wait for will not come."""
        self._watches.give_up()

    def _look(self, checks: Sequence[Check]) -> Committed | Conflict:
        """A commit without writes: one read, which may be repeated."""
        reads = self._history.read_along([get_op(self._stored(check.key)) for check in checks])
        conflict = self._conflict(checks, reads)
        return conflict if conflict.current else Committed({})

    def _range(self, request: Any) -> Any:
        """Read. Linearizable: etcd asks a quorum by default."""
        return self._history.read(lambda: request)

    def _page(self, start: bytes, end: bytes, size: int) -> tuple[Any, int]:
        """Read records from `start` on: fewer after each try that was not answered.

        Also returns how many to read next, judged by how large these were.
        """
        fewer = size

        def request() -> Any:
            nonlocal size, fewer
            size, fewer = fewer, max(1, fewer // _FEWER)
            return rpc.RangeRequest(key=start, range_end=end, limit=size)

        page = self._history.read(request)
        if not page.kvs:
            return page, _FIRST
        return page, max(1, min(_PAGE, _PAGE_BYTES * len(page.kvs) // page.ByteSize()))

    def _compares(self, checks: Sequence[Check]) -> Sequence[Any]:
        """Compare the versions and, as far as there is room, that no record belongs to a session.

        On etcd such a version would be as good as any. It is refused because on other engines it
        is not.
        """
        compares = [unchanged(self._stored(check.key), check.version) for check in checks]
        versioned = [self._stored(check.key) for check in checks if check.version]
        return compares + [unbound(key) for key in versioned][: _OPERATIONS - 1 - len(compares)]

    def _operation(self, write: Write) -> Any:
        key = self._stored(write.key)
        if not isinstance(write, Put):
            return delete_op(key)
        lease = 0 if write.session is None else lease_of(write.session)
        return put_op(key, bytes(write.value), lease)

    def _conflict(self, checks: Sequence[Check], reads: Sequence[Any]) -> Conflict:
        records = [self._record(kv) for kv in map(first_kv, reads) if kv is not None]
        return Conflict(failed_checks(checks, {record.key: record for record in records}))

    def _record(self, kv: Any) -> Versioned:
        return Versioned(
            key=kv.key[len(self._folder) :].decode(),
            value=bytes(kv.value),
            version=kv.mod_revision,
            session=session_id(kv.lease) if kv.lease else None,
        )

    def _stored(self, key: str) -> bytes:
        return self._folder + key.encode()
