"""A simulated process: the real member, driven by steps instead of by threads.

Three threads of a consumer are three kinds of steps here: the background's (`look`, `commit`), the
session's (`renew`) and the caller's (everything about messages). A step that is stopped inside a
store call lets steps of the other kinds happen in between, as far as the real locks would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from random import Random

from pxrs.clock import Clock
from pxrs.codec.messages import Decoder
from pxrs.config import ConsumerSettings
from pxrs.consuming.member_steps import MemberSteps
from pxrs.core.records import head_key, members_prefix
from pxrs.errors import (
    Displaced,
    Fenced,
    OffsetOutOfRange,
    PxrsError,
    SessionLost,
    StoreError,
    TopicNotFound,
    TransactionConflict,
)
from pxrs.stores.api import Stores, Watch
from pxrs.testing.clock import ShiftedClock
from pxrs.testing.faults import Interrupted
from pxrs.topics import Topics
from pxrs.types import TopicPartition
from simulator.groups.caller import Caller, Mode, Transacting
from simulator.groups.judge import OUTPUT, Ledger
from simulator.groups.plan import GROUP, Plan
from simulator.stage import Blocked, Died, Process, StepLock

_CAREFUL = 1.0
_RETRY = 0.2


class Actor:
    """One process of the group, from its start to its end."""

    def __init__(
        self,
        who: str,
        stores: Stores,
        clock: Clock,
        plan: Plan,
        ledger: Ledger,
        rng: Random,
        say: Callable[[str], None],
        switch: Callable[[str, str], None],
        wait: Callable[[Process], None],
        *,
        static: bool,
        mode: Mode,
    ) -> None:
        self.who = who
        self.name = who.partition("#")[0]
        self.static = static
        self.mode = mode
        self._ledger = ledger
        self._rng = rng
        self._say = say
        self._coord = stores.coord
        self._clock = ShiftedClock(clock, rng.uniform(0, 1000))
        numbers = count(1)
        topics = Topics(stores.coord, stores.log, self._clock)
        self.member = MemberSteps(
            stores,
            topics,
            self._clock,
            (lambda: tuple(each.name for each in topics.list() if each.name != OUTPUT))
            if plan.pattern
            else (lambda: tuple(sorted(plan.topics))),
            ConsumerSettings(
                group=GROUP,
                member_name=self.name,
                static=static,
                session_ttl=plan.ttl,
                debounce=plan.debounce,
                revoke_timeout=plan.revoke_timeout,
                rejoin_timeout=plan.rejoin_timeout,
                strategy=plan.strategy,
                start=plan.start,
                on_trimmed=plan.on_trimmed,
                auto_commit=mode not in ("asks", "transactions"),
            ),
            Decoder(),
            asks_before_release=rng.random() < 0.3,
            new_id=lambda: f"{who}-{next(numbers)}",
        )
        self.lock = StepLock(lambda: switch(who, "taking its lock"))
        self.member.owned_claims.lock = self.lock  # type: ignore[assignment]
        self._transacting = Transacting(
            who,
            stores,
            topics,
            self._clock,
            self.member,
            ledger.told,
            rng,
            plan,
            lambda: wait(self),
        )
        self._caller = Caller(
            who,
            mode,
            self.member,
            self._transacting,
            self._clock,
            ledger,
            rng,
            say,
            lambda: self.remaining,
        )
        self.alive = True
        self.frozen = False
        self.thaw_at = 0.0
        # What its threads are at right now, further down the stack.
        self.in_background = self.calling = self._renewing = False
        self._watch: Watch | None = None
        self._watched: frozenset[str] | None = None
        self._joined = False
        self._look_at = 0.0
        self._commit_at = 0.0

    # The session's thread

    @property
    def remaining(self) -> float:
        session = self.member.membership.session
        return session.remaining() if session is not None else 0.0

    def renew(self) -> None:
        session = self.member.membership.session
        if session is not None and not self._renewing:
            self._renewing = True
            with self._tolerating("renew"):
                session.renew()
            with self._tolerating("renew what holds its items"):
                self._transacting.hold_session.renew()
            self._renewing = False

    # The background's thread

    @property
    def due(self) -> bool:
        """Whether the background would wake up now."""
        now = self._clock.monotonic()
        return (
            self._watch is None
            or now >= self._look_at
            or now >= self._commit_at
            or self._watch.wait(0)
        )

    def background(self) -> None:
        """Look at the group, then commit if it is time: one turn of the background's loop."""
        membership = self.member.membership
        now = self._clock.monotonic()
        self._look_at = now + _RETRY
        with self._tolerating("look"):
            if not self._joined:
                # As `Consumer` does before it starts its threads.
                membership.join()
                self._joined = True
                self._ledger.joined(self.who)
            if not self.member.alive:
                self._ledger.lease_over(self.who)
            self._arm(membership.waiting_for)
            wanted = membership.look()
            now = self._clock.monotonic()
            self._look_at = now + _CAREFUL if wanted is None else min(now + _CAREFUL, wanted)
            if self.mode == "asks":
                self._commit_asked()
            if now >= self._commit_at:
                self._commit_at = now + _CAREFUL
                if self.mode not in ("asks", "transactions"):
                    self.member.commit_handled()
                else:
                    self.member.commit_empty()
            if self._watched != membership.waiting_for:
                self._look_at = now

    def commit(self) -> None:
        """Commit what was handled, or asked for, without looking."""
        self._say(f"{self.who} commits")
        if self.mode == "transactions":
            return
        with self._tolerating("commit"):
            if self.mode == "asks":
                self._commit_asked()
            else:
                self.member.commit_handled()

    def _commit_asked(self) -> None:
        """See `Background.commit_what_was_asked`."""
        asked, self._caller.asked = self._caller.asked, []
        if asked:
            try:
                self.member.commit_asked(asked)
            except BaseException:
                self._caller.asked += asked
                raise

    def _arm(self, claims: frozenset[str]) -> None:
        if self._watch is not None and self._watched == claims:
            return
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._watch = self._coord.watch(
            head_key(GROUP), members_prefix(GROUP), "topics/", *sorted(claims)
        )
        self._watched = claims

    # The caller's thread

    def work(self) -> None:
        """Go on with the messages: finish one, take the next."""
        with self._tolerating("work"):
            try:
                self._caller.work()
            except OffsetOutOfRange as error:
                self._say(f"{self.who} work: {error}")
                if self._rng.random() < 0.5:
                    self.seek(TopicPartition(error.topic, error.partition), error.start)

    @property
    def interruptible(self) -> bool:
        """Whether its caller's thread is the one that calls the store now.

        `px.run` handles signals by itself: they only tell it to stop.
        """
        return self.mode != "keys" and self.lock.steps[-1:] == ["calling"]

    @property
    def busy(self) -> bool:
        """Whether it has messages that it was given and has not handled."""
        return self._caller.busy

    def hurry(self) -> None:
        """Take many messages at a time from now on, of everything."""
        self._caller.sizes = (10, 100)
        for part in sorted(self._caller.paused):
            self._caller.resume(part)

    def pause_or_resume(self) -> None:
        """Pause one of the partitions that it has, or go on with one of those that are paused."""
        paused = sorted(self._caller.paused)
        owned = sorted(self.member.table.partitions)
        if paused and self._rng.random() < 0.7:
            part = self._rng.choice(paused)
            self._say(f"{self.who} resumes {part.topic}/{part.partition}")
            self._caller.resume(part)
        elif owned:
            part = self._rng.choice(owned)
            self._say(f"{self.who} pauses {part.topic}/{part.partition}")
            self._caller.pause(part)

    def attend(self) -> None:
        """Between messages: hear what has changed, let go of what has to go."""
        table = self.member.table
        with self._tolerating("attend"):
            while (change := table.next_change()) is not None:
                if change.kind == "leaving":
                    table.said_goodbye(change.parts)
            self.member.membership.release_what_is_finished()

    def give_up(self) -> None:
        """The handler raises: the messages it has are not handled."""
        self._caller.give_up()

    def seek(self, part: TopicPartition, offset: int) -> None:
        with (
            self._tolerating(f"seek {part.topic}/{part.partition} to {offset}"),
            suppress(TopicNotFound, OffsetOutOfRange),
        ):
            self.member.seek(*part, offset)

    def commit_seen(self) -> None:
        """An explicit commit."""
        with self._tolerating("commit()"):
            self._caller.commit()

    # Its end

    def leave(self) -> None:
        """Close: what was handled is committed, everything is released."""
        self._say(f"{self.who} leaves")
        with self._tolerating("leave"):
            self.member.sync()
            self.member.membership.leave()
        self.end()

    def end(self) -> None:
        """The process is gone."""
        self.alive = False
        if self._watch is not None:
            self._watch.close()

    @contextmanager
    def _tolerating(self, what: str) -> Iterator[None]:
        """Errors that a caller has to expect; anything else is a bug."""
        try:
            yield
        except Displaced as error:
            self._say(f"{self.who} {what}: {error}")
            self.end()
        except (StoreError, Fenced, SessionLost, TransactionConflict) as error:
            self._say(f"{self.who} {what}: {type(error).__name__}: {error}")
        except Died:
            self._say(f"{self.who} died in {what}")
            self.end()
        except Interrupted as interrupted:
            # A program that lives on after Ctrl-C: it makes its next call.
            self._say(f"{self.who} {what}: interrupted ({interrupted})")
        except Blocked as blocked:
            self._say(f"{self.who} {what}: {blocked}")
        except PxrsError as error:
            raise AssertionError(f"{self.who} {what}: {type(error).__name__}: {error}") from error
