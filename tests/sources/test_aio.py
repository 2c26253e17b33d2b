"""Sources, awaited."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pxrs import aio
from pxrs.sources import Table
from support.loops import run

pytestmark = pytest.mark.engine("sqlite")


def test_a_table_is_attached_consumed_and_detached(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT, part INTEGER)"
        )
        db.executemany("INSERT INTO events (text, part) VALUES (?, 0)", [("a",), ("b",), ("c",)])
        db.commit()

    async def main() -> None:
        async with aio.connect(f"sqlite:///{path}") as px:
            table = Table("events", value="text", partition="part")
            topic = await px.attach("events", table, partitions=1)
            assert await px.sources.list() == [topic]
            assert (await px.sources.describe("events")).final == 4
            assert len(await px.sources.prepare("events")) == 1
            changes = await px.groups.import_checkpoint("billing", "events", 1)
            assert [each.after for each in changes] == [2]
            found: list[bytes] = []
            async with px.consumer("events", group="billing") as consumer:
                while len(found) < 2:
                    found += [message.value for message in await consumer.poll(timeout=10)]
            assert found == [b"b", b"c"]
            await px.sources.detach("events")
            assert await px.sources.list() == []

    run(main())
