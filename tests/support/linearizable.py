"""Whether a recorded history of one register can have happened one operation at a time.

Wing and Gong's search, with Lowe's memory of what was tried: operations are put into an order that
respects real time (one that had returned before another began comes first) and in which every
answer is the right one. An operation whose answer never came may stand anywhere after its
beginning, or nowhere.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

GONE = None


class Op(NamedTuple):
    """One operation on one key: what it did, and between which moments.

    `kind`: "read" saw `value`; "write" made it `value` (None deletes); "cas" made it `value` if it
    was `expected`, and `done` says whether it was; `done` None: no answer came. `returned` is
    infinite then. Written values are unique.
    """

    key: Hashable
    kind: str
    value: Hashable
    called: float
    returned: float
    expected: Hashable = GONE
    done: bool | None = True

    def step(self, state: Hashable) -> tuple[bool, Hashable]:
        """Whether it can follow on this state, and the state after it."""
        if self.kind == "read":
            return state == self.value, state
        if self.kind == "write":
            return True, self.value
        if self.done is False:
            return state != self.expected, state
        return state == self.expected, self.value


def find_violation(history: Iterable[Op]) -> list[Op] | None:
    """A key's operations that no order explains; None if there is none."""
    by_key: dict[Hashable, list[Op]] = defaultdict(list)
    for op in history:
        by_key[op.key].append(op)
    for ops in by_key.values():
        if not is_linearizable(ops):
            return sorted(ops, key=lambda op: op.called)
    return None


def is_linearizable(ops: list[Op]) -> bool:
    """Whether these operations of one key can have happened one at a time."""
    ops = sorted(ops, key=lambda op: op.called)
    certain = sum(1 << i for i, op in enumerate(ops) if op.returned < math.inf)
    tried: set[tuple[int, Hashable]] = set()
    stack: list[tuple[int, Hashable]] = [(0, GONE)]
    while stack:
        done, state = stack.pop()
        if done & certain == certain:
            return True
        if (done, state) in tried:
            continue
        tried.add((done, state))
        # Only those may be next before which no other one, that is still left, has returned.
        earliest = math.inf
        for index, op in enumerate(ops):
            if done >> index & 1:
                continue
            if op.called > earliest:
                break
            earliest = min(earliest, op.returned)
        for index, op in enumerate(ops):
            if op.called > earliest:
                break
            if not done >> index & 1:
                fits, after = op.step(state)
                if fits:
                    stack.append((done | 1 << index, after))
    return False
