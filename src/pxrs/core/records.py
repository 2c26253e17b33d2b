"""The records of a group in the coordination store: their keys, and JSON that a person can read.

    group/<group>                        generation, target, reason
    members/<group>/<name>               session-bound: who is there, and what it subscribes to
    claims/<group>/<topic id>/<p>        owner, epoch, checkpoint; never deleted: epochs rise
    history/<group>/<generation>         the last hundred moves, and why
    resets/<group>/<number>              explicit changes of checkpoints, recorded
    relays/<group>/…                     what a relay copies where: see `core/relaying.py`

Each kind has a root of its own: listing groups reads no claims, and a watch on a group's members
is not woken by checkpoints.

`schema` rises when a reader that does not know the change would do harm. A process that reads a
higher number than its own stops with `SchemaMismatch`: it must not write such a record back, since
that would drop fields that it does not know.

The head and the history of a large group are written packed (schema 2: names once, partitions as
ranges), as they would be too large for the stores. Others are not: members of an older version can
read every group that they could be in.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

from pxrs.core import packing
from pxrs.errors import SchemaMismatch
from pxrs.types import TopicPartition, Versioned

SCHEMA = 1
PACKED = 2
HISTORY_LENGTH = 100
# A record that is larger than this is packed, if it can be.
_LARGE = 100_000

Ranges = tuple[tuple[int, int], ...]


class GroupTopic(msgspec.Struct, frozen=True):
    """A topic as a target was computed for it."""

    id: str
    partitions: int


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A connected member. `id` is new with every start; a static member keeps its name.

    `rejoin_timeout`: how long a static member's partitions wait for it after it is gone. `node`:
    the address of the node that holds it for a remote client, empty for an embedded member.
    """

    id: str
    topics: tuple[str, ...]
    client: str = ""
    node: str = ""
    joined_ms: int = 0
    rejoin_timeout: float | None = None
    schema: int = SCHEMA


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The record of the group: which member shall own what, since which generation, and why.

    `target` maps a member's name to topic names and their partitions. `touched` changes with
    every join, so that a target computed before it fails. `static` maps the names of static
    members to their rejoin timeouts: once they are gone, only this record has it. `left` names
    members that left cleanly since the last generation.
    """

    generation: int = 0
    reason: str = ""
    coordinator: str = ""
    at_ms: int = 0
    target: dict[str, dict[str, tuple[int, ...]]] = {}
    topics: dict[str, GroupTopic] = {}
    subscriptions: dict[str, tuple[str, ...]] = {}
    static: dict[str, float] = {}
    left: tuple[str, ...] = ()
    touched: str = ""
    schema: int = SCHEMA

    def owner_of(self) -> dict[TopicPartition, str]:
        """Returns the target the other way round: partition → member."""
        return {
            TopicPartition(topic, number): name
            for name, topics in self.target.items()
            for topic, numbers in topics.items()
            for number in numbers
        }

    def target_of(self, name: str) -> set[TopicPartition]:
        """Returns the partitions that the member shall own."""
        return {
            TopicPartition(topic, number)
            for topic, numbers in self.target.get(name, {}).items()
            for number in numbers
        }


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a partition, its epoch, and the group's checkpoint in it.

    `owner` is a member's id, `name` its name. `topic` is the name of the topic, whose id stands
    in the key: one that is made again has another id, and its epochs go on above. `checkpoint` is
    the offset to start from, None if there never was one. `done` lists finished ranges above it,
    start and end (not included).
    `write` is the unique id of the write that made this record: reading it back proves that the
    write happened.
    """

    owner: str | None = None
    name: str | None = None
    topic: str = ""
    epoch: int = 0
    checkpoint: int | None = None
    done: Ranges = ()
    metadata: str = ""
    write: str = ""
    at_ms: int = 0
    schema: int = SCHEMA


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A generation in the history: what changed hands, and why."""

    generation: int
    reason: str
    coordinator: str
    at_ms: int
    members: tuple[str, ...]
    moves: tuple[tuple[str, int, str | None, str | None], ...]
    schema: int = SCHEMA


class PackedHead(msgspec.Struct, frozen=True, kw_only=True):
    """A large `Head`. `topics` has all that are named, None where there is none of that name.

    Topics and members go by their number, as they stand in `topics` and `members`.
    """

    generation: int
    reason: str
    coordinator: str
    at_ms: int
    members: tuple[str, ...]
    topics: dict[str, GroupTopic | None]
    target: dict[int, dict[int, str]]
    subscriptions: tuple[tuple[str, str], ...]
    static: dict[str, float]
    left: tuple[str, ...]
    touched: str
    schema: int = PACKED

    @classmethod
    def pack(cls, head: Head) -> PackedHead:
        named = {topic for wanted in head.subscriptions.values() for topic in wanted}
        topics = sorted(named | head.topics.keys())
        members = sorted(head.target.keys() | head.subscriptions.keys())
        return cls(
            generation=head.generation,
            reason=head.reason,
            coordinator=head.coordinator,
            at_ms=head.at_ms,
            members=tuple(members),
            topics={name: head.topics.get(name) for name in topics},
            target=packing.pack_target(head.target, topics, members),
            subscriptions=packing.pack_subscriptions(head.subscriptions, topics, members),
            static=head.static,
            left=head.left,
            touched=head.touched,
        )

    def unpack(self) -> Head:
        topics = list(self.topics)
        return Head(
            generation=self.generation,
            reason=self.reason,
            coordinator=self.coordinator,
            at_ms=self.at_ms,
            target=packing.unpack_target(self.target, topics, self.members),
            topics={name: topic for name, topic in self.topics.items() if topic is not None},
            subscriptions=packing.unpack_subscriptions(self.subscriptions, topics, self.members),
            static=self.static,
            left=self.left,
            touched=self.touched,
        )


class PackedMove(msgspec.Struct, frozen=True, kw_only=True):
    """A large `Move`. Members go by their number: first `members`, then those that are `gone`."""

    generation: int
    reason: str
    coordinator: str
    at_ms: int
    members: tuple[str, ...]
    gone: tuple[str, ...]
    moves: dict[str, tuple[tuple[int | None, int | None, str], ...]]
    schema: int = PACKED

    @classmethod
    def pack(cls, move: Move) -> PackedMove:
        named = {name for *_, before, after in move.moves for name in (before, after) if name}
        gone = tuple(sorted(named.difference(move.members)))
        return cls(
            generation=move.generation,
            reason=move.reason,
            coordinator=move.coordinator,
            at_ms=move.at_ms,
            members=move.members,
            gone=gone,
            moves=packing.pack_moves(move.moves, (*move.members, *gone)),
        )

    def unpack(self) -> Move:
        return Move(
            generation=self.generation,
            reason=self.reason,
            coordinator=self.coordinator,
            at_ms=self.at_ms,
            members=self.members,
            moves=packing.unpack_moves(self.moves, (*self.members, *self.gone)),
        )


class _Schema(msgspec.Struct):
    schema: int = SCHEMA


class _Record(Protocol):
    @property
    def schema(self) -> int: ...


R = TypeVar("R", bound=_Record)


def encode(record: msgspec.Struct) -> bytes:
    """Encodes a record as JSON, packed if it is large."""
    written = msgspec.json.encode(record)
    if len(written) > _LARGE:
        if isinstance(record, Head):
            return msgspec.json.encode(PackedHead.pack(record))
        if isinstance(record, Move):
            return msgspec.json.encode(PackedMove.pack(record))
    return written


def decode(record: Versioned, kind: type[R]) -> R:
    """Decodes a record of the store; raises `SchemaMismatch` if it can't."""
    try:
        value = _unpacked(record.value, kind) or msgspec.json.decode(record.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, ValueError) as error:
        raise SchemaMismatch(
            f"the record {record.key!r} can't be read ({error}); another version of pxrs wrote it"
        ) from error
    if not 1 <= value.schema <= SCHEMA:
        raise SchemaMismatch(
            f"the record {record.key!r} has schema {value.schema}, but this version of pxrs knows "
            f"only {SCHEMA}; run the same version of pxrs everywhere in a group"
        )
    return value


def _unpacked(value: bytes, kind: type[R]) -> R | None:
    """Decodes a packed record; returns None for others."""
    packed = _PACKED.get(kind)
    if packed is None or msgspec.json.decode(value, type=_Schema).schema != PACKED:
        return None
    found: R = msgspec.json.decode(value, type=packed).unpack()
    return found


_PACKED: dict[type, Any] = {Head: PackedHead, Move: PackedMove}
GROUPS_PREFIX = "group/"
CLAIMS_PREFIX = "claims/"


def head_key(group: str) -> str:
    return f"group/{group}"


def members_prefix(group: str) -> str:
    return f"members/{group}/"


def member_key(group: str, name: str) -> str:
    return f"members/{group}/{name}"


def claims_prefix(group: str) -> str:
    return f"{CLAIMS_PREFIX}{group}/"


def claim_key(group: str, topic_id: str, partition: int) -> str:
    return f"{CLAIMS_PREFIX}{group}/{topic_id}/{partition}"


def history_prefix(group: str) -> str:
    return f"history/{group}/"


def history_key(group: str, generation: int) -> str:
    return f"history/{group}/{generation:012}"


def resets_prefix(group: str) -> str:
    return f"resets/{group}/"
