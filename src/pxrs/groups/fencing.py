"""How partitions that somebody else owns now are told."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from pxrs.errors import Fenced, PartitionNotFound, PxrsError
from pxrs.topics import Topics
from pxrs.types import TopicPartition

_WHAT_TO_DO = "partitions are assigned when it polls: poll first, or seek in on_assigned"


def names_of(parts: Iterable[TopicPartition]) -> str:
    """Partitions, for people."""
    return ", ".join(f"{topic}/{partition}" for topic, partition in sorted(parts))


def fenced(parts: Iterable[TopicPartition]) -> Fenced:
    """The error that names these partitions."""
    parts = frozenset(parts)
    return Fenced(f"not committed, owned by somebody else now: {names_of(parts)}", parts)


def not_owned(part: TopicPartition, topics: Topics) -> Fenced | PartitionNotFound:
    """The error for a partition that a consumer does not own: nobody can own one that is not."""
    # Whatever is with the topic, or the store: owned it is not.
    with suppress(PxrsError):
        partitions = topics.find(part.topic).partitions
        if not 0 <= part.partition < partitions:
            return PartitionNotFound(*part, partitions)
    what = f"{part.topic!r} partition {part.partition} is not owned by this consumer"
    return Fenced(f"{what}; {_WHAT_TO_DO}", [part])


def all_of(assignment: set[TopicPartition]) -> set[TopicPartition]:
    """Where all that a consumer owns is meant: refused if that is nothing."""
    if not assignment:
        raise Fenced(f"this consumer owns no partition; {_WHAT_TO_DO}")
    return assignment
