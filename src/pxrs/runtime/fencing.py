"""How partitions that somebody else owns now are told."""

from __future__ import annotations

from collections.abc import Iterable

from pxrs.errors import Fenced
from pxrs.types import TopicPartition


def names_of(parts: Iterable[TopicPartition]) -> str:
    """Partitions, for people."""
    return ", ".join(f"{topic}/{partition}" for topic, partition in sorted(parts))


def fenced(parts: Iterable[TopicPartition]) -> Fenced:
    """The error that names these partitions."""
    parts = frozenset(parts)
    return Fenced(f"not committed, owned by somebody else now: {names_of(parts)}", parts)
