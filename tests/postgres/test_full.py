"""A PostgreSQL whose disk is full."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psycopg
import pytest

import pxrs
from pxrs.errors import StoreFull
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.small_disk import small_disk

pytestmark = [pytest.mark.engine("postgres"), pytest.mark.long]
MB = 2**20


def test_a_full_disk_takes_nothing_and_loses_nothing(new_engine: NewEngine) -> None:
    """The tables' disk: without room for its write-ahead log the server itself would end."""
    engine = new_engine("postgres")
    folder = engine.folder / "small"
    folder.mkdir(mode=0o700)
    shutil.chown(folder, Path(engine.folder).owner())
    with small_disk(folder, 64 * MB) as disk:
        with psycopg.connect(engine.url, autocommit=True) as admin:
            admin.execute(f"CREATE TABLESPACE small LOCATION '{folder}'".encode())
            admin.execute("CREATE DATABASE app TABLESPACE small")
        with pxrs.connect(f"{engine.url.rpartition('/')[0]}/app") as px:
            px.topics.create("t", 1)
            px.queues.create("q")
            consumer = px.consumer("t", "g", debounce=0.0)
            disk.fill(but=4 * MB)
            taken = 0
            with pytest.raises(StoreFull, match=r"no room left .*; nothing was written"):
                while True:
                    px.put("q", os.urandom(100_000))
                    taken += 1
            assert px.queues.describe("q").ready == taken
            disk.make_room()
            px.put("q", b"again")
            assert px.queues.describe("q").ready == taken + 1
            with px.producer() as producer:
                producer.send("t", "x").result()
            assert [each.value for each in consumer.poll(timeout=PATIENCE)] == [b"x"]
            consumer.close()
        engine.kill()
