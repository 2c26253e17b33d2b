"""To describe a topic costs as many questions for many partitions as for few."""

from __future__ import annotations

from typing import Any

import pytest

import pxrs
from pxrs.stores.postgres.database import Database

pytestmark = pytest.mark.engine("postgres")


def test_many_partitions_are_described_by_as_many_statements_as_two(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    read = Database.read

    def counted(self: Database, statement: str, *arguments: Any) -> Any:
        asked.append(statement)
        return read(self, statement, *arguments)

    with pxrs.connect(postgres_url) as px:
        px.topics.create("few", 2)
        px.topics.create("many", 300)
        with px.producer() as producer:
            producer.send("many", b"x" * 1000, partition=299).result()
        monkeypatch.setattr(Database, "read", counted)
        px.topics.describe("few")
        for_few = len(asked)
        found = px.topics.describe("many").partitions
        assert for_few == len(asked) - for_few < 5
        assert [each.partition for each in found] == list(range(300))
        assert [each.partition for each in found if each.size] == [299]
        assert found[299].size > 1000
        assert (found[299].start, found[299].end) == (0, 1)
