"""What a process lets the store forget of its units, and what it does not."""

from __future__ import annotations

import pytest

from pxrs import OutcomeUnknown, Pxrs, TransactionConflict
from pxrs.errors import Fenced
from pxrs.types import QueueChange


def test_a_unit_that_will_never_be_done_stays_refused(
    px: Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many came after it: it may be on its way, and find nobody who remembers it."""
    queues, changes = px.stores.queues, list[QueueChange]()
    apply = queues.apply

    def slow(change: QueueChange) -> list[int | None]:
        changes.append(change)
        if len(changes) == 1:
            raise OutcomeUnknown("it is on its way")
        return apply(change)

    monkeypatch.setattr(queues, "apply", slow)
    with pytest.raises(TransactionConflict), px.transaction() as tx:
        tx.put("q", "late")
    for number in range(200):
        with px.transaction() as tx:
            tx.put("q", f"{number}")
    assert any(change.forget for change in changes)
    with pytest.raises(Fenced):
        apply(changes[0])
    assert px.queues.describe("q").depth == 200
