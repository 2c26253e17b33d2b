"""The stores of nodes: the seams, carried over a `Link`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast
from weakref import WeakSet

from pxrs.client.client import Client
from pxrs.client.link import Link
from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import RemoteSettings
from pxrs.core.queue import validate_change
from pxrs.errors import (
    ConfigError,
    NotAtomic,
    OutcomeUnknown,
    PxrsError,
    SessionLost,
    StoreUnavailable,
)
from pxrs.stores.api import CoordStore, LogStore, QueueStore, Watch
from pxrs.stores.block import Block
from pxrs.stores.remote import wire
from pxrs.stores.timed_sessions import TimedSession
from pxrs.types import (
    Append,
    Appended,
    Check,
    Committed,
    Conflict,
    ItemState,
    LogPartition,
    Put,
    QueueChange,
    StoredItem,
    Versioned,
    Write,
)


class Seam:
    """Carries the methods of one seam: each is a call of that name."""

    def __init__(self, link: Link, folder: str, without: frozenset[str] = frozenset()) -> None:
        for name in wire.METHODS:
            seam, _, method = name.partition(".")
            if seam == folder and method not in without:
                setattr(self, method, partial(link.call, name))


class RemoteCoord(Seam):
    """See `pxrs.stores.api.CoordStore`. `now_ms` is there if the nodes' store has it."""

    def __init__(self, link: Link, clock: Clock) -> None:
        without = {"list"} if "now" in link.hello.abilities else {"list", "now_ms"}
        super().__init__(link, "coord", frozenset(without) | {"commit"})
        self._link = link
        self._clock = clock
        self.limits = link.hello.limits
        self._sessions: WeakSet[TimedSession] = WeakSet()
        link.sessions = self._living

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        """Refuses an answer that leaves versions out."""
        outcome: Committed | Conflict = self._link.call("coord.commit", checks, writes)
        if isinstance(outcome, Committed):
            _check_versions("coord.commit", writes, outcome.versions)
        return outcome

    def watch(self, *where: str) -> Watch:
        return self._link.watch("node.watch_records", [*where])

    def session(self, ttl: float) -> TimedSession:
        """Open a session that nodes hold for this client. It ends if the client stops renewing."""
        since, sent = self._link.stream, self._clock.monotonic()
        name: str = self._link.call("node.open_session", ttl)
        session = TimedSession(
            name,
            ttl,
            sent,
            self._clock,
            renew=partial(self._renew, name),
            end=partial(self._end, name),
        )
        self._sessions.add(session)
        self._link.hand_over_again(since)
        return session

    def _living(self) -> list[str]:
        """The living sessions: a node that this client moves to must learn them and go on."""
        return [session.id for session in list(self._sessions) if session.remaining() > 0]

    def _renew(self, name: str) -> bool:
        try:
            self._link.call("node.renew_session", name)
        except SessionLost:
            return False
        return True

    def _end(self, name: str) -> None:
        # If the node can't be reached, the session ends by itself.
        with suppress(PxrsError):
            self._link.call("node.close_session", name)

    def close(self) -> None:
        """Do nothing: the stores close the link."""

    def list(
        self, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Versioned]:
        """See `CoordStore`. Makes as many calls as needed: a node answers a few MB at a time."""
        found: list[Versioned] = []
        while True:
            left = None if limit is None else limit - len(found)
            page: wire.Records = self._link.call("coord.list", prefix, after, left)
            found += page.found
            if not page.is_cut or not page.found:
                return found
            if after is not None and page.found[-1].key <= after:
                raise StoreUnavailable("the node returns the same records again and again")
            after = page.found[-1].key


class RemoteLog(Seam):
    """See `pxrs.stores.api.LogStore`."""

    def __init__(self, link: Link) -> None:
        super().__init__(link, "log", frozenset({"append"}))
        self._link = link

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        """Refuses an answer that has not one outcome for each."""
        outcomes: list[Appended | PxrsError] = self._link.call("log.append", appends)
        _check_count("log.append", len(appends), len(outcomes))
        return outcomes

    def watch(self, *where: LogPartition) -> Watch:
        return self._link.watch("node.watch_log", list(where))

    def close(self) -> None:
        """Do nothing: the stores close the link."""


