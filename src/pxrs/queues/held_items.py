"""The items that one transaction holds, and how it gives them back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, TypeVar

from pxrs.clock import Clock
from pxrs.core.retry import Backoff
from pxrs.errors import OutcomeUnknown, PxrsError
from pxrs.queues.hold_session import Asked, GivenBack, HoldSession
from pxrs.stores.api import Session, Stores
from pxrs.topics import Topics
from pxrs.types import Delivery, Held, Holder, Outcome, Release, Taken

_PATIENCE = 10

T = TypeVar("T")


class Context(NamedTuple):
    """The parts that transactions of one open store share."""

    stores: Stores
    topics: Topics
    clock: Clock
    hold_session: HoldSession
    random: random.Random


class InHand(NamedTuple):
    """A taken item, and how often and when it may be delivered again."""

    held: Held
    retry: Backoff


class HeldItems:
    """The items of a transaction. It gets its session with the first of them.

    Not thread-safe: the transaction's lock guards it.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session: Session | None = None
        self._holder: Holder | None = None
        self.taken: list[InHand] = []
        # Takes without an answer, because of an interrupt or an outage.
        self.asked: list[Asked] = []
        self.surrendered: list[Held] = []
        self._returned: list[Held] = []

    @property
    def holder(self) -> Holder:
        """The holder, as the store knows it: this transaction, under the process's session."""
        if self._holder is None:
            self._session = self._context.hold_session.session()
            self._holder = Holder(self._session.id, self._context.hold_session.next_name())
        return self._holder

    @property
    def is_lost(self) -> bool:
        """Whether its session is over, and everything it held is free."""
        return self._session is not None and not self._context.hold_session.holds(self._session)

    def take(
        self,
        queue: str,
        most_items: int,
        retry: Backoff,
        lock_for: float | None,
        *,
        suspects: bool = True,
    ) -> Taken:
        """Takes the items there are now. If no answer comes, asks the store what this take holds.

        Items that an earlier, unanswered take of this queue holds come first.
        """
        if found := self._answered_late(queue, most_items, retry):
            return Taken(found, 0.0)
        queues, holder = self._context.stores.queues, self.holder
        asked = Asked(queue, self._context.hold_session.next_name())
        self.asked.append(asked)
        try:
            taken = queues.take(
                queue,
                holder,
                most_items,
                most=retry.attempts,
                lock_for=lock_for,
                unit=asked.unit,
                suspects=suspects,
            )
        except OutcomeUnknown:
            found = self._ask(lambda: queues.held(queue, holder, asked.unit))
            taken = Taken(self._unknown(found), 0.0)
        except PxrsError:
            self.asked.remove(asked)
            raise
        self.taken += [InHand(delivery.held, retry) for delivery in taken.items]
        self.asked.remove(asked)
        return taken

    def _answered_late(self, queue: str, most_items: int, retry: Backoff) -> list[Delivery]:
        """Hands out items that takes in doubt hold; gives back those beyond `most_items`.

        Else these would stay locked for as long as the transaction is open.
        """
        queues, doubts = self._context.stores.queues, [a for a in self.asked if a.queue == queue]
        if not doubts:
            return []
        answers = [queues.held(queue, self.holder, doubt.unit) for doubt in doubts]
        # The last one has everything: it comes when no take in doubt can hold any more.
        found = self._unknown(answers[-1])
        wanted, others = found[:most_items], [each.held for each in found[most_items:]]
        self.taken += [InHand(delivery.held, retry) for delivery in wanted]
        if others:
            self._returned += others
            self._context.hold_session.give_back(
                GivenBack(self.holder, tuple(map(Release, others)))
            )
        self.asked[:] = [asked for asked in self.asked if asked not in doubts]
        return wanted

    def _unknown(self, held: Sequence[Delivery]) -> list[Delivery]:
        """The deliveries that this transaction neither has nor is giving back."""
        known = {*(each.held for each in self.taken), *self.surrendered, *self._returned}
        return [delivery for delivery in held if delivery.held not in known]

    def extend(self, seconds: float) -> None:
        """Hold all items for `seconds` more. Raises `Fenced` if some of them are lost."""
        held = [each.held for each in self.taken]
        if held:
            self._context.stores.queues.extend(self.holder, held, seconds)

    def was_applied(self, unit: str) -> bool:
        """Asks what became of a commit that got no answer. Raises `OutcomeUnknown` if none comes.

        Asks until there is an answer: the caller must not get "done" if it was not done, nor "not
        done" if it was, or will be.
        """
        session = self.holder.session
        found = self._ask(lambda: self._context.stores.queues.outcome(session, unit))
        if found is Outcome.UNKNOWN:
            raise OutcomeUnknown(
                "the store did not answer the commit, and has forgotten its session; look before "
                "you repeat it"
            )
        return found is Outcome.DONE

    def given_back(self, error: str, *, with_doubts: bool = True) -> GivenBack:
        """Builds the release of all items, each by the `retry` with which it was taken."""
        releases = []
        for held, retry in self.taken:
            delay = retry.delay(held.delivery, self._context.random)
            if delay is None:
                releases.append(Release(held, error=error, dead=True))
            else:
                releases.append(Release(held, delay, error))
        doubts = tuple(self.asked) if with_doubts else ()
        return GivenBack(self.holder, tuple(releases), doubts)

    def surrender(self, items: Sequence[Delivery], error: str) -> None:
        """Give back some of the items; the transaction goes on without them."""
        unwanted = {delivery.held for delivery in items}
        given = self.given_back(error, with_doubts=False)
        # In place: the finalizer of a dropped transaction looks at the same list.
        self.taken[:] = [each for each in self.taken if each.held not in unwanted]
        releases = tuple(release for release in given.releases if release.held in unwanted)
        self.surrendered += [release.held for release in releases]
        self._context.hold_session.give_back(GivenBack(given.holder, releases))

    def release(self, error: str) -> None:
        """Give all items back. While the store is away it waits, at most for the session's end."""
        if not self.taken and not self.asked:
            return
        hold_session, given = self._context.hold_session, self.given_back(error)
        failures = 0
        try:
            while not hold_session.release(given):
                failures += 1
                hold_session.pause(failures)
        except BaseException:
            hold_session.give_back(given)
            raise

    def release_when_caller_ends(self, error: str) -> None:
        """Give back items that still exist when the caller's own transaction has ended."""
        if self.taken or self.asked:
            self._context.hold_session.release_unless_removed(self.given_back(error))

    def release_later(self, error: str) -> None:
        """Have another thread give all items back. Destructors call it."""
        if self.taken or self.asked:
            self._context.hold_session.give_back(self.given_back(error))

    def forget_doubts(self) -> None:
        """Gives back, after the commit, items that unanswered takes may hold."""
        if self.asked:
            self._context.hold_session.give_back(GivenBack(self.holder, (), tuple(self.asked)))

    def _ask(self, question: Callable[[], T]) -> T:
        for failures in count(1):
            try:
                return question()
            except PxrsError as error:
                # Asking changes nothing more the second time, so it may be repeated.
                can_be_asked_again = error.retryable or isinstance(error, OutcomeUnknown)
                if not can_be_asked_again or failures > _PATIENCE:
                    raise OutcomeUnknown(
                        "the store gave no answer, and the outcome of the request can't be known"
                    ) from error
                self._context.hold_session.pause(failures)
        raise AssertionError
