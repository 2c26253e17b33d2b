"""The ledger's account of one partition."""

from __future__ import annotations

from pxrs.core.records import Claim
from pxrs.types import TopicPartition


class Broken(AssertionError):  # noqa: N818 - what happened to a promise
    """A promise was not kept."""


class Account:
    """One partition: who owned which epoch, what was handled, how far it was committed."""

    def __init__(self, part: TopicPartition, topic_id: str) -> None:
        self.part = part
        self.topic_id = topic_id
        # Its topic was deleted.
        self.gone = False
        # Retention has removed what was before this.
        self.log_start = 0
        self.owners: dict[int, str | None] = {}
        self.deliveries: dict[int, Delivery] = {}
        # The generations in which it was claimed last, and in which its target changed last.
        self.generation = 0
        self.retargeted = 0
        self.wanted_since = 0.0
        # Raised by every seek: what was handled before it does not count after it.
        self.segment = 0
        self._start = 0
        self._handled: set[int] = set()
        self._prefix = 0
        # What transactions did about it since the last seek, and how far that got for each key.
        self.effects: set[int] = set()
        self._effects_up_to: dict[bytes, int] = {}

    def __str__(self) -> str:
        name = f"{self.part.topic}/{self.part.partition}"
        return f"{name} (deleted, {self.topic_id})" if self.gone else name

    @property
    def prefix(self) -> int:
        """The first offset that was not handled since the last seek."""
        while self._prefix in self._handled:
            self._prefix += 1
        return self._prefix

    def note_owner(self, old: Claim, new: Claim) -> None:
        """Promise 1: every change of hands raises the epoch, and no epoch has two owners."""
        if new.epoch < old.epoch:
            raise Broken(f"the epoch of {self} fell from {old.epoch} to {new.epoch}")
        if new.owner != old.owner and new.epoch == old.epoch:
            raise Broken(f"{self} went from {old.owner} to {new.owner}, both at epoch {new.epoch}")
        if self.owners.setdefault(new.epoch, new.owner) != new.owner:
            raise Broken(
                f"epoch {new.epoch} of {self} has the owners {self.owners[new.epoch]} "
                f"and {new.owner}"
            )

    def last_owned(self) -> int:
        """The last epoch at which somebody owned it."""
        return max((epoch for epoch, owner in self.owners.items() if owner is not None), default=0)

    def begin(self, claim: Claim) -> None:
        """A member claimed it, to go on from the checkpoint."""
        self.deliveries[claim.epoch] = Delivery(self, claim)

    def sought(self, claim: Claim) -> None:
        """Its checkpoint was set, and that is recorded: all from there on is to be handled."""
        self.segment += 1
        self._handled = set()
        self._start = self._prefix = claim.checkpoint or 0
        self.effects = set()
        self._effects_up_to = {}
        self.begin(claim)

    def begun_at(self, offset: int) -> None:
        """Without a checkpoint: the first one to work on it begins here."""
        self._start = self._prefix = max(self._prefix, offset)

    def pinned(self, claim: Claim) -> None:
        """Its first checkpoint was set before anything was handed out."""
        self.begun_at(claim.checkpoint or 0)
        self.begin(claim)

    def begins(self, old: Claim, new: Claim, start: str) -> bool:
        """Whether it gets its first checkpoint before anything was handed out, where it may."""
        delivery = self.deliveries.get(old.epoch)
        return (
            old.checkpoint is None
            and new.checkpoint is not None
            and delivery is not None
            and delivery.is_untouched
            and (start == "latest" or new.checkpoint <= self.log_start)
        )

    def first_to_handle(self, claim: Claim) -> int:
        """Where the group begins, or goes on, as things are now."""
        return self.log_start if claim.checkpoint is None else claim.checkpoint

    def passed_over(self, old: Claim, new: Claim, policy: str) -> None:
        """What retention has removed is passed over, as the group's policy says."""
        if policy == "error":
            raise Broken(f"{self} was set to {new.checkpoint} by itself; that is to be an error")
        if old.checkpoint is not None and old.checkpoint >= self.log_start:
            raise Broken(f"{self} was set to {new.checkpoint}, and {old.checkpoint} is not gone")
        if policy == "earliest" and new.checkpoint is not None and new.checkpoint > self.log_start:
            raise Broken(f"{self} was set to {new.checkpoint}, past what is there")

    def moved(self, old: Claim, new: Claim) -> None:
        """Promises 3 and 5: a checkpoint goes forward, over what was handled and nothing else."""
        if old.checkpoint is not None and (
            new.checkpoint is None or new.checkpoint < old.checkpoint
        ):
            raise Broken(
                f"the checkpoint of {self} went back from {old.checkpoint} to {new.checkpoint}"
            )
        if new.checkpoint is not None and new.checkpoint > self.prefix:
            raise Broken(
                f"the checkpoint of {self} is {new.checkpoint}, and {self.prefix} was not handled"
            )
        for start, end in new.done:
            missing = [offset for offset in range(start, end) if offset not in self._handled]
            if missing and missing[-1] >= self.prefix:
                raise Broken(f"{self} counts {missing[-1]} as done, and it was not handled")

    def leave_effect(self, segment: int, offset: int, key: bytes) -> None:
        """Promises 3 and 4: a transaction's effect is there once, and in the order of its key.

        What was in hand when somebody sought is handled as if that had been before the seek.
        """
        if segment != self.segment:
            return
        if offset in self.effects:
            raise Broken(f"{self} offset {offset} has its effect twice")
        if self._effects_up_to.get(key, -1) > offset:
            raise Broken(f"{self} offset {offset} has its effect after that of a later one")
        self.effects.add(offset)
        self._effects_up_to[key] = offset
        self._handled.add(offset)

    def without_effect(self, first: int, end: int) -> list[int]:
        """The offsets up to `end` of which no transaction has left an effect."""
        return sorted(set(range(max(self._start, first), end)) - self.effects)

    def moved_by_transaction(self, old: Claim, new: Claim, effects: set[int]) -> None:
        """Promise 3: effects and checkpoint are one."""
        counted = {offset for offset in _done(new) - _done(old) if offset >= self._start}
        if counted != effects:
            raise Broken(
                f"a transaction counts {sorted(counted)} of {self} as done, and has the effects "
                f"{sorted(effects)}"
            )

    def finished(self, segment: int, offset: int) -> None:
        """The offset was handled by somebody who started in this segment."""
        if segment == self.segment:
            self._handled.add(offset)


