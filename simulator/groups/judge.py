"""The judge: hears of every write that was applied and of every message that was handled.

It keeps its own account, in its own way, and raises `Broken` at the first thing that the promises
exclude. It knows nothing of the code under test but the records' format. `Ledger` hears it all,
`Account` is about one partition, `Delivery` about one owner of it, `Told` about transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pxrs.codec.batches import decode as decode_batch
from pxrs.codec.batches import set_base_offset
from pxrs.config import Start
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
from pxrs.queues.item import decode_body
from pxrs.stores.api import CoordStore
from pxrs.types import (
    Append,
    Fence,
    Message,
    Put,
    QueueChange,
    StoredBatch,
    TopicPartition,
    Versioned,
    Write,
)
from simulator.groups.plan import GROUP, OPERATOR, Plan
from simulator.stage import Broken

_EPSILON = 1e-6

# The topic and the queue where the effects go. The members read other topics.
OUTPUT = "effects"
# A queue of which transactions take something, besides their messages.
TASKS = "tasks"


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


class Account:
    """One partition: who owned which epoch, what was handled, how far it was committed."""

    def __init__(self, part: TopicPartition, topic_id: str) -> None:
        self.part = part
        self.topic_id = topic_id
        # Its topic was deleted.
        self.gone = False
        # Retention has removed what was before this.
        self.log_start = 0
        # Offsets of a source that have no message here, and never will.
        self.empty: set[int] = set()
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
        while self._prefix in self._handled or self._prefix in self.empty:
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

    def begins(self, old: Claim, new: Claim, start: Start) -> bool:
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
            counted = set(range(start, end))
            missing = sorted(counted - self._handled - self.empty)
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
        return sorted(set(range(max(self._start, first), end)) - self.effects - self.empty)

    def moved_by_transaction(self, old: Claim, new: Claim, effects: set[int]) -> None:
        """Promise 3: effects and checkpoint are one."""
        moved = _done(new) - _done(old) - self.empty
        counted = {offset for offset in moved if offset >= self._start}
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
        # More may be known to be empty by now.
        self._skip()
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
        while self._next in self._done or self._next in self.account.empty:
            self._next += 1


class Landed(NamedTuple):
    """What a transaction has done beside its writes, in the same commit."""

    appends: Sequence[Append]
    change: QueueChange | None


class Effect(NamedTuple):
    """A transaction has handled this offset of a partition, as it came after so many seeks."""

    transaction: str
    topic_id: str
    partition: int
    segment: int
    offset: int
    key: bytes

    def encode(self) -> bytes:
        """For the value of a message or an item."""
        return " ".join([*map(str, self[:5]), self.key.hex()]).encode()

    @classmethod
    def decode(cls, value: bytes) -> Effect:
        """From such a value."""
        transaction, topic_id, *numbers, key = value.decode().split()
        partition, segment, offset = map(int, numbers)
        return cls(transaction, topic_id, partition, segment, offset, bytes.fromhex(key))


def effect_of(transaction: str, message: Message, delivery: Delivery) -> Effect:
    """What a transaction does about a message."""
    where = delivery.account.topic_id, message.partition
    return Effect(transaction, *where, delivery.segment, message.offset, message.key)


def effects_in(landed: Landed) -> list[Effect]:
    """The effects in what was appended and put."""
    values = []
    for _, batch in landed.appends:
        data = bytearray(batch.data)
        set_base_offset(data, 0)
        messages = decode_batch(StoredBatch(0, batch.count, bytes(data)), Fence(OUTPUT, 0, 0))
        values += [message.value for message in messages]
    if landed.change is not None:
        values += [decode_body(item.body)[0] for item in landed.change.put]
    return [Effect.decode(value) for value in values]


class Told:
    """What callers were told of their transactions, and whether it was so."""

    def __init__(self) -> None:
        self._applied: set[str] = set()
        self._failed: set[str] = set()
        self._took: dict[str, set[int]] = {}
        self._removed: set[int] = set()

    def took(self, transaction: str, task: int) -> None:
        """It was given this task; whether it has done it, its commit tells."""
        self._took.setdefault(transaction, set()).add(task)

    def removed(self, transactions: Iterable[str], tasks: set[int]) -> None:
        """A commit has removed these tasks: those that its transaction took, and nobody before."""
        taken = {task for each in transactions for task in self._took.get(each, ())}
        if tasks != taken:
            raise Broken(
                f"{sorted(transactions)} took tasks {sorted(taken)}, removed {sorted(tasks)}"
            )
        if twice := tasks & self._removed:
            raise Broken(f"{sorted(transactions)} removed tasks {sorted(twice)} once more")
        self._removed |= tasks

    def tasks_left(self, tasks: set[int], ever: int) -> None:
        """These are in the queue at the end, of so many that ever were."""
        if tasks & self._removed or len(tasks) + len(self._removed) != ever:
            raise Broken(f"{ever} tasks were put, {len(self._removed)} removed, {len(tasks)} left")

    def applied(self, transactions: Iterable[str]) -> None:
        """They are in the store now."""
        for transaction in transactions:
            if transaction in self._failed:
                raise Broken(
                    f"{transaction} was committed after its caller was told that it was not"
                )
            self._applied.add(transaction)

    def committed(self, transaction: str) -> None:
        """Its block was left without an error."""
        if transaction not in self._applied:
            raise Broken(f"{transaction} was told to be committed, and left no effect")

    def failed(self, transaction: str, why: str) -> None:
        """It raised something that says that nothing was done."""
        if transaction in self._applied:
            raise Broken(f"{transaction} was committed, and its caller was told {why}")
        self._failed.add(transaction)
