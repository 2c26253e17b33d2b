"""What processes left that were killed between two engines is found and removed, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

import pxrs
from pxrs.cli.main import cli
from pxrs.operations.doctor import examine
from pxrs.operations.tidy import LeftLog, Leftovers, find_leftovers, remove_leftovers
from pxrs.stores.api import KeepsOwners, Stores
from pxrs.stores.open import open_stores
from support.child import Child
from support.copying import copied, copy_and_die
from support.inside import say, wait_for_parent
from support.jetstream import opened

pytestmark = pytest.mark.engine("nats")

TOPIC = "orders"


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=pytest.mark.engine("etcd"))])
def store(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> str:
    """Messages in JetStream, the rest elsewhere."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/app.db log={url}"
    return f"{request.getfixturevalue('etcd_url')} log={url}"


@pytest.fixture
def px(store: str) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(store) as px:
        yield px
        for topic in px.topics.list():
            px.topics.delete(topic.name)


def create_slowly(url: str) -> None:
    """Says each log that it has made, and goes on when it is told to."""
    stores = open_stores(url)
    make = stores.log.create

    def create(topic_id: str, partitions: int) -> None:
        make(topic_id, partitions)
        say(topic_id)
        wait_for_parent()

    stores.log.create = create  # type: ignore[method-assign]
    with pxrs.Pxrs(stores) as px:
        say(px.topics.create(TOPIC, partitions=2).id)


def delete_slowly(url: str) -> None:
    """Says the log that it is about to drop, and waits."""
    stores = open_stores(url)
    drop = stores.log.drop

    def slowly(topic_id: str) -> None:
        say(topic_id)
        wait_for_parent()
        drop(topic_id)

    stores.log.drop = slowly  # type: ignore[method-assign]
    with pxrs.Pxrs(stores) as px:
        px.topics.delete(TOPIC)


def logs(stores: Stores) -> set[str]:
    assert isinstance(stores.log, KeepsOwners)
    return set(stores.log.held())


def findings(url: str) -> list[str]:
    found = [each for place in examine(url).places for each in place.findings]
    return [f"{each.level}: {each.says}" for each in found if each.check == "leftovers"]


def tidy(url: str, *options: str) -> list[str]:
    result = CliRunner().invoke(cli, ["store", "tidy", url, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()


def use(px: pxrs.Pxrs) -> None:
    with px.producer() as producer:
        producer.send(TOPIC, b"x", partition=0).result()
    assert [each.value for each in px.reader(TOPIC).read(0, 0)] == [b"x"]


def test_a_topic_whose_maker_was_killed(store: str, px: pxrs.Pxrs) -> None:
    assert findings(store) == []
    assert tidy(store) == ["nothing is left behind"]
    child = Child(create_slowly, store)
    left = child.read()
    child.kill()
    assert px.topics.list() == []
    assert findings(store) == ["note: 1 topics that are not made yet, or were given up"]
    told = [f"topic 'orders', log {left}: not made yet, or given up"]
    assert tidy(store) == [*told, "nothing was removed; run it again with --apply"]
    assert logs(px.stores) == {left}
    assert tidy(store, "--apply") == [*told, "removed"]
    assert logs(px.stores) == set()
    assert findings(store) == []


def test_a_topic_whose_maker_was_killed_is_made_by_the_next(store: str, px: pxrs.Pxrs) -> None:
    child = Child(create_slowly, store)
    left = child.read()
    child.kill()
    with pytest.raises(pxrs.TopicNotFound):
        px.topics.delete(TOPIC)
    assert px.topics.create(TOPIC, partitions=2).id == left
    use(px)
    assert find_leftovers(px.stores) == Leftovers()


def test_a_log_whose_remover_was_killed(store: str, px: pxrs.Pxrs) -> None:
    topic = px.topics.create(TOPIC, partitions=2)
    use(px)
    child = Child(delete_slowly, store)
    assert child.read() == topic.id
    child.kill()
    assert find_leftovers(px.stores) == Leftovers(logs=(LeftLog(topic.id, 1),))
    assert findings(store) == ["warning: 1 logs, with 1 messages, which no topic names"]
    told = [f"log {topic.id}, 1 message: no topic names it"]
    assert tidy(store) == [*told, "nothing was removed; run it again with --apply"]
    again = px.topics.create(TOPIC, partitions=2)
    assert tidy(store, "--apply") == [*told, "removed"]
    assert logs(px.stores) == {again.id}
    use(px)


def test_a_maker_that_runs_begins_anew(store: str, px: pxrs.Pxrs) -> None:
    """Its first log is removed before it could record it: it records another one."""
    child = Child(create_slowly, store)
    first = child.read()
    removed = remove_leftovers(px.stores, find_leftovers(px.stores))
    assert [each.topic.id for each in removed.unmade] == [first]
    assert logs(px.stores) == set()
    child.tell()
    second = child.read()
    child.tell()
    assert child.read() == second != first
    assert child.join() == 0
    assert px.topics.find(TOPIC).id == second
    assert logs(px.stores) == {second}
    use(px)


def test_what_is_made_while_others_look_stays(
    store: str, px: pxrs.Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maker is done when the logs were listed, and before the records are read."""
    child = Child(create_slowly, store)
    made = child.read()
    log = px.stores.log
    assert isinstance(log, KeepsOwners)
    held = log.held

    def slowly() -> dict[str, str]:
        found = held()
        child.tell()
        assert child.read() == made
        return found

    monkeypatch.setattr(log, "held", slowly)
    assert find_leftovers(px.stores) == Leftovers()
    assert child.join() == 0
    use(px)


def test_what_is_made_between_the_look_and_the_removal_stays(store: str, px: pxrs.Pxrs) -> None:
    child = Child(create_slowly, store)
    made = child.read()
    found = find_leftovers(px.stores)
    child.tell()
    assert child.read() == made
    assert child.join() == 0
    assert remove_leftovers(px.stores, found) == Leftovers()
    use(px)


def test_what_is_of_others_stays(store: str, url: str, px: pxrs.Pxrs, tmp_path: Path) -> None:
    """Of another store with the same prefix, and of one that is not known."""
    neighbour = f"sqlite:///{tmp_path}/neighbour.db log={url}"
    with pxrs.connect(neighbour) as other, closing(opened(url)) as unknown:
        theirs = other.topics.create(TOPIC, partitions=1)
        with Child(delete_slowly, neighbour) as child:
            assert child.read() == theirs.id
            unknown.create("t-1", 1)
            assert find_leftovers(px.stores) == Leftovers()
            assert tidy(store, "--apply") == ["nothing is left behind"]
            assert logs(px.stores) == {theirs.id, "t-1"}
        assert tidy(neighbour, "--apply")[-1] == "removed"
        assert logs(px.stores) == {"t-1"}
        unknown.drop("t-1")


def test_what_a_copy_has_begun_stays(store: str, tmp_path: Path) -> None:
    source = f"sqlite:///{tmp_path}/from.db"
    with pxrs.connect(source) as px:
        px.topics.create(TOPIC, partitions=2)
        use(px)
    assert Child(copy_and_die, source, store, "messages", 0).join() < 0
    with closing(open_stores(store)) as stores:
        assert len(logs(stores)) == 1
    assert tidy(store, "--apply") == ["nothing is left behind"]
    assert copied(source, store).complete
    with pxrs.connect(store) as px:
        assert find_leftovers(px.stores) == Leftovers()
        px.topics.delete(TOPIC)
