"""Effectively once from an event loop: connections and sessions that belong to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.ext.asyncio import async_sessionmaker as sessionmaker

import pxrs
from pxrs import aio
from support.loops import PATIENCE, run
from support.postgres import query

pytestmark = pytest.mark.engine("postgres")


class ChangedMindError(Exception):
    """Raised by a handler that wants nothing of its block to be kept."""


class Lent:
    """What a caller has, and how it writes with it."""

    def __init__(self, connection: Any, execute: Callable[[str], Awaitable[Any]]) -> None:
        self.connection = connection
        self.execute = execute

    async def insert(self, *numbers: int) -> None:
        for number in numbers:
            await self.execute(f"INSERT INTO done VALUES ({number})")


@asynccontextmanager
async def driver(url: str) -> AsyncIterator[Lent]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield Lent(connection, lambda statement: connection.execute(statement.encode()))


@asynccontextmanager
async def committing_driver(url: str) -> AsyncIterator[Lent]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        yield Lent(connection, lambda statement: connection.execute(statement.encode()))


@asynccontextmanager
async def session(url: str) -> AsyncIterator[Lent]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    async with AsyncSession(engine) as mine:
        yield Lent(mine, lambda statement: mine.execute(text(statement)))
    await engine.dispose()


@asynccontextmanager
async def scoped(url: str) -> AsyncIterator[Lent]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    mine = async_scoped_session(sessionmaker(engine), asyncio.current_task)
    yield Lent(mine, lambda statement: mine.execute(text(statement)))
    await mine.remove()
    await engine.dispose()


@asynccontextmanager
async def alchemys_connection(url: str) -> AsyncIterator[Lent]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    async with engine.connect() as mine:
        yield Lent(mine, lambda statement: mine.execute(text(statement)))
    await engine.dispose()


Lends = Callable[[str], AbstractAsyncContextManager[Lent]]
every_kind = pytest.mark.parametrize(
    "lends", [driver, committing_driver, session, scoped, alchemys_connection]
)
ALL, NOTHING = (3, 1, 3), (0, 0, 0)


@asynccontextmanager
async def consuming(url: str) -> AsyncIterator[tuple[aio.Pxrs, aio.Consumer]]:
    """A consumer that has polled three messages, and a table to write to."""
    async with aio.connect(url) as px:
        await px.topics.create("orders", 1)
        await px.topics.create("invoices", 1)
        query(url, "CREATE TABLE done (number int)")
        async with px.producer() as producer:
            for number in range(3):
                await producer.send("orders", str(number))
        async with px.consumer("orders", "g", auto_commit=False) as consumer:
            assert len(await consumer.poll(3, timeout=PATIENCE)) == 3
            yield px, consumer


async def landed(px: aio.Pxrs, url: str) -> tuple[int, int, int]:
    """Rows, messages sent and messages that count as handled."""
    ((rows,),) = query(url, "SELECT count(*) FROM done")
    sent = (await px.topics.describe("invoices")).messages
    return rows, sent, 3 - (await px.groups.describe("g")).lag


@every_kind
def test_all_of_it_lands_together(postgres_url: str, lends: Lends) -> None:
    async def main() -> None:
        async with consuming(postgres_url) as (px, consumer), lends(postgres_url) as lent:
            async with consumer.transaction(commits=lent.connection) as tx:
                await lent.insert(0, 1)
                await tx.execute("INSERT INTO done VALUES (2)")
                assert isinstance(tx.connection, psycopg.AsyncConnection)
                await tx.send("invoices", "for all")
                assert await landed(px, postgres_url) == NOTHING
            assert await landed(px, postgres_url) == ALL

    run(main())


@every_kind
def test_an_exception_rolls_back_what_the_caller_wrote(postgres_url: str, lends: Lends) -> None:
    async def main() -> None:
        async with consuming(postgres_url) as (px, consumer), lends(postgres_url) as lent:
            with pytest.raises(ChangedMindError):
                async with consumer.transaction(commits=lent.connection) as tx:
                    await lent.insert(0, 1, 2)
                    await tx.send("invoices", "for all")
                    raise ChangedMindError
            assert await landed(px, postgres_url) == NOTHING
            assert len(await consumer.poll(3, timeout=PATIENCE)) == 3
            async with consumer.transaction(commits=lent.connection) as tx:
                await lent.insert(0, 1, 2)
                await tx.send("invoices", "for all")
            assert await landed(px, postgres_url) == ALL

    run(main())


@every_kind
def test_a_fenced_owner_is_rolled_back_and_told(postgres_url: str, lends: Lends) -> None:
    async def main() -> None:
        async with (
            consuming(postgres_url) as (px, consumer),
            aio.connect(postgres_url) as other,
            lends(postgres_url) as lent,
        ):
            with pytest.raises(pxrs.Fenced):
                async with consumer.transaction(commits=lent.connection) as tx:
                    await lent.insert(0, 1, 2)
                    await tx.send("invoices", "for all")
                    await other.groups.reset("g", "orders", to="earliest", force=True)
            assert await landed(px, postgres_url) == NOTHING
            # What the caller has is as good as before.
            await lent.execute("SELECT 1")

    run(main())


@every_kind
def test_items_go_with_what_the_caller_wrote(postgres_url: str, lends: Lends) -> None:
    async def main() -> None:
        query(postgres_url, "CREATE TABLE done (number int)")
        async with aio.connect(postgres_url) as px, lends(postgres_url) as lent:
            await px.put("inbox", "1")
            with pytest.raises(ChangedMindError):
                async with px.transaction(commits=lent.connection) as tx:
                    assert await tx.take("inbox", timeout=PATIENCE) is not None
                    await tx.execute("INSERT INTO done VALUES (1)")
                    raise ChangedMindError
            async with px.transaction(commits=lent.connection) as tx:
                item = await tx.take("inbox", timeout=PATIENCE)
                assert item is not None
                await tx.execute("INSERT INTO done VALUES (2)")
                await tx.put("outbox", item.value)
            assert query(postgres_url, "SELECT number FROM done") == [(2,)]
            assert (await px.queues.describe("inbox")).held == 0
            async with px.transaction() as tx:
                assert await tx.take("outbox", timeout=PATIENCE) is not None

    run(main())


def test_a_transaction_of_the_callers_own_ends_when_the_caller_says(postgres_url: str) -> None:
    async def main() -> None:
        query(postgres_url, "CREATE TABLE done (number int)")
        async with aio.connect(postgres_url) as px, session(postgres_url) as lent:
            for end, rows in ((lent.connection.rollback, 0), (lent.connection.commit, 1)):
                await lent.insert(1)
                async with px.transaction(join=lent.connection) as tx:
                    await tx.put("outbox", "from inside")
                async with px.transaction() as other:
                    assert await other.take("outbox", timeout=0) is None
                await end()
                assert query(postgres_url, "SELECT count(*) FROM done") == [(rows,)]
            async with px.transaction() as other:
                assert await other.take("outbox", timeout=PATIENCE) is not None

    run(main())


def test_a_task_cancelled_inside_leaves_the_session_clean(postgres_url: str) -> None:
    async def main() -> None:
        async with consuming(postgres_url) as (px, consumer), session(postgres_url) as lent:
            inside = asyncio.Event()

            async def hang() -> None:
                async with consumer.transaction(commits=lent.connection):
                    await lent.insert(0)
                    inside.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hang())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not lent.connection.in_transaction()
            assert await landed(px, postgres_url) == NOTHING
            assert len(await consumer.poll(3, timeout=PATIENCE)) == 3

    run(main())


def test_what_is_not_this_store_is_refused(postgres_url: str) -> None:
    async def main() -> None:
        elsewhere = postgres_url.rpartition("/")[0] + "/postgres"
        async with consuming(postgres_url) as (_, consumer):
            async with driver(elsewhere) as lent:
                with pytest.raises(pxrs.NotAtomic):
                    async with consumer.transaction(commits=lent.connection):
                        pass
            await consumer.poll(timeout=PATIENCE)
            async with driver(postgres_url) as lent:
                with pytest.raises(pxrs.InvalidRequest, match="ended inside its block"):
                    async with consumer.transaction(commits=lent.connection) as tx:
                        await lent.connection.commit()
                        await tx.send("invoices", "after the end")

    run(main())


def test_the_blocking_side_refuses_what_belongs_to_a_loop(postgres_url: str) -> None:
    async def main() -> None:
        with pxrs.connect(postgres_url) as px:
            async with driver(postgres_url) as lent:
                with (
                    pytest.raises(pxrs.NotAtomic, match=r"pxrs\.aio"),
                    px.transaction(join=lent.connection) as tx,
                ):
                    tx.put("q", "1")

    run(main())
