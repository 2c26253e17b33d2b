"""Batches of remote clients: written once, whichever nodes have them, whenever these act."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.core import kv
from pxrs.core.kv import Change, KeyBatch, Writer, Written
from pxrs.errors import AlreadyExists, OutcomeUnknown, PxrsError, VersionMismatch
from pxrs.kv.store import Attempt, KeyValues
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing import VirtualClock
from pxrs.types import ABSENT, Version

Node = KeyValues
Answers = list[Written | PxrsError]


class Nodes:
    """Some nodes over one store, and what each still has of a client's batches."""

    def __init__(self, count: int = 2) -> None:
        self.clock = VirtualClock()
        self.coord = MemoryStores(clock=self.clock).coord
        self.nodes = [KeyValues(self.coord, self.clock) for _ in range(count)]

    def send(self, batch: KeyBatch, node: int = 0) -> Answers:
        (answers,) = self.nodes[node]._do_all([batch])
        if isinstance(answers, BaseException):
            raise answers
        return answers

    def freeze(
        self, batch: KeyBatch, node: int = 0, *, after_reading: bool = True
    ) -> Callable[[], Answers]:
        """Freezes the node when it got the batch, or has read what it needs; the call wakes it."""
        if not after_reading:
            return lambda: self.send(batch, node)
        frozen = self.nodes[node]
        attempt = frozen._attempt([batch], {})

        def wake() -> Answers:
            # As the node's own loop does.
            tried: Attempt = attempt
            while not frozen._apply(tried, {}, []):
                tried = frozen._attempt([batch], {})
            return tried.answers[0]

        return wake

    @property
    def values(self) -> dict[bytes, tuple[bytes, Version]]:
        return {it.key: (it.value, it.version) for it in self.nodes[0].scan()}


def put(number: int, *changes: Change, again: bool = False) -> KeyBatch:
    return KeyBatch(changes, Writer("client.0", number, again))


def test_a_batch_that_waits_beside_itself_is_written_once() -> None:
    """A node is slow, so its client sends the batch again; both are in one commit."""
    nodes = Nodes(1)
    (node,) = nodes.nodes
    created = Change(b"created", b"1", ABSENT)
    blind = Change(b"blind", b"1")
    first, again = node._do_all([put(1, created, blind), put(1, created, blind, again=True)])
    assert first == again == [Written(Version(1, 1)), Written(Version(1, 1))]
    assert nodes.values == {b"blind": (b"1", Version(1, 1)), b"created": (b"1", Version(1, 1))}
    # So does the next one of the writer, of which the earlier copies may come later.
    second = put(2, Change(b"created", b"2"))
    behind, after = node._do_all([second, put(1, created, blind, again=True)])
    assert behind == [Written(Version(1, 2))]
    assert isinstance(after, list)
    assert all(isinstance(answer, OutcomeUnknown) for answer in after)
    assert nodes.send(put(2, Change(b"created", b"2"), again=True)) == behind


def test_a_batch_that_is_sent_again_is_answered_as_before() -> None:
    nodes = Nodes()
    nodes.nodes[0].put("there", "x")
    changes = (
        Change(b"a", b"1"),
        Change(b"there", b"y", ABSENT),
        Change(b"there", b"y", Version(9, 9)),
        Change(b"missing", None),
        Change(b"a", None),
    )
    first = nodes.send(put(1, *changes))
    nodes.nodes[0].put("a", "other")
    before = nodes.values
    for node in (0, 1):
        again = nodes.send(put(1, *changes, again=True), node)
        assert again[0] == first[0]
        assert isinstance(again[1], AlreadyExists)
        assert isinstance(again[2], VersionMismatch)
        assert str(again[2]) == str(first[2])
        assert again[3] == Written(ABSENT, existed=False)
        assert again[4] == first[4]
    assert nodes.values == before


def test_a_frozen_node_that_wakes_writes_nothing_again() -> None:
    nodes = Nodes()
    wake = nodes.freeze(put(1, Change(b"a", b"1")))
    answers = nodes.send(put(1, Change(b"a", b"1"), again=True), 1)
    nodes.nodes[1].put("a", "2")
    before = nodes.values
    assert wake() == answers
    assert nodes.values == before


