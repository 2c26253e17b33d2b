"""Sessions and watches of a `CoordStore`: what ends with a session, and which changes wake.

Watches are hints that may repeat and may be spurious, but are never missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from pxrs.errors import InvalidRequest, SessionLost
from pxrs.stores.api import CoordStore, Session, Watch
from pxrs.testing.conformance.lab import Lab, Violation
from pxrs.testing.conformance.tools import (
    FACTORS,
    LONG,
    close_must_wake,
    committed,
    keys_of,
    mortal,
    must_wake,
    put,
    raises,
    refused,
    require,
    same,
    together,
    value_of,
)
from pxrs.types import Check, Delete, Put, Versioned


def check_bound_record_is_a_record(lab: Lab) -> None:
    """While its session lives a bound record is read like any other, on every handle."""
    here, there = lab.open().coord, lab.open().coord
    session = here.session(LONG)
    version = put(here, "k", b"1", session.id)
    for coord in (here, there):
        same(coord.get("k"), Versioned("k", b"1", version, session.id), "the record")
        same(keys_of(coord, "k"), ["k"], "what is listed")


def check_sessions_differ(lab: Lab) -> None:
    """No two sessions share an id, not even one after the other."""
    here, there = lab.open().coord, lab.open().coord
    sessions = [coord.session(LONG) for coord in (here, there, here)]
    sessions[0].close()
    sessions.append(there.session(LONG))
    same(len({session.id for session in sessions}), 4, "the number of ids")


def check_ttl_has_to_be_positive(lab: Lab) -> None:
    """A session that could not live is refused."""
    coord = lab.open().coord
    for ttl in (0.0, -1.0):
        with raises(InvalidRequest):
            coord.session(ttl)
    same(coord.session(lab.ttl).ttl, lab.ttl, "the TTL")


def check_records_vanish_on_close(lab: Lab) -> None:
    """When `close` returns, all records of the session are gone, for every reader."""
    here, there = lab.open().coord, lab.open().coord
    session = here.session(LONG)
    committed(here.commit((), [Put(f"k/{n}", b"1", session.id) for n in range(3)]))
    put(here, "k/kept", b"1")
    session.close()
    for coord in (there, here):
        same(coord.get("k/1"), None, "a record of the closed session")
        same(keys_of(coord, "k/"), ["k/kept"], "what is left")
    session.close()


def check_records_vanish_on_expiry(lab: Lab) -> None:
    """When a session is past its TTL all its records are gone, for every reader."""
    here, there = lab.open().coord, lab.open().coord
    session = mortal(lab, here, *(f"k/{n}" for n in range(3)))
    put(here, "k/kept", b"1")
    lab.let_expire(session)
    for coord in (there, here):
        same([coord.get(f"k/{n}") for n in range(3)], [None] * 3, "the records")
        same(keys_of(coord, "k/"), ["k/kept"], "what is left")


def check_records_vanish_all_at_once(lab: Lab) -> None:
    """A reader that sees one record of a session gone sees all of them gone."""
    here, there = lab.open().coord, lab.open().coord
    for number in range(8):
        session = here.session(LONG)
        keys = [f"{number}/a", f"{number}/b"]
        committed(here.commit((), [Put(key, b"1", session.id) for key in keys]))

        def look(first: str, second: str) -> None:
            gone = any(there.get(first) is None for _ in range(100_000))
            same((gone, there.get(second)), (True, None), "whether both are gone")

        together(lab, session.close, partial(look, *keys), partial(look, *keys[::-1]))


def check_other_sessions_stay(lab: Lab) -> None:
    """The end of a session touches no record of another one."""
    here, there = lab.open().coord, lab.open().coord
    longer = there.session(LONG)
    put(there, "k/longer", b"1", longer.id)
    for name in ("expires", "closes"):
        session = mortal(lab, here, f"k/{name}")
        if name == "expires":
            lab.let_expire(session)
        session.close()
        same(keys_of(here, "k/"), ["k/longer"], "what is left")
    longer.renew()


def check_expired_session_is_dead(lab: Lab) -> None:
    """An expired session can't renew, can't write, and does not come back by trying."""
    coord = lab.open().coord
    session = mortal(lab, coord, "k")
    lab.let_expire(session)
    for _ in range(2):
        with raises(SessionLost):
            session.renew()
        same(session.remaining(), 0.0, "the time that remains")
        with raises(SessionLost):
            put(coord, "k", b"2", session.id)
        same(coord.list(""), [], "the records")


def check_late_renewal_is_refused(lab: Lab) -> None:
    """A renewal that comes too late is refused, even if the expiry was not noticed before."""
    coord = lab.open().coord
    session = mortal(lab, coord, "k")
    lab.let_expire(session)
    with raises(SessionLost):
        session.renew()
    same(coord.get("k"), None, "the record of the expired session")


def check_expired_session_writes_nothing(lab: Lab) -> None:
    """A commit that names an expired session writes none of its records."""
    coord = lab.open().coord
    session, other = coord.session(lab.ttl), coord.session(LONG)
    version = put(coord, "k", b"1")
    lab.let_expire(session)
    with raises(SessionLost):
        coord.commit(
            (Check("k", version),),
            (Put("k", b"2"), Put("mine", b"2", session.id), Put("its", b"2", other.id)),
        )
    same(keys_of(coord, ""), ["k"], "the records")
    same(value_of(coord, "k"), b"1", "the value")


def check_closed_session_is_dead(lab: Lab) -> None:
    """A closed session can't renew and can't write, and has no time left."""
    coord = lab.open().coord
    session = coord.session(LONG)
    session.close()
    same(session.remaining(), 0.0, "the time that remains")
    with raises(SessionLost):
        session.renew()
    with raises(SessionLost):
        put(coord, "k", b"1", session.id)
    same(coord.list(""), [], "the records")


def check_unknown_session_is_dead(lab: Lab) -> None:
    """No record can be put with a session id that never existed."""
    coord = lab.open().coord
    with raises(SessionLost):
        put(coord, "k", b"1", "never-was")
    same(coord.list(""), [], "the records")


def renewed_in_time(session: Session) -> bool:
    """Whether a renewal was answered before the session's time was over: then it must succeed."""
    left, asked = session.remaining(), time.monotonic()
    try:
        session.renew()
    except SessionLost as error:
        if time.monotonic() - asked < left:
            raise Violation(f"the session was lost with {left} s of its TTL left") from error
        return False
    return True


