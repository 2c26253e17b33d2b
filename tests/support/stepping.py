"""Members of a group that take their steps by hand, over a store that fails when told to."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random

from pxrs.codec.batches import encode
from pxrs.codec.messages import Decoder
from pxrs.config import ConsumerSettings, Start
from pxrs.consuming.member_steps import MemberSteps
from pxrs.consuming.transactions import Transactions
from pxrs.core.records import Claim, claim_key, decode
from pxrs.queues.held_items import Context
from pxrs.queues.hold_session import HoldSession
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.faults import Faults, FaultyStores, Rates
from pxrs.topics import Topics
from pxrs.types import Append, LogPartition

TTL = 10.0


class Group:
    """A topic of one partition with five messages, and members that take their steps by hand."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.stores = MemoryStores(clock=self.clock)
        self.topics = Topics(self.stores.coord, self.stores.log, self.clock)
        self.topics.create("out", 1)
        self.make_topic()
        self.faults = Faults(Random(1), self.clock)

    def make_topic(self) -> None:
        """The topic, with its messages."""
        self.topic = self.topics.create("t", 1)
        self.send()

    def send(self) -> None:
        """Five messages more."""
        batch = encode((b"k", b"%d" % number, [], 0) for number in range(5))
        self.stores.log.append([Append(LogPartition(self.topic.id, 0), batch)])

    def member(
        self,
        name: str,
        process: str = "",
        *,
        static: bool = False,
        names: Callable[[], tuple[str, ...]] = lambda: ("t",),
        start: Start = "earliest",
    ) -> MemberSteps:
        stores = FaultyStores(self.stores, self.faults, name)
        numbers = count()
        settings = ConsumerSettings(
            group="g",
            member_name=name,
            static=static,
            session_ttl=TTL,
            debounce=0.0,
            revoke_timeout=None,
            rejoin_timeout=0.0,
            strategy="fair",
            start=start,
        )
        member = MemberSteps(
            stores,
            Topics(stores.coord, stores.log, self.clock),
            self.clock,
            names,
            settings,
            Decoder(),
            new_id=lambda: f"{name}{process}-{next(numbers)}",
        )
        member.membership.join()
        return member

    def transactions(self, member: MemberSteps, name: str) -> Transactions:
        """Those of a consumer around this member."""
        stores = FaultyStores(self.stores, self.faults, name)
        hold_session = HoldSession(stores, self.clock, TTL, threads=False)
        topics = Topics(stores.coord, stores.log, self.clock)
        return Transactions(
            Context(stores, topics, self.clock, hold_session, Random(1)), member, lambda: None
        )

    def interrupt(self, *fates: str) -> None:
        """The next commits are interrupted, and are "done", "late" or "lost"."""
        drawn = [
            number
            for fate in fates
            for number in {"done": (0.0, 0.0), "late": (0.0, 0.5, 0.5), "lost": (0.0, 0.9)}[fate]
        ]
        self.faults.rates = Rates(interrupted=1, longest_delay=TTL / 2)
        self.faults.rng.random = iter(drawn).__next__  # type: ignore[method-assign]

    def poll(self, member: MemberSteps) -> list[int]:
        """The offsets of all that is there to be handed out."""
        member.finish()
        member.fetch(lambda: None)
        return [message.offset for message in member.all_at_once(member.hand_out(100))]

    def sent(self) -> int:
        """How many messages transactions have sent to the topic "out"."""
        return self.topics.describe("out").messages

    def look(self, *workers: MemberSteps) -> None:
        """All look, again and again, for a second."""
        for _ in range(10):
            for member in workers:
                member.membership.look()
            self.clock.advance(0.1)

    def claim(self) -> Claim:
        found = self.stores.coord.get(claim_key("g", self.topic.id, 0))
        assert found is not None
        return decode(found, Claim)
