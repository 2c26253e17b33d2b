"""Whether a recorded history of one register can have happened one operation at a time.

Wing and Gong's search, with Lowe's memory of what was tried: operations are put into an order that
respects real time (one that had returned before another began comes first) and in which every
answer is the right one. An operation whose answer never came may stand anywhere after its
beginning, or nowhere.

The search is exact. Three arguments keep it short:

- An operation that changes nothing, and fits, comes next: whatever order there is with it later, it
  is as good there.
- An operation whose answer never came is worth its place only if the next one depends on what it
  did. Else the order is as good without it.
- A value that one operation alone has written is not left behind while others still have to see it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

GONE = None


class Op(NamedTuple):
    """One operation on one key: what it did, and between which moments.

    `kind`: "read" saw `value`; "write" made it `value` (None deletes); "cas" made it `value` if it
    was `expected`, and `done` says whether it was; "delete" removed it, and `done` says whether
    there was something. `done` None: no answer came. `returned` is infinite then. Written values
    are unique. `rank` is where it stands among the changes of its key, if that is known: the
    search begins with that order, and does not rely on it.
    """

    key: Hashable
    kind: str
    value: Hashable
    called: float
    returned: float
    expected: Hashable = GONE
    done: bool | None = True
    rank: float = math.inf

    def step(self, state: Hashable) -> tuple[bool, Hashable]:
        """Whether it can follow on this state, and the state after it."""
        if self.kind == "read":
            return state == self.value, state
        if self.kind == "write":
            return True, self.value
        if self.kind == "delete":
            return self.done is None or self.done is (state is not GONE), GONE
        if self.done is False:
            return state != self.expected, state
        return state == self.expected, self.value

    @property
    def is_change(self) -> bool:
        """Whether the state after it can be another one."""
        return self.kind == "write" or (self.kind != "read" and self.done is not False)

    @property
    def is_blind(self) -> bool:
        """Whether it fits any state, and leaves the same one."""
        return self.kind == "write" or (self.kind == "delete" and self.done is None)

    @property
    def needs(self) -> Hashable:
        """The only state that it fits; GONE if there is none such, or it is that."""
        if self.kind == "read":
            return self.value
        return self.expected if self.kind == "cas" and self.done else GONE


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
    return _Search(ops).succeeds()


class _Place(NamedTuple):
    """How far a search is. `done` is a set of operations, as bits. `after_lost`: the last one's
    answer never came."""

    done: int
    state: Hashable
    after_lost: bool


class _Search:
    def __init__(self, ops: list[Op]) -> None:
        self._ops = sorted(ops, key=lambda op: op.called)
        self._certain = 0
        # By value: the operations that have to see it, which only one other has written.
        self._seen_by: dict[Hashable, int] = defaultdict(int)
        writers = Counter(op.value for op in ops if op.is_change and op.kind != "delete")
        for index, op in enumerate(self._ops):
            if op.returned == math.inf:
                continue
            self._certain |= 1 << index
            if op.needs is not GONE and writers[op.needs] == 1:
                self._seen_by[op.needs] |= 1 << index

    def succeeds(self) -> bool:
        tried: set[_Place] = set()
        stack = [_Place(0, GONE, False)]
        while stack:
            place, changes = self._run_on(stack.pop())
            if place.done & self._certain == self._certain:
                return True
            if place in tried:
                continue
            tried.add(place)
            waiting = self._seen_by.get(place.state, 0) & ~place.done
            if waiting:
                # Whoever changes the value has to be the last of those that see it.
                changes = [index for index in changes if waiting == 1 << index]
            stack.extend(self._following(place, changes))
        return False

    def _run_on(self, place: _Place) -> tuple[_Place, list[int]]:
        """Goes on by all that fits and changes nothing; and the changes that may come next."""
        done, state, after_lost = place
        while True:
            fits = 0
            changes = []
            for index in self._candidates(done):
                op = self._ops[index]
                if op.is_change:
                    changes.append(index)
                elif op.step(state)[0]:
                    fits |= 1 << index
            if not fits:
                return _Place(done, state, after_lost), changes
            done |= fits
            after_lost = False

    def _candidates(self, done: int) -> list[int]:
        """Those before which no other one, that is still left, has returned."""
        # The lowest bit that is not set: all before it are done.
        index = (~done & (done + 1)).bit_length() - 1
        earliest = math.inf
        left = []
        while index < len(self._ops) and self._ops[index].called <= earliest:
            if not done >> index & 1:
                left.append(index)
                earliest = min(earliest, self._ops[index].returned)
            index += 1
        return [index for index in left if self._ops[index].called <= earliest]

    def _following(self, place: _Place, changes: list[int]) -> list[_Place]:
        """The places after each of the changes that fits, the likeliest last."""
        found = []
        for index in sorted(changes, key=lambda index: self._ops[index].rank, reverse=True):
            op = self._ops[index]
            fits, state = op.step(place.state)
            if fits and not (place.after_lost and op.is_blind):
                lost = op.returned == math.inf
                found.append(_Place(place.done | 1 << index, state, lost))
        return found
