"""`px.relay`: a source is copied into a topic, each message once, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import aio
from pxrs.core.relaying import RelayRecord
from pxrs.running import relay as relaying
from pxrs.running.relay import TwoStores
from pxrs.sources import Table
from pxrs.types import Message
from support.child import Child
from support.inside import say, wait_for_parent
from support.loops import run as run_loop

ROWS = 400
KEYS = 17
TTL = 1.0

Place = Callable[[], str]


@pytest.fixture
def shop(tmp_path: Path) -> str:
    """The URL of a file with a table of events, of which some are gone."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as db:
        db.execute(
            """CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT,
                payload TEXT, at INTEGER)"""
        )
        rows = [(f"account-{n % KEYS}", f"event {n}", 1_700_000_000_000 + n) for n in range(ROWS)]
        db.executemany("INSERT INTO events (account, payload, at) VALUES (?, ?, ?)", rows)
        db.execute("DELETE FROM events WHERE id % 50 = 7")
        db.commit()
    return f"sqlite:///{tmp_path}/shop.db"


def rows_of(shop: str) -> list[tuple[str, str, int]]:
    with closing(sqlite3.connect(shop.removeprefix("sqlite:///"))) as db:
        return db.execute("SELECT account, payload, at FROM events ORDER BY id").fetchall()


