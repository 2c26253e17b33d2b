"""Large records of a group are written with names once and partitions as ranges."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.core import records
from pxrs.core.packing import numbers_in, ranges_of
from pxrs.core.records import GroupTopic, Head, Move, PackedHead, PackedMove, decode, encode
from pxrs.errors import SchemaMismatch
from pxrs.types import Versioned

MEMBERS, TOPICS = ("a", "b", "c"), ("orders", "payments", "t")
PARTS = st.sets(st.integers(0, 30), min_size=1).map(lambda found: tuple(sorted(found)))
HEADS = st.builds(
    Head,
    generation=st.integers(0, 9),
    reason=st.text(),
    target=st.fixed_dictionaries(
        {name: st.dictionaries(st.sampled_from(TOPICS), PARTS) for name in MEMBERS}
    ),
    topics=st.just({name: GroupTopic(name, 31) for name in TOPICS}),
    subscriptions=st.fixed_dictionaries(
        {
            name: st.sets(st.sampled_from((*TOPICS, "missing"))).map(
                lambda found: tuple(sorted(found))
            )
            for name in MEMBERS
        }
    ),
    static=st.dictionaries(st.sampled_from(MEMBERS), st.floats(0, 9)),
    left=st.lists(st.sampled_from(MEMBERS)).map(tuple),
)
OWNERS = st.sampled_from([*MEMBERS, "gone", None])
MOVES = st.dictionaries(
    st.tuples(st.sampled_from(TOPICS), st.integers(0, 30)), st.tuples(OWNERS, OWNERS)
).map(lambda found: tuple((*part, *hands) for part, hands in sorted(found.items())))


@given(st.sets(st.integers(0, 200)))
def test_ranges(numbers: set[int]) -> None:
    assert numbers_in(ranges_of(numbers)) == tuple(sorted(numbers))


def test_how_they_look() -> None:
    assert ranges_of([7, 0, 2, 1]) == "0-2,7"
    assert ranges_of([]) == ""


@given(HEADS)
def test_a_head_comes_back(head: Head) -> None:
    packed = msgspec.json.encode(PackedHead.pack(head))
    assert decode(Versioned("group/g", packed, 1), Head) == head


@given(MOVES)
def test_a_move_comes_back(moves: tuple[tuple[str, int, str | None, str | None], ...]) -> None:
    move = Move(generation=3, reason="r", coordinator="a", at_ms=5, members=MEMBERS, moves=moves)
    packed = msgspec.json.encode(PackedMove.pack(move))
    assert decode(Versioned("history/g/3", packed, 1), Move) == move


def test_small_groups_are_written_as_they_always_were() -> None:
    """Members of an older version can read them."""
    head = Head(target={"a": {"t": (0, 1)}}, topics={"t": GroupTopic("id", 2)})
    written = json.loads(encode(head))
    assert (written["schema"], written["target"]) == (1, {"a": {"t": [0, 1]}})


def test_large_ones_can_be_read_by_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_LARGE", 0)
    head = Head(
        target={"a": {"t": (0, 1, 3)}, "b": {"t": (2,)}},
        topics={"t": GroupTopic("id", 4)},
        subscriptions={"a": ("t",), "b": ("t",)},
    )
    written = json.loads(encode(head))
    assert written["schema"] == 2
    assert written["members"] == ["a", "b"]
    assert written["target"] == {"0": {"0": "0-1,3", "1": "2"}}
    assert written["subscriptions"] == [["0", "0-1"]]


@pytest.mark.parametrize(
    "wrong",
    [{"schema": 2}, {"target": {"0": {"7": "0"}}}, {"target": {"0": {"0": "x"}}}, {"schema": 3}],
)
def test_one_that_makes_no_sense_is_told(wrong: dict[str, object]) -> None:
    sound = json.loads(
        msgspec.json.encode(PackedHead.pack(Head(topics={"t": GroupTopic("id", 4)})))
    )
    value = wrong if wrong == {"schema": 2} else sound | {"members": ["a"]} | wrong
    with pytest.raises(SchemaMismatch):
        decode(Versioned("group/g", json.dumps(value).encode(), 1), Head)
