"""Members of one group that a node holds: one watch, one look and one thread for all of them.

A remote client is a member like any other: it has a record, owns partitions by claims, and is seen
by embedded members and by operators. Its record is bound to the node's session and static, so that
the node's death moves nothing at once: the client joins again through another node under the same
name. The client itself is judged here, by its requests: one that is silent for its session timeout
leaves for good.

Requests are answered from what the thread saw last; those that change the group wait for the
thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from pxrs.clock import Clock
from pxrs.core.group import Rules
from pxrs.core.records import Claim, claims_prefix, decode, head_key, members_prefix
from pxrs.errors import (
    Closed,
    GroupNotFound,
    InvalidRequest,
    OutcomeUnknown,
    PxrsError,
    SessionLost,
)
from pxrs.groups.membership import MemberSettings, Membership, join_together
from pxrs.groups.owned_claims import Mark, OwnedClaims
from pxrs.groups.snapshot import GroupReader, Snapshot
from pxrs.server.groups.held_member import HeldMember, Owned
from pxrs.server.node_session import NodeSession
from pxrs.stores.api import CoordStore, Watch
from pxrs.topics import Topics
from pxrs.types import TopicPartition

# How long a lost wake-up can go unnoticed.
_CAREFUL_WAIT = 5.0
_RETRY_PAUSE = 0.2
_AFTER_A_BUG = 1.0
# Not retryable by the same call, but the next look settles it.
_MAY_PASS = (OutcomeUnknown, SessionLost)
# More members than this in one group make every look and every change slow.
MOST_MEMBERS = 500
_LOG = logging.getLogger("pxrs.serve")


class Context(NamedTuple):
    """The parts that all hosts of a node share."""

    coord: CoordStore
    topics: Topics
    clock: Clock
    session: NodeSession
    node: str


class Joining(NamedTuple):
    """A client that wants to be a member."""

    name: str
    topics: tuple[str, ...]
    client: str
    session_timeout: float
    notice: float
    done: Future[None]


class Told(NamedTuple):
    """The answer to a client's request: what it owns, and whether that is about to change.

    `complete`: it is all that the generation gives the member, and nothing else. `settled`:
    besides, the group needs no other generation. `owner` is the id under which the member owns it.
    `has_news`: no answer before left out what this one leaves out.
    """

    owned: dict[TopicPartition, Owned]
    generation: int
    complete: bool
    settled: bool
    owner: str
    has_news: bool


class Standing(NamedTuple):
    """The findings of the group's last look about a member, once it has acted on them."""

    generation: int = 0
    # Its partitions in that generation.
    target: frozenset[TopicPartition] = frozenset()
    # Whether it owns them, in a group that needs no other generation.
    settled: bool = False


class CommitResult(NamedTuple):
    """Which checkpoints were written, and which partitions the member does not own."""

    written: frozenset[TopicPartition]
    refused: frozenset[TopicPartition]
    # The one that the member's heartbeats tell.
    generation: int


