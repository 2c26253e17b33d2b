"""A damaged batch never takes the whole ones around it along."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture
def px(tmp_path: Path) -> Iterator[pxrs.Pxrs]:
    """Three batches of two messages; the one in the middle is damaged."""
    path = tmp_path / "log.db"
    with pxrs.connect(f"sqlite:///{path}") as px:
        px.topics.create("t", 1)
        with px.producer() as producer:
            for batch in ("ab", "cd", "ef"):
                producer.send_many("t", [(None, value) for value in batch]).result()
        with sqlite3.connect(path) as connection:
            connection.execute(
                "UPDATE pxrs_log_batches "
                "SET data = CAST(substr(data, 1, length(data) - 1) || x'7f' AS BLOB) WHERE base = 2"
            )
        connection.close()
        yield px


def test_what_comes_before_a_damaged_batch_is_returned_first(px: pxrs.Pxrs) -> None:
    reader = px.reader("t")
    assert [message.value for message in reader.read(0, 0)] == [b"a", b"b"]
    assert [message.value for message in reader.read(0, 1)] == [b"b"]
    with pytest.raises(pxrs.DamagedBatch) as caught:
        reader.read(0, 2)
    assert caught.value.next_offset == 4
    assert [message.value for message in reader.read(0, 4)] == [b"e", b"f"]


def test_following_goes_on_where_each_partition_is_told(px: pxrs.Pxrs) -> None:
    found = px.reader("t").follow(start={0: 4}, timeout=0)
    assert [message.value for message in found] == [b"e", b"f"]
