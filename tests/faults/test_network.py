"""What the network between a client and its engine can do to commits, sessions and watches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pxrs.errors import OutcomeUnknown, StoreUnavailable
from pxrs.stores.api import CoordStore
from pxrs.testing import VirtualClock
from pxrs.types import Check, Committed, Conflict, Delete, Put
from support.site import Site, open_coord

PATIENCE = 30.0


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._answer: list[Any] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        if self._error:
            raise self._error[0]
        assert self._answer, "the call did not end"
        return self._answer[0]

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._answer.append(call())
        except BaseException as error:  # noqa: BLE001 - raised in `result`
            self._error.append(error)


def await_value(coord: CoordStore, key: str, value: bytes | None) -> None:
    """Block until the record holds the value."""
    watch = coord.watch(key)
    try:
        while True:
            record = coord.get(key)
            if (None if record is None else record.value) == value:
                return
            assert watch.wait(PATIENCE), f"{key} did not become {value!r}"
    finally:
        watch.close()


def test_a_commit_whose_answer_was_lost_is_known_to_have_happened(site: Site) -> None:
    near, far = site.near(), site.far()
    far.commit([], [Put("k", b"0")])
    for number in range(3):
        # So that it knows how to write it in one request.
        far.get("k")
        site.proxy.hold_answers()
        value = b"answer %d" % number
        commit = Later(partial(far.commit, [], [Put("k", value)]))
        await_value(near, "k", value)
        site.proxy.reset()
        site.proxy.heal()
        outcome = commit.result()
        record = near.get("k")
        assert record is not None
        assert outcome == Committed({"k": record.version})


def test_a_commit_that_was_lost_on_the_way_happens_once(site: Site) -> None:
    near, far = site.near(), site.far()
    far.commit([], [Put("k", b"0")])
    for number in range(3):
        seen = near.get("k")
        assert seen is not None
        site.proxy.cut()
        write = Put("k", seen.value + b"+")
        commit = Later(partial(far.commit, [Check("k", seen.version)], [write]))
        site.proxy.await_request()
        site.proxy.reset()
        site.proxy.heal()
        outcome = commit.result()
        record = near.get("k")
        assert record is not None
        assert record.value == b"0" + b"+" * (number + 1)
        assert outcome == Committed({"k": record.version})


def test_a_conflict_is_final_though_a_copy_of_the_commit_was_on_its_way(site: Site) -> None:
    """Absence may come again: a copy that arrives late must not find it."""
    near, far = site.near(), site.far()
    far.commit([], [Put("warm", b"")])
    site.proxy.cut()
    commit = Later(lambda: far.commit([Check("k", 0)], [Put("k", b"far")]))
    site.proxy.await_request()
    near.commit([], [Put("k", b"near")])
    site.proxy.reset()
    site.proxy.heal()
    outcome = commit.result()
    assert isinstance(outcome, Conflict)
    near.commit([], [Delete("k")])
    far.commit([], [Put("after", b"")])
    assert near.get("k") is None


def test_what_no_node_answers_is_an_error_that_says_so(site: Site) -> None:
    site.proxy.heal()
    far = open_impatient(site)
    far.commit([], [Put("k", b"0")])
    site.proxy.cut()
    with pytest.raises(StoreUnavailable):
        far.get("k")
    with pytest.raises((StoreUnavailable, OutcomeUnknown)):
        far.commit([], [Put("k", b"1")])
    site.proxy.reset()
    site.proxy.heal()
    far.close()


def open_impatient(site: Site) -> CoordStore:
    return open_coord(f"{site.proxied}?timeout=3")


def test_a_renewal_counts_from_when_it_was_sent(site: Site) -> None:
    clock = VirtualClock()
    session = site.far(clock).session(5.0)
    assert session.remaining() == 5.0
    clock.advance(1.0)
    site.proxy.hold_answers()
    renewal = Later(session.renew)
    site.proxy.await_request()
    clock.advance(1.5)
    site.proxy.heal()
    renewal.result()
    assert session.remaining() == pytest.approx(3.5)


def test_a_session_is_over_for_its_holder_before_it_is_for_others(site: Site) -> None:
    near, far = site.near(), site.far()
    session = far.session(4.0)
    far.commit([], [Put("mine", b"1", session.id)])
    session.renew()
    site.proxy.cut()
    await_value(near, "mine", None)
    assert session.remaining() == 0.0
    site.proxy.reset()
    site.proxy.heal()


def test_a_watch_hears_what_happened_while_it_was_cut_off(site: Site) -> None:
    near, far = site.near(), site.far()
    near.commit([], [Put("k/1", b"0")])
    watch = far.watch("k/")
    for number in range(3):
        while watch.wait(0):
            pass
        site.proxy.cut()
        near.commit([], [Put("k/1", b"%d" % number)])
        site.proxy.reset()
        site.proxy.heal()
        assert watch.wait(PATIENCE)
    watch.close()


def test_a_store_that_is_closed_under_a_commit_does_not_say_that_it_did_not_happen(
    site: Site,
) -> None:
    near, far = site.near(), open_coord(site.proxied)
    far.commit([], [Put("k", b"0")])
    site.proxy.hold_answers()
    commit = Later(lambda: far.commit([], [Put("k", b"1")]))
    await_value(near, "k", b"1")
    close = Later(far.close)
    with pytest.raises(OutcomeUnknown):
        commit.result()
    site.proxy.heal()
    close.result()
