"""Recognises repeated batches of a producer: the pure part of idempotence.

A log keeps one `ProducerState` per partition and producer id, as a value or as its packed
bytes, and asks `judge` or `judge_packed` before it appends.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import NamedTuple

from pxrs.errors import ProducerFenced, SequenceGap
from pxrs.types import Batch

# How many batches of a producer may be on their way at once and still be recognised.
WINDOW = 5

# Sequences are Kafka's: they go from 2^31 - 1 on to 0.
SEQUENCES = 2**31


class Seen(NamedTuple):
    """An appended batch: its first sequence, its offset and its number of messages."""

    sequence: int
    base: int
    length: int


class ProducerState(NamedTuple):
    """A producer's epoch and its last batches in one partition, oldest first."""

    epoch: int
    batches: tuple[Seen, ...]


class Fresh(NamedTuple):
    """The batch may be appended; `state` is what to keep once it is."""

    state: ProducerState


class Duplicate(NamedTuple):
    """The very batch is in the log already, from `base` on."""

    base: int


Verdict = Fresh | Duplicate | ProducerFenced | SequenceGap


def judge(state: ProducerState | None, batch: Batch, base: int) -> Verdict:
    """Judges a batch that carries a producer id and would be appended at `base`.

    A producer that is not known, or no longer, may start anywhere; a higher epoch starts at
    sequence 0. Within an epoch every batch follows the one before it, or repeats one of the
    last five exactly.
    """
    epoch, sequence = batch.producer_epoch, batch.base_sequence
    seen = Seen(sequence, base, batch.count)
    if state is None:
        return Fresh(ProducerState(epoch, (seen,)))
    if epoch < state.epoch:
        return fenced(batch, state.epoch)
    if epoch > state.epoch:
        if sequence != 0:
            return gap(batch, 0)
        return Fresh(ProducerState(epoch, (seen,)))
    last = state.batches[-1]
    expected = (last.sequence + last.length) % SEQUENCES
    if sequence == expected:
        return Fresh(ProducerState(epoch, (*state.batches[1 - WINDOW :], seen)))
    for known in state.batches:
        if known.sequence == sequence and known.length == batch.count:
            return Duplicate(known.base)
    return gap(batch, expected)


def fenced(batch: Batch, epoch: int) -> ProducerFenced:
    """Builds the error for a batch of an epoch that is over."""
    return ProducerFenced(
        f"producer {batch.producer_id} is at epoch {epoch}; epoch {batch.producer_epoch} is over"
    )


def gap(batch: Batch, expected: int) -> SequenceGap:
    """Builds the error for a batch whose predecessor never arrived."""
    return SequenceGap(
        f"producer {batch.producer_id} sent sequence {batch.base_sequence}, but {expected} "
        f"must follow, and it repeats none of the last {WINDOW} batches"
    )


_SEEN = struct.Struct("<iqi")
_EPOCH = struct.Struct("<h")
_LAYOUTS = [struct.Struct("<h" + "iqi" * held) for held in range(WINDOW + 1)]


def pack(state: ProducerState) -> bytes:
    """Packs the state into at most 82 bytes."""
    return _LAYOUTS[len(state.batches)].pack(state.epoch, *chain.from_iterable(state.batches))


def unpack(data: bytes) -> ProducerState:
    """Reverses `pack`."""
    fields = _LAYOUTS[len(data) // _SEEN.size].unpack(data)
    return ProducerState(fields[0], tuple(map(Seen, fields[1::3], fields[2::3], fields[3::3])))


def judge_packed(
    data: bytes | None, batch: Batch, base: int
) -> bytes | Duplicate | ProducerFenced | SequenceGap:
    """`judge` for a packed state; a batch that may be appended gets the packed state to keep.

    The next batch of a producer, which almost every one is, is recognised without unpacking.
    """
    if data is not None:
        sequence, _, length = _SEEN.unpack_from(data, len(data) - _SEEN.size)
        if (
            batch.producer_epoch == _EPOCH.unpack_from(data)[0]
            and batch.base_sequence == (sequence + length) % SEQUENCES
        ):
            kept = data[max(_EPOCH.size, len(data) - (WINDOW - 1) * _SEEN.size) :]
            return data[: _EPOCH.size] + kept + _SEEN.pack(batch.base_sequence, base, batch.count)
    verdict = judge(None if data is None else unpack(data), batch, base)
    return pack(verdict.state) if isinstance(verdict, Fresh) else verdict


def is_first(data: bytes) -> bool:
    """Whether the packed state has one batch only."""
    return len(data) == _EPOCH.size + _SEEN.size
