"""A JetStream without room: what frees it needs none."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import OffsetOutOfRange, OutcomeUnknown, StoreFull
from pxrs.stores.jetstream import appending
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.testing.conformance.tools import append, batch, values_in
from pxrs.types import Append, Appended, Bounds, LogPartition
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.jetstream import fill, leader_of, little_room, opened, stuff

pytestmark = pytest.mark.engine("nats")

HERE = LogPartition("t-1", 0)
A_LOT = 1 << 30
MB = 1 << 20


def full_one(new_engine: NewEngine, nodes: int = 1) -> str:
    """The URL of servers that keep little for an account."""
    engine = new_engine("nats", nodes=nodes, settings=little_room(MB))
    # The servers of a busy machine tell each other late what was freed.
    return f"{engine.url}?replicas={nodes}&timeout=30"


# Servers of a cluster tell each other late what they keep. Until the leader knows, it may have
# taken all that the account may keep as the first of three replicas. So to free a part is not
# enough: what is left of it, three times, may be more than there is room for.


def trim(log: JetStreamLog, end: int) -> int:
    assert log.trim(HERE, end - 5) == end - 5
    return end


def expire(log: JetStreamLog, end: int) -> int:
    assert log.expire(HERE, None, 100_000) > 0
    return end


def create_again(log: JetStreamLog, end: int) -> int:
    log.drop(HERE.topic_id)
    log.create(HERE.topic_id, 1)
    return 0


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("free", [trim, expire, create_again])
def test_a_full_one_is_freed(
    new_engine: NewEngine, free: Callable[[JetStreamLog, int], int], nodes: int
) -> None:
    with closing(opened(full_one(new_engine, nodes))) as log:
        log.create(HERE.topic_id, 1)
        check_freed(log, free)


def check_freed(log: JetStreamLog, free: Callable[[JetStreamLog, int], int]) -> None:
    """There is room after `free`, which returns where the partition ends, and after a trim."""
    end = free(log, fill(log, HERE))
    start = log.bounds(HERE.topic_id)[0].start
    assert append_with_room(log) == end
    assert sorted(values_in(log, HERE)) == list(range(start, end + 1))
    fill(log, HERE)
    end = log.bounds(HERE.topic_id)[0].end
    assert log.trim(HERE, A_LOT) == end
    assert log.bounds(HERE.topic_id) == {0: Bounds(end, end)}
    assert append_with_room(log) == end


def append_with_room(log: JetStreamLog) -> int:
    """Append again and again: servers of a cluster learn a little late what others have freed."""
    deadline = time.monotonic() + PATIENCE
    while True:
        (outcome,) = log.append([Append(HERE, batch(b"again"))])
        if isinstance(outcome, Appended):
            return outcome.base
        assert isinstance(outcome, StoreFull), outcome
        assert time.monotonic() < deadline


@pytest.mark.parametrize("free", [trim, expire, create_again])
def test_a_server_at_its_limit_is_freed(
    new_engine: NewEngine, tmp_path: Path, free: Callable[[JetStreamLog, int], int]
) -> None:
    settings = {"jetstream": {"store_dir": str(tmp_path), "max_file_store": MB}}
    with closing(opened(new_engine("nats", settings=settings).url)) as log:
        log.create(HERE.topic_id, 1)
        check_freed(log, free)


def test_retention_frees_a_full_one_for_a_producer(new_engine: NewEngine) -> None:
    with pxrs.connect("memory://", log=full_one(new_engine)) as px:
        topic = px.topics.create("orders", partitions=1, retention_bytes=200_000)
        end = _send_until_full(px)
        assert isinstance(px.stores.log, JetStreamLog)
        stuff(px.stores.log, topic.id)
        px.topics.apply_retention("orders")
        with px.producer(compression="none") as producer:
            assert producer.send("orders", b"x" * 60_000).result().offset == end
        assert px.topics.describe("orders").partitions[0].start > 0


def _send_until_full(px: pxrs.Pxrs) -> int:
    sent = 0
    with px.producer(compression="none") as producer, pytest.raises(pxrs.DeliveryFailed) as caught:
        while sent < 100:
            producer.send("orders", b"x" * 60_000).result()
            sent += 1
    assert isinstance(caught.value.__cause__, StoreFull)
    return sent


def test_a_full_cluster_tells_where_a_partition_ends(new_engine: NewEngine) -> None:
    with closing(opened(full_one(new_engine, nodes=3))) as log:
        log.create(HERE.topic_id, 1)
        end = fill(log, HERE)
        with pytest.raises(OffsetOutOfRange) as told:
            log.fetch(HERE, end + 5, 1)
        assert (told.value.start, told.value.end) == (0, end)
        assert len(values_in(log, HERE)) == end


class Disk:
    """A small disk. A ballast file leaves little room on it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        folder.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder],
            capture_output=True,
            text=True,
        )
        if mounted.returncode != 0:
            pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
        # `-l`: a server that is about to end may still have files there.
        stack.callback(lambda: subprocess.run(["umount", "-l", folder], check=True))
        self._ballast = folder / "ballast"

    def leave(self, room: int) -> None:
        self._ballast.write_bytes(bytes(max(0, shutil.disk_usage(self.folder).free - room)))

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Disk]]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    with ExitStack() as stack:
        yield [Disk(tmp_path / f"disk{number}", stack) for number in range(3)]


