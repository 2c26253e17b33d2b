"""Transactions from an event loop: all or nothing, and nothing locked after a cancellation."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import pxrs
from pxrs import aio
from support.loops import PATIENCE, run

pytestmark = pytest.mark.engine("sqlite")


class ChangedMindError(Exception):
    """Raised by a handler that wants nothing of its block to be kept."""


@asynccontextmanager
async def consuming(folder: Path) -> AsyncIterator[tuple[aio.Pxrs, aio.Consumer]]:
    """A consumer that has polled three messages, and a table to write to."""
    async with aio.connect(f"sqlite:///{folder}/store.db") as px:
        await px.topics.create("orders", 1)
        await px.topics.create("invoices", 1)
        with sqlite3.connect(folder / "store.db") as mine:
            mine.execute("CREATE TABLE done (number)")
        mine.close()
        async with px.producer() as producer:
            for number in range(3):
                await producer.send("orders", str(number))
        async with px.consumer("orders", "g", auto_commit=False) as consumer:
            assert len(await consumer.poll(timeout=PATIENCE)) == 3
            yield px, consumer


async def landed(px: aio.Pxrs, folder: Path) -> tuple[int, int, int]:
    """Rows, messages sent and messages that count as handled."""
    with sqlite3.connect(folder / "store.db") as mine:
        rows = mine.execute("SELECT count(*) FROM done").fetchone()[0]
    mine.close()
    sent = (await px.topics.describe("invoices")).messages
    return rows, sent, 3 - (await px.groups.describe("g")).lag


def require_free(folder: Path) -> None:
    """Whoever writes now, from elsewhere, does not have to wait."""
    with pxrs.connect(f"sqlite:///{folder}/store.db?busy_timeout=0") as other:
        other.topics.create("free", 1)
        other.topics.delete("free")


async def write(tx: aio.Transaction) -> None:
    for number in range(3):
        await tx.execute("INSERT INTO done VALUES (?)", (number,))
    await tx.send("invoices", "for all")


def test_all_of_it_lands_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with consuming(tmp_path) as (px, consumer):
            async with consumer.transaction() as tx:
                await write(tx)
                assert tx.connection.in_transaction
                assert await landed(px, tmp_path) == (0, 0, 0)
            assert await landed(px, tmp_path) == (3, 1, 3)
            with pytest.raises(pxrs.InvalidRequest):
                await tx.send("invoices", "too late")
            with pytest.raises(pxrs.InvalidRequest):
                async with tx:
                    pass

    run(main())


def test_an_exception_rolls_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with consuming(tmp_path) as (px, consumer):
            with pytest.raises(ChangedMindError):
                async with consumer.transaction() as tx:
                    await write(tx)
                    raise ChangedMindError
            assert await landed(px, tmp_path) == (0, 0, 0)
            require_free(tmp_path)
            assert len(await consumer.poll(timeout=PATIENCE)) == 3

    run(main())


def test_a_task_cancelled_inside_leaves_nothing_locked(tmp_path: Path) -> None:
    async def main() -> None:
        async with consuming(tmp_path) as (px, consumer):
            inside = asyncio.Event()

            async def hang() -> None:
                async with consumer.transaction() as tx:
                    await write(tx)
                    inside.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hang())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            require_free(tmp_path)
            assert await landed(px, tmp_path) == (0, 0, 0)
            assert len(await consumer.poll(timeout=PATIENCE)) == 3
            async with consumer.transaction() as tx:
                await write(tx)
            assert await landed(px, tmp_path) == (3, 1, 3)

    run(main())


def test_a_task_cancelled_while_it_waits_for_the_writer(tmp_path: Path) -> None:
    async def main() -> None:
        async with consuming(tmp_path) as (px, consumer):
            other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            began = asyncio.Event()

            async def enter() -> None:
                began.set()
                async with consumer.transaction() as tx:
                    await write(tx)

            task = asyncio.create_task(enter())
            await began.wait()
            task.cancel()
            other.execute("ROLLBACK")
            other.close()
            with pytest.raises(asyncio.CancelledError):
                await task
            require_free(tmp_path)
            assert await landed(px, tmp_path) == (0, 0, 0)
            assert len(await consumer.poll(timeout=PATIENCE)) == 3

    run(main())


def test_a_task_cancelled_while_it_commits_is_over_when_it_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with consuming(tmp_path) as (px, consumer):
            leaving = asyncio.Event()

            async def commit() -> None:
                async with consumer.transaction() as tx:
                    await write(tx)
                    leaving.set()

            task = asyncio.create_task(commit())
            await leaving.wait()
            task.cancel()
            await asyncio.wait([task])
            require_free(tmp_path)
            # All or nothing, whichever was first; and the consumer knows which.
            found = await landed(px, tmp_path)
            assert found == (3, 1, 3) or (task.cancelled() and found == (0, 0, 0))
            async with px.producer() as producer:
                await producer.send("orders", "3")
            expected = 4 - found[2]
            assert len(await consumer.poll(expected, PATIENCE)) == expected

    run(main())


def test_what_would_wait_for_the_block_is_refused_in_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with consuming(tmp_path) as (_, consumer):
            async with consumer.transaction():
                with pytest.raises(pxrs.InsideTransaction):
                    await consumer.poll()
                with pytest.raises(pxrs.InsideTransaction):
                    await consumer.commit()
                with pytest.raises(pxrs.InsideTransaction):
                    await consumer.seek("orders", 0, 0)
                with pytest.raises(pxrs.InsideTransaction):
                    consumer.commit_async()
                with pytest.raises(pxrs.InsideTransaction):
                    await anext(consumer.batches())
            assert await consumer.poll(timeout=0) == []

    run(main())


def test_a_block_in_another_and_an_end_in_it_are_refused(tmp_path: Path) -> None:
    """Each would wait for the block around it, which waits for them."""

    async def main() -> None:
        async with consuming(tmp_path) as (px, consumer):
            begun = consumer.transaction()
            async with consumer.transaction() as tx:
                await write(tx)
                with pytest.raises(pxrs.InsideTransaction):
                    consumer.transaction()
                with pytest.raises(pxrs.InsideTransaction):
                    await begun.__aenter__()
                with pytest.raises(pxrs.InsideTransaction):
                    await consumer.run_transaction(write)
                with pytest.raises(pxrs.InsideTransaction):
                    await consumer.close()
            assert await landed(px, tmp_path) == (3, 1, 3)

    run(main())


def test_a_session_of_the_callers(tmp_path: Path) -> None:
    async def main() -> None:
        engine = create_engine(f"sqlite:///{tmp_path}/store.db")
        async with consuming(tmp_path) as (px, consumer):
            with Session(engine) as session:
                with pytest.raises(ChangedMindError):
                    async with consumer.transaction(commits=session):
                        session.execute(text("INSERT INTO done VALUES (1)"))
                        raise ChangedMindError
                assert len(await consumer.poll(timeout=PATIENCE)) == 3
                async with consumer.transaction(commits=session) as tx:
                    session.execute(text("INSERT INTO done VALUES (1)"))
                    await tx.send("invoices", "for all")
                assert not session.in_transaction()
            assert await landed(px, tmp_path) == (1, 1, 3)
        engine.dispose()

    run(main())


def test_run_transaction_tries_again_over_the_same_messages(tmp_path: Path) -> None:
    async def main() -> None:
        async with consuming(tmp_path) as (px, consumer):
            tries = []

            async def work(tx: aio.Transaction) -> str:
                tries.append(1)
                await write(tx)
                if len(tries) < 3:
                    raise pxrs.TransactionConflict("again")
                return "done"

            assert await consumer.run_transaction(work) == "done"
            assert len(tries) == 3
            assert await landed(px, tmp_path) == (3, 1, 3)
            with pytest.raises(pxrs.InvalidRequest):
                await consumer.run_transaction(work, attempts=0)

    run(main())
