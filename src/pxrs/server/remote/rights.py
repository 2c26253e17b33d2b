"""The rights that a call of `pxrs.v1` needs: pure rules, by its method and arguments.

A call that no rule knows, and a record whose key none knows, need `cluster:store:admin`: what is
added to the seams or to the store is closed until a rule here opens it. What opens:

    topics/<topic>                        to see it any right on the topic; to write it admin, but
                                          over a source only with the cluster's
    group/, members/, claims/, history/, resets/, relays/   of a group: to see them any right on the
                                          group, to write them write, to remove the group or a claim
                                          admin
    a log                                 by the topic whose record names it
    a queue, a key                        by its name; of keys only `kv.*`, not their records:
                                          who writes the head of a shard has all keys of it

To write is to see: a commit whose check fails answers with what is there, so each key that is
checked needs what reading it needs. Keys and values are written by clients, so others must be able
to read them: a record that no member or topic could have written is an `InvalidRequest`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pxrs.config import check_group_name, check_member_name, check_partitions, check_topic_name
from pxrs.core import records, relaying
from pxrs.errors import InvalidRequest, PermissionDenied, SchemaMismatch, TopicNotFound, quoted
from pxrs.groups.resets import Reset
from pxrs.server.rest.routes import Need, of_key
from pxrs.server.tokens import Action, Identity, Kind
from pxrs.stores.remote.wire import unpack_writes
from pxrs.topics import check_topic_id, read_topic
from pxrs.types import (
    RESERVED,
    Append,
    Check,
    Held,
    LogPartition,
    Put,
    QueueChange,
    Release,
    Topic,
    Versioned,
    Write,
)

# Everything, tokens and what nodes keep for themselves too.
CLUSTER = Need("cluster", "store", "admin")
TOPICS = "topics/"
GROUPS = records.GROUPS_PREFIX


class Some(NamedTuple):
    """The right to do this with at least one name."""

    kind: Kind
    action: Action


# One of these is enough; the first is what a refusal names.
Wanted = tuple[Need | Some, ...]
# The topic that a log belongs to, None if no topic's record names it.
TopicOf = Callable[[str], Topic | None]
Arguments = Mapping[str, Any]


def may(identity: Identity, wanted: Wanted) -> bool:
    """Whether the identity has one of the rights."""
    return any(
        any(it.kind == each.kind and each.action in it.actions for it in identity.rights)
        if isinstance(each, Some)
        else identity.may(*each)
        for each in wanted
    )


def require(identity: Identity, wanted: Wanted, method: str) -> None:
    """Raises `PermissionDenied` unless the identity has one of the rights, for this method."""
    if may(identity, wanted):
        return
    first = wanted[0]
    if first == CLUSTER:
        raise identity.denied(f"make this call of {method}", *CLUSTER)
    if isinstance(first, Some):
        right = f"{first.kind}:NAME:{first.action}"
        raise PermissionDenied(
            f"token {identity.name!r} may not {first.action} any {first.kind}; it lacks a right "
            f"such as {right}",
            right,
        )
    identity.require(*first)


def needs(method: str, arguments: Arguments, topic_of: TopicOf) -> Iterable[Wanted]:
    """All that a call needs, one by one: what comes later may look at what was allowed before.

    Raises `TopicNotFound` for a log that no topic has.
    """
    rule = _RULES.get(method)
    return [(CLUSTER,)] if rule is None else rule(arguments, topic_of)


def sessions(method: str, arguments: Arguments) -> set[str]:
    """The sessions that a call uses: the caller must have opened them."""
    found = {each.session for each in written(method, arguments) if isinstance(each, Put)}
    found.add(arguments.get("session"))
    for holds in (arguments.get("holder"), getattr(arguments.get("change"), "holder", None)):
        found.add(None if holds is None else holds.session)
    return {each for each in found if each is not None}


def written(method: str, arguments: Arguments) -> Sequence[Write]:
    """The records that a call writes."""
    if method == "node.atomic":
        return unpack_writes(arguments["writes"])
    return arguments["writes"] if method == "coord.commit" else ()


# Records


class Owner(NamedTuple):
    """The topic or group that a record belongs to, and what it is there."""

    kind: Kind
    name: str
    folder: str
    rest: str = ""


# The folders of a group: the keys that can be in them, and what they hold.
_GROUP_FOLDERS: dict[str, dict[re.Pattern[str], type]] = {
    "group": {re.compile(""): records.Head},
    "members": {re.compile(r"[^/]+"): records.MemberRecord},
    "claims": {re.compile(r"[^/]+/[0-9]{1,9}"): records.Claim},
    "history": {re.compile(r"[0-9]{12,20}"): records.Move},
    "resets": {re.compile(r"[0-9]{15}-[^/]+-[0-9]{6,9}"): Reset},
    "relays": {
        re.compile(r"[^/]+"): relaying.Target,
        re.compile(r"[^/]+/[^/]+/[0-9]{1,9}"): relaying.RelayRecord,
    },
}


def owner_of(key: str) -> Owner | None:
    """Whose record it is; None if it is the cluster's, or nobody's that is known here."""
    folder, slash, rest = key.partition("/")
    if not slash:
        return None
    try:
        if folder == "topics":
            return Owner("topic", check_topic_name(rest), folder)
        if folder == "group":
            return Owner("group", check_group_name(rest), folder)
        if folder in _GROUP_FOLDERS:
            group, slash, rest = rest.partition("/")
            return Owner("group", check_group_name(group), folder, rest) if slash else None
    except InvalidRequest:
        return None  # no topic and no group can have such a name, or it is a reserved one
    return None


def to_see(key: str) -> Wanted:
    """The rights to read a record, or a folder within one group's: any right on its owner."""
    owner = owner_of(key)
    if owner is None:
        return (CLUSTER,)
    return _any_right(owner.kind, owner.name)


