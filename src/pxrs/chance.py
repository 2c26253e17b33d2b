"""Random numbers that are independent of the program's own.

Processes that compete draw random pauses to get out of step. The `random` module of their program
may be seeded, with the same number in all of them, and belongs to the program. This generator has
no state: neither a seed nor a fork can make two of them equal.
"""

from __future__ import annotations

from random import SystemRandom

CHANCE = SystemRandom()
