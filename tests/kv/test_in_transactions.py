"""Keys and values in a unit of work: with everything else that it does, or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

import pxrs
from pxrs import ABSENT, AlreadyExists, CommitConflict, InvalidRequest, Pxrs, VersionMismatch, aio
from support.child import PATIENCE


@pytest.fixture
def px(engine_url: str) -> Pxrs:
    return pxrs.connect(engine_url)


def test_it_is_written_with_items_and_messages(px: Pxrs) -> None:
    px.topics.create("events", partitions=1)
    px.put("inbox", "order")
    version = px.kv.put("gone", "x")
    with px.transaction() as tx:
        item = tx.take("inbox")
        assert item is not None
        tx.kv.put("order", item.value)
        tx.kv.delete("gone", if_match=version)
        tx.send("events", "placed")
        assert tx.kv.get("order") is None
        assert px.kv.get("order") is None
    found = px.kv.get("order")
    assert found is not None
    assert found.value == b"order"
    assert px.kv.get("gone") is None
    assert px.reader("events").bounds(0).end == 1
    assert px.queues.describe("inbox").depth == 0
    px.close()


def test_a_condition_that_fails_undoes_all(px: Pxrs) -> None:
    px.put("inbox", "order")
    px.kv.put("k", "x")
    with pytest.raises(AlreadyExists), px.transaction() as tx:
        tx.take("inbox")
        tx.put("outbox", "y")
        tx.kv.put("k", "y", if_match=ABSENT)
    with pytest.raises(ZeroDivisionError), px.transaction() as tx:
        tx.kv.put("k", "y")
        raise ZeroDivisionError
    found = px.kv.get("k")
    assert found is not None
    assert found.value == b"x"
    assert px.queues.describe("inbox").ready == 1
    assert "outbox" not in [queue.name for queue in px.queues.list()]
    px.close()


def test_a_version_that_was_read_in_it_is_checked_when_it_commits(px: Pxrs) -> None:
    px.kv.put("k", "1")
    with pytest.raises(VersionMismatch), px.transaction() as tx:
        found = tx.kv.get("k")
        assert found is not None
        px.kv.put("k", "2")
        tx.kv.put("k", "3", if_match=found.version)
    now = px.kv.get("k")
    assert now is not None
    assert now.value == b"2"
    px.close()


def test_several_keys_of_one_shard_and_one_key_twice(px: Pxrs) -> None:
    with px.transaction() as tx:
        for number in range(20):
            tx.kv.put(f"k{number}", f"{number}")
        tx.kv.put("k0", "again")
    assert len(list(px.kv.scan("k"))) == 20
    found = px.kv.get("k0")
    assert found is not None
    assert found.value == b"again"
    px.close()


def test_transactions_beside_other_writers_all_land(px: Pxrs) -> None:
    """Other keys of the same shard are written meanwhile: that is no conflict of theirs."""
    errors: list[BaseException] = []

    def write(name: str) -> None:
        try:
            for number in range(15):
                with px.transaction() as tx:
                    tx.kv.put("shared", f"{name}-{number}")
                    tx.put("done", name)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for number in range(15):
        px.kv.put("shared", f"c-{number}")
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []
    assert px.queues.describe("done").ready == 30
    version = px.kv.put("shared", "last")
    assert version.index == 46
    px.close()


def test_a_consumers_transaction_writes_keys_with_its_checkpoint(px: Pxrs) -> None:
    px.topics.create("orders", partitions=1)
    with px.producer() as producer:
        producer.send("orders", "one", key="k")
    with px.consumer("orders", group="g", start="earliest", auto_commit=False) as consumer:
        while not (batch := consumer.poll(max_records=1, timeout=PATIENCE)):
            pass
        with consumer.transaction() as tx:
            tx.kv.put("seen", batch[0].value)
    found = px.kv.get("seen")
    assert found is not None
    assert found.value == b"one"
    assert px.groups.describe("g").partitions[0].checkpoint == 1
    px.close()


def test_nothing_is_written_to_one_that_has_ended(px: Pxrs) -> None:
    with px.transaction() as tx:
        tx.kv.put("k", "x")
    with pytest.raises(InvalidRequest, match="was committed"):
        tx.kv.put("k", "y")
    with px.begin() as begun:
        begun.kv.put("k", "z")
    found = px.kv.get("k")
    assert found is not None
    assert found.value == b"x"
    px.close()


def test_in_a_transaction_of_the_callers(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with pxrs.connect(f"sqlite:///{path}") as px:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE mine (x)")
        connection.execute("INSERT INTO mine VALUES (1)")
        with px.transaction(join=connection) as tx:
            tx.kv.put("k", "x")
        assert px.kv.get("k") is None
        connection.rollback()
        assert px.kv.get("k") is None
        connection.execute("INSERT INTO mine VALUES (1)")
        with px.transaction(join=connection) as tx:
            tx.kv.put("k", "x")
        # A second write to the same shard can't see the first, which is not committed yet.
        with pytest.raises(CommitConflict), px.transaction(join=connection) as tx:
            tx.kv.put("k", "y")
        connection.commit()
        found = px.kv.get("k")
        assert found is not None
        assert found.value == b"x"
        connection.close()


def test_for_asyncio(engine_url: str) -> None:
    async def main() -> None:
        async with aio.connect(engine_url) as px:
            version = await px.kv.put("a:1", "x")
            async with px.transaction() as tx:
                await tx.kv.put("a:2", "y", if_match=ABSENT)
                await tx.kv.delete("a:1", if_match=version)
                assert await tx.kv.get("a:2") is None
            assert [entry.value async for entry in px.kv.scan("a:")] == [b"y"]
            assert (await px.kv.get_many(["a:1", "a:2"])).keys() == {b"a:2"}
            async with px.kv.watch("a:") as changes:
                assert (await anext(changes)).value == b"y"
                waiting = asyncio.ensure_future(anext(changes))
                await asyncio.sleep(0)
                waiting.cancel()
                await px.kv.delete("a:2")
                assert (await anext(changes)).version == ABSENT
            assert [entry async for entry in changes] == []

    asyncio.run(main())
