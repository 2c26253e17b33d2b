"""Judges the ledger by what the producer was told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter

import msgspec

from pxrs.cli.demo.script import KEYS, Entry


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the ledger, and what is wrong with it."""

    entries: int
    lost: int
    repeated: int
    unknown: int
    out_of_order: int


def check(entries: Iterable[Entry], acknowledged: int, *, once: bool) -> Findings:
    """Every number below `acknowledged` must be there, and in order for its key.

    The order is that of the effects: a partition's epochs follow each other, and under an epoch
    its owner counts. A key's numbers are `KEYS` apart, so the next one is known. Where a message
    may be handled again (not `once`) going back is allowed, leaving one out is not.
    """
    found = list(entries)
    numbers = {entry.number for entry in found}
    by_key: defaultdict[int, list[Entry]] = defaultdict(list)
    for entry in sorted(found, key=attrgetter("epoch", "turn")):
        by_key[entry.number % KEYS].append(entry)
    return Findings(
        entries=len(found),
        lost=acknowledged - sum(0 <= number < acknowledged for number in numbers),
        repeated=len(found) - len(numbers),
        unknown=sum(not 0 <= number < acknowledged for number in numbers),
        out_of_order=sum(
            _out_of_order([entry.number for entry in key], first, once=once)
            for first, key in by_key.items()
        ),
    )


def _out_of_order(numbers: list[int], first: int, *, once: bool) -> int:
    due, wrong = first, 0
    for number in numbers:
        if number > due or (number < due and once):
            wrong += 1
        due = max(due, number + KEYS)
    return wrong
