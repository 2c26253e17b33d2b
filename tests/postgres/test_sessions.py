"""Sessions: a closed connection is noticed at once, and nobody is judged by time too early."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import count

import psycopg
import pytest

from pxrs.errors import Closed, SessionLost
from pxrs.stores.api import CoordStore
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.conformance.queue_tools import Worker
from pxrs.types import Put
from support.child import PATIENCE, Child
from support.engine_fixtures import NewEngine
from support.inside import say, wait_for_parent
from support.postgres import PostgresLab, query

pytestmark = pytest.mark.engine("postgres")

LONG = 3600.0
# In this database: other tests use the server as well.
LOCKS_HERE = """pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE d.datname = current_database() AND l.granted AND l.locktype = 'advisory'"""
WAITING_HERE = """SELECT 1 FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock'"""
OpenStores = Callable[[], PostgresStores]


def hold(url: str, ttl: float) -> None:
    """Hold a session with a record until killed."""
    stores = PostgresStores(url)
    session = stores.coord.session(ttl)
    stores.coord.commit((), (Put("k/held", b"1", session.id),))
    say(session.id)
    wait_for_parent()


def await_absence(coord: CoordStore, key: str) -> None:
    watch = coord.watch(key)
    while coord.get(key) is not None:
        assert watch.wait(PATIENCE), f"{key} did not vanish"
    watch.close()


def test_a_killed_process_is_noticed_long_before_its_ttl(
    stores: PostgresStores, postgres_url: str
) -> None:
    with Child(hold, postgres_url, LONG) as child:
        child.read()
        assert stores.coord.get("k/held") is not None
        child.kill()
        await_absence(stores.coord, "k/held")


def test_a_killed_process_is_noticed_by_one_look_without_a_watch(
    open_stores: OpenStores, postgres_url: str
) -> None:
    """A command that lists members and ends has no time to watch."""
    with Child(hold, postgres_url, LONG) as child:
        child.read()
        child.kill()
        # The server needs a moment to see that the socket is closed.
        while query(postgres_url, f"SELECT 1 FROM {LOCKS_HERE}"):
            pass
        assert open_stores().coord.list("k/") == []


def test_whose_connection_is_closed_knows_it_at_once(
    open_stores: OpenStores, postgres_url: str
) -> None:
    here, there = open_stores(), open_stores()
    watch = here.coord.watch("nothing")
    watch.wait(PATIENCE)
    session = here.coord.session(LONG)
    here.coord.commit((), (Put("k/mine", b"1", session.id),))
    watch.wait(0)
    query(
        postgres_url,
        f"SELECT pg_terminate_backend(l.pid) FROM {LOCKS_HERE} AND l.mode = 'ExclusiveLock'",
    )
    while session.remaining() > 0:
        assert watch.wait(PATIENCE), "nobody was told"
    with pytest.raises(SessionLost):
        session.renew()
    await_absence(there.coord, "k/mine")
    again = here.coord.session(LONG)
    again.renew()


INDEXED = """SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid
    WHERE i.indrelid = %s::regclass AND (a.attnum = ANY (i.indkey::int2[]) OR EXISTS (
        SELECT 1 FROM pg_depend d WHERE d.objid = i.indexrelid AND d.refobjid = i.indrelid
        AND d.refobjsubid = a.attnum))"""


def require_hot(url: str, table: str, where: str, change: Callable[[], object]) -> None:
    """Changing the row again and again needs no index, and finds room beside its old versions.

    The server counts such updates, too, but other snapshots have a part in that figure.
    """

    def look() -> tuple[dict[str, object], str]:
        ((row, page),) = query(
            url, f"SELECT to_json(t), split_part(ctid::text, ',', 1) FROM {table} t WHERE {where}"
        )
        return row, page

    before, page = look()
    for _ in range(8):
        change()
        after, now_in = look()
        assert now_in == page
        changed = {name for name, value in after.items() if value != before[name]}
        assert changed
        assert changed.isdisjoint(name for (name,) in query(url, INDEXED, table))


def test_who_waits_for_an_answer_does_not_wait_on_another_connection(
    stores: PostgresStores, postgres_url: str
) -> None:
    """A connection that is given up is not closed under a renewal: the next one has its number."""
    session = stores.coord.session(LONG)
    anchor = stores.coord._sessions._anchor
    assert anchor is not None
    number = anchor.connection.fileno()
    lost: list[SessionLost] = []

    def renew() -> None:
        try:
            session.renew()
        except SessionLost as error:
            lost.append(error)

    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT 1 FROM pxrs.pxrs_sessions FOR UPDATE")
        renewing = threading.Thread(target=renew, daemon=True)
        renewing.start()
        while not query(postgres_url, WAITING_HERE):
            pass
        # As if the server had just hung up, and this thread were the first to see it.
        anchor.lost = True
        stores.coord.session(LONG)
        another = stores.coord._sessions._anchor
        assert another is not None
        assert another.connection.fileno() == number
        other.rollback()
        renewing.join(PATIENCE)
    assert len(lost) == 1


def test_renewals_are_hot_updates(stores: PostgresStores, postgres_url: str) -> None:
    session = stores.coord.session(LONG)
    # Its page gets as full as it may.
    for _ in range(100):
        stores.coord.session(LONG)
    require_hot(postgres_url, "pxrs.pxrs_sessions", f"id = '{session.id}'", session.renew)