def _any_right(kind: Kind, name: str) -> Wanted:
    # Who may write learns the rest from the conflicts of its writes, and needs it to write well.
    return Need(kind, name, "read"), Need(kind, name, "write"), Need(kind, name, "admin")


def is_shared(prefix: str) -> bool:
    """Whether a list of these records is answered with those that the caller may see.

    The records of all topics, and the heads of all groups. It is as HTTP lists them, and the
    embedded code lists topics to describe a group. Any other list that goes beyond one group is
    refused: it would have to be read as a whole to leave out what is not for the caller.
    """
    return prefix.startswith((TOPICS, GROUPS))


def _to_write(write: Write) -> Iterable[Wanted]:
    owner = owner_of(write.key)
    if owner is None:
        yield (CLUSTER,)
    elif owner.kind == "topic":
        yield (Need("topic", owner.name, "admin"),)
        if isinstance(write, Put) and read_topic(write).source is not None:
            # Nodes open a source with rights of their own: files, databases.
            yield (CLUSTER,)
    elif isinstance(write, Put):
        yield Need("group", owner.name, "write"), Need("group", owner.name, "admin")
        yield from _to_put(write, owner)
    elif owner.folder in ("group", "claims"):
        # Without its claims a group's epochs would begin anew.
        yield (Need("group", owner.name, "admin"),)
    else:
        yield Need("group", owner.name, "write"), Need("group", owner.name, "admin")


def _to_put(put: Put, owner: Owner) -> Iterable[Wanted]:
    """The further rights that the content of a group's record needs."""
    if owner.folder == "members":
        # One who joins is told of its topics, and gets partitions of them.
        for topic in _member(put, owner).topics:
            yield _topic(topic, "read")


def check_write(write: Write) -> Topic | None:
    """Raises `InvalidRequest` where others could not read the record; the topic, if it is one."""
    owner = owner_of(write.key)
    if owner is None or not isinstance(write, Put):
        return None
    if (put := write).session is not None and owner.folder != "members":
        raise InvalidRequest(f"{quoted(put.key)} must not be bound to a session")
    if owner.kind == "topic":
        return read_topic(put)
    if owner.folder == "members":
        _member(put, owner)
    else:
        kinds = _GROUP_FOLDERS[owner.folder].items()
        kind = next((kind for shape, kind in kinds if shape.fullmatch(owner.rest)), None)
        if kind is None:
            raise InvalidRequest(f"there is no record {quoted(put.key)} of a group")
        _decoded(put, kind)
    return None