def check_renewal_extends(lab: Lab) -> None:
    """A session that is renewed outlives its first TTL, and its records with it."""
    if not any(outlives_its_first_ttl(lab, factor) for factor in FACTORS):
        raise Violation("no session could be kept alive")


def outlives_its_first_ttl(lab: Lab, factor: int) -> bool:
    """False if it was not renewed in time, which proves nothing."""
    here, there = lab.open().coord, lab.open().coord
    session = here.session(factor * lab.ttl)
    put(here, "k", b"1", session.id)
    for number in range(factor + 1):
        lab.let_expire(there.session(lab.ttl))
        if not renewed_in_time(session):
            return False
        put(here, f"k{number}", b"1", session.id)
    found = there.get("k")
    if session.remaining() == 0:
        return False
    same(found and found.value, b"1", "the record of the renewed session")
    lab.let_expire(session)
    same(keys_of(there, "k"), [], "the records after the last renewal's TTL")
    return True


def check_remaining_time(lab: Lab) -> None:
    """`remaining` is at most one TTL, never rises but by renewal, and is 0 at the end."""
    if not any(counts_down(lab, factor) for factor in FACTORS):
        raise Violation("nothing remained of any session after one TTL of the lab")


def counts_down(lab: Lab, factor: int) -> bool:
    """False if it was over before it could be looked at, which proves nothing."""
    coord = lab.open().coord
    session = coord.session(factor * lab.ttl)
    first = session.remaining()
    require(0 < first <= session.ttl, f"{first} s remain of a new session of {session.ttl} s")
    lab.let_expire(coord.session(lab.ttl))
    second = session.remaining()
    require(second <= first - lab.ttl / 2, f"{second} s remain of {first} s after {lab.ttl} s")
    if second == 0 or not renewed_in_time(session):
        return False
    third = session.remaining()
    require(second < third <= session.ttl, f"{third} s remain after a renewal")
    lab.let_expire(session)
    same(session.remaining(), 0.0, "what remains of an expired session")
    return True


def check_persistent_put_unbinds(lab: Lab) -> None:
    """A bound record that is put again without a session outlives the session."""
    coord = lab.open().coord
    expiring, closing = mortal(lab, coord, "k/1"), coord.session(LONG)
    put(coord, "k/2", b"1", closing.id)
    for key in ("k/1", "k/2"):
        put(coord, key, b"2")
    lab.let_expire(expiring)
    closing.close()
    found = [(record.value, record.session) for record in coord.list("k/")]
    same(found, [(b"2", None), (b"2", None)], "the records put again")


