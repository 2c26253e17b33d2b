"""A server whose disk is full ends: its clients go elsewhere, or say what became of a commit."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import engines
from pxrs.config import parse_url, zookeeper_settings
from pxrs.errors import OutcomeUnknown, StoreUnavailable
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.testing.conformance.tools import committed
from pxrs.types import Put
from support.engine_fixtures import NewEngine
from support.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.engine("zookeeper")
# The log is made longer by so many kB at once.
STEPS = ["-Dzookeeper.preAllocSize=64"]
VALUE = 100_000
DISK = 8 * 2**20


@contextmanager
def on_small_disk(engine: engines.Engine, folder: Path) -> Iterator[SmallDisk]:
    """Move the first node's data there."""
    engine.stop(0)
    data = engine.folder / "data0"
    shutil.copytree(data, folder)
    with small_disk(data, DISK) as disk:
        shutil.copytree(folder, data, dirs_exist_ok=True)
        engine.start()
        yield disk
        engine.kill()


def opened(url: str, timeout: int) -> ZooKeeperCoord:
    return ZooKeeperCoord(zookeeper_settings(parse_url(f"{url}/x?timeout={timeout}")))


def test_a_single_server(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine("zookeeper", java=STEPS)
    with on_small_disk(engine, tmp_path / "kept") as disk, closing(opened(engine.url, 1)) as coord:
        written: dict[str, bytes] = {}

        def write(number: int) -> None:
            value = secrets.token_bytes(VALUE)
            committed(coord.commit([], [Put(f"k/{number:03d}", value)]))
            written[f"k/{number:03d}"] = value

        write(0)
        disk.fill()
        with pytest.raises((OutcomeUnknown, StoreUnavailable)):
            for number in range(1, DISK // VALUE):
                write(number)
        with pytest.raises(StoreUnavailable):
            coord.get("k/000")
        disk.make_room()
        engine.start()
        with closing(opened(engine.url, 20)) as again:
            found = {record.key: record.value for record in again.list("k/")}
            assert written.items() <= found.items()
            assert len(found) <= len(written) + 1
            committed(again.commit([], [Put("k/after", b"")]))


@pytest.mark.long
def test_one_of_three(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine("zookeeper", nodes=3, java=STEPS)
    with on_small_disk(engine, tmp_path / "kept") as disk, closing(opened(engine.url, 30)) as coord:
        committed(coord.commit([], [Put("k", b"")]))
        disk.fill()
        for number in range(2 * DISK // VALUE):
            value = secrets.token_bytes(VALUE)
            while True:
                try:
                    committed(coord.commit([], [Put(f"k/{number % 10}", value)]))
                    break
                except OutcomeUnknown:
                    # The server that was asked has ended meanwhile.
                    continue
            found = coord.get(f"k/{number % 10}")
            assert found is not None
            assert found.value == value