def _member(put: Put, owner: Owner) -> records.MemberRecord:
    check_member_name(owner.rest)
    member: records.MemberRecord = _decoded(put, records.MemberRecord)
    for topic in member.topics:
        check_topic_name(topic)
    if put.session is None:
        raise InvalidRequest("the record of a member must be bound to a session")
    if member.node:
        # Nodes pass requests on to where a member is held.
        raise InvalidRequest("the record of a member must name no node: clients are none")
    return member


def _decoded(put: Put, kind: type) -> Any:
    try:
        return records.decode(Versioned(put.key, put.value, 0), kind)
    except (SchemaMismatch, RecursionError):
        raise InvalidRequest(f"{quoted(put.key)} must be the record of a group") from None


def _commit(checks: Iterable[Check], writes: Iterable[Write]) -> Iterable[Wanted]:
    yield from (to_see(check.key) for check in checks)
    for write in writes:
        yield from _to_write(write)


def watched(where: Sequence[str], identity: Identity) -> list[str]:
    """Narrows what an identity watches: of the folder of topics to the records that it may see.

    Where it may see all with a prefix it is the folder itself: it hears that some topic was made
    or deleted, not which.
    """
    if TOPICS not in where:
        return list(where)
    names = {right.names for right in identity.rights if right.kind == "topic"}
    if any(name.endswith("*") for name in names):
        return list(where)
    others = [each for each in where if each != TOPICS]
    return list(dict.fromkeys([*others, *(TOPICS + name for name in sorted(names))]))


def _to_watch(where: str) -> Wanted:
    if where == TOPICS:
        return Some("topic", "read"), Some("topic", "write"), Some("topic", "admin")
    return to_see(where)


# Logs and queues


def _topic(name: str, action: Action) -> Wanted:
    return (CLUSTER,) if name.startswith(RESERVED) else (Need("topic", name, action),)


def of_queue(name: str, action: Action) -> Wanted:
    """The right on a queue."""
    return (CLUSTER,) if name.startswith(RESERVED) else (Need("queue", name, action),)


def to_append(append: Append, topic_of: TopicOf) -> Wanted:
    """The rights to append one batch."""
    return _log(append.where.topic_id, "write", topic_of)


def _log(topic_id: str, action: Action, topic_of: TopicOf) -> Wanted:
    topic = topic_of(topic_id)
    if topic is None:
        # To whoever may not see all of the store a log without a topic is not there.
        raise TopicNotFound(topic_id)
    return _topic(topic.name, action)


def _log_of_its_own(topic_id: str, topic_of: TopicOf) -> Wanted:
    """To make a log, or drop it: before its topic's record is there, and when it is gone.

    Nobody else can mean a log that no topic names: its id is random and stands nowhere.
    """
    topic = topic_of(topic_id)
    if topic is not None:
        return _topic(topic.name, "admin")
    check_topic_id(topic_id)
    return (Some("topic", "admin"),)


def _new_log(it: Arguments, topic_of: TopicOf) -> Iterable[Wanted]:
    yield _log_of_its_own(it["topic_id"], topic_of)
    check_partitions(it["partitions"])


def _expire(where: LogPartition, topic_of: TopicOf) -> Wanted:
    """Who writes keeps up its retention, and no more: `kept` sees to that."""
    (need,) = _log(where.topic_id, "write", topic_of)
    return need, *_log(where.topic_id, "admin", topic_of)


class Kept(NamedTuple):
    """The limits of what a partition has to keep."""

    before_timestamp: int | None
    max_bytes: int | None


def kept(topic: Topic, asked: Kept, now_ms: int) -> Kept:
    """Limits what a writer may expire to what the topic's retention says."""
    before, most = asked
    if topic.retention_ms is None:
        before = None
    elif before is not None:
        before = min(before, now_ms - topic.retention_ms)
    if topic.retention_bytes is None:
        most = None
    elif most is not None:
        most = max(most, topic.retention_bytes)
    return Kept(before, most)


