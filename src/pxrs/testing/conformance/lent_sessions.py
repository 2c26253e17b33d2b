"""Sessions of `LendsSessions`: they outlive the handle that opened them, and another goes on."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from pxrs.errors import SessionLost
from pxrs.stores.api import CoordStore, LendsSessions, LentSession, Stores
from pxrs.testing.conformance.lab import Lab, Violation
from pxrs.testing.conformance.tools import (
    FACTORS,
    LONG,
    keys_of,
    must_wake,
    put,
    raises,
    require,
    same,
    together,
)


class Lender(CoordStore, LendsSessions, Protocol):
    """The store that is checked."""


def lender(stores: Stores) -> Lender:
    """The stores' coordination, which has to lend sessions."""
    coord: CoordStore = stores.coord
    require(isinstance(coord, LendsSessions), "the store lends no sessions")
    return coord  # type: ignore[return-value]


def lent(coord: Lender, key: str = "k") -> LentSession:
    """A lent session with a record."""
    session = coord.lend(LONG)
    put(coord, key, b"1", session.id)
    return session


def check_it_is_a_session(lab: Lab) -> None:
    """Any handle writes with it; when it is closed its records are gone, for every reader."""
    here, there = lender(lab.open()), lender(lab.open())
    session = lent(here, "k/1")
    put(there, "k/2", b"1", session.id)
    require(0 < session.remaining() <= session.ttl, f"{session.remaining()} s remain of {LONG}")
    session.renew()
    same(keys_of(there, "k/"), ["k/1", "k/2"], "the records")
    session.close()
    for coord in (here, there):
        same(keys_of(coord, "k/"), [], "the records of the closed session")
        with raises(SessionLost):
            put(coord, "k/1", b"1", session.id)
        with raises(SessionLost):
            coord.adopt(session.id)
    with raises(SessionLost):
        session.renew()
    same(session.remaining(), 0.0, "the time that remains")


def check_it_outlives_its_handle(lab: Lab) -> None:
    """Closing the store that lent it does not end it: another handle goes on, and ends it."""
    stores, there = lab.open(), lender(lab.open())
    session = lent(lender(stores))
    stores.close()
    same(keys_of(there, "k"), ["k"], "the records after its handle was closed")
    adopted = there.adopt(session.id)
    same((adopted.id, adopted.ttl), (session.id, session.ttl), "the adopted session")
    adopted.renew()
    same(keys_of(there, "k"), ["k"], "the records after it was adopted")
    adopted.close()
    same(keys_of(there, "k"), [], "the records of the closed session")


def check_it_ends_by_its_time(lab: Lab) -> None:
    """Past its TTL all its records are gone, and no handle can go on with it."""
    here, there = lender(lab.open()), lender(lab.open())
    session = here.lend(lab.ttl)
    lab.let_expire(session)
    same(here.list(""), [], "the records")
    for coord in (there, here):
        with raises(SessionLost):
            coord.adopt(session.id)
        with raises(SessionLost):
            put(coord, "k", b"1", session.id)
    with raises(SessionLost):
        session.renew()
    same(there.list(""), [], "the records of the ended session")


def check_adopting_extends(lab: Lab) -> None:
    """One that is adopted by turns outlives its first TTL, and its records with it."""
    if not any(outlives_its_first_ttl(lab, factor) for factor in FACTORS):
        raise Violation("no session could be kept alive")


def outlives_its_first_ttl(lab: Lab, factor: int) -> bool:
    """False if it was not adopted in time, which proves nothing."""
    here, there = lender(lab.open()), lender(lab.open())
    session = here.lend(factor * lab.ttl)
    put(here, "k", b"1", session.id)
    for number in range(factor + 1):
        lab.let_expire(here.session(lab.ttl))
        left = session.remaining()
        try:
            session = (there, here)[number % 2].adopt(session.id)
        except SessionLost:
            require(left <= lab.ttl, f"it was lost with {left} s left")
            return False
    if session.remaining() == 0:
        return False
    same(keys_of(there, "k"), ["k"], "the records of the adopted session")
    lab.let_expire(session)
    same(keys_of(there, "k"), [], "the records after the last TTL")
    return True


def check_abandoning_ends_it(lab: Lab) -> None:
    """Abandoned by the handle that has it, it ends at once, and wakes watches."""
    here, there = lender(lab.open()), lender(lab.open())
    session = there.adopt(lent(here).id)
    watch = here.watch("k")
    watch.wait(0)
    session.abandon()
    must_wake(lab, watch, "a session that was abandoned")
    watch.close()
    same(keys_of(here, "k"), [], "the records of the abandoned session")
    with raises(SessionLost):
        here.adopt(session.id)


def check_who_adopted_it_keeps_it(lab: Lab) -> None:
    """A former handle neither ends it by abandoning nor harms it by renewing late."""
    here, there = lender(lab.open()), lender(lab.open())
    first = lent(here)
    late = there.adopt(first.id)
    session = here.adopt(first.id)
    for former in (first, late):
        try:
            former.renew()
        except SessionLost:
            same(former.remaining(), 0.0, "what remains for a former handle")
        former.abandon()
        session.renew()
        same(keys_of(there, "k"), ["k"], "the records of the session that was adopted")
    session.abandon()
    same(keys_of(there, "k"), [], "the records of the abandoned session")


def check_adopting_races_with_abandoning(lab: Lab) -> None:
    """One of the two is first: it is adopted and lives, or it is over and adopting raises."""
    here, there = lender(lab.open()), lender(lab.open())
    for number in range(10):
        key = f"k/{number}"
        session = lent(here, key)
        adopted: list[LentSession] = []

        def adopt(name: str, adopted: list[LentSession]) -> None:
            try:
                adopted.append(there.adopt(name))
            except SessionLost:
                return

        together(lab, session.abandon, partial(adopt, session.id, adopted))
        same(keys_of(there, key), [key] if adopted else [], "the record")
        for each in adopted:
            each.renew()


def check_only_lent_ones_are_adopted(lab: Lab) -> None:
    """A process's own session, and what was never one, can't be adopted."""
    here, there = lender(lab.open()), lender(lab.open())
    own = here.session(LONG)
    put(here, "k", b"1", own.id)
    for name in (own.id, "never-was", "lent-never-was", f"lent-{'0' * 24}", "../x", "1f", ""):
        with raises(SessionLost):
            there.adopt(name)
    own.renew()
    same(keys_of(there, "k"), ["k"], "the records of the other process")
