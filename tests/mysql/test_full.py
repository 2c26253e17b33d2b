"""A MariaDB whose disk is full."""

from __future__ import annotations

import os
import subprocess

import pytest

import pxrs
from pxrs.errors import OutcomeUnknown, StoreFull, StoreUnavailable
from support.engine_fixtures import NewEngine
from support.small_disk import small_disk

pytestmark = [pytest.mark.engine("mariadb"), pytest.mark.long]
MB = 2**20


def test_a_full_disk_loses_nothing_that_was_acknowledged(new_engine: NewEngine) -> None:
    """InnoDB may refuse the commit, or end the whole server: it has to be started again then."""
    engine = new_engine("mariadb")
    engine.stop()
    data, aside = engine.folder / "data", engine.folder / "aside"
    data.rename(aside)
    data.mkdir()
    with small_disk(data, 160 * MB) as disk:
        subprocess.run(["cp", "-a", f"{aside}/.", str(data)], check=True)
        engine.start()
        with pxrs.connect(engine.url) as px:
            px.queues.create("q")
            disk.fill(but=6 * MB)
            taken = 0
            with pytest.raises((StoreFull, StoreUnavailable, OutcomeUnknown)):
                while True:
                    px.put("q", os.urandom(100_000))
                    taken += 1
            disk.make_room()
            engine.restart()
            assert taken <= px.queues.describe("q").ready <= taken + 1
            px.put("q", b"again")
        engine.kill()