def _change(change: QueueChange) -> Iterable[Wanted]:
    yield from (of_queue(held.queue, "read") for held in change.remove)
    yield from (of_queue(item.queue, "write") for item in change.put)


def _held(held: Iterable[Held]) -> Iterable[Wanted]:
    return [of_queue(each.queue, "read") for each in held]


def _released(releases: Iterable[Release]) -> Iterable[Wanted]:
    return _held(each.held for each in releases)


# A session is there to hold something with: a membership, items, or the outcome of a commit.
_TO_HOLD: Wanted = (
    Some("group", "write"),
    Some("queue", "read"),
    Some("queue", "write"),
    Some("topic", "write"),
)
_Rule = Callable[[Arguments, TopicOf], Iterable[Wanted]]


def _nothing(it: Arguments, topic_of: TopicOf) -> Iterable[Wanted]:
    return ()


def _of_log(action: Action) -> _Rule:
    return lambda it, topic_of: [_log(it["where"].topic_id, action, topic_of)]


def _of_queue(action: Action, name: str = "queue") -> _Rule:
    return lambda it, _: [of_queue(it[name], action)]


def _atomic(it: Arguments, topic_of: TopicOf) -> Iterable[Wanted]:
    yield from _commit(it["checks"], unpack_writes(it["writes"]))
    yield from (to_append(each, topic_of) for each in it["appends"])
    if it["change"] is not None:
        yield from _change(it["change"])


# What is answered with a part, or done in part, has no needs: see `Gate`.
_RULES: dict[str, _Rule] = {
    "coord.get": lambda it, _: [to_see(it["key"])],
    "coord.list": lambda it, _: () if is_shared(it["prefix"]) else [to_see(it["prefix"])],
    "coord.commit": lambda it, _: _commit(it["checks"], it["writes"]),
    "coord.now_ms": _nothing,
    "log.create": _new_log,
    "log.drop": lambda it, topic_of: [_log_of_its_own(it["topic_id"], topic_of)],
    "log.append": _nothing,
    "log.fetch": _of_log("read"),
    "log.bounds": lambda it, topic_of: [_log(it["topic_id"], "read", topic_of)],
    "log.size": _of_log("read"),
    "log.batch_at": _of_log("read"),
    "log.trim": _of_log("admin"),
    "log.expire": lambda it, topic_of: [_expire(it["where"], topic_of)],
    "queues.create": _of_queue("admin", "name"),
    "queues.find": _of_queue("read", "name"),
    "queues.all": _nothing,
    "queues.delete": _of_queue("admin", "name"),
    "queues.take": _of_queue("read"),
    "queues.held": _of_queue("read"),
    "queues.extend": lambda it, _: _held(it["held"]),
    "queues.apply": lambda it, _: _change(it["change"]),
    "queues.outcome": _nothing,
    "queues.release": lambda it, _: _released(it["releases"]),
    "queues.reap": lambda it, _: [(Some("queue", "read"), Some("queue", "write"))],
    "queues.stats": _of_queue("read"),
    "queues.peek": _of_queue("read"),
    "queues.drop": _of_queue("admin"),
    "queues.redrive": _of_queue("admin"),
    "queues.purge": _of_queue("admin"),
    # Its numbers are the caller's, and those of all queues go on above: that is for copies.
    "queues.restore": lambda it, _: [(CLUSTER,)],
    "node.open_session": lambda it, _: [_TO_HOLD],
    "node.renew_session": _nothing,
    "node.close_session": _nothing,
    "node.watch_records": lambda it, _: [_to_watch(where) for where in it["where"]],
    "node.watch_log": lambda it, topic_of: [
        _log(where.topic_id, "read", topic_of) for where in it["where"]
    ],
    "node.watch_queues": lambda it, _: [of_queue(queue, "read") for queue in it["where"]],
    "node.unwatch": _nothing,
    "node.atomic": _atomic,
    # Clients have to know where the nodes are.
    "node.view": _nothing,
    "node.watch_view": _nothing,
    "kv.read": lambda it, _: [(of_key(key, "read"),) for key in it["keys"]],
    "kv.write": lambda it, _: [(of_key(change.key, "write"),) for change in it["changes"]],
}