class RemoteQueues(Seam):
    """See `pxrs.stores.api.QueueStore`."""

    def __init__(self, link: Link) -> None:
        limits = link.hello.queue_limits
        if limits is None:
            raise ConfigError("the nodes' store has no queues")
        without = {"apply", "peek"}
        if "restore" not in link.hello.abilities:
            without.add("restore")
        super().__init__(link, "queues", frozenset(without))
        self._link = link
        self.limits = limits

    def apply(self, change: QueueChange) -> list[int | None]:
        """See `QueueStore`. Refuses too large a change here: a node would refuse the frame."""
        validate_change(change, self.limits)
        ids: list[int | None] = self._link.call("queues.apply", change)
        _check_count("queues.apply", len(change.put), len(ids))
        return ids

    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]:
        """See `QueueStore`. Makes as many calls as needed: a node answers a few MB at a time."""
        found: list[StoredItem] = []
        while True:
            left = limit - len(found)
            page: wire.Items = self._link.call("queues.peek", queue, states, after, left)
            found += page.found
            if not page.is_cut or not page.found:
                return found
            if after is not None and page.found[-1].id <= after:
                raise StoreUnavailable("the node returns the same items again and again")
            after = page.found[-1].id

    def watch(self, *queues: str) -> Watch:
        return self._link.watch("node.watch_queues", list(queues))

    def close(self) -> None:
        """Do nothing: the stores close the link."""


class RemoteAtomic(Block[Link]):
    """An `Atomic` that a node commits."""

    connection = None
    joined = False

    def __init__(self, link: Link) -> None:
        hello = link.hello
        if "atomic" not in hello.abilities or hello.queue_limits is None:
            raise NotAtomic(
                "the nodes' store keeps coordination and messages in different places, which "
                "can't commit together"
            )
        super().__init__(hello.limits, hello.queue_limits)
        self._link = link

    def __enter__(self) -> RemoteAtomic:
        self._require_new()
        self._enter(self._link)
        return self

    def _end(self, on: Link, error: BaseException | None) -> None:
        # Left first: a block that is interrupted while it waits for the answer is not sent again.
        self._leave()
        if error is None:
            self._validate()
            writes = wire.pack_writes(self._writes)
            done: wire.WireAtomic = on.call(
                "node.atomic", self._checks, writes, self._appends, self._change
            )
            _check_versions("node.atomic", self._writes, done.versions)
            _check_count("node.atomic", len(self._appends), len(done.appended))
            puts = () if self._change is None else self._change.put
            _check_count("node.atomic", len(puts), len(done.queued))
            self.versions, self.appended, self.queued = done


def _check_count(name: str, wanted: int, got: int) -> None:
    if got != wanted:
        raise OutcomeUnknown(f"the node answered {name} of {wanted} entries with {got}")


def _check_versions(name: str, writes: Sequence[Write], versions: Mapping[str, int]) -> None:
    if not {it.key for it in writes if isinstance(it, Put)} <= versions.keys():
        raise OutcomeUnknown(f"the node's answer to {name} leaves versions out")


class RemoteStores:
    """`Stores` of nodes. The data is wherever the nodes keep it.

    `client` finds and calls the nodes.
    """

    def __init__(self, settings: RemoteSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self.url = settings.url
        self._link = Link(settings, wire.METHODS)
        self.client = Client(self._link)
        try:
            self._coord = RemoteCoord(self._link, clock)
            self._log = RemoteLog(self._link)
        except BaseException:
            self._link.close()
            raise
        self._queues: RemoteQueues | None = None

    @property
    def coord(self) -> CoordStore:
        return cast(CoordStore, self._coord)

    @property
    def log(self) -> LogStore:
        return cast(LogStore, self._log)

    @property
    def queues(self) -> QueueStore:
        if self._queues is None:
            self._queues = RemoteQueues(self._link)
        return cast(QueueStore, self._queues)

    def atomic(self, connection: Any = None) -> RemoteAtomic:
        """One commit on a node; it can't contain statements of the caller's."""
        if connection is not None:
            raise NotAtomic(
                "a pxrs:// store commits on a node, which can't use your connection; to commit "
                "your own statements with the rest, connect to the database itself"
            )
        return RemoteAtomic(self._link)

    def close(self) -> None:
        self.client._close()
        self._link.close()