@pytest.fixture(
    params=[
        pytest.param("one", marks=pytest.mark.engine("sqlite")),
        pytest.param("two", marks=pytest.mark.engine("sqlite")),
        pytest.param(
            "etcd and nats", marks=[pytest.mark.engine("etcd"), pytest.mark.engine("nats")]
        ),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One store that holds all, or two of which one holds the messages."""
    if request.param == "one":
        return f"sqlite:///{tmp_path}/app.db"
    return two_stores(request, request.param)


@pytest.fixture(
    params=[
        pytest.param("two", marks=pytest.mark.engine("sqlite")),
        pytest.param(
            "etcd and nats", marks=[pytest.mark.engine("etcd"), pytest.mark.engine("nats")]
        ),
    ]
)
def two(request: pytest.FixtureRequest) -> str:
    return two_stores(request, request.param)


def two_stores(request: pytest.FixtureRequest, which: str) -> str:
    if which == "two":
        folder = request.getfixturevalue("tmp_path")
        return f"sqlite:///{folder}/log.db coord=sqlite:///{folder}/coord.db"
    etcd, nats = request.getfixturevalue("etcd_url"), request.getfixturevalue("nats_url")
    return f"{etcd} log={nats}/relay{os.getpid()}x{request.node.name.__hash__() % 10**8}"


def events(shop: str) -> Table:
    return Table("events", key="account", value="payload", timestamp="at", url=shop)


@contextmanager
def prepared(url: str, shop: str) -> Iterator[pxrs.Pxrs]:
    """A store with the source and the topic, there before anybody relays."""
    with pxrs.connect(url) as px:
        prepare(px, shop)
        yield px


def prepare(px: pxrs.Pxrs, shop: str) -> None:
    px.topics.create("orders", partitions=3)
    px.attach("events", events(shop), partitions=4)


def start(px: pxrs.Pxrs) -> pxrs.Running:
    return px.relay("events", topic="orders", session_ttl=TTL, revoke_timeout=5.0, debounce=0.05)


def wait_for_end(px: pxrs.Pxrs, group: str = "relay") -> None:
    """Until the group has copied all there is."""
    watch = px.stores.coord.watch("claims/")
    for _ in range(600):
        with suppress(pxrs.GroupNotFound):
            parts = px.groups.describe(group, lag_seconds=False).partitions
            if parts and all(part.lag == 0 for part in parts):
                break
        watch.wait(0.1)
    else:
        pytest.fail(f"not copied after a minute: {parts}")
    watch.close()


def copied(px: pxrs.Pxrs, topic: str = "orders") -> list[Message[bytes]]:
    """All messages, by partition."""
    reader = px.reader(topic)
    found: list[Message[bytes]] = []
    for part in px.topics.describe(topic).partitions:
        offset = part.start
        while offset < part.end:
            messages = reader.read(part.partition, offset)
            found += messages
            offset = messages[-1].offset + 1
    return found


def check(px: pxrs.Pxrs, wanted: list[tuple[str, str, int]]) -> None:
    """Each row is there once, as it was, and those of a key in order."""
    found = [(m.key.decode(), m.value.decode(), m.timestamp) for m in copied(px)]
    assert sorted(found) == sorted(wanted)
    ours, theirs = defaultdict(list), defaultdict(list)
    for key, value, _ in wanted:
        theirs[key].append(value)
    for key, value, _ in found:
        ours[key].append(value)
    assert ours == theirs


def test_a_table_is_copied(url: str, shop: str) -> None:
    with pxrs.connect(url) as px:
        prepare(px, shop)
        with start(px) as running:
            wait_for_end(px)
        assert running.handled == len(rows_of(shop))
        check(px, rows_of(shop))
        # What was sent by others goes to the partition of its key, too.
        by_key = {message.key: message.partition for message in copied(px)}
        with px.producer() as producer:
            for key, partition in by_key.items():
                assert producer.send("orders", b"", key).result().partition == partition


@pytest.mark.engine("sqlite")
def test_it_goes_on_where_it_was(tmp_path: Path, shop: str) -> None:
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db") as px:
        px.topics.create("orders", partitions=3)
        for number in (1, 2):
            with px.relay(events(shop), topic="orders"):
                wait_for_end(px)
            with closing(sqlite3.connect(shop.removeprefix("sqlite:///"))) as db:
                late = ("late", str(number), 1_800_000_000_000)
                db.execute("INSERT INTO events (account, payload, at) VALUES (?, ?, ?)", late)
                db.commit()
        check(px, rows_of(shop)[:-1])
        assert [topic.name for topic in px.sources.list()] == ["orders.source"]


@pytest.mark.parametrize("way", ["one", "two"])
@pytest.mark.engine("sqlite")
def test_headers_and_messages_without_a_key_or_a_value(way: str, tmp_path: Path) -> None:
    coord = None if way == "one" else f"sqlite:///{tmp_path}/coord.db"
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db", coord=coord) as px:
        px.topics.create("from", partitions=2)
        px.topics.create("to", partitions=3)
        with px.producer() as producer:
            for number in range(20):
                producer.send("from", None, headers=[("n", b"%d" % number), ("none", None)])
        with px.relay("from", topic="to"):
            wait_for_end(px)
        before, after = copied(px, "from"), copied(px, "to")
        assert [m.headers for m in before] == [m.headers for m in after]
        assert [m.timestamp for m in before] == [m.timestamp for m in after]
        assert all(m.key is None and not m.value for m in after)


# Those that die, and those that come back


def relay_until_killed(url: str) -> None:
    with pxrs.connect(url) as px, start(px) as running:
        say("begun")
        running.join()


def few_at_a_time() -> None:
    relaying._MOST = 20


def relay_slowly(url: str) -> None:
    """In small steps, so that there are many at which it can die."""
    few_at_a_time()
    relay_until_killed(url)


@pytest.mark.long
def test_members_are_killed_at_any_time(url: str, shop: str) -> None:
    with pxrs.connect(url) as px:
        prepare(px, shop)
        for _ in range(5):
            before = px.topics.describe("orders").messages
            with Child(relay_slowly, url) as child:
                child.read()
                watch = px.stores.coord.watch("claims/")
                while px.topics.describe("orders").messages == before < len(rows_of(shop)):
                    watch.wait(0.05)
                watch.close()
        with start(px):
            wait_for_end(px)
        check(px, rows_of(shop))


def test_two_members_share_the_work(url: str, shop: str) -> None:
    with prepared(url, shop) as px, Child(relay_slowly, url) as child:
        child.read()
        with start(px):
            wait_for_end(px)
        check(px, rows_of(shop))


POINTS = ["begun", "one of the batches", "all batches", "done"]


def die_at(point: str) -> None:
    """Die in the first copy that goes to several partitions."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    append, write = TwoStores._append, TwoStores._write

    def dying_append(self: Any, record: Any, spread: Any) -> Any:
        if point == "one of the batches":
            append(self, record, dict(list(spread.items())[:1]))
        elif point == "all batches":
            append(self, record, spread)
        die()

    def dying_write(self: Any, owned: Any, checkpoint: int, record: RelayRecord) -> None:
        write(self, owned, checkpoint, record)
        if record.pending is None:
            die()

    if point == "done":
        TwoStores._write = dying_write  # type: ignore[method-assign]
    else:
        TwoStores._append = dying_append  # type: ignore[method-assign]


def relay_and_die(url: str, point: str) -> None:
    die_at(point)
    relay_slowly(url)


@pytest.mark.parametrize("point", POINTS)
def test_a_copy_that_was_begun_is_finished(two: str, shop: str, point: str) -> None:
    with pxrs.connect(two) as px:
        prepare(px, shop)
        with Child(relay_and_die, two, point) as child:
            assert child.join() == -signal.SIGKILL
        with start(px):
            wait_for_end(px)
        check(px, rows_of(shop))


@pytest.mark.parametrize("point", POINTS)
def test_rows_that_change_meanwhile_come_once(two: str, shop: str, point: str) -> None:
    """Their keys would lead them elsewhere now; and others are gone."""
    with pxrs.connect(two) as px:
        px.topics.create("orders", partitions=3)
        px.attach("events", events(shop), partitions=1)
        with Child(relay_and_die, two, point) as child:
            assert child.join() == -signal.SIGKILL
        with closing(sqlite3.connect(shop.removeprefix("sqlite:///"))) as db:
            db.execute("UPDATE events SET account = 'moved-' || (id * 7919 % 31) WHERE id % 5 > 0")
            db.execute("UPDATE events SET account = NULL WHERE id % 11 = 0")
            db.execute("DELETE FROM events WHERE id % 10 = 3")
            db.commit()
        with start(px):
            wait_for_end(px)
        values = [message.value.decode() for message in copied(px)]
        gone = [f"event {n - 1}" for n in range(1, ROWS + 1) if n % 10 == 3]
        # A row that was deleted may have been copied before.
        assert sorted(set(values) - set(gone)) == sorted(value for _, value, _ in rows_of(shop))
        assert len(values) == len(set(values))


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("forgotten", ["record", "read back"])
def test_broken_ones_are_caught(
    tmp_path: Path, shop: str, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not look for a copy that was begun, and a log that has forgotten producers."""
    url = f"sqlite:///{tmp_path}/log.db coord=sqlite:///{tmp_path}/coord.db"
    with pxrs.connect(url) as px:
        prepare(px, shop)
        with Child(relay_and_die, url, "all batches") as child:
            assert child.join() == -signal.SIGKILL
        if forgotten == "record":
            monkeypatch.setattr(RelayRecord, "is_unfinished", lambda *_: False)
        else:
            monkeypatch.setattr(TwoStores, "_is_there", lambda *_: False)
            forget_producers(tmp_path / "log.db")
        with start(px):
            wait_for_end(px)
        assert px.topics.describe("orders").messages > len(rows_of(shop))


@pytest.mark.engine("sqlite")
def test_what_was_appended_is_read_back_if_the_log_has_forgotten_it(
    tmp_path: Path, shop: str
) -> None:
    url = f"sqlite:///{tmp_path}/log.db coord=sqlite:///{tmp_path}/coord.db"
    with pxrs.connect(url) as px:
        prepare(px, shop)
        with Child(relay_and_die, url, "one of the batches") as child:
            assert child.join() == -signal.SIGKILL
        forget_producers(tmp_path / "log.db")
        with start(px):
            wait_for_end(px)
        check(px, rows_of(shop))


def forget_producers(path: Path) -> None:
    """As a log does once they were silent for a week."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM pxrs_log_producers")
        db.commit()


def relay_and_wait(url: str) -> None:
    """Stop before the batches are appended, until the parent says so."""
    append = TwoStores._append

    def late(self: Any, record: Any, spread: Any) -> Any:
        say("about to append")
        wait_for_parent()
        counts = append(self, record, spread)
        say("appended")
        return counts

    TwoStores._append = late  # type: ignore[method-assign]
    relay_slowly(url)


@pytest.mark.parametrize("deleted", [False, True])
def test_one_that_was_frozen_appends_late(two: str, shop: str, deleted: bool) -> None:
    """Others have finished its copy by then, perhaps with fewer rows: its own changes nothing."""
    with prepared(two, shop) as px, Child(relay_and_wait, two) as child:
        assert [child.read(), child.read()] == ["begun", "about to append"]
        child.freeze()
        if deleted:
            with closing(sqlite3.connect(shop.removeprefix("sqlite:///"))) as db:
                db.execute("DELETE FROM events WHERE id < 10")
                db.commit()
        with start(px):
            wait_for_end(px)
            child.signal(signal.SIGCONT)
            child.tell()
            if not deleted:
                assert child.read() == "appended"
            else:
                # Refused, and then it has nothing: all is copied.
                child.signal(signal.SIGTERM)
                child.tell()
                child.join()
        check(px, rows_of(shop))


# Bad input


@pytest.mark.engine("sqlite")
def test_bad_input(tmp_path: Path, shop: str) -> None:
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db") as px:
        prepare(px, shop)
        px.topics.create("others", partitions=1)
        with pytest.raises(pxrs.TopicNotFound, match="nowhere"):
            px.relay("events", topic="nowhere")
        with pytest.raises(pxrs.TopicNotFound, match="nothing"):
            px.relay("nothing", topic="orders")
        with pytest.raises(pxrs.InvalidRequest, match="can only be read"):
            px.relay("orders", topic="events")
        with pytest.raises(pxrs.InvalidRequest, match="to itself"):
            px.relay("orders", topic="orders")
        with pytest.raises(pxrs.InvalidRequest, match="group"):
            px.relay("events", topic="orders", group="no/name")
        with pytest.raises(pxrs.ConfigError, match="copied as they are"):
            px.relay("events", topic="orders", key_serde=pxrs.JSON())
        with pytest.raises(TypeError, match="sesion_ttl"):
            px.relay("events", topic="orders", sesion_ttl=3)  # type: ignore[call-arg]
        with pytest.raises(pxrs.InvalidRequest, match="a source"):
            px.relay(5, topic="orders")  # type: ignore[arg-type]
        assert px.groups.list() == []
        with px.relay("events", topic="orders"):
            wait_for_end(px)
        with pytest.raises(pxrs.InvalidRequest, match="use another group"):
            px.relay("events", topic="others")
        px.groups.delete("relay")
        with px.relay("events", topic="others"):
            wait_for_end(px)
        assert px.topics.describe("others").messages == len(rows_of(shop))


@pytest.mark.engine("sqlite")
def test_it_ends_with_the_error_if_its_topic_is_deleted(tmp_path: Path, shop: str) -> None:
    with pxrs.connect(f"sqlite:///{tmp_path}/app.db") as px:
        prepare(px, shop)
        running = start(px)
        wait_for_end(px)
        assert all(each.ok for each in running.health().values())
        px.topics.delete("orders")
        with closing(sqlite3.connect(shop.removeprefix("sqlite:///"))) as db:
            db.execute("INSERT INTO events (account) VALUES ('one more')")
            db.commit()
        with pytest.raises(pxrs.TopicNotFound):
            running.join(60)


@pytest.mark.engine("sqlite")
def test_awaited(tmp_path: Path, shop: str) -> None:
    async def main() -> None:
        async with aio.connect(f"sqlite:///{tmp_path}/app.db") as px:
            await px.topics.create("orders", partitions=1)
            wanted = len(rows_of(shop))
            found = 0
            async with (
                await px.relay(events(shop), topic="orders"),
                px.consumer("orders", group="billing") as consumer,
            ):
                while found < wanted:
                    found += len(await consumer.poll(timeout=10))

    run_loop(main())