def check_other_sessions_put_rebinds(lab: Lab) -> None:
    """A record belongs to the session that wrote it last, deleted in between or not."""
    coord = lab.open().coord
    first, second = mortal(lab, coord, "k/a", "k/b"), coord.session(LONG)
    put(coord, "k/a", b"2", second.id)
    committed(coord.commit((), (Delete("k/b"),)))
    put(coord, "k/b", b"2", second.id)
    lab.let_expire(first)
    same(keys_of(coord, "k/"), ["k/a", "k/b"], "the records of the living session")
    second.close()
    same(keys_of(coord, "k/"), [], "the records of the closed session")


def check_persistent_record_can_be_bound(lab: Lab) -> None:
    """A record that is put again with a session ends with it."""
    coord = lab.open().coord
    session = coord.session(LONG)
    version = put(coord, "k", b"1")
    committed(coord.commit((Check("k", version),), (Put("k", b"2", session.id),)))
    session.close()
    same(coord.get("k"), None, "the record")


def check_dead_record_is_absent(lab: Lab) -> None:
    """A record that must be absent can be created where only a dead session's record was."""
    here, there = lab.open().coord, lab.open().coord
    session = mortal(lab, here, "k")
    refused(there.commit((Check("k", 0),), (Put("k", b"2"),)))
    lab.let_expire(session)
    committed(there.commit((Check("k", 0),), (Put("k", b"3"),)))
    session.close()
    same(value_of(here, "k"), b"3", "the record made after the session's end")


def check_bound_versions_are_not_checked(lab: Lab) -> None:
    """A check of a session-bound record's version is refused: engines restart such versions."""
    coord = lab.open().coord
    session = coord.session(LONG)
    version = put(coord, "k", b"1", session.id)
    with raises(InvalidRequest):
        coord.commit((Check("k", version),), (Put("k", b"2"), Put("other", b"2")))
    same(keys_of(coord, ""), ["k"], "the records")
    same(value_of(coord, "k"), b"1", "the value")


def check_death_races_with_a_write(lab: Lab) -> None:
    """A write that races with its session's end is refused, or is gone with the session."""
    here, there = lab.open().coord, lab.open().coord

    def write(coord: CoordStore, key: str, session_id: str) -> None:
        try:
            for _ in range(20_000):
                put(coord, key, b"1", session_id)
        except SessionLost:
            return
        raise Violation("the closed session went on writing")

    for number in range(5):
        session = here.session(LONG)
        put(here, f"k/{number}", b"1", session.id)
        together(lab, partial(write, here, f"k/{number}", session.id), session.close)
        same(there.get(f"k/{number}"), None, "the record of the closed session")


def wait_until(lab: Lab, watch: Watch, seen: Callable[[], bool]) -> None:
    """Look, wait, look again: ends only if every change wakes."""
    while not seen():
        must_wake(lab, watch, "the last change")


def check_watch_is_armed_on_return(lab: Lab) -> None:
    """A change right after `watch` returned ends the first wait."""
    here, there = lab.open().coord, lab.open().coord
    for coord in (here, there):
        watch = here.watch("k/")
        put(coord, "k/1")
        must_wake(lab, watch, "a put before the first wait")
        watch.close()


def check_no_change_between_waits_is_lost(lab: Lab) -> None:
    """A change between two waits ends the next wait."""
    here, there = lab.open().coord, lab.open().coord
    watch = here.watch("k/")
    for coord in (here, there, here):
        put(coord, "k/1")
        must_wake(lab, watch, "a put between two waits")
        watch.wait(0)
    watch.close()


def check_every_kind_of_change_wakes(lab: Lab) -> None:
    """Making, changing, binding and deleting a record wake, and so does a session's close."""
    here, there = lab.open().coord, lab.open().coord
    watch = there.watch("k/")
    session = here.session(LONG)
    changes: list[tuple[str, Callable[[], object]]] = [
        ("a put", lambda: put(here, "k/1")),
        ("another put", lambda: put(here, "k/1")),
        ("a delete", lambda: committed(here.commit((), (Delete("k/1"),)))),
        ("a bound put", lambda: put(here, "k/2", b"1", session.id)),
        ("the end of a session", session.close),
    ]
    for name, change in changes:
        # Read first, as watchers do: a record that was never read may vanish without a wake-up.
        there.list("k/")
        watch.wait(0)
        change()
        must_wake(lab, watch, name)
    watch.close()


