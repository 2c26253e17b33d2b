"""A log that was put back to an older state, beside checkpoints that were not."""

from __future__ import annotations

from pathlib import Path

import pytest

import pxrs
from pxrs import MessagesLost
from pxrs.config import OnTrimmed
from support.child import PATIENCE

POLICIES: list[OnTrimmed] = ["error", "earliest", "latest"]


def send(px: pxrs.Pxrs, *values: str) -> None:
    with px.producer() as producer:
        for value in values:
            producer.send("t", value).result()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_restored_database_is_told_of(tmp_path: Path, policy: OnTrimmed) -> None:
    log, coord = tmp_path / "log.db", f"sqlite:///{tmp_path}/coord.db"

    def connect() -> pxrs.Pxrs:
        return pxrs.connect(coord, log=f"sqlite:///{log}")

    with connect() as px:
        px.topics.create("t", partitions=1)
        send(px, "0", "1")
    backup = log.read_bytes()
    with connect() as px:
        send(px, "2", "3", "4")
        with px.consumer("t", "g") as consumer:
            assert len(consumer.poll(timeout=PATIENCE)) == 5
            consumer.commit()
    log.write_bytes(backup)
    with connect() as px:
        with (
            px.consumer("t", "g", on_trimmed=policy) as consumer,
            pytest.raises(MessagesLost, match="'t' partition 0 was read up to offset 5"),
        ):
            consumer.poll(timeout=PATIENCE)
        with pytest.raises(MessagesLost):
            px.run(print, topic="t", group="g", on_trimmed=policy).join(PATIENCE)
        assert px.groups.describe("g").partitions[0].checkpoint == 5
        px.groups.reset("g", "t", to=2)
        send(px, "new")
        with px.consumer("t", "g", on_trimmed=policy) as consumer:
            assert [m.value for m in consumer.poll(timeout=PATIENCE)] == [b"new"]
