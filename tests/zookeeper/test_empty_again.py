"""ZooKeeper that comes back without its data: said in our words; who opens it anew goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

import engines
import pxrs
from pxrs.config import parse_url, zookeeper_settings
from pxrs.errors import OutcomeUnknown, SessionLost, StoreDamaged, StoreUnavailable
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.stores.zookeeper.names import guard_of
from pxrs.types import Check, Committed, Delete, Put
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("zookeeper")
PATIENCE = 30.0


def wipe(engine: engines.Engine) -> None:
    """Stop it, remove what it has stored, and start it again."""
    engine.stop()
    for data in engine.folder.glob("data*"):
        for version in data.glob("version-*"):
            shutil.rmtree(version)
    engine.start()


def told(call: Callable[[], object]) -> Exception:
    """The first error that does not say to try again, or to look."""
    for _ in range(20):
        try:
            call()
        except (StoreUnavailable, OutcomeUnknown, SessionLost):
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
            return error
    raise AssertionError("nothing final was said")


def take_one(px: pxrs.Pxrs) -> object:
    with px.transaction() as tx:
        item = tx.take("q", 0)
        return None if item is None else item.value


def test_an_old_handle_says_what_is_missing_and_a_new_one_begins_anew(
    new_engine: NewEngine,
) -> None:
    engine = new_engine("zookeeper")
    url = f"{engine.url}/x?timeout=1"
    settings = zookeeper_settings(parse_url(url))
    with pxrs.connect(url) as old, closing(ZooKeeperCoord(settings)) as fenced:
        old.put("q", "before")
        assert take_one(old) == "before"
        owned = fenced.commit([], [Put("claims/1", b"mine")])
        assert isinstance(owned, Committed)
        watch = fenced.watch("claims/")
        while watch.wait(0):
            pass
        wipe(engine)
        for call in (
            lambda: old.put("q", "lost"),
            lambda: take_one(old),
            lambda: fenced.session(5.0),
            lambda: fenced.watch("other/"),
            lambda: fenced.commit([], [Put("claims/1", b"mine")]),
        ):
            assert "open the store again" in str(told(call))
        assert watch.wait(PATIENCE)
        with pxrs.connect(url) as new, closing(ZooKeeperCoord(settings)) as other:
            new.put("q", "after")
            assert take_one(new) == "after"
            assert isinstance(
                other.commit([Check("claims/1", 0)], [Put("claims/1", b"")]), Committed
            )
            # The same counters as before: what was owned before must not pass for what is there.
            for write in (Put("claims/1", b"again"), Put("elsewhere", b"")):
                check = Check("claims/1", owned.versions["claims/1"])
                late = partial(fenced.commit, [check], [write])
                assert isinstance(told(late), StoreDamaged)
            assert isinstance(told(lambda: old.put("q", "lost")), StoreDamaged)
        watch.close()


def test_members_say_what_is_missing(
    new_engine: NewEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine("zookeeper")
    log, coord = f"sqlite:///{tmp_path}/log.db", f"{engine.url}/x?timeout=1"
    shown = []
    # While its session lives a member leaves its group when it is closed, which fails likewise.
    with suppress(StoreDamaged), pxrs.connect(log, coord=coord) as px:
        px.topics.create("t", 2)
        with px.producer() as producer:
            producer.send("t", "x").result()
        consumer = px.consumer("t", "g", debounce=0.0, session_ttl=2.0)
        assert consumer.poll(timeout=PATIENCE)
        wipe(engine)
        with pytest.raises(StoreDamaged, match="open the store again"):
            for _ in range(20):
                consumer.poll(timeout=2.0)
        health = consumer.health()
        shown = [health.detail, caplog.text]
        assert (health.state, health.ok) == ("failed", False)
    assert len(shown) == 2
    assert all("open the store again" in each for each in shown)
    with pxrs.connect(log, coord=coord) as px:
        px.topics.create("t", 2)
        with px.producer() as producer, px.consumer("t", "g", debounce=0.0) as consumer:
            producer.send("t", "again").result()
            assert [each.value for each in consumer.poll(timeout=PATIENCE)] == [b"again"]


@pytest.mark.parametrize(
    ("whole", "checked"),
    [(True, False), (True, True), (False, True)],
    ids=["all of it", "all of it, by a check", "its guard"],
)
def test_a_folder_that_another_program_removed_is_told(
    zookeeper_url: str, whole: bool, checked: bool
) -> None:
    """Or only the znode by which versions in it are told from later ones."""
    settings = zookeeper_settings(parse_url(f"{zookeeper_url}?timeout=1"))
    with closing(ZooKeeperCoord(settings)) as coord:
        outcome = coord.commit([], [Put("a/b", b"")])
        assert isinstance(outcome, Committed)
        root = f"/{settings.prefix}/records"
        removed = f"{root}/a" if whole else guard_of(root, f"{root}/a")
        coord._link.client.delete(removed, recursive=True)
        mine = [Check("a/b", outcome.versions["a/b"])] if checked else []
        write = Put("a/b", b"again") if whole else Delete("a/b")
        assert isinstance(told(lambda: coord.commit(mine, [write])), StoreDamaged)
        with closing(ZooKeeperCoord(settings)) as again:
            assert isinstance(again.commit([], [Put("a/b", b"")]), Committed)
