"""An etcd that comes back without its data, at the same address."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import engines
import pxrs
from pxrs.config import etcd_settings, parse_url
from pxrs.errors import SessionLost, StoreDamaged, TopicNotFound
from pxrs.stores.etcd.coord import EtcdCoord
from pxrs.types import Check, Committed, Put
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("etcd")
PATIENCE = 20.0


@pytest.fixture
def etcd(new_engine: NewEngine) -> engines.Engine:
    return new_engine("etcd")


def wipe(etcd: engines.Engine) -> None:
    etcd.kill()
    for data in etcd.folder.glob("data*"):
        shutil.rmtree(data)
    etcd.restart()


def opened(etcd: engines.Engine) -> EtcdCoord:
    return EtcdCoord(etcd_settings(parse_url(f"{etcd.url}/x")))


def test_who_has_known_it_is_told_once_and_writes_nothing(
    etcd: engines.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    old = opened(etcd)
    made = old.commit([], [Put("k", b"old")])
    assert isinstance(made, Committed)
    session = old.session(60.0)
    watch = old.watch("k")
    wipe(etcd)
    new = opened(etcd)
    version = 0
    # What was read before may be the version of another record now.
    while version < made.versions["k"]:
        again = new.commit([], [Put("k", b"new")])
        assert isinstance(again, Committed)
        version = again.versions["k"]
    with caplog.at_level(logging.ERROR, "pxrs.etcd"):
        assert watch.wait(PATIENCE)
        with pytest.raises(StoreDamaged, match="start this program again"):
            old.commit([Check("k", made.versions["k"])], [Put("k", b"stale")])
        for call in (lambda: old.get("k"), lambda: old.watch("k"), lambda: old.session(1.0)):
            with pytest.raises(StoreDamaged, match="etcd has lost its data"):
                call()
        with pytest.raises(SessionLost):
            session.renew()
        assert session.remaining() == 0.0
        session.close()
        old.close()
    assert len([line for line in caplog.messages if "has lost" in line]) == 1
    record = new.get("k")
    assert record is not None
    assert record.value == b"new"
    new.close()


@pytest.mark.parametrize("warm", [False, True], ids=["first commit", "later commit"])
def test_a_commit_is_of_the_history_in_which_its_versions_were_read(
    etcd: engines.Engine, warm: bool
) -> None:
    """Also where this handle has nothing in the store that would be missing, and no watch."""
    with_mark = opened(etcd)
    with_mark.commit([], [Put("k", b"old")])
    with_mark.close()
    old = opened(etcd)
    if warm:
        old.commit([], [Put("warm", b"")])
    seen = old.get("k")
    assert seen is not None
    wipe(etcd)
    new = opened(etcd)
    version = 0
    while version < seen.version:
        again = new.commit([], [Put("k", b"new")])
        assert isinstance(again, Committed)
        version = again.versions["k"]
    assert version == seen.version
    with pytest.raises(StoreDamaged):
        old.commit([Check("k", seen.version)], [Put("k", b"stale")])
    record = new.get("k")
    assert record is not None
    assert record.value == b"new"
    old.close()
    new.close()


def regrown(etcd: engines.Engine, to: int) -> None:
    """Wipe it, and write until a record has this version again."""
    wipe(etcd)
    new = opened(etcd)
    version = 0
    while version < to:
        again = new.commit([], [Put("k", b"new")])
        assert isinstance(again, Committed)
        version = again.versions["k"]
    assert version == to
    new.close()


@pytest.mark.parametrize("how", ["get", "list", "check"])
def test_a_handle_that_was_opened_before_anything_was_written(
    etcd: engines.Engine, how: str
) -> None:
    """It learns what marks the history together with the first version that it reads."""
    old = opened(etcd)
    writer = opened(etcd)
    made = writer.commit([], [Put("k", b"old")])
    assert isinstance(made, Committed)
    version = made.versions["k"]
    writer.close()
    if how == "get":
        assert old.get("k") is not None
    elif how == "list":
        assert old.list("k")
    else:
        assert old.commit([Check("k", version)], []) == Committed({})
    regrown(etcd, version)
    with pytest.raises(StoreDamaged):
        old.commit([Check("k", version)], [Put("k", b"stale")])
    old.close()


def test_checks_alone_are_of_the_same_history_too(etcd: engines.Engine) -> None:
    old = opened(etcd)
    made = old.commit([], [Put("k", b"old")])
    assert isinstance(made, Committed)
    regrown(etcd, made.versions["k"])
    with pytest.raises(StoreDamaged):
        old.commit([Check("k", made.versions["k"])], [])
    old.close()


def test_a_backup_that_is_restored_is_told_as_long_as_it_is_behind(etcd: engines.Engine) -> None:
    """It has the same mark. A watch would wait until it has caught up."""
    before = opened(etcd)
    before.commit([], [Put("k", b"in the backup")])
    before.close()
    etcd.kill()
    (data,) = etcd.folder.glob("data*")
    shutil.copytree(data, etcd.folder / "backup")
    etcd.restart()
    old = opened(etcd)
    for _ in range(20):
        old.commit([], [Put("k", b"later")])
    watch = old.watch("k")
    etcd.kill()
    shutil.rmtree(data)
    shutil.move(etcd.folder / "backup", data)
    etcd.restart()
    assert watch.wait(PATIENCE)
    with pytest.raises(StoreDamaged, match="its revision is"):
        old.get("k")
    old.close()


def test_a_mark_that_is_made_while_another_thread_looks_for_it_is_not_gone(etcd_url: str) -> None:
    coord = EtcdCoord(etcd_settings(parse_url(etcd_url)))
    history = coord._history
    ask = history.ask

    def overtaken(method: Any, request: Any) -> Any:
        history.ask = ask  # type: ignore[method-assign]
        answer = ask(method, request)
        coord.commit([], [Put("k", b"")])
        return answer

    history.ask = overtaken  # type: ignore[method-assign]
    history.check()
    assert coord.get("k") is not None
    coord.close()


def test_members_say_what_is_missing(etcd: engines.Engine, tmp_path: Path) -> None:
    log = f"sqlite:///{tmp_path}/log.db"
    with pxrs.connect(log, coord=etcd.url) as px:
        px.topics.create("t", 2)
        with px.producer() as producer:
            producer.send("t", "x").result()
        consumer = px.consumer("t", "g", debounce=0.0, session_ttl=2.0)
        assert consumer.poll(timeout=PATIENCE)
        wipe(etcd)
        with pytest.raises(StoreDamaged, match="topics that are gone must be created again"):
            for _ in range(10):
                consumer.poll(timeout=2.0)
        health = consumer.health()
        assert (health.state, health.ok) == ("failed", False)
        assert "etcd has lost" in health.detail
    with pxrs.connect(log, coord=etcd.url) as px:
        with pytest.raises(TopicNotFound):
            px.consumer("t", "g")
        px.topics.create("t", 2)
        with px.producer() as producer, px.consumer("t", "g", debounce=0.0) as consumer:
            producer.send("t", "again").result()
            assert [each.value for each in consumer.poll(timeout=PATIENCE)] == [b"again"]
