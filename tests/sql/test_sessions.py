"""Who may end the sessions of others, and when."""

from __future__ import annotations

import pytest
import sqlalchemy

from pxrs.errors import SessionLost, StoreUnavailable
from pxrs.stores.api import CoordStore, Watch
from pxrs.testing.conformance.sessions import LONG
from pxrs.testing.conformance.tools import put
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
        observer.coord.ears.observer._since = -100.0
        look_on(watch, observer.coord)
        proxy.refuse()
        with pytest.raises(StoreUnavailable):
            observer.coord.ears.observer.look()
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
