"""Judges the health of a consumer, a run or a listener: a state and a sentence. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

HealthState = Literal[
    "joining",
    "assigned",
    "idle",
    "lagging",
    "running",
    "restarting",
    "stuck",
    "fenced",
    "failed",
    "lost the store",
    "closed",
]


class Health(msgspec.Struct, frozen=True):
    """A state and its details. `ok` is for readiness probes."""

    state: HealthState
    detail: str

    @property
    def ok(self) -> bool:
        return self.state in ("assigned", "idle", "lagging", "running")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a verdict. Times are seconds of the monotonic clock.

    `asked_at`: when the caller has last asked for messages; while it waits for them, now.
    `fatal`: the error that ended its membership; `fenced`: because another process has its place.
    `lease`: for how many seconds no other can take what it owns; None while it joins. `missing`:
    topics that it is subscribed to and that were deleted. `unreadable`: the error that keeps a
    partition from being read.
    """

    generation: int
    owned: int
    meant: int
    waiting: int
    in_hand_since: float | None
    asked_at: float
    store_lost_since: float | None
    fatal: str | None
    fenced: bool = False
    closed: bool = False
    lease: float | None = None
    missing: tuple[str, ...] = ()
    unreadable: str | None = None


def judge(facts: Facts, now: float, *, stuck_after: float, lag_limit: int) -> Health:
    """The worst state that applies."""
    if facts.fatal is not None:
        return Health("fenced" if facts.fenced else "failed", facts.fatal)
    if facts.closed:
        return Health("closed", "it has left the group")
    if facts.store_lost_since is not None:
        lost = now - facts.store_lost_since
        return Health("lost the store", f"no answer from the store for {lost:.1f} s")
    if facts.lease is not None and facts.lease <= 0:
        return Health("lost the store", "the session could not be renewed in time")
    if facts.generation == 0:
        return Health("joining", "the group has not given it partitions yet")
    if facts.owned < facts.meant:
        return Health("joining", f"{facts.owned} of {facts.meant} partitions are here")
    if facts.in_hand_since is not None and now - facts.in_hand_since > stuck_after:
        held = now - facts.in_hand_since
        return Health("stuck", f"the handler has been at the same messages for {held:.0f} s")
    if facts.owned and facts.in_hand_since is None and now - facts.asked_at > stuck_after:
        silent = now - facts.asked_at
        return Health("stuck", f"the program has not asked for messages for {silent:.0f} s")
    if facts.unreadable is not None:
        return Health("stuck", facts.unreadable)
    if facts.waiting > lag_limit:
        return Health("lagging", f"{facts.waiting} messages wait")
    if facts.waiting == 0:
        gone = f"; deleted: {', '.join(facts.missing)}" if facts.missing else ""
        return Health("idle", f"{facts.owned} partitions, nothing waits{gone}")
    return Health("assigned", f"{facts.owned} partitions, {facts.waiting} messages wait")
