"""The judge: hears of every write that was applied and of every message that was handled.

It keeps its own account, in its own way, and raises `Broken` at the first thing that the promises
exclude. It knows nothing of the code under test but the records' format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pxrs.core.records import (
    Claim,
    Head,
    MemberRecord,
    claim_key,
    claims_prefix,
    decode,
    head_key,
    member_key,
    members_prefix,
    resets_prefix,
)
from pxrs.groups.resets import Reset
from pxrs.stores.api import CoordStore
from pxrs.types import Message, Put, TopicPartition, Versioned, Write
from simulator.account import Account, Broken, Delivery
from simulator.effects import Effect, Landed, Told, effects_in
from simulator.plan import GROUP, OPERATOR, Plan

_EPSILON = 1e-6


def writer_of(owner: str) -> str:
    """Which process made this member id: `name.process-number`."""
    return owner.partition(".")[2].rpartition("-")[0]


def _number(who: str) -> int:
    """Processes are numbered as they start: `name#number`."""
    return int(who.partition("#")[2])


class Ledger:
    """What has happened to every partition, and whether it may have."""

    def __init__(self, coord: CoordStore, now: Callable[[], float], plan: Plan) -> None:
        self._coord = coord
        self._now = now
        self._revoke_timeout = plan.revoke_timeout
        self._start = plan.start
        self._on_trimmed = plan.on_trimmed
        self._head = Head()
        self._keys: dict[str, Account] = {}
        self.accounts: dict[TopicPartition, Account] = {}
        # Writes of these processes to these claims had no answer: they may claim them again.
        self._doubtful: set[tuple[str, str]] = set()
        self._have_joined: set[str] = set()
        self.told = Told()

    def add_topic(self, name: str, topic_id: str, partitions: int) -> None:
        """A topic is there from now on."""
        for number in range(partitions):
            part = TopicPartition(name, number)
            account = Account(part, topic_id)
            self.accounts[part] = account
            self._keys[claim_key(GROUP, topic_id, number)] = account

    def topic_gone(self, name: str) -> None:
        """A topic was deleted. One of the same name is another one."""
        for part in [part for part in self.accounts if part.topic == name]:
            self.accounts.pop(part).gone = True

    def in_doubt(self, who: str, keys: Sequence[str]) -> None:
        """A commit of these keys had no answer."""
        self._doubtful.update((who, key) for key in keys)

    def lease_over(self, who: str) -> None:
        """By its own clock its lease is over: it stops, even if the store still keeps it."""
        self.in_doubt(who, list(self._keys))

    def joined(self, who: str) -> None:
        """The process has joined, and knows it."""
        self._have_joined.add(who)

    # What was written

    def heard(
        self,
        who: str,
        before: Mapping[str, Versioned | None],
        writes: Sequence[Write],
        landed: Landed | None = None,
    ) -> None:
        """A commit was applied; `landed` if it was a transaction's."""
        effects = [] if landed is None else effects_in(landed)
        transactions = {effect.transaction for effect in effects}
        self.told.applied(transactions)
        if landed is not None and landed.change is not None:
            self.told.removed(transactions, {held.id for held in landed.change.remove})
        for effect in effects:
            account = self._account_of(effect)
            account.leave_effect(effect.segment, effect.offset, effect.key)
        puts = [write for write in writes if isinstance(write, Put)]
        resets = {
            TopicPartition(reset.topic, reset.partition): reset
            for put in puts
            if put.key.startswith(resets_prefix(GROUP))
            for reset in [decode(Versioned(put.key, put.value, 0), Reset)]
        }
        for put in puts:
            if put.key.startswith(claims_prefix(GROUP)):
                found = before[put.key]
                old = decode(found, Claim) if found is not None else Claim()
                new = decode(Versioned(put.key, put.value, 0), Claim)
                self._claim_written(who, put.key, old, new, resets)
                if landed is not None:
                    account = self._keys[put.key]
                    mine = {
                        each.offset
                        for each in effects
                        if self._account_of(each) is account and each.segment == account.segment
                    }
                    account.moved_by_transaction(old, new, mine)
                    effects = [each for each in effects if self._account_of(each) is not account]
        if effects:
            raise Broken(f"{who} left {effects[0]} without moving its checkpoint")
        for put in puts:
            if put.key == head_key(GROUP):
                self._head_written(decode(Versioned(put.key, put.value, 0), Head))
            elif put.key.startswith(members_prefix(GROUP)):
                self._member_written(who, put.key, before[put.key])
        for write in writes:
            if isinstance(write, Put):
                continue
            if write.key.startswith(claims_prefix(GROUP)):
                raise Broken(f"{who} deleted the claim {write.key}: its epochs would start again")
            if write.key == head_key(GROUP):
                self._forgotten(who)

    def _forgotten(self, who: str) -> None:
        """The group was deleted; one of the same name begins anew."""
        if who != OPERATOR:
            raise Broken(f"{who} deleted the group")
        self._head = Head()
        for key, account in self._keys.items():
            account.generation = account.retargeted = 0
            found = self._coord.get(key)
            if found is not None and decode(found, Claim).checkpoint is not None:
                raise Broken(f"the group was deleted, and {account} has its checkpoint still")

    def _account_of(self, effect: Effect) -> Account:
        return self._keys[claim_key(GROUP, effect.topic_id, effect.partition)]

    def _member_written(self, who: str, key: str, found: Versioned | None) -> None:
        """A process that was away does not push out the one that came in its place."""
        if found is not None and who in self._have_joined:
            there = decode(found, MemberRecord).id
            if _number(writer_of(there)) > _number(who):
                raise Broken(f"{who} came back and pushed {there} out of {key}")

    def _claim_written(
        self,
        who: str,
        key: str,
        old: Claim,
        new: Claim,
        resets: Mapping[TopicPartition, Reset],
    ) -> None:
        account = self._keys.get(key)
        if account is None:
            raise Broken(f"{who} wrote {key}, which is a claim of no topic")
        account.note_owner(old, new)
        if who == OPERATOR:
            is_forgotten = (new.owner, new.checkpoint, new.done) == (None, None, ())
            if new.epoch == old.epoch or not (account.part in resets or is_forgotten):
                raise Broken(
                    f"{who} changed {account} without a record, or without fencing anybody"
                )
        elif new.epoch == old.epoch:
            if old.owner is None or writer_of(old.owner) != who:
                raise Broken(f"{who} wrote {account} owned by {old.owner} at epoch {old.epoch}")
        elif new.owner is not None:
            self._taken(who, key, account, old, new)
        elif old.owner is None or writer_of(old.owner) != who:
            raise Broken(f"{who} released {account}, which {old.owner} owns")
        else:
            self._must_move(who, key, account, old)
        if account.part in resets:
            if resets[account.part].after != new.checkpoint:
                raise Broken(f"{account} was set to {new.checkpoint}, not to what was recorded")
            if resets[account.part].why:
                account.passed_over(old, new, self._on_trimmed)
            account.sought(new)
        elif who == OPERATOR:
            account.sought(new)
        elif account.begins(old, new, self._start):
            account.pinned(new)
        else:
            account.moved(old, new)

    def _taken(self, who: str, key: str, account: Account, old: Claim, new: Claim) -> None:
        assert new.owner is not None
        if writer_of(new.owner) != who:
            raise Broken(f"{who} claimed {account} for {new.owner}")
        if (old.checkpoint, old.done) != (new.checkpoint, new.done):
            raise Broken(f"{who} changed the checkpoint of {account} while claiming it")
        if _meant(self._head)(account) != new.name:
            raise Broken(f"{who} claimed {account}, which the target does not give it")
        if any(each.last_owned() >= new.epoch for each in self._namesakes(account)):
            raise Broken(f"{account} epoch {new.epoch} was there, of a topic of the same name")
        if old.owner is not None and self._lives(old):
            if old.name == new.name:
                self._must_move(who, key, account, old)
            else:
                self._must_be_late(who, account, old)
        account.generation = self._head.generation
        self._doubtful = {doubt for doubt in self._doubtful if doubt[1] != key or doubt[0] == who}
        account.begin(new)

    def _namesakes(self, account: Account) -> list[Account]:
        return [
            each
            for each in self._keys.values()
            if each.part == account.part and each is not account
        ]

    def _must_move(self, who: str, key: str, account: Account, old: Claim) -> None:
        """Promise 6: a partition that stays with a member that lives does not stop."""
        assert old.owner is not None
        stays = account.retargeted <= account.generation and not account.gone and self._lives(old)
        if stays and writer_of(old.owner) == who and (who, key) not in self._doubtful:
            raise Broken(f"{account} stopped at {who} at epoch {old.epoch}, and need not have")

    def _must_be_late(self, who: str, account: Account, old: Claim) -> None:
        """Promise 6: from a member that lives a partition is taken only after the deadline."""
        if self._revoke_timeout is None:
            raise Broken(f"{who} took {account} from {old.owner}, which lives")
        waited = self._now() - account.wanted_since
        if waited < self._revoke_timeout - _EPSILON:
            raise Broken(
                f"{who} took {account} from {old.owner} after {waited:.3f} s of "
                f"{self._revoke_timeout:g}"
            )

    def _lives(self, claim: Claim) -> bool:
        """Whether the owner is there, as the store sees it."""
        assert claim.name is not None
        record = self._coord.get(member_key(GROUP, claim.name))
        return record is not None and decode(record, MemberRecord).id == claim.owner

    def _head_written(self, head: Head) -> None:
        old, self._head = self._head, head
        if head.generation == old.generation:
            if head.target != old.target:
                raise Broken(f"another target in the same generation {head.generation}")
            return
        if head.generation != old.generation + 1:
            raise Broken(f"generation {old.generation} was followed by {head.generation}")
        before, after = _meant(old), _meant(head)
        for account in self._keys.values():
            if before(account) != after(account):
                account.retargeted = head.generation
                account.wanted_since = self._now()

    # What was done with messages

    def handed(self, who: str, topic_id: str, message: Message) -> None:
        """A message left the table for the handler's queue."""
        self._delivery(who, topic_id, message).hand_out(message.offset)

    def began(self, who: str, topic_id: str, message: Message, remaining: float) -> Delivery:
        """A handler began with a message."""
        delivery = self._delivery(who, topic_id, message)
        if remaining <= 0:
            raise Broken(
                f"{who} began with {delivery} offset {message.offset} after its lease was over"
            )
        delivery.begin(message.offset, message.key)
        return delivery

    def handled(self, delivery: Delivery, message: Message) -> None:
        """A handler has finished with a message."""
        delivery.finish(message.offset, message.key)

    def _delivery(self, who: str, topic_id: str, message: Message) -> Delivery:
        account = self._keys[claim_key(GROUP, topic_id, message.partition)]
        owner = account.owners.get(message.fence.epoch)
        if owner is None or writer_of(owner) != who:
            raise Broken(f"{who} handed out {account} at epoch {message.fence.epoch} of {owner}")
        return account.deliveries[message.fence.epoch]


def _meant(head: Head) -> Callable[[Account], str | None]:
    """For whom the head's target means a partition, of this very topic and not of a namesake."""
    owners = head.owner_of()
    ids = {name: topic.id for name, topic in head.topics.items()}
    return lambda account: (
        owners.get(account.part) if ids.get(account.part.topic) == account.topic_id else None
    )