def _done(claim: Claim) -> set[int]:
    """Every offset that the claim counts as handled."""
    above = {offset for start, end in claim.done for offset in range(start, end)}
    return above | set(range(claim.checkpoint or 0))


class Delivery:
    """What one owner does with a partition from a claim, or a seek, on."""

    def __init__(self, account: Account, claim: Claim) -> None:
        self.account = account
        self.segment = account.segment
        self._epoch = claim.epoch
        self._start = claim.checkpoint or 0
        self._done = frozenset(offset for start, end in claim.done for offset in range(start, end))
        self._next = self._start
        self._is_fresh = claim.checkpoint is None
        self.is_untouched = True
        self._handled: set[int] = set()
        self._last: dict[bytes, int] = {}
        self._skip()

    def __str__(self) -> str:
        return f"{self.account} epoch {self._epoch}"

    def hand_out(self, offset: int) -> None:
        """Nothing before the checkpoint, no gap, nothing that the claim calls done."""
        if self._is_fresh and self.is_untouched and offset <= self.account.log_start:
            self.account.begun_at(offset)
            self._start = self._next = offset
        self.is_untouched = False
        if offset < self._start or offset in self._done:
            raise Broken(f"{self}: offset {offset} was handed out, and it was done before")
        if offset > self._next:
            raise Broken(f"{self}: offset {offset} was handed out before {self._next}")
        if offset == self._next:
            self._next += 1
            self._skip()

    def begin(self, offset: int, key: bytes) -> None:
        """Promise 4: order per key, and nothing twice while it stays with one owner."""
        if offset in self._handled:
            raise Broken(f"{self}: offset {offset} was handled before, by the same owner")
        if self._last.get(key, -1) > offset:
            raise Broken(f"{self}: offset {offset} after {self._last[key]} of the same key")

    def finish(self, offset: int, key: bytes) -> None:
        """It was handled."""
        self._handled.add(offset)
        self._last[key] = max(offset, self._last.get(key, -1))
        self.account.finished(self.segment, offset)

    def _skip(self) -> None:
        while self._next in self._done:
            self._next += 1
