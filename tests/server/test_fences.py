"""Commits by fence: how many reads a request may cause, and how often it is tried again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from pxrs.clock import SYSTEM_CLOCK
from pxrs.core.records import Claim, claim_key, decode, encode
from pxrs.errors import TransactionConflict
from pxrs.server.groups import fences
from pxrs.server.groups.fences import Fence
from pxrs.stores.api import CoordStore
from pxrs.stores.open import open_stores
from pxrs.types import Check, Committed, Conflict, Put, Versioned, Write

PARTITIONS = 300


class Counted:
    """A `CoordStore` that counts reads, and whose user is overtaken before each commit."""

    def __init__(self, coord: CoordStore, overtaken: Sequence[str] = (), times: int = 0) -> None:
        self._coord = coord
        self._overtaken = overtaken
        self._times = times
        self.limits = coord.limits
        self.reads = 0

    def get(self, key: str) -> Versioned | None:
        self.reads += 1
        return self._coord.get(key)

    def list(self, prefix: str) -> list[Versioned]:
        self.reads += 1
        return self._coord.list(prefix)

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        if self._times:
            self._times -= 1
            for key in self._overtaken:
                record = self._coord.get(key)
                assert record is not None
                self._coord.commit([], [Put(key, record.value)])
        return self._coord.commit(checks, writes)


@pytest.fixture
def coord() -> Any:
    with closing(open_stores("memory://")) as stores:
        for number in range(PARTITIONS):
            claim = Claim(owner="me", name="m", topic="t", epoch=1, checkpoint=0)
            stores.coord.commit([], [Put(claim_key("g", "t-1", number), encode(claim))])
        yield stores.coord


def fence(number: int, owner: str = "me") -> Fence:
    return Fence("g", "t", "t-1", number, owner, 1)


def commit(coord: Any, offsets: dict[Fence, int]) -> dict[Fence, int | None]:
    return fences.commit(coord, SYSTEM_CLOCK, offsets, lambda _: None)


def test_many_fences_are_read_at_once(coord: CoordStore) -> None:
    """Also those that were made up."""
    counted = Counted(coord)
    offsets = {fence(number): number for number in range(PARTITIONS)}
    made_up = {Fence("g", "t", f"t-{n}", 0, "me", 1): 1 for n in range(2, 3000)}
    done = commit(counted, offsets | made_up | {fence(0, "other"): 7})
    assert counted.reads == 1
    assert {each: done[each] for each in offsets} == offsets
    assert not any(done[each] for each in [*made_up, fence(0, "other")])
    record = coord.get(claim_key("g", "t-1", PARTITIONS - 1))
    assert record is not None
    assert decode(record, Claim).checkpoint == PARTITIONS - 1


def test_only_what_has_changed_is_tried_with_a_new_version(coord: CoordStore) -> None:
    counted = Counted(coord, overtaken=[claim_key("g", "t-1", 1)], times=3)
    offsets = {fence(number): 5 for number in range(PARTITIONS)}
    assert commit(counted, offsets) == offsets
    assert counted.reads == 1


def test_a_claim_that_always_changes_is_given_up(coord: CoordStore) -> None:
    counted = Counted(coord, overtaken=[claim_key("g", "t-1", 1)], times=10_000)
    with pytest.raises(TransactionConflict, match="commit them again"):
        commit(counted, {fence(1): 5})
