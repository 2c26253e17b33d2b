"""Break producers in one place: the simulator has to notice, and to say what broke."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from simulator.producers import draw, run

from pxrs.producing.committer import Committer
from pxrs.producing.handles import PendingBatch
from pxrs.testing.faults import Interrupted, Rates
from pxrs.types import Appended, Batch
from simulator import Broken
from support.mutants import SEEDS, Mutant, Patch

pytestmark = pytest.mark.thorough

Sealed = list[tuple[PendingBatch, Batch]]


def first_error_is_told_to_all(patch: Patch) -> None:
    """One partition's error is the whole round's."""
    attempt = Committer._attempt

    def together(self: Committer, sealed: Sealed) -> Any:
        results = attempt(self, sealed)
        errors = [result for result in results if not isinstance(result, Appended)]
        return [errors[0]] * len(results) if errors else results

    patch.setattr(Committer, "_attempt", together)


def no_answer_is_failure(patch: Patch) -> None:
    """What got no answer counts as not appended once a later try is refused."""
    attempt = Committer._attempt

    def forgetful(self: Committer, sealed: Sealed) -> Any:
        results = attempt(self, sealed)
        for pending, _ in sealed:
            pending.unsure = False
        return results

    patch.setattr(Committer, "_attempt", forgetful)


def interrupted_is_failure(patch: Patch) -> None:
    """A doubt is noted only where the log said that it does not know."""
    attempt = Committer._attempt

    def forgetful(self: Committer, sealed: Sealed) -> Any:
        doubts = [pending.unsure for pending, _ in sealed]
        try:
            return attempt(self, sealed)
        except Interrupted:
            for (pending, _), doubt in zip(sealed, doubts, strict=True):
                pending.unsure = doubt
            raise

    patch.setattr(Committer, "_attempt", forgetful)


def successors_keep_their_numbers(patch: Patch) -> None:
    """Behind a batch that was given up the others look like successors of what never came."""
    patch.setattr(Committer, "_begin_anew", lambda self, where: None)


def given_up_may_still_come(patch: Patch) -> None:
    """What follows one that was given up comes from somebody else, and does not fence it."""
    patch.setattr(Committer, "_raise_epoch", lambda self, where: self._new_identity())


FULL = Rates(full=0.2)
UNSURE = Rates(full=0.2, unknown_applied=0.2, unknown_late=0.2)
INTERRUPTED = Rates(full=0.2, interrupted=0.3)

MUTANTS = [
    Mutant(first_error_is_told_to_all, r"is in the log, and its sender|to others", {"rates": FULL}),
    Mutant(no_answer_is_failure, r"is in the log, and its sender", {"rates": UNSURE}),
    Mutant(interrupted_is_failure, r"is in the log, and its sender", {"rates": INTERRUPTED}),
    Mutant(successors_keep_their_numbers, r"told SequenceGap|not settled|can't send"),
    Mutant(given_up_may_still_come, r"before what was sent", {"rates": UNSURE}),
]


@pytest.mark.engine("memory")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(Broken, match=mutant.words):
        for seed in range(SEEDS):
            run(msgspec.structs.replace(draw(seed), **mutant.plan))
