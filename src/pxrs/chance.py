"""Chance that is nobody else's.

Rivals draw pauses to come apart. The `random` of the program they are in may be seeded, with the
same number in all of them, and is the program's to draw from. This one has no state: not for a
seed, not for a fork.
"""

from __future__ import annotations

from random import SystemRandom

CHANCE = SystemRandom()
