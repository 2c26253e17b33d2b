"""Break the reading of tables in one place: the simulator has to notice."""

from __future__ import annotations

import pytest

from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.core.progress import Progress
from pxrs.core.settling import Settling
from pxrs.sources.virtual import VirtualLog
from support.mutants import Mutant, Patch, catch

pytestmark = pytest.mark.thorough

SOURCES = {"sources": True}


def reads_to_the_highest_id(patch: Patch) -> None:
    def look(
        self: Settling, top: int, running: frozenset[str], now: float, settle: float = 0.0
    ) -> int:
        self.final = max(self.final, top)
        return self.final

    patch.setattr(Settling, "look", look)


def forgets_the_gap(patch: Patch) -> None:
    """Only those are waited for who still write when it looks again."""
    look = Settling.look

    def forgetful(
        self: Settling, top: int, running: frozenset[str], now: float, settle: float = 0.0
    ) -> int:
        waited_for = {name for wait in self._waits for name in wait.running or ()}
        return look(self, top, running - waited_for, now, settle)

    patch.setattr(Settling, "look", forgetful)


def takes_what_comes_next_for_final(patch: Patch) -> None:
    patch.setattr("pxrs.sources.table.following", lambda last, ids: max([last, *ids]))


def gaps_are_never_done(patch: Patch) -> None:
    patch.setattr(Progress, "found", lambda self, start, offsets, end: None)


def gaps_are_done_with_their_messages(patch: Patch) -> None:
    patch.setattr(Progress, "found", lambda self, start, offsets, end: self._finish(start, end))


def a_chunk_that_was_cut_ends_where_it_did(patch: Patch) -> None:
    """The rows that did not fit are passed over."""
    fetch = VirtualLog.fetch

    def cut(self: VirtualLog, *arguments: object) -> object:
        fetched = fetch(self, *arguments)  # type: ignore[arg-type]
        return fetched._replace(
            batches=[each._replace(rows=each.rows[:1]) for each in fetched.batches]  # type: ignore[call-arg, attr-defined]
        )

    patch.setattr(VirtualLog, "fetch", cut)


def empty_partitions_count_what_is_in_hand(patch: Patch) -> None:
    patch.setattr(OwnedPartition, "gap", OwnedPartition.moved)


MUTANTS = [
    Mutant(
        empty_partitions_count_what_is_in_hand,
        r"and has the effects|was not handled",
        {**SOURCES, "transactions": True},
    ),
    Mutant(reads_to_the_highest_id, r"was not handled|handed out before", SOURCES),
    Mutant(forgets_the_gap, r"was not handled|handed out before", SOURCES),
    Mutant(takes_what_comes_next_for_final, r"was not handled|handed out before", SOURCES),
    Mutant(gaps_are_never_done, r"no rest", SOURCES),
    Mutant(gaps_are_done_with_their_messages, r"was not handled", SOURCES),
    Mutant(a_chunk_that_was_cut_ends_where_it_did, r"was not handled|handed out before", SOURCES),
]


@pytest.mark.engine("memory")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(mutant, monkeypatch)
