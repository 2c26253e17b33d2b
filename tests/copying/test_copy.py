"""Copies between any two stores: all of it arrives, nothing twice, and what differs is found."""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import CopyRefused
from pxrs.operations.copy import Phase
from pxrs.sources import Table
from pxrs.stores.open import open_stores
from pxrs.types import Holder, ItemState, NewItem, Put, QueueChange
from support.child import Child
from support.copying import copied, copy_and_die
from support.filled import BATCHES, GROUP, PARTITIONS, append, consume, fill, send

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]

ALL = PARTITIONS * BATCHES


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    return f"sqlite:///{tmp_path}/from.db", f"sqlite:///{tmp_path}/to.db"


def test_everything_arrives(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    with pxrs.connect(source) as px:
        before = px.groups.describe(GROUP)
        history = px.groups.explain(GROUP)
        topics = px.topics.list()
        infos = [px.topics.describe(topic.name) for topic in topics]
    report = copied(source, target)
    assert report.differences == ()
    assert report.complete
    with pxrs.connect(target) as px:
        assert px.topics.list() == topics
        assert [px.topics.describe(topic.name) for topic in topics] == infos
        after = px.groups.describe(GROUP)
        assert px.groups.explain(GROUP) == history
    assert [(p.checkpoint, p.epoch, p.end) for p in after.partitions] == [
        (p.checkpoint, p.epoch, p.end) for p in before.partitions
    ]
    assert [part.start for part in infos[2].partitions][:2] == [3, 4]


def test_a_virtual_topic_goes_along_with_its_checkpoints(
    places: tuple[str, str], tmp_path: Path
) -> None:
    """Its rows stay where they are."""
    source, target = places
    with closing(sqlite3.connect(tmp_path / "app.db")) as db:
        db.execute("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT)")
        db.executemany("INSERT INTO events (text) VALUES (?)", [("a",), ("b",), ("c",)])
        db.commit()
    events = Table("events", value="text", url=f"sqlite:///{tmp_path}/app.db")
    with pxrs.connect(source) as px:
        px.attach("events", events, partitions=2)
        px.groups.import_checkpoint("billing", "events", 2)
    report = copied(source, target)
    assert report.differences == ()
    with pxrs.connect(target) as px, px.consumer("events", group="billing") as consumer:
        assert [message.value for message in consumer.poll(timeout=10)] == [b"c"]


def test_the_group_goes_on_where_it_was_with_higher_epochs(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    copied(source, target)
    with pxrs.connect(target) as px:
        parts = px.groups.describe(GROUP).partitions
        expected = {
            (part.partition, offset)
            for part in parts
            for offset in range(part.checkpoint or 0, part.end)
        }
        epochs = [part.epoch for part in parts]
    seen = consume(target, len(expected))
    assert sorted(seen) == sorted(expected)
    with pxrs.connect(target) as px:
        after = [part.epoch for part in px.groups.describe(GROUP).partitions]
    assert all(new > old for new, old in zip(after, epochs, strict=True))


def test_queues_go_on_in_order(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    copied(source, target)
    with closing(open_stores(source)) as origin, closing(open_stores(target)) as place:
        for queue in ("fifo", "mixed", "many"):
            states = tuple(ItemState)
            assert origin.queues.peek(queue, states, limit=1000) == place.queues.peek(
                queue, states, limit=1000
            )
        for stores in (origin, place):
            session = stores.coord.session(30.0)
            taken = stores.queues.take("mixed", Holder(session.id, "tx"), 20).items
            order = [(item.held, item.body) for item in taken]
            if stores is origin:
                expected = order
            session.close()
    assert order == expected
    assert [body for _, body in order][:5] == [b"p4", b"p3", b"p2", b"p1", b"k0"]


def test_new_items_and_messages_come_after_the_copied_ones(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    copied(source, target)
    send(target, PARTITIONS)
    with closing(open_stores(target)) as place:
        highest = place.queues.peek("many", tuple(ItemState), limit=1000)[-1].id
        change = QueueChange(Holder("nobody", "tx"), (), (NewItem(queue="many", body=b"new"),))
        assert place.queues.apply(change) == [highest + 1]
    with pxrs.connect(target) as px:
        ends = [part.end for part in px.topics.describe("orders").partitions]
    assert ends == [BATCHES + 1] * PARTITIONS


@pytest.mark.parametrize(
    ("phase", "at_least"),
    [
        (Phase.MESSAGES, 0),
        (Phase.MESSAGES, 1),
        (Phase.MESSAGES, ALL // 2),
        (Phase.ITEMS, 0),
        (Phase.ITEMS, 100),
        (Phase.RECORDS, 0),
        (Phase.RECORDS, 1),
        (Phase.VERIFY, 1),
    ],
)
def test_a_killed_copy_goes_on_and_nothing_comes_twice(
    places: tuple[str, str], phase: Phase, at_least: int
) -> None:
    source, target = places
    fill(source)
    child = Child(copy_and_die, source, target, phase, at_least)
    assert child.join() == -signal.SIGKILL
    report = copied(source, target)
    assert (report.complete, report.resumed, report.differences) == (True, True, ())
    if phase is not Phase.MESSAGES:
        assert report.copied["messages"] == 0
    elif at_least:
        assert report.copied["messages"] < ALL


def test_killed_again_and_again(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    for _ in range(PARTITIONS):
        child = Child(copy_and_die, source, target, Phase.MESSAGES, 1)
        assert child.join() == -signal.SIGKILL
    report = copied(source, target)
    assert report.complete
    assert report.copied["messages"] == 0


def test_a_copy_that_is_complete_is_only_verified(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    assert not copied(source, target).only_verified
    again = copied(source, target)
    assert (again.complete, again.only_verified) == (True, True)
    assert set(again.copied.values()) == {0}
    append_to(target)
    used = copied(source, target)
    assert (used.complete, used.only_verified) == (False, True)
    (difference,) = used.differences
    assert difference.startswith(
        f"partition 1 of topic 'orders' holds 4 to {BATCHES} in the source"
    )


def append_to(url: str) -> None:
    with closing(open_stores(url)) as stores:
        append(stores, "orders", 1, b"by somebody else")


def test_bytes_that_changed_are_found(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    copied(source, target)
    with closing(open_stores(target)) as stores, stores.atomic() as block:
        (rowid,) = block.connection.execute(
            "SELECT max(rowid) FROM pxrs_log_batches WHERE base = 20"
        ).fetchone()
        block.connection.execute(
            "UPDATE pxrs_log_batches SET data = CAST(substr(data, 1, 60) || x'ff' || "
            "substr(data, 62) AS BLOB) WHERE rowid = ?",
            (rowid,),
        )
    report = copied(source, target)
    assert not report.complete
    (difference,) = report.differences
    assert "the batches are not the same" in difference


def test_a_target_with_other_data_is_refused(places: tuple[str, str]) -> None:
    source, target = places
    fill(source, queues=False)
    with pxrs.connect(target) as px:
        px.topics.create("mine", 1)
    with pytest.raises(CopyRefused, match="not empty: it holds record 'topics/mine'"):
        copied(source, target)
    with pxrs.connect(target) as px:
        assert [topic.name for topic in px.topics.list()] == ["mine"]


def test_a_target_with_a_queue_is_refused(places: tuple[str, str]) -> None:
    source, target = places
    with closing(open_stores(target)) as stores:
        stores.queues.create("mine")
    with pytest.raises(CopyRefused, match="queue 'mine'"):
        copied(source, target)


def test_a_copy_of_something_else_is_refused(places: tuple[str, str], tmp_path: Path) -> None:
    source, target = places
    fill(source, queues=False)
    copied(source, target)
    with pytest.raises(CopyRefused, match=r"holds a copy of sqlite:///.*from\.db"):
        copied(f"sqlite:///{tmp_path}/third.db", target)


def test_a_store_is_not_copied_into_itself(places: tuple[str, str]) -> None:
    source, _ = places
    with pytest.raises(CopyRefused, match="into itself"):
        copied(source, source)


def test_a_source_in_use_is_refused_unless_forced_and_brought_up_to_date(
    places: tuple[str, str],
) -> None:
    source, target = places
    fill(source)
    with pxrs.connect(source) as px, px.consumer("orders", group=GROUP) as consumer:
        assert consumer.poll(timeout=30.0)
        with pytest.raises(CopyRefused, match=f"in use: {GROUP}/"):
            copied(source, target)
        first = copied(source, target, force=True)
        assert first.copied["messages"] > 0
        assert any("in use" in difference for difference in first.differences)
    change_everything(source)
    second = copied(source, target)
    assert (second.complete, second.resumed, second.differences) == (True, True, ())
    with pxrs.connect(target) as px:
        assert [topic.name for topic in px.topics.list()] == ["emptied", "none", "orders"]
        assert px.topics.describe("none").topic.partitions == 2


def change_everything(url: str) -> None:
    """What happens in a store between two runs of a copy."""
    send(url, 8)
    consume(url, 3)
    with pxrs.connect(url) as px:
        px.topics.delete("none")
        px.topics.create("none", 2)
        queues = px.stores.queues
        session = px.stores.coord.session(30.0)
        holder = Holder(session.id, "tx")
        done = queues.take("many", holder, 10).items
        queues.apply(
            QueueChange(
                holder,
                tuple(item.held for item in done[:5]),
                (NewItem(queue="many", body=b"new"), NewItem(queue="fresh", body=b"new")),
            )
        )
        session.close()
        queues.delete("fifo")
        queues.create("fifo", fifo=False)
    with closing(open_stores(url)) as stores:
        stores.queues.reap()


def test_held_items_are_use(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    with closing(open_stores(source)) as stores:
        session = stores.coord.session(30.0)
        assert stores.queues.take("many", Holder(session.id, "tx"), 1).items
        with pytest.raises(CopyRefused, match=r"items are held: many/\d+"):
            copied(source, target)
        (difference,) = copied(source, target, force=True).differences
        assert difference.startswith("the source is in use, items are held: many/")
        session.close()
    assert copied(source, target).complete


def test_a_target_in_use_before_it_is_complete_is_refused(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    child = Child(copy_and_die, source, target, Phase.VERIFY, 1)
    assert child.join() == -signal.SIGKILL
    with pxrs.connect(target) as px, px.consumer("orders", group=GROUP) as consumer:
        assert consumer.poll(timeout=30.0)
        with pytest.raises(CopyRefused, match="target is in use before it is complete"):
            copied(source, target)


def test_somebody_consumed_from_an_unfinished_target(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    child = Child(copy_and_die, source, target, Phase.VERIFY, 1)
    assert child.join() == -signal.SIGKILL
    consume(target, 4)
    with pytest.raises(CopyRefused, match="higher epoch in the target"):
        copied(source, target)


def test_somebody_sent_to_an_unfinished_target(places: tuple[str, str]) -> None:
    source, target = places
    fill(source)
    child = Child(copy_and_die, source, target, Phase.VERIFY, 1)
    assert child.join() == -signal.SIGKILL
    append_to(target)
    with pytest.raises(CopyRefused, match="a producer has sent to the target"):
        copied(source, target)


def test_from_memory(places: tuple[str, str]) -> None:
    _, target = places
    source = "memory://copied"
    with closing(open_stores(source)):
        fill(source)
        assert copied(source, target).complete


def test_an_empty_store(places: tuple[str, str]) -> None:
    report = copied(*places)
    assert report.complete
    assert (report.topics, report.records, report.queues) == (0, 0, 0)


def test_records_that_queues_are_kept_in_are_left_to_the_queues(places: tuple[str, str]) -> None:
    source, target = places
    with closing(open_stores(source)) as stores:
        stores.coord.commit((), [Put("queues/q/tail", b"1"), Put("queue-list/q", b"{}")])
        stores.coord.commit((), [Put("kept/by/somebody", b"2")])
    report = copied(source, target)
    assert (report.complete, report.records) == (True, 1)
    with closing(open_stores(target)) as stores:
        assert stores.coord.get("queues/q/tail") is None
        kept = stores.coord.get("kept/by/somebody")
    assert kept is not None
    assert kept.value == b"2"