class _Member:
    """A member that is held here."""

    def __init__(
        self, joining: Joining, context: Context, group: str, rules: Rules, patience: float
    ) -> None:
        self.name = joining.name
        self.topics = joining.topics
        self.client = joining.client
        self.held = HeldMember(
            context.clock.monotonic(), joining.session_timeout, patience, joining.notice
        )
        self.claims = OwnedClaims(context.coord, context.clock)
        self.membership = Membership(
            MemberSettings(
                group=group,
                name=joining.name,
                topics=lambda: joining.topics,
                rules=rules,
                ttl=joining.session_timeout,
                client=joining.client,
                node=context.node,
                rejoin_timeout=joining.session_timeout,
            ),
            context.coord,
            context.topics,
            context.clock,
            self.claims,
            self.held,
            open_session=context.session.lend,
        )
        self._joined = False
        self._joining = [joining.done]
        self.standing = Standing()
        self._announced = 0
        self.look_at: float | None = None
        self.waiting: list[Callable[[], None]] = []

    @property
    def is_new(self) -> bool:
        """Whether it has not begun to join."""
        return self.membership.session is None

    def join_again(self, done: Future[None]) -> None:
        """Note that the client repeats its join, before or after the first one was answered."""
        self._joining.append(done)
        if self._joined:
            self.has_joined()

    def has_joined(self) -> None:
        """Note that the group's records have the member."""
        self._joined = True
        for done in self._take_joining():
            done.set_result(None)

    def end(self, reason: PxrsError) -> None:
        """The member is not held here any more: requests that wait for it fail with `reason`."""
        for done in self._take_joining():
            done.set_exception(reason)
        self.call_back()

    def _take_joining(self) -> Iterator[Future[None]]:
        """The requests that wait for the join, each once, even if two threads take them."""
        while self._joining:
            try:
                done = self._joining.pop()
            except IndexError:
                return
            if not done.done():
                yield done

    def call_back(self) -> None:
        """Wake the requests that wait until the member is settled, has news, or is gone."""
        while self.waiting:
            try:
                callback = self.waiting.pop()
            except IndexError:
                return  # another thread has woken the last one
            callback()

    @property
    def has_answer(self) -> bool:
        """Whether a request that waits is to be answered: it is settled, or has to give up some."""
        standing = self.standing
        return self.held.has_news or (standing.settled and self.held.shown == standing.target)

    @property
    def announced(self) -> int:
        """The generation that heartbeats tell, for which a client fetches its partitions.

        A new one is announced when there is something to fetch: a partition is to be given up, or
        all are there that it gets. It never goes back.
        """
        generation, target, _ = self.standing
        if not self.held.is_leaving and self.held.shown != target:
            generation -= 1
        self._announced = max(self._announced, generation)
        return self._announced

    def told(self) -> Told:
        # The host may look meanwhile: then these partitions are not those of this standing.
        standing, owned = self.standing, self.held.tell()
        complete = owned.keys() == standing.target
        return Told(
            owned, standing.generation, complete, complete and standing.settled,
            self.membership.me.id, self.held.told_news,
        )  # fmt: skip