def test_a_frozen_node_is_too_late_when_the_client_has_gone_on() -> None:
    nodes = Nodes()
    wake = nodes.freeze(put(1, Change(b"a", b"1")))
    nodes.send(put(1, Change(b"a", b"1"), again=True), 1)
    nodes.send(put(2, Change(b"a", b"2")), 1)
    before = nodes.values
    assert isinstance(wake()[0], OutcomeUnknown)
    assert nodes.values == before


@pytest.mark.parametrize("after_reading", [True, False])
@pytest.mark.parametrize("change", [Change(b"a", b"1", ABSENT), Change(b"b", None)])
def test_what_was_refused_is_not_done_later(change: Change, after_reading: bool) -> None:
    """The client was told that there is such a key, or that there is none: so it stays."""
    nodes = Nodes()
    nodes.nodes[1].put("a", "x")
    wake = nodes.freeze(put(1, change), after_reading=after_reading)
    (refused,) = nodes.send(put(1, change, again=True), 1)
    assert isinstance(refused, AlreadyExists) or refused == Written(ABSENT, existed=False)
    nodes.nodes[1].delete("a")
    nodes.nodes[1].put("b", "x")
    before = nodes.values
    wake()
    assert nodes.values == before


def test_several_clients_share_a_commit() -> None:
    nodes = Nodes()
    batches = [
        KeyBatch(
            [Change(b"%d-%d" % (client, key), b"x") for key in range(3)], Writer(f"c{client}", 1)
        )
        for client in range(4)
    ]
    answers = nodes.nodes[0]._do_all(batches)
    assert all(len(each) == 3 for each in answers if isinstance(each, list))
    assert len(nodes.values) == 12
    assert len(nodes.coord.list(kv.WRITERS)) == 4


def test_writers_that_wrote_nothing_for_long_are_removed() -> None:
    nodes = Nodes()
    nodes.send(put(1, Change(b"a", b"1")))
    for minute in range(80):
        nodes.clock.advance(60)
        nodes.nodes[0].put("tick", f"{minute}")
    assert nodes.coord.list(kv.WRITERS) == []


_changes = st.builds(
    Change,
    key=st.sampled_from([b"a", b"b"]),
    value=st.none() | st.sampled_from([b"x", b"y"]),
    if_match=st.none() | st.just(ABSENT),
    ttl_ms=st.just(0),
    once=st.just(""),
    expired=st.just(False),
)
# For each batch: where it is frozen first, whether after reading, where it is sent then, and after
# which of them the frozen one wakes.
_steps = st.tuples(
    st.lists(_changes, min_size=1, max_size=3),
    st.none() | st.integers(0, 1),
    st.booleans(),
    st.integers(0, 1),
    st.integers(0, 3),
)


@given(st.lists(_steps, max_size=6))
def test_batches_happen_once_and_in_order(
    steps: list[tuple[list[Change], int | None, bool, int, int]],
) -> None:
    """The store ends as if each batch had been sent once, to one node."""
    nodes, twin = Nodes(), KeyValues(MemoryStores().coord, VirtualClock())
    asleep: list[tuple[int, Callable[[], Answers]]] = []
    for number, (changes, frozen, after_reading, node, sleeps) in enumerate(steps, 1):
        if frozen is not None:
            batch = put(number, *changes)
            wake = nodes.freeze(batch, frozen, after_reading=after_reading)
            asleep.append((number + sleeps, wake))
        answers = nodes.send(put(number, *changes, again=frozen is not None), node)
        (expected,) = twin._do_all([KeyBatch(changes)])
        assert isinstance(expected, list)
        assert [_told(it) for it in answers] == [_told(it) for it in expected]
        for due, wake in asleep:
            if due == number:
                wake()
    for _, wake in asleep:
        wake()
    left = {it.key: (it.value, it.version.index) for it in twin.scan()}
    assert {key: (value, it.index) for key, (value, it) in nodes.values.items()} == left


def _told(answer: Written | PxrsError) -> object:
    if isinstance(answer, Written):
        return answer.existed, answer.version.index
    return type(answer), str(answer)