def test_checkpoints_are_hot_updates(stores: PostgresStores, postgres_url: str) -> None:
    numbers = count()

    def commit() -> None:
        stores.coord.commit((), (Put("claims/g/t/0", b"%0200d" % next(numbers)),))

    commit()
    for number in range(100):
        stores.coord.commit((), (Put(f"claims/g/u/{number}", b"%0200d" % number),))
    require_hot(postgres_url, "pxrs.pxrs_coord", "key = 'claims/g/t/0'", commit)


def test_who_has_just_come_judges_nobody_by_time(
    open_stores: OpenStores, postgres_url: str
) -> None:
    """The server may have stood still, and everybody with it: one TTL has to pass first."""
    stores = open_stores()
    session = stores.coord.session(LONG)
    stores.coord.commit((), (Put("k/late", b"1", session.id),))
    query(postgres_url, "UPDATE pxrs.pxrs_sessions SET deadline = now() - interval '1 minute'")
    newcomer = open_stores()
    watch = newcomer.coord.watch("k/")
    for _ in range(3):
        watch.wait(0.3)
        assert newcomer.coord.get("k/late") is not None
    # With a TTL that is over since it came, it may.
    query(postgres_url, "UPDATE pxrs.pxrs_sessions SET ttl = 0.5")
    await_absence(newcomer.coord, "k/late")


def test_an_expired_session_can_not_be_renewed_though_nobody_has_noticed(
    stores: PostgresStores, postgres_url: str
) -> None:
    session = stores.coord.session(LONG)
    query(postgres_url, "UPDATE pxrs.pxrs_sessions SET deadline = clock_timestamp()")
    with pytest.raises(SessionLost):
        session.renew()
    assert session.remaining() == 0.0


def test_a_restart_of_the_server_frees_all_locks_and_proves_nothing(
    new_engine: NewEngine,
) -> None:
    """Whoever was alive before has its TTL to come back; only then is it judged, by time."""
    engine = new_engine("postgres")
    lab = PostgresLab(engine.url)
    holder, observer = lab.open(), lab.open()
    session = holder.coord.session(LONG)
    short = holder.coord.session(2.0)
    holder.coord.commit((), (Put("k/long", b"1", session.id), Put("k/short", b"1", short.id)))
    engine.restart()
    await_absence(observer.coord, "k/short")
    assert observer.coord.get("k/long") is not None
    assert session.remaining() == 0.0
    lab.close()


def test_a_forked_child_can_not_use_it_and_does_not_hold_it(
    open_stores: OpenStores, stores: PostgresStores
) -> None:
    session = stores.coord.session(LONG)
    stores.coord.commit((), (Put("k/parent", b"1", session.id),))
    release, held = os.pipe(), os.pipe()
    block = stores.atomic().__enter__()
    block.write(Put("k/block", b"1"))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                stores.coord.get("k/parent")
            except Closed:
                code = 0 if session.remaining() == 0.0 else 2
            try:
                block.__exit__(None, None, None)
            except Closed:
                pass
            else:
                code = 3
            os.write(held[1], b"x")
            os.read(release[0], 1)
        finally:
            os._exit(code)
    os.read(held[0], 1)
    session.renew()
    block.__exit__(None, None, None)
    assert stores.coord.get("k/block") is not None
    # The parent's connection closes while the child lives: that has to be the end of it.
    other = open_stores()
    assert stores.coord.get("k/parent") is not None
    anchor = stores.coord._sessions._anchor
    assert anchor is not None
    anchor.connection.close()
    await_absence(other.coord, "k/parent")
    os.write(release[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for fd in (*release, *held):
        os.close(fd)


def test_who_looks_rarely_ends_the_dead_all_the_same(lab: PostgresLab, postgres_url: str) -> None:
    """Every five seconds, as a process does that always finds an item at its first try."""
    worker = Worker(lab.open())
    worker.put(b"1")
    worker.take_one()
    query(
        postgres_url,
        "UPDATE pxrs.pxrs_sessions SET ttl = 10, deadline = clock_timestamp(), lock = NULL",
    )
    clock = VirtualClock()
    rare = lab.open(clock=clock).queues
    looks = 1
    rare.reap()
    while rare.stats("q").held:
        clock.advance(5.0)
        rare.reap()
        looks += 1
        assert looks <= 4
    assert rare.stats("q").ready == 1


def test_a_deadline_too_far_ahead_is_nobodys_unless_it_is_renewed(
    lab: PostgresLab, postgres_url: str
) -> None:
    """The server's clock was set back by an hour. Who lives has renewed before its TTL is over."""
    stores, clock = lab.open(), VirtualClock()
    dead, living = stores.coord.session(LONG), stores.coord.session(LONG)
    for session, key in ((dead, "k/dead"), (living, "k/living")):
        stores.coord.commit((), (Put(key, b"1", session.id),))
    query(
        postgres_url,
        "UPDATE pxrs.pxrs_sessions SET ttl = 60, lock = NULL,"
        " deadline = clock_timestamp() + interval '1 hour'",
    )
    observer = lab.open(clock=clock)

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
