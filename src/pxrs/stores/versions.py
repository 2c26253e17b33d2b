"""Versions of records that no crash of a server gives twice, for engines that count them in a row.

A crash or a fail-over may lose the last commits, and the counter with them. It would then give the
numbers of lost commits again, and an owner that was frozen would take its successor's record for
its own. So each step of the counter is of a length that is drawn by chance: the same number comes
again in one of a million such cases.
"""

from __future__ import annotations

import secrets

CHANCE_BITS = 20


def next_step() -> int:
    """How far a counter of versions goes with one commit."""
    return 1 + secrets.randbits(CHANCE_BITS)