def check_expiry_wakes(lab: Lab) -> None:
    """A session that expired between two waits ends the second one."""

    def expire(watch: Watch, there: CoordStore, session: Session) -> None:
        lab.let_expire(session)
        must_wake(lab, watch, "the expiry of a session")

    in_time(lab, expire)


def in_time(lab: Lab, then: Callable[[Watch, CoordStore, Session], None]) -> None:
    """Call `then` with a session that still lives after all wake-ups of its making have arrived.

    On a busy machine it can be over by then, which proves nothing: then another gets more time.
    """
    here, there = lab.open().coord, lab.open().coord
    for factor in FACTORS:
        watch = there.watch("k/")
        session = mortal(lab, here, "k/1", least=factor)
        must_wake(lab, watch, "a bound put")
        watch.wait(0)
        lives = there.get("k/1") is not None
        if lives:
            then(watch, there, session)
        watch.close()
        if lives:
            return
    raise Violation("no session lived long enough to be waited for")


def check_every_place_is_watched(lab: Lab) -> None:
    """A watch on keys and folders wakes on each of them; the empty folder holds everything."""
    coord = lab.open().coord
    for places, key in [
        (("a/", "b/", "c"), "a/1"),
        (("a/", "b/", "c"), "b/x/y"),
        (("a/", "b/", "c"), "c"),
        (("a_%/",), "a_%/1"),
        (("é/",), "é/日"),
        (("",), "anything"),
    ]:
        watch = coord.watch(*places)
        put(coord, key)
        must_wake(lab, watch, f"a put of {key!r} under {places}")
        watch.close()


def check_every_watch_wakes(lab: Lab) -> None:
    """One change wakes all its watches, on every handle; closing one watch leaves the others."""
    here, there = lab.open().coord, lab.open().coord
    watches = [coord.watch("k/") for coord in (here, here, there, there)]
    put(here, "k/1")
    for watch in watches:
        must_wake(lab, watch, "a put that all of them watch")
    watches[0].close()
    watches[2].close()
    put(there, "k/2")
    for watch in (watches[1], watches[3]):
        must_wake(lab, watch, "a put after the other watches were closed")
        watch.close()


def check_no_change_is_missed_in_a_race(lab: Lab) -> None:
    """Look, wait, look again: two threads that wait for each other in turn both finish."""
    here, there = lab.open().coord, lab.open().coord

    def ping(mine: CoordStore, my_key: str, other_key: str) -> None:
        watch = mine.watch(other_key)
        for number in range(25):
            put(mine, my_key, b"%d" % number)
            wait_until(lab, watch, partial(reached, mine, other_key, number))
        watch.close()

    def reached(coord: CoordStore, key: str, number: int) -> bool:
        value = value_of(coord, key)
        return value is not None and int(value) >= number

    together(lab, partial(ping, here, "a", "b"), partial(ping, there, "b", "a"))


def check_expiry_wakes_a_sleeper(lab: Lab) -> None:
    """A waiter is woken when a session expires, even if no client touches the store."""

    def expire(watch: Watch, there: CoordStore, session: Session) -> None:
        def sleep() -> None:
            must_wake(lab, watch, "the expiry of a session")
            wait_until(lab, watch, lambda: there.get("k/1") is None)

        together(lab, sleep, lambda: lab.let_expire(session))

    in_time(lab, expire)


def check_a_watch_can_be_woken(lab: Lab) -> None:
    """`wake` ends the current wait or, if there is none, the next one."""
    watch = lab.open().coord.watch("k/")
    watch.wake()
    must_wake(lab, watch, "a call of wake")
    asleep = threading.Event()

    def sleep() -> None:
        asleep.set()
        must_wake(lab, watch, "a call of wake")

    def wake() -> None:
        require(asleep.wait(lab.patience), "the sleeper did not start")
        watch.wake()

    together(lab, sleep, wake)
    watch.close()


def check_close_wakes_a_sleeper(lab: Lab) -> None:
    """Closing a watch ends a wait without a timeout; a closed watch never blocks."""
    close_must_wake(lab, lab.open().coord.watch("k/"))
