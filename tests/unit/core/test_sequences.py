"""`judge` against a twin that keeps everything and is too simple to be wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from pxrs.core.sequences import (
    SEQUENCES,
    WINDOW,
    Duplicate,
    Fresh,
    ProducerState,
    Seen,
    Verdict,
    is_first,
    judge,
    judge_packed,
    pack,
    unpack,
)
from pxrs.errors import ProducerFenced, SequenceGap
from pxrs.types import Batch


def batch(sequence: int, count: int = 1, epoch: int = 0) -> Batch:
    return Batch(
        data=bytearray(),
        count=count,
        max_timestamp=0,
        producer_id=7,
        producer_epoch=epoch,
        base_sequence=sequence,
    )


def fresh(verdict: Verdict) -> ProducerState:
    assert isinstance(verdict, Fresh), verdict
    return verdict.state


@dataclass
class Twin:
    """The whole history of one producer in one partition."""

    history: list[tuple[int, int, int, int]] = field(default_factory=list)
    end: int = 0

    def append(self, sequence: int, count: int, epoch: int) -> str:
        if self.history:
            newest = self.history[-1][0]
            if epoch < newest:
                return "fenced"
            mine = [entry for entry in self.history if entry[0] == epoch]
            for _, old, base, length in mine[-5:]:
                if (old, length) == (sequence, count):
                    return f"duplicate of {base}"
            follows = (mine[-1][1] + mine[-1][3]) % 2**31 if mine else 0
            if sequence != follows:
                return "gap"
        self.history.append((epoch, sequence, self.end, count))
        self.end += count
        return "fresh"


def described(verdict: Verdict) -> str:
    match verdict:
        case Fresh():
            return "fresh"
        case Duplicate(base):
            return f"duplicate of {base}"
        case ProducerFenced():
            return "fenced"
        case SequenceGap():
            return "gap"


steps = st.lists(
    st.tuples(
        st.integers(-7, 2),
        st.integers(1, 3),
        st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1]),
        st.booleans(),
    ),
    max_size=40,
)


@given(steps=steps, start=st.sampled_from([0, 1, 2**31 - 5, 2**31 - 1]))
def test_judges_as_a_log_that_remembers_everything(
    steps: list[tuple[int, int, int, bool]], start: int
) -> None:
    twin = Twin()
    state: ProducerState | None = None
    epoch, sequence = 3, start
    for back, count, change, restart in steps:
        epoch += change
        if change and restart:
            sequence = 0
        elif back < 0 and state is not None and -back <= len(state.batches):
            sequence, _, count = state.batches[back]
        elif back > 0:
            sequence = (sequence + back) % SEQUENCES
        sent = batch(sequence, count, epoch)
        verdict = judge(state, sent, twin.end)
        packed = judge_packed(None if state is None else pack(state), sent, twin.end)
        if isinstance(packed, bytes):
            assert Fresh(unpack(packed)) == verdict
            assert is_first(packed) == (len(unpack(packed).batches) == 1)
        else:
            assert described(packed) == described(verdict)
        assert described(verdict) == twin.append(sequence, count, epoch)
        if isinstance(verdict, Fresh):
            state = unpack(pack(verdict.state))
            assert state == verdict.state
            assert len(state.batches) <= WINDOW
            sequence = (sequence + count) % SEQUENCES


def test_an_unknown_producer_starts_anywhere() -> None:
    assert fresh(judge(None, batch(41, epoch=9), base=100)) == ProducerState(9, (Seen(41, 100, 1),))


def test_only_the_last_five_batches_are_recognised() -> None:
    state = None
    for sequence in range(6):
        state = fresh(judge(state, batch(sequence), base=10 + sequence))
    assert isinstance(judge(state, batch(0), base=16), SequenceGap)
    assert judge(state, batch(1), base=16) == Duplicate(11)


def test_a_repeat_with_another_length_is_no_duplicate() -> None:
    state = fresh(judge(None, batch(0, count=2), base=0))
    assert isinstance(judge(state, batch(0, count=3), base=2), SequenceGap)


def test_a_higher_epoch_starts_at_zero_and_forgets_the_old_batches() -> None:
    state = fresh(judge(None, batch(0, epoch=1), base=0))
    assert isinstance(judge(state, batch(1, epoch=2), base=1), SequenceGap)
    raised = fresh(judge(state, batch(0, epoch=2), base=1))
    assert raised.batches == (Seen(0, 1, 1),)
    assert isinstance(judge(raised, batch(1, epoch=1), base=2), ProducerFenced)


def test_sequences_wrap() -> None:
    state = fresh(judge(None, batch(SEQUENCES - 2, count=3), base=0))
    state = fresh(judge(state, batch(1), base=3))
    assert judge(state, batch(SEQUENCES - 2, count=3), base=4) == Duplicate(0)


@given(
    st.integers(-(2**15), 2**15 - 1),
    st.lists(
        st.builds(
            Seen,
            st.integers(0, SEQUENCES - 1),
            st.integers(0, 2**63 - 1),
            st.integers(1, 2**31 - 1),
        ),
        max_size=WINDOW,
    ),
)
def test_packing_keeps_everything(epoch: int, batches: list[Seen]) -> None:
    state = ProducerState(epoch, tuple(batches))
    data = pack(state)
    assert len(data) <= 82
    assert unpack(data) == state
