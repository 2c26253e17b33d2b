"""What the demo's messages look like and who plays in it, so that all its processes agree.

The producer numbers its messages 0, 1, 2 … and deals them out to its keys in turn. A consumer
enters each into a ledger: where it stood, its number, and under which epoch it was handled.
"""

from __future__ import annotations

from typing import NamedTuple

PARTITIONS = 8
KEYS = 64
ROUNDS_PER_SECOND = 50
# How many messages a consumer commits at once, at most.
BATCH = 250
# Short, so that a frozen consumer need not be waited for long.
SESSION_TTL = 2.0


def key_of(number: int) -> bytes:
    return b"account-%02d" % (number % KEYS)


def value_of(number: int) -> bytes:
    return b"%d" % number


class Entry(NamedTuple):
    """A line of the ledger. `turn` counts what its consumer has entered, from 0."""

    partition: int
    offset: int
    number: int
    epoch: int
    turn: int