# A server takes no more than a part of its disk, unless it is told to.
_TOO_MUCH = {"max_file_store": A_LOT, "sync_interval": "2m"}


@pytest.mark.thorough
def test_a_full_disk(
    new_engine: NewEngine, disks: list[Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the documents say: a stream that met it stores nothing until its server is restarted."""
    monkeypatch.setattr(appending, "_PUBLISH", 0.5)
    disk = disks[0]
    settings = {"jetstream": {"store_dir": str(disk.folder), **_TOO_MUCH}}
    engine = new_engine("nats", settings=settings)
    elsewhere = LogPartition("t-2", 0)
    with closing(opened(f"{engine.url}?timeout=2")) as log:
        for where in (HERE, elsewhere):
            log.create(where.topic_id, 1)
            append(log, where, batch(b"first"))
        disk.leave(MB)
        end = 1
        while isinstance((outcome := send(log, HERE)), Appended):
            assert outcome.base == end
            end += 1
        assert isinstance(outcome, OutcomeUnknown)
        assert end > 1
        assert sorted(values_in(log, HERE)) == list(range(end))
        disk.free()
        assert isinstance(send(log, HERE), OutcomeUnknown)
        assert append(log, elsewhere, batch(b"second")) == [1]
        engine.restart()
        assert sorted(values_in(log, HERE)) == list(range(end))
        assert log.trim(HERE, end - 1) == end - 1
        assert append(log, HERE, batch(b"again")) == [end]


def send(log: JetStreamLog, where: LogPartition) -> object:
    (outcome,) = log.append([Append(where, batch(b"x" * 60_000))])
    return outcome


@pytest.mark.thorough
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_a_full_disk_of_one_of_three(new_engine: NewEngine, disks: list[Disk], leads: bool) -> None:
    """Two others are a majority; the one comes back when it is restarted with room."""
    engine = new_engine("nats", nodes=3, disks=[disk.folder for disk in disks])
    with closing(opened(f"{engine.url}?replicas=3")) as log:
        log.create(HERE.topic_id, 1)
        append(log, HERE, batch(b"first"))
        full = (leader_of(engine.url, "pxrs_t-1") + (0 if leads else 1)) % 3
        disks[full].leave(MB)
        for number in range(1, 40):
            assert append(log, HERE, batch(b"x" * 60_000)) == [number]
        disks[full].free()
        engine.restart(full)
        engine.stop((full + 1) % 3)
        assert append(log, HERE, batch(b"again")) == [40]
        assert sorted(values_in(log, HERE)) == list(range(41))
