"""The end of a run: no more faults; the group has to come to rest, with everything handled."""

from __future__ import annotations

from collections import Counter

from pxrs.core.group import group_state
from pxrs.core.records import Claim, Head, MemberRecord, claim_key, decode, head_key, members_prefix
from pxrs.types import ItemState, TopicPartition
from simulator.account import Broken
from simulator.effects import TASKS
from simulator.plan import GROUP
from simulator.world import World

_ROUND = 0.1
_PATIENCE = 30.0


def settle(world: World) -> None:
    """Let everybody who lives go on until nothing is left to do, or raise `Broken`."""
    world.end_trouble()
    for actor in world.living:
        actor.hurry()
    plan = world.plan
    patience = _PATIENCE + 2 * plan.ttl + 2 * plan.rejoin_timeout + (plan.revoke_timeout or 0.0)
    end = world.clock.monotonic() + patience
    while unrest := _round(world):
        if world.clock.monotonic() > end:
            raise Broken(f"no rest {patience:g} s after the last fault: {unrest}")
    _check_shares(world)
    _check_tasks(world)


def _round(world: World) -> str | None:
    """One second of everybody's life; then what is not as it should be."""
    for _ in range(10):
        if not world.living:
            world.start("last", static=False)
        with world.judged():
            for actor in world.living:
                if actor.due:
                    actor.background()
                actor.attend()
                actor.work()
                while actor.busy and world.rng.random() < 0.8:
                    actor.work()
            world.advance(_ROUND)
    return _unrest(world)


def claims_of(world: World) -> dict[TopicPartition, Claim]:
    """All claims, as the store holds them."""
    claims = {}
    for topic in world.topics.there.values():
        for number in range(topic.partitions):
            found = world.stores.coord.get(claim_key(GROUP, topic.id, number))
            if found is not None:
                claims[TopicPartition(topic.name, number)] = decode(found, Claim)
    return claims


def _unrest(world: World) -> str | None:
    coord = world.stores.coord
    found = coord.get(head_key(GROUP))
    prefix = members_prefix(GROUP)
    members = {
        record.key.removeprefix(prefix): decode(record, MemberRecord)
        for record in coord.list(prefix)
    }
    claims = claims_of(world)
    state = group_state(decode(found, Head) if found is not None else None, members, claims)
    if state != "STABLE":
        return f"the group is {state}"
    ids = {actor.member.membership.me.id: actor for actor in world.living}
    gone = sorted({member.id for member in members.values()} - ids.keys())
    if gone:
        return f"{gone[0]} is not there, and its session is not over yet"
    for part in sorted(world.ledger.accounts):
        claim, account = claims.get(part), world.ledger.accounts[part]
        if claim is None or claim.owner not in ids:
            return f"{account} is owned by {claim and claim.owner}, which is not there"
        owned_claim = ids[claim.owner].member.owned_claims.get(part)
        if owned_claim is None or owned_claim.epoch != claim.epoch:
            return f"{claim.owner} does not know that it owns {account} at epoch {claim.epoch}"
        end = world.topics.end_of(part)
        first = account.first_to_handle(claim)
        if first < end and account.prefix < end:
            return f"{account} was handled up to {account.prefix} of {end}"
        if first < end:
            return f"{account} was committed up to {claim.checkpoint} of {end}"
        since = first if claim.checkpoint is None else 0
        if world.plan.transactions and (missing := account.without_effect(since, end)):
            return f"{account} has no effects of {missing}"
    return None


def _check_shares(world: World) -> None:
    """Everybody subscribes to everything: fair to within one partition, per topic for `range`."""
    claims = claims_of(world)
    groups = (
        [claims]
        if world.plan.strategy != "range"
        else [
            {part: claim for part, claim in claims.items() if part.topic == name}
            for name in sorted(world.topics.there)
        ]
    )
    for group in groups:
        shares = Counter(claim.name for claim in group.values())
        counts = [shares[actor.name] for actor in world.living]
        if max(counts) - min(counts) > 1:
            raise Broken(f"unfair: {dict(sorted(shares.items()))} of {len(world.living)} members")


def _check_tasks(world: World) -> None:
    if world.plan.queues:
        left = world.stores.queues.peek(TASKS, tuple(ItemState), limit=world.plan.tasks)
        world.ledger.told.tasks_left({item.id for item in left}, world.plan.tasks)
