"""The records of a group in the coordination store: their keys, and JSON that a person can read.

    group/<group>                        generation, target, reason
    members/<group>/<name>               session-bound: who is there, and what it subscribes to
    claims/<group>/<topic id>/<p>        owner, epoch, checkpoint; never deleted: epochs rise
    history/<group>/<generation>         the last hundred moves, and why
    resets/<group>/<number>              explicit changes of checkpoints, recorded

Each kind has a root of its own: listing groups reads no claims, and a watch on a group's members
hears no checkpoints.

`schema` rises when a reader that does not know the change would do harm. Whoever meets a higher
number than its own stops with `SchemaMismatch`: it must not write such a record back, since that
would drop what it can't see.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from pxrs.errors import SchemaMismatch
from pxrs.types import TopicPartition, Versioned

SCHEMA = 1
HISTORY_LENGTH = 100

Runs = tuple[tuple[int, int], ...]


class GroupTopic(msgspec.Struct, frozen=True):
    """A topic as a target was computed for it."""

    id: str
    partitions: int


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A member that is there. `id` is new with every start; the record's name is not, if static.

    `rejoin_timeout`: how long a static member's partitions wait for it after it is gone.
    """

    id: str
    topics: tuple[str, ...]
    client: str = ""
    joined_ms: int = 0
    rejoin_timeout: float | None = None
    schema: int = SCHEMA


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The group itself: which member shall own what, since which generation, and why.

    `target` maps a member's name to topic names and their partitions. `touched` changes with
    every join, so that a target computed before it fails. `static` maps the names of static
    members to their rejoin timeouts: once they are gone nobody else remembers it. `left` names
    those that said goodbye since the last generation.
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
        """The target the other way round: partition → member."""
        return {
            TopicPartition(topic, number): name
            for name, topics in self.target.items()
            for topic, numbers in topics.items()
            for number in numbers
        }

    def target_of(self, name: str) -> set[TopicPartition]:
        """The partitions that the member shall own."""
        return {
            TopicPartition(topic, number)
            for topic, numbers in self.target.get(name, {}).items()
            for number in numbers
        }


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns a partition and how far the group has come in it.

    `owner` is a member's id, `name` its name. `topic` is the name of the topic, whose id stands
    in the key: one that is made again has another id, and its epochs go on above. `checkpoint` is
    the offset to start from, None if there never was one. `done` lists finished runs above it,
    start and end (not included).
    `write` is the unique id of the write that made this record: reading it back proves that the
    write happened.
    """

    owner: str | None = None
    name: str | None = None
    topic: str = ""
    epoch: int = 0
    checkpoint: int | None = None
    done: Runs = ()
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


class _Record(Protocol):
    @property
    def schema(self) -> int: ...


R = TypeVar("R", bound=_Record)


def encode(record: msgspec.Struct) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(record)


def decode(record: Versioned, kind: type[R]) -> R:
    """What the store holds under a key, as a value."""
    try:
        value = msgspec.json.decode(record.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaMismatch(
            f"the record {record.key!r} can't be read ({error}); another version of pxrs wrote it"
        ) from error
    if not 1 <= value.schema <= SCHEMA:
        raise SchemaMismatch(
            f"the record {record.key!r} has schema {value.schema}, this version of pxrs knows "
            f"{SCHEMA}; run the same version everywhere in a group"
        )
    return value


GROUPS_PREFIX = "group/"


def head_key(group: str) -> str:
    return f"group/{group}"


def members_prefix(group: str) -> str:
    return f"members/{group}/"


def member_key(group: str, name: str) -> str:
    return f"members/{group}/{name}"


def claims_prefix(group: str) -> str:
    return f"claims/{group}/"


def claim_key(group: str, topic_id: str, partition: int) -> str:
    return f"claims/{group}/{topic_id}/{partition}"


def history_prefix(group: str) -> str:
    return f"history/{group}/"


def history_key(group: str, generation: int) -> str:
    return f"history/{group}/{generation:012}"


def resets_prefix(group: str) -> str:
    return f"resets/{group}/"
