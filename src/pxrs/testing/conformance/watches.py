"""Watches of a `CoordStore`: hints that may repeat and may be spurious, but never lack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from pxrs.stores.api import CoordStore, Session, Watch
from pxrs.testing.conformance.lab import Lab, Suite, Violation
from pxrs.testing.conformance.sessions import LONG
from pxrs.testing.conformance.tools import (
    FACTORS,
    committed,
    mortal,
    put,
    require,
    together,
    value_of,
)
from pxrs.types import Delete

suite = Suite()


def must_wake(lab: Lab, watch: Watch, why: str) -> None:
    """Require that the watch wakes within the lab's patience."""
    require(watch.wait(lab.patience), f"the watch was not woken by {why}")


def wait_until(lab: Lab, watch: Watch, seen: Callable[[], bool]) -> None:
    """Look, wait, look again: ends only if every change wakes."""
    while not seen():
        must_wake(lab, watch, "the last change")


@suite
def check_watch_is_armed_on_return(lab: Lab) -> None:
    """A change right after `watch` returned ends the first wait."""
    here, there = lab.open().coord, lab.open().coord
    for coord in (here, there):
        watch = here.watch("k/")
        put(coord, "k/1")
        must_wake(lab, watch, "a put before the first wait")
        watch.close()


@suite
def check_no_change_between_waits_is_lost(lab: Lab) -> None:
    """A change between two waits ends the next wait."""
    here, there = lab.open().coord, lab.open().coord
    watch = here.watch("k/")
    for coord in (here, there, here):
        put(coord, "k/1")
        must_wake(lab, watch, "a put between two waits")
        watch.wait(0)
    watch.close()


@suite
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
        watch.wait(0)
        change()
        must_wake(lab, watch, name)
    watch.close()


@suite
def check_expiry_wakes(lab: Lab) -> None:
    """A session that expired between two waits ends the second one."""

    def expire(watch: Watch, there: CoordStore, session: Session) -> None:
        lab.let_expire(session)
        must_wake(lab, watch, "the expiry of a session")

    in_time(lab, expire)


def in_time(lab: Lab, then: Callable[[Watch, CoordStore, Session], None]) -> None:
    """Go on with a session that lives when all of its news have been heard.

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


@suite
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


@suite
def check_every_watch_wakes(lab: Lab) -> None:
    """One change wakes all who watch it, on every handle; closing one watch leaves the others."""
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


@suite
def check_no_change_is_missed_in_a_race(lab: Lab) -> None:
    """Look, wait, look again: two who wait for each other in turn both come to the end."""
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


@suite
def check_expiry_wakes_a_sleeper(lab: Lab) -> None:
    """A waiter is woken when a session expires, even if no client touches the store."""

    def expire(watch: Watch, there: CoordStore, session: Session) -> None:
        def sleep() -> None:
            must_wake(lab, watch, "the expiry of a session")
            wait_until(lab, watch, lambda: there.get("k/1") is None)

        together(lab, sleep, lambda: lab.let_expire(session))

    in_time(lab, expire)


@suite
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


@suite
def check_close_wakes_a_sleeper(lab: Lab) -> None:
    """Closing a watch ends a wait without a timeout; a closed watch never blocks."""
    watch = lab.open().coord.watch("k/")
    asleep = threading.Event()
    awake = threading.Event()

    def sleep() -> None:
        asleep.set()
        while not awake.is_set():
            require(watch.wait(None), "a wait without a timeout timed out")

    def wake() -> None:
        require(asleep.wait(lab.patience), "the sleeper did not start")
        awake.set()
        watch.close()

    together(lab, sleep, wake)
    watch.close()
    require(watch.wait(None) and watch.wait(0), "a closed watch says that nothing happened")
