"""What a commit did, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pxrs.core.records import Claim, Head, claims_prefix, decode, head_key, members_prefix
from pxrs.types import Put, Versioned, Write
from simulator.plan import GROUP


def describe(before: Mapping[str, Versioned | None], writes: Sequence[Write]) -> Iterator[str]:
    """A line for each record of the group that was written."""
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
