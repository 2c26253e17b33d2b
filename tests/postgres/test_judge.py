"""The database judges producers as `pxrs.core.sequences` does, whatever retention has removed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pxrs.core.sequences import SEQUENCES, Duplicate, Fresh, ProducerState, judge
from pxrs.errors import ProducerFenced, PxrsError, SequenceGap
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.tools import batch
from pxrs.types import Append, Appended, LogPartition

pytestmark = pytest.mark.engine("postgres")

_numbers = iter(range(1_000_000))
_sends = st.tuples(
    st.integers(0, 2),  # epoch
    st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, SEQUENCES - 2, SEQUENCES - 1]),  # sequence
    st.integers(1, 3),  # messages
)
_steps = st.lists(st.one_of(_sends, st.integers(0, 12)), max_size=14)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps)
def test_same_verdicts(stores: PostgresStores, steps: list[tuple[int, int, int] | int]) -> None:
    where = LogPartition(f"t-{next(_numbers)}", 0)
    stores.log.create(where.topic_id, 1)
    state: ProducerState | None = None
    end = 0
    for step in steps:
        if isinstance(step, int):
            stores.log.trim(where, step)
            continue
        epoch, sequence, count = step
        sent = batch(*[b"x"] * count, producer=(7, epoch, sequence))
        verdict = judge(state, sent, end)
        outcome = stores.log.append([Append(where, sent)])[0]
        assert _kind(outcome) == _expected(verdict, end), step
        if isinstance(verdict, Fresh):
            state = verdict.state
            end += count


def _kind(outcome: Appended | PxrsError) -> object:
    return outcome if isinstance(outcome, Appended) else (type(outcome), str(outcome))


def _expected(verdict: Fresh | Duplicate | ProducerFenced | SequenceGap, end: int) -> object:
    if isinstance(verdict, Fresh):
        return Appended(end)
    if isinstance(verdict, Duplicate):
        return Appended(verdict.base, duplicate=True)
    return type(verdict), str(verdict)
