"""The store as nobody in the simulation sees it: every commit that was applied is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pxrs.core.records import Claim, Head, claims_prefix, decode, head_key, members_prefix
from pxrs.stores.api import Atomic, CoordStore, Stores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.forwarding import Forwarding
from pxrs.types import Check, Committed, Conflict, Put, Versioned, Write
from simulator.groups.judge import Landed
from simulator.groups.plan import GROUP

# Who has committed what on top of what; `Landed` if it was a transaction.
Heard = Callable[[str, Mapping[str, Versioned | None], Sequence[Write], Landed | None], None]


class ObservedStores(Forwarding, seam=Stores):
    """Memory stores as one member reaches them. Faults are injected above this."""

    def __init__(self, stores: MemoryStores, who: str, heard: Heard) -> None:
        super().__init__(stores)
        self._who = who
        self._heard = heard
        self.coord = ObservedCoord(stores.coord, who, heard)

    @contextmanager
    def atomic(self, connection: Any = None) -> Iterator[Atomic]:
        with self._inner.atomic(connection) as block:
            yield block
            writes, landed = block._writes, Landed(block._appends, block._change)
            before = {write.key: self._inner.coord.get(write.key) for write in writes}
        self._heard(self._who, before, writes, landed)

    def close(self) -> None:
        """The stores outlive their members."""


class ObservedCoord(Forwarding, seam=CoordStore):
    """A `CoordStore` that tells who has committed what on top of what."""

    def __init__(self, inner: CoordStore, who: str, heard: Heard) -> None:
        super().__init__(inner)
        self._who = who
        self._heard = heard

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        before = {write.key: self._inner.get(write.key) for write in writes}
        outcome: Committed | Conflict = self._inner.commit(checks, writes)
        if isinstance(outcome, Committed):
            self._heard(self._who, before, writes, None)
        return outcome

    def close(self) -> None:
        """The store outlives its members."""


def describe(before: Mapping[str, Versioned | None], writes: Sequence[Write]) -> Iterator[str]:
    """What a commit did, in words: a line for each record of the group that was written."""
    for write in writes:
        if not isinstance(write, Put):
            if write.key.startswith(members_prefix(GROUP)):
                yield f"→ deleted {write.key}"
            continue
        value = Versioned(write.key, write.value, 0)
        if write.key.startswith(claims_prefix(GROUP)):
            found = before[write.key]
            old = decode(found, Claim) if found is not None else Claim()
            place = write.key.removeprefix(claims_prefix(GROUP))
            yield f"→ {place}: {_line(old)} ⇒ {_line(decode(value, Claim))}"
        elif write.key == head_key(GROUP):
            head = decode(value, Head)
            found = before[write.key]
            old_head = decode(found, Head) if found is not None else Head()
            if head.generation != old_head.generation:
                target = " ".join(
                    f"{name}={','.join(f'{t}/{p}' for t, ps in parts.items() for p in ps)}"
                    for name, parts in head.target.items()
                )
                yield f"→ generation {head.generation} ({head.reason}): {target}"
        elif write.key.startswith(members_prefix(GROUP)):
            yield f"→ joined as {write.key}"


def _line(claim: Claim) -> str:
    done = f" done {list(claim.done)}" if claim.done else ""
    return f"{claim.owner or 'free'} epoch {claim.epoch} at {claim.checkpoint}{done}"