class GroupHost:
    """The members of one group on this node. Thread-safe."""

    def __init__(self, group: str, context: Context, rules: Rules, patience: float) -> None:
        self._group = group
        self._context = context
        self._rules = rules
        self._patience = patience
        self._reader = GroupReader(group, context.coord, context.topics)
        self._members: dict[str, _Member] = {}
        self._joining: list[Joining] = []
        self._leaving: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._watched: frozenset[str] | None = None
        self._stop = threading.Event()
        self._nudge = threading.Event()
        self._seen: object = None
        self._thread = threading.Thread(
            target=self._run, name=f"pxrs-host-{group[:40]}", daemon=True
        )
        self._thread.start()

    # Requests

    def join(
        self,
        name: str,
        topics: tuple[str, ...],
        client: str,
        session_timeout: float,
        notice: float = 0.0,
    ) -> Future[None]:
        """Become a member, or stay one; the future is done when the group's records have it."""
        joining = Joining(name, topics, client, session_timeout, notice, Future())
        with self._lock:
            if self._stop.is_set():
                raise Closed("the node is stopping")
            if (member := self._members.get(name)) is not None and member.topics == topics:
                member.held.heard(self._context.clock.monotonic())
                member.join_again(joining.done)
                return joining.done
            others = {*self._members, *(each.name for each in self._joining)} - {name}
            if len(others) >= MOST_MEMBERS:
                raise InvalidRequest(
                    f"group {self._group!r} has {MOST_MEMBERS} members on this node already"
                )
            self._joining.append(joining)
        self.wake()
        return joining.done

    def leave(self, name: str) -> Future[None]:
        """Leave the group for good; the future is done when the group's records show it."""
        with self._lock:
            self._member(name)
            done = self._leaving.setdefault(name, Future())
        self.wake()
        return done

    def holds(self, name: str) -> bool:
        """Whether the member is held here."""
        return name in self._members

    def parts(self, name: str) -> frozenset[TopicPartition]:
        """The partitions that the member may commit."""
        return self._member(name).held.parts

    @property
    def size(self) -> int:
        """How many members are held here."""
        return len(self._members)

    @property
    def is_empty(self) -> bool:
        with self._lock:
            return not self._members and not self._joining

    def ask(self, name: str) -> Told:
        """Note a request of a client that has seen the answers before; returns the answer to it."""
        member = self._member(name)
        self._asked(member)
        return member.told()

    def beat(self, name: str, generation: int | None) -> int:
        """Note a sign of life whose answer shows no partitions, but the generation, returned here.

        A client that names the generation as it is has fetched it. One that names an older one has
        not: what it was told may be on its way, or lost.
        """
        member = self._member(name)
        if generation is None or generation >= member.standing.generation:
            self._asked(member)
        else:
            member.held.heard(self._context.clock.monotonic())
        return member.announced

    def heard(self, name: str) -> Standing:
        """Note a sign of life that the client may have sent before it saw the last answer."""
        member = self._member(name)
        member.held.heard(self._context.clock.monotonic())
        return member.standing

    def announced(self, name: str) -> int:
        """The generation that the member's heartbeats tell."""
        return self._member(name).announced

    def _asked(self, member: _Member) -> None:
        was_leaving = member.held.is_leaving
        member.held.ask(self._context.clock.monotonic())
        if was_leaving:
            # Partitions that the answer before left out may be released now.
            self.wake()

    def tell(self, name: str) -> Told:
        """The answer to the client's request before, once it has waited."""
        return self._member(name).told()

    def patience(self, name: str) -> float:
        """How many seconds an answer to the member may wait: it is silent meanwhile."""
        return self._member(name).held.session_timeout / 2

    def when_settled(self, name: str, callback: Callable[[], None]) -> None:
        """Call `callback`, in any thread, once the member owns its target, or is gone.

        Also once it has to give up a partition, which the client does not know.
        """
        member = self._member(name)
        member.waiting.append(callback)
        if member.has_answer or not self.holds(name):
            member.call_back()

    def commit(self, name: str, offsets: Mapping[TopicPartition, int]) -> CommitResult:
        """Move checkpoints forward where the member owns the partition. Waits for the store."""
        member = self._member(name)
        # The thread may claim one anew that turns out to be lost here: not in between.
        with member.claims.lock:
            applied = member.claims.commit({part: Mark(offset) for part, offset in offsets.items()})
            member.held.committed({each.part: each.claim.checkpoint for each in applied.written})
            member.held.gone(applied.lost, lost=True)
        if applied.lost:
            self.wake()
        written = frozenset(each.part for each in applied.written)
        return CommitResult(written, applied.lost, member.announced)

    def committed(self, owner: str, checkpoints: Mapping[TopicPartition, int]) -> None:
        """Note checkpoints that a member has committed under this id, not through `commit`."""
        member = self._members.get(owner.rpartition(".")[0])
        if member is not None and member.membership.me.id == owner:
            member.held.committed(checkpoints)

    def read_checkpoints(self, name: str) -> None:
        """Note what the member has committed through any node. Reads the store."""
        member = self._member(name)
        found = self._context.coord.list(claims_prefix(self._group))
        claims = {each.key: decode(each, Claim) for each in found}
        me = member.claims.owner
        for part in member.claims.parts:
            owned = member.claims.get(part)
            claim = None if owned is None else claims.get(owned.key)
            if claim is not None and claim.owner == me:
                member.held.committed({part: claim.checkpoint})

    def _member(self, name: str) -> _Member:
        member = self._members.get(name)
        if member is None:
            raise MemberNotHere(name, self._group)
        return member

    # Ending

    def wake(self) -> None:
        """Make the thread look at the group now."""
        self._nudge.set()
        watch = self._watch
        if watch is not None:
            watch.wake()

    def close(self) -> None:
        """End the thread. Members stay in the group for their session timeout, as if the node died:
        their clients find another node in that time."""
        self._stop.set()
        self.wake()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        while not self._stop.is_set():
            self._nudge.clear()
            try:
                self._follow()
                due = self._step()
            except PxrsError:
                self._stop.wait(_RETRY_PAUSE)
                continue
            except Exception:  # noqa: BLE001 - logged, and tried again
                # A bug of ours. Without this thread its members would get no answers at all.
                _LOG.exception("group %r: a look at it failed", self._group)
                self._stop.wait(_AFTER_A_BUG)
                continue
            now = self._context.clock.monotonic()
            wait = _CAREFUL_WAIT if due is None else min(_CAREFUL_WAIT, max(0.0, due - now))
            # The step may have found other claims to wait for. What is written to those wakes the
            # next watch, not this one, and may have been written since the step read them.
            armed = self._watch is not None and self._watched == self._waited()
            if self._watch is not None and armed and wait > 0 and not self._nudge.is_set():
                self._watch.wait(wait)
        if self._watch is not None:
            self._watch.close()
        stopping = Closed("the node is stopping")
        for done in [*(joining.done for joining in self._joining), *self._leaving.values()]:
            done.set_exception(stopping)
        for member in self._members.values():
            member.end(stopping)

    def _follow(self) -> None:
        """Watch the group, and the claims that members wait for."""
        waited = self._waited()
        if waited == self._watched and self._watch is not None:
            return
        if self._watch is not None:
            self._watch.close()
        self._watch = self._context.coord.watch(
            head_key(self._group), members_prefix(self._group), "topics/", *sorted(waited)
        )
        self._watched = waited

    def _waited(self) -> frozenset[str]:
        """The claims that its members wait for."""
        return frozenset().union(
            *(member.membership.waiting_for for member in self._members.values())
        )

    def _step(self) -> float | None:
        """Add members that join, drop those that leave, look once for all; when to step again."""
        now = self._context.clock.monotonic()
        self._take_in()
        self._let_go(now)
        if not self._members:
            return None
        self._look(now)
        times = [member.look_at for member in self._members.values()]
        times += [member.held.release_due() for member in self._members.values()]
        times += [member.held.silent_until() for member in self._members.values()]
        # There is no time if all members have gone to other nodes.
        return min((at for at in times if at is not None), default=None)

    def _take_in(self) -> None:
        """Hold the members that want to join; the look that follows announces them."""
        with self._lock:
            joining, self._joining = self._joining, []
            for each in joining:
                former = self._members.get(each.name)
                if former is not None and former.topics == each.topics:
                    former.join_again(each.done)
                    continue
                member = _Member(each, self._context, self._group, self._rules, self._patience)
                self._members[each.name] = member
                if former is not None:
                    former.end(Closed("the member has joined with other topics"))

    def _let_go(self, now: float) -> None:
        with self._lock:
            leaving = dict(self._leaving)
        silent = {
            name for name, member in self._members.items() if member.held.silent_until() <= now
        }
        for name in leaving.keys() | silent:
            member = self._members.get(name)
            if member is not None:
                member.membership.leave(for_good=True, silent=name not in leaving)
            self._drop(name)

    def _drop(self, name: str, reason: PxrsError | None = None) -> None:
        with self._lock:
            member = self._members.pop(name, None)
            done = self._leaving.pop(name, None)
        if member is not None:
            member.end(reason or MemberNotHere(name, self._group))
        if done is not None:
            done.set_result(None)

    def _look(self, now: float) -> None:
        join_together([each.membership for each in self._members.values() if each.is_new])
        seen = self._see()
        changed = (state := _state_of(seen)) != self._seen
        # Not before all of them have looked: if one fails, all look again.
        self._seen = None
        for member in list(self._members.values()):
            due = member.look_at is not None and member.look_at <= now
            settled = member.standing.settled and not member.held.is_leaving
            if settled and not changed and not due:
                continue
            member.held.tick(now)
            try:
                member.look_at = member.membership.look_at(seen)
            except PxrsError as error:
                if error.retryable or isinstance(error, _MAY_PASS):
                    raise
                # Its client has joined through another node, or its record can't be written.
                self._drop(member.name, error)
                continue
            if member.look_at is not None and member.look_at <= self._context.clock.monotonic():
                # It has changed the group: the others must not decide on the old snapshot.
                seen = self._see()
            member.standing = self._standing(member, seen)
            # Not before: the first answer to a member must show what this look saw.
            member.has_joined()
            if member.has_answer:
                member.call_back()
        self._seen = state

    def _see(self) -> Snapshot:
        return self._reader.see(
            {name: member.claims.parts for name, member in self._members.items()}
        )

    def _standing(self, member: _Member, seen: Snapshot) -> Standing:
        """The member's standing. One that has just joined is not in a snapshot from before."""
        view = seen.view
        mine = view.members.get(member.name)
        target = frozenset(view.head.target_of(member.name))
        subscriptions = {name: tuple(sorted(each.topics)) for name, each in view.members.items()}
        settled = (
            mine is not None
            and mine.id == member.membership.me.id
            and not member.held.is_leaving
            and member.claims.parts == target
            and subscriptions.items() <= view.head.subscriptions.items()
        )
        return Standing(view.head.generation, target, settled)


class MemberNotHere(GroupNotFound):
    """The group has no such member on this node."""

    def __init__(self, name: str, group: str) -> None:
        InvalidRequest.__init__(
            self, f"{name!r} is not a member of group {group!r} any more; join again"
        )
        self.group = group
        self.name = name


def _state_of(seen: Snapshot) -> object:
    """The state that all members decide on; equal if nothing has changed."""
    members = tuple((name, member.id) for name, member in seen.view.members.items())
    return seen.head_version, members, tuple(sorted(seen.view.topics.items()))
