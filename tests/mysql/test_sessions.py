"""Who may end the sessions of others, and when."""

from __future__ import annotations

import pytest
import sqlalchemy

from pxrs.errors import SessionLost, StoreUnavailable
from pxrs.stores.api import CoordStore, Watch
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance.queue_tools import Worker
from pxrs.testing.conformance.tools import LONG, put
from pxrs.types import Put
from support.child import PATIENCE
from support.proxy import Proxy
from support.sql import SqlPlace

pytestmark = pytest.mark.engine("mariadb")

_LATE = "UPDATE pxrs_sessions SET deadline = UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE"
_BRIEF = "UPDATE pxrs_sessions SET ttl = 0.3"


def look_on(watch: Watch, coord: CoordStore) -> None:
    """Let the watch look a few times: nobody is judged."""
    for _ in range(4):
        watch.wait(0.25)
        assert coord.get("k/late") is not None


def await_absence(watch: Watch, coord: CoordStore) -> None:
    while coord.get("k/late") is not None:
        assert watch.wait(PATIENCE)


def test_who_has_just_come_judges_nobody_by_time(place: SqlPlace) -> None:
    """The server may have stood still, and everybody with it: one TTL has to pass first."""
    holder = place.open()
    put(holder.coord, "k/late", b"1", holder.coord.session(LONG).id)
    place.query(_LATE)
    newcomer = place.open()
    watch = newcomer.coord.watch("k/")
    look_on(watch, newcomer.coord)
    # With a TTL that is over since it came, it may.
    place.query(_BRIEF)
    await_absence(watch, newcomer.coord)
    watch.close()


def test_who_was_out_of_touch_judges_nobody_by_time(place: SqlPlace) -> None:
    """Long known to the server, but cut off meanwhile: what it knew counts for nothing."""
    holder = place.open()
    put(holder.coord, "k/late", b"1", holder.coord.session(LONG).id)
    url = sqlalchemy.make_url(place.url)
    with Proxy(url.port or 0) as proxy:
        shown = url.set(port=proxy.port).render_as_string(hide_password=False)
        observer = place.open(shown)
        watch = observer.coord.watch("k/")
        place.query("UPDATE pxrs_sessions SET ttl = 2.0")
        # It has been in touch for the whole TTL, and sees nothing wrong.
        observer.coord.sessions.observer._since = float("-inf")
        look_on(watch, observer.coord)
        proxy.refuse()
        with pytest.raises(StoreUnavailable):
            observer.coord.sessions.look()
        place.query(_LATE)
        proxy.heal()
        look_on(watch, observer.coord)
        await_absence(watch, observer.coord)
        watch.close()
        observer.close()


def test_an_expired_session_can_not_be_renewed_though_nobody_has_noticed(place: SqlPlace) -> None:
    stores = place.open()
    session = stores.coord.session(LONG)
    place.query(_LATE)
    with pytest.raises(SessionLost):
        stores.coord.commit((), (Put("k/mine", b"1", session.id),))
    with pytest.raises(SessionLost):
        session.renew()
    assert session.remaining() == 0.0


def test_who_looks_rarely_ends_the_dead_all_the_same(place: SqlPlace) -> None:
    """Every five seconds, as a process does that always finds an item at its first try."""
    worker = Worker(place.open())
    worker.put(b"1")
    worker.take_one()
    place.query("UPDATE pxrs_sessions SET ttl = 10, deadline = UTC_TIMESTAMP(6)")
    clock = VirtualClock()
    rare = place.open(clock=clock).queues
    looks = 1
    rare.reap()
    while rare.stats("q").held:
        clock.advance(5.0)
        rare.reap()
        looks += 1
        assert looks <= 4
    assert rare.stats("q").ready == 1


def test_a_deadline_too_far_ahead_is_nobodys_unless_it_is_renewed(place: SqlPlace) -> None:
    """The server's clock was set back by an hour. Who lives has renewed before its TTL is over."""
    stores, clock = place.open(), VirtualClock()
    dead, living = stores.coord.session(LONG), stores.coord.session(LONG)
    for session, key in ((dead, "k/dead"), (living, "k/living")):
        stores.coord.commit((), (Put(key, b"1", session.id),))
    place.query("UPDATE pxrs_sessions SET ttl = 60, deadline = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
    observer = place.open(clock=clock)

    def look() -> list[str]:
        clock.advance(12.0)
        observer.queues.reap()
        return [record.key for record in observer.coord.list("k/")]

    for _ in range(4):
        assert look() == ["k/dead", "k/living"]
    living.renew()
    for _ in range(20):
        found = look()
        assert "k/living" in found
    assert found == ["k/living"]
    living.renew()
    with pytest.raises(SessionLost):
        dead.renew()
