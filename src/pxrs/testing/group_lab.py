"""Test a handler against crashes, zombies and rebalances, without threads and without waiting.

    from pxrs.testing import GroupLab

    with GroupLab() as lab:
        lab.start("a", handle)
        lab.start("b", handle)
        lab.send("4 apples", key="account-42")
        lab.run(messages=1)      # handled, not committed yet …
        lab.kill("a")            # … when the machine dies
        lab.run_until_quiet()    # b takes over; what a had not committed comes again
        lab.assert_nothing_lost()

The members take the steps that a consumer's threads take, over the memory store and a clock that
the lab moves. The same calls give the same run, every time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any, Literal, NamedTuple

import msgspec

from pxrs.app import Pxrs
from pxrs.arguments import check_handler
from pxrs.clock import Clock
from pxrs.codec.messages import Decoder
from pxrs.config import ConsumerSettings, check_member_name
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.transactions import Transactions
from pxrs.core.group import group_state
from pxrs.core.records import (
    Claim,
    Head,
    MemberRecord,
    claim_key,
    decode,
    head_key,
    members_prefix,
)
from pxrs.errors import Fenced, InvalidRequest, PxrsError, SessionLost
from pxrs.producing.records import Outgoing
from pxrs.queues.held_items import Context
from pxrs.queues.hold_session import HoldSession
from pxrs.running.handler_results import refuse_unfinished
from pxrs.serde import Serde
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.topics import Topics
from pxrs.types import Header, Message, Position, TopicPartition

Handler = Callable[..., Any]
State = Literal["running", "frozen", "killed", "stopped"]

_LEAST_TICK = 0.001
# After more steps than this the handler must be feeding itself, or the group is stuck.
_MOST_STEPS = 100_000


class Crash(BaseException):
    """Raise it to simulate a power cut: inside a handler, or in code that a handler calls.

    The member that runs the handler is gone at once, as by `GroupLab.kill`. No `except
    Exception` of the code under test stops it, as none would stop a power cut.
    """


class Handled(NamedTuple):
    """A message that a handler has seen. `stale`: another member owned its partition by then."""

    member: str
    message: Message
    at: float
    stale: bool


class Refused(NamedTuple):
    """A commit that was refused, because another member owns these partitions now."""

    member: str
    partitions: tuple[int, ...]
    at: float


class LabMember:
    """A member and its handler: the steps of a consumer, one after the other.

    A step does what a consumer's threads would do at one moment: renew the session, look at the
    group, handle a message, commit. Nothing waits, and nothing happens outside of steps.
    """

    def __init__(
        self,
        member: MemberSteps,
        settings: ConsumerSettings,
        clock: Clock,
        handler: Handler,
        in_hand: int,
        handled: Callable[[str, Message], None],
        fenced: Callable[[str, frozenset[TopicPartition]], None],
        hold: Context | None,
    ) -> None:
        """`handled` is called with every message that the handler has seen, `fenced` with every
        commit that was refused. `hold`: for one that handles each message in a transaction."""
        self.name = settings.member_name
        self.state: State = "running"
        self._member = member
        self._settings = settings
        self._clock = clock
        self._handler = handler
        self._most = in_hand
        self._handled = handled
        self._fenced = fenced
        self._hold = hold
        self._transactions = hold and Transactions(hold, member, lambda: None)
        self._loop: Iterator[Message] = iter(())
        # The message that the loop had handed out when the member was frozen.
        self._shown: Message | None = None
        member.membership.join()
        now = clock.monotonic()
        self._renew_at = now + settings.session_ttl / 3
        self._commit_at = now + settings.auto_commit_interval
        self._look_at: float | None = now

    @property
    def assignment(self) -> set[int]:
        """The partitions that it believes to own; a frozen member may be wrong about that."""
        partitions = self._member.table.partitions
        return {part.partition for part, owned in partitions.items() if owned.state == "owned"}

    @property
    def in_hand(self) -> list[Message]:
        """Messages that the member has and that its handler has not seen yet."""
        return [
            message
            for flight in self._member.table.in_flight
            if flight.turn == flight.owned.turn
            for message in flight.messages[flight.handled :]
            if message.offset < flight.owned.handed
        ]

    @property
    def version(self) -> int:
        """Rises whenever something about its partitions changes."""
        return self._member.table.version

    def due(self) -> float:
        """Returns when the member must take its next step."""
        times = [self._renew_at, self._commit_at]
        return min(times if self._look_at is None else [*times, self._look_at])

    def step(self) -> None:
        """Do what there is to do now; at most one message is handled."""
        if self._shown is not None:
            # Just woken: the handler goes on before the member looks at the clock.
            shown, self._shown = self._shown, None
            self._handle(shown)
            self._commit()
            return
        self._renew()
        self._look_at = self._member.membership.look()
        while self._member.table.next_change() is not None:
            pass
        self._member.membership.release_what_is_finished()
        if (message := next(self._loop, None) or self._fetch()) is not None:
            self._handle(message)
        if self._clock.monotonic() >= self._commit_at:
            self._commit()

    def leave(self) -> None:
        """Commit what was handled, release everything, say goodbye."""
        self._leave_loop()
        self._member.membership.leave()
        if self._hold is not None:
            self._hold.hold_session.close()

    def freeze(self) -> None:
        """Stand still; if there is a message, after it was handed out and before it is handled."""
        self.state = "frozen"
        self._shown = self._shown or next(self._loop, None)

    def _renew(self) -> None:
        session = self._member.membership.session
        now = self._clock.monotonic()
        if session is None or now < self._renew_at:
            return
        self._renew_at = now + self._settings.session_ttl / 3
        # If it is lost, the look that follows opens another one.
        with suppress(SessionLost):
            session.renew()
        if self._hold is not None:
            self._hold.hold_session.renew()

    def _commit(self) -> None:
        self._commit_at = self._clock.monotonic() + self._settings.auto_commit_interval
        if self._settings.auto_commit and (lost := self._member.commit_handled()):
            self._fenced(self.name, lost)

    # Messages

    def _fetch(self) -> Message | None:
        """Fetch messages when none are in hand; returns the first."""
        self._member.finish()
        self._member.fetch(lambda: None)
        self._loop = self._member.one_by_one(self._member.hand_out(self._most))
        return next(self._loop, None)

    def _handle(self, message: Message) -> None:
        """Call the handler. Its errors go to the test; the message will be handed out again."""
        try:
            if self._transactions is None:
                self._call(message)
            else:
                self._call_in_transaction(self._transactions, message)
        except Exception:
            self._leave_loop()
            raise
        # Handlers take no time: it counts now, not when the loop is asked for the next one.
        for flight in self._member.table.in_flight:
            flight.handled = flight.seen

    def _call_in_transaction(self, transactions: Transactions, message: Message) -> None:
        try:
            with transactions.begin() as tx:
                self._call(message, tx)
        except Fenced as fenced:
            # The messages in hand are no longer its own: its loop skips them.
            self._fenced(self.name, fenced.parts)

    def _call(self, message: Message, *more: Any) -> None:
        refuse_unfinished(self._handler(message, *more))
        self._handled(self.name, message)

    def _leave_loop(self) -> None:
        """Give back what is in hand; it will be handed out again."""
        self._member.leave_loop()
        self._loop, self._shown = iter(()), None


class GroupLab:
    """A topic, a group and its members, in one thread and with a clock of its own.

    Time passes in `advance`, and as little as needed in `run` and `run_until_quiet`. Meanwhile each
    living member does what is due: renews its session, looks at the group, handles, commits. A
    handler takes no time. Members take turns, in the order in which they were started; with a
    `seed`, in an order that the seed decides.
    """

    def __init__(
        self,
        *,
        topic: str = "orders",
        partitions: int = 4,
        group: str = "lab",
        serde: Serde | None = None,
        key_serde: Serde | None = None,
        auto_commit_interval: float = 1.0,
        session_ttl: float = 10.0,
        revoke_timeout: float | None = 30.0,
        in_hand: int = 10,
        seed: int | None = None,
    ) -> None:
        """`in_hand`: how many messages a member gets at a time. The rest as in `consumer`."""
        self.clock = VirtualClock()
        self.topic = topic
        self.group = group
        stores = MemoryStores(clock=self.clock)
        # The store, for anything else: other topics, readers. `send` here is for the lab's topic.
        self.px = Pxrs(stores, self.clock)
        self._stores = stores
        self._topics = Topics(stores.coord, stores.log, self.clock)
        self._topic = self._topics.create(topic, partitions)
        self._serdes = (key_serde, serde)
        self._settings = ConsumerSettings(
            group=group,
            member_name="",
            auto_commit_interval=auto_commit_interval,
            session_ttl=session_ttl,
            revoke_timeout=revoke_timeout,
        )
        self._in_hand = in_hand
        self._random = None if seed is None else random.Random(seed)
        self._ids = count(1)
        self._members: dict[str, LabMember] = {}
        self._steps = 0
        self._committed: dict[int, int] = {}
        self.sent: list[Position] = []
        self.handled: list[Handled] = []
        self.fenced: list[Refused] = []

    # Messages

    def send(
        self,
        value: Any,
        key: Any = None,
        *,
        partition: int | None = None,
        headers: list[Header] | None = None,
    ) -> Position:
        """Append a message; returns its position."""
        outgoing = Outgoing(self._topics, self.clock, *self._serdes)
        outgoing.send(self.topic, value, key, partition, headers)
        (append,) = outgoing.appends()
        (appended,) = self._stores.log.append([append])
        if isinstance(appended, PxrsError):
            raise appended
        position = Position(self.topic, append.where.partition, appended.base)
        self.sent.append(position)
        return position

    # Members

    def start(self, name: str, handler: Handler, *, transaction: bool = False) -> LabMember:
        """Start a member. Its handler is called as `handler(message)`.

        With `transaction` as `handler(message, tx)`, and the message's checkpoint is committed
        with what `tx` sends. A name can be used again when its member was killed or stopped.
        """
        check_member_name(name)
        takes = ("message", "tx") if transaction else ("message",)
        given = ", ".join(takes)
        instead = f"a plain function that runs it: lambda {given}: asyncio.run(handle({given}))"
        check_handler(handler, *takes, instead=instead)
        if name in self._members and self._members[name].state in ("running", "frozen"):
            raise InvalidRequest(f"member {name!r} is {self._members[name].state} already")
        settings = msgspec.structs.replace(
            self._settings, member_name=name, auto_commit=not transaction
        )
        steps = MemberSteps(
            self._stores, self._topics, self.clock, lambda: (self.topic,), settings,
            Decoder(*self._serdes), new_id=lambda: f"{next(self._ids):06}",
        )  # fmt: skip
        hold_session = HoldSession(self._stores, self.clock, settings.session_ttl, threads=False)
        hold = Context(self._stores, self._topics, self.clock, hold_session, random.Random(name))
        member = LabMember(
            steps, settings, self.clock, handler, self._in_hand, self._note_handled,
            self._note_fenced, hold if transaction else None,
        )  # fmt: skip
        self._members.pop(name, None)
        self._members[name] = member
        return member

    def stop(self, name: str) -> None:
        """End a member cleanly: it commits what it handled, releases everything and leaves."""
        member = self._member(name, "running")
        member.state = "stopped"
        member.leave()

    def kill(self, name: str) -> None:
        """End a member as SIGKILL would. The others notice when its session is over."""
        self._member(name, "running", "frozen").state = "killed"

    def freeze(self, name: str) -> None:
        """Let a member stand still, as SIGSTOP or a long pause would, with what it has in hand."""
        self._member(name, "running").freeze()

    def wake(self, name: str) -> None:
        """Let a frozen member go on where it was. It does not know that any time has passed:
        it handles the next message in hand and commits before it looks at the group."""
        self._member(name, "frozen").state = "running"

    def member(self, name: str) -> LabMember:
        """The member that was started last under this name."""
        try:
            return self._members[name]
        except KeyError:
            raise InvalidRequest(f"no member {name!r} was started") from None

    def _member(self, name: str, *states: State) -> LabMember:
        member = self.member(name)
        if member.state not in states:
            raise InvalidRequest(f"member {name!r} is {member.state}, not {' or '.join(states)}")
        return member

    # Time

    def run(self, messages: int) -> None:
        """Run until this many more messages were handled; time passes only if it must."""
        self._run(len(self.handled) + messages, lambda: False, f"{messages} more messages handled")

    def run_until_quiet(self, limit: float = 600.0) -> None:
        """Run until every message is handled and committed and the group is at rest.

        At rest: the members are those that run, and every partition has the owner that the target
        names. As much time passes as that takes, at most `limit` seconds of the lab's clock: past
        the session of a member that was killed or frozen, for instance.
        """
        self._run(None, lambda: self.quiet, "a quiet group", limit)

    def advance(self, seconds: float) -> None:
        """Let time pass, for all living members."""
        end = self.clock.monotonic() + seconds
        self._run(None, lambda: self.clock.monotonic() >= end, "", seconds + 1, end)

    @property
    def now(self) -> float:
        """Seconds since the lab was made."""
        return self.clock.monotonic()

    def _run(
        self,
        handled: int | None,
        done: Callable[[], bool],
        what: str,
        limit: float = 600.0,
        end: float | None = None,
    ) -> None:
        give_up = self.clock.monotonic() + limit
        self._steps = 0
        while True:
            if self._exhaust(handled):
                return
            if done():
                return
            if end is None and not self._running():
                raise AssertionError(f"{what}: no member runs\n{self.describe()}")
            if self.clock.monotonic() >= give_up:
                raise AssertionError(f"{what}: not within {limit:g} s\n{self.describe()}")
            self._tick(end)

    def _exhaust(self, handled: int | None) -> bool:
        """Step until no member has anything to do now; returns whether enough were handled."""
        before = None
        while before != (before := self._fingerprint()):
            for member in self._turns():
                if handled is not None and len(self.handled) >= handled:
                    return True
                self._step(member)
        return handled is not None and len(self.handled) >= handled

    def _step(self, member: LabMember) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise AssertionError(f"no end after {_MOST_STEPS:,} steps\n{self.describe()}")
        if member.state != "running":
            return
        try:
            member.step()
        except Crash:
            member.state = "killed"
        self._watch_checkpoints()

    def _turns(self) -> list[LabMember]:
        members = self._running()
        if self._random is not None:
            self._random.shuffle(members)
        return members

    def _running(self) -> list[LabMember]:
        return [member for member in self._members.values() if member.state == "running"]

    def _tick(self, end: float | None) -> None:
        """Move the clock to the next step of any member."""
        now = self.clock.monotonic()
        times = [member.due() for member in self._running()]
        times += [end] if end is not None else []
        self.clock.advance(max(min(times) - now, _LEAST_TICK))

    def _fingerprint(self) -> object:
        """A value that changes as long as anything happens."""
        return (
            len(self.handled),
            [(record.key, record.version) for record in self._stores.coord.list("")],
            [(member.version, member.state) for member in self._members.values()],
        )

    # What happened

    @property
    def quiet(self) -> bool:
        """Whether every message is handled and committed, and the group is at rest."""
        coord, prefix = self._stores.coord, members_prefix(self.group)
        members = {
            record.key.removeprefix(prefix): decode(record, MemberRecord)
            for record in coord.list(prefix)
        }
        found = coord.get(head_key(self.group))
        head = decode(found, Head) if found is not None else None
        claims = {TopicPartition(self.topic, at): claim for at, claim in self._claims().items()}
        return (
            members.keys() == {member.name for member in self._running()}
            and group_state(head, members, claims) == "STABLE"
            and not any(self.lags.values())
        )

    @property
    def checkpoints(self) -> dict[int, int]:
        """The committed checkpoint of each partition; 0 where there is none."""
        return {number: claim.checkpoint or 0 for number, claim in self._claims().items()}

    @property
    def owners(self) -> dict[int, str | None]:
        """The owner of each partition, according to the group's records."""
        return {number: claim.name for number, claim in self._claims().items()}

    @property
    def lags(self) -> dict[int, int]:
        """Messages of each partition that no checkpoint covers."""
        ends = self._stores.log.bounds(self._topic.id)
        return {number: ends[number].end - at for number, at in self.checkpoints.items()}

    def _claims(self) -> dict[int, Claim]:
        """The claim of each partition; an empty one where there is none yet."""
        found = {}
        for number in range(self._topic.partitions):
            record = self._stores.coord.get(claim_key(self.group, self._topic.id, number))
            found[number] = decode(record, Claim) if record is not None else Claim()
        return found

    @property
    def repeated(self) -> list[Position]:
        """Messages that were handled more than once, in the order of the log."""
        times = Counter(_position(each.message) for each in self.handled)
        return sorted(position for position, often in times.items() if often > 1)

    def handled_by(self, name: str) -> list[Message]:
        """Return the messages that a member's handler has seen, in order."""
        return [each.message for each in self.handled if each.member == name]

    def values(self) -> list[Any]:
        """The values that handlers have seen, in that order."""
        return [each.message.value for each in self.handled]

    def assert_nothing_lost(self) -> None:
        """Assert that every message that was sent was handled by an owner of its partition, and
        that no checkpoint is ahead of the handled messages."""
        seen = {_position(each.message) for each in self.handled if not each.stale}
        below = {
            Position(self.topic, number, offset)
            for number, checkpoint in self.checkpoints.items()
            for offset in range(checkpoint)
        }
        lost = sorted({*self.sent, *below} - seen)
        if lost:
            raise AssertionError(f"never handled: {_places(lost)}\n{self.describe()}")

    def assert_in_order(self) -> None:
        """Assert that owners have handled each partition message after message. After a crash they
        go back to the checkpoint; they never skip a message."""
        due = [0] * self._topic.partitions
        for each in self.handled:
            number, offset = each.message.partition, each.message.offset
            if each.stale:
                continue
            if offset > due[number]:
                raise AssertionError(
                    f"{each.member} handled offset {offset} of partition {number} "
                    f"before offset {due[number]}\n{self.describe()}"
                )
            due[number] = max(due[number], offset + 1)

    def describe(self) -> str:
        """The group as it is, for people."""
        owners, lags, checkpoints = self.owners, self.lags, self.checkpoints
        lines = [f"at {self.now:.3f} s, {len(self.sent)} sent, {len(self.handled)} handled"]
        lines += [f"  member {name}: {member.state}" for name, member in self._members.items()]
        lines += [
            f"  partition {number}: owner {owner or '-'}, checkpoint {checkpoints[number]}, "
            f"lag {lags[number]}"
            for number, owner in owners.items()
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """Close the store."""
        self.px.close()

    def __enter__(self) -> GroupLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note_handled(self, name: str, message: Message) -> None:
        claim = self._claims()[message.partition]
        stale = claim.epoch != message.fence.epoch
        self.handled.append(Handled(name, message, self.now, stale))

    def _note_fenced(self, name: str, parts: frozenset[TopicPartition]) -> None:
        numbers = tuple(sorted(part.partition for part in parts))
        self.fenced.append(Refused(name, numbers, self.now))

    def _watch_checkpoints(self) -> None:
        """Fail if a checkpoint went back: that is a bug in pxrs."""
        for number, checkpoint in self.checkpoints.items():
            before = self._committed.get(number, 0)
            if checkpoint < before:
                raise AssertionError(
                    f"the checkpoint of partition {number} went back from {before} to {checkpoint}"
                )
            self._committed[number] = checkpoint


def _position(message: Message) -> Position:
    return Position(message.topic, message.partition, message.offset)


def _places(positions: list[Position]) -> str:
    shown = ", ".join(f"partition {each.partition} offset {each.offset}" for each in positions[:5])
    return shown if len(positions) <= 5 else f"{shown} and {len(positions) - 5} more"
