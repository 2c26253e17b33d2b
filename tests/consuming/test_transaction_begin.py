"""A transaction that could not begin: its messages are not handled, and come again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import pxrs

pytestmark = pytest.mark.engine("sqlite")


def test_messages_come_again_when_the_transaction_could_not_begin(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with pxrs.connect(f"sqlite:///{path}?busy_timeout=0.1") as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            producer.send_many("orders", [("k", "1"), ("k", "2")]).result()
        with px.consumer("orders", group="g", auto_commit=False) as consumer:
            first = consumer.poll(timeout=10.0)
            other = sqlite3.connect(path, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(pxrs.StoreBusy), consumer.transaction():
                pass
            other.execute("ROLLBACK")
            other.close()
            again = consumer.poll(timeout=10.0)
            assert [message.offset for message in again] == [message.offset for message in first]
            with consumer.transaction():
                pass
        assert px.groups.describe("g").partitions[0].checkpoint == 2
