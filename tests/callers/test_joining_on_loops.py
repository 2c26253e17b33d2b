"""As `test_joining`, from an event loop: psycopg's AsyncConnection and SQLAlchemy's twins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

import psycopg
import pytest
from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.ext.asyncio import async_sessionmaker as make_sessions

from pxrs import aio
from pxrs.errors import InvalidRequest
from support.callers import ChangedMindError, Row, Site, site_of
from support.loops import run

pytestmark = pytest.mark.engine("postgres")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_of("postgres", tmp_path_factory.mktemp("loops")) as site:
        yield site


@pytest.fixture
def site(made: Site) -> Site:
    made.renew()
    return made


class Caller(NamedTuple):
    """Somebody inside of a transaction. See `support.callers.Caller`."""

    connection: Any
    insert: Callable[[int], Awaitable[Any]]
    nested: Callable[[], AbstractAsyncContextManager[Any]]
    driver: Callable[[], Awaitable[Any]]

    async def write(self, px: aio.Pxrs, name: str, number: int) -> None:
        await px.put(name, str(number), connection=self.connection)
        await px.send(name, str(number), key="k", connection=self.connection)


def statement_of(number: int) -> str:
    return f"INSERT INTO callers_rows VALUES ({number})"


def of_alchemy(connection: Any, raw: Callable[[], Awaitable[Any]]) -> Caller:
    async def driver() -> Any:
        return (await raw()).driver_connection

    return Caller(
        connection,
        lambda number: connection.execute(text(statement_of(number))),
        connection.begin_nested,
        driver,
    )


def of_session(session: Any) -> Caller:
    async def raw() -> Any:
        return await (await session.connection()).get_raw_connection()

    return of_alchemy(session, raw)


@asynccontextmanager
async def an_engine(site: Site) -> AsyncIterator[Any]:
    engine = create_async_engine(site.dialect, poolclass=NullPool)
    yield engine
    await engine.dispose()


@asynccontextmanager
async def session_begin(site: Site) -> AsyncIterator[Caller]:
    async with an_engine(site) as engine, AsyncSession(engine) as session, session.begin():
        yield of_session(session)


@asynccontextmanager
async def session_autobegin(site: Site) -> AsyncIterator[Caller]:
    async with an_engine(site) as engine, AsyncSession(engine) as session:
        yield of_session(session)
        await session.commit()


@asynccontextmanager
async def session_unflushed(site: Site) -> AsyncIterator[Caller]:
    async with an_engine(site) as engine, AsyncSession(engine, autoflush=False) as session:

        async def add(number: int) -> None:
            session.add(Row(n=number))

        yield of_session(session)._replace(insert=add)
        await session.commit()


@asynccontextmanager
async def scoped(site: Site) -> AsyncIterator[Caller]:
    async with an_engine(site) as engine:
        registry = async_scoped_session(make_sessions(engine), asyncio.current_task)
        try:
            yield of_session(registry)
            await registry.commit()
        finally:
            await registry.remove()


@asynccontextmanager
async def engine_begin(site: Site) -> AsyncIterator[Caller]:
    async with an_engine(site) as engine, engine.begin() as connection:
        yield of_alchemy(connection, connection.get_raw_connection)


@asynccontextmanager
async def engine_connect(site: Site) -> AsyncIterator[Caller]:
    async with an_engine(site) as engine, engine.connect() as connection:
        yield of_alchemy(connection, connection.get_raw_connection)
        await connection.commit()


def of_driver(connection: psycopg.AsyncConnection[Any]) -> Caller:
    async def driver() -> Any:
        return connection

    return Caller(
        connection,
        lambda number: connection.execute(statement_of(number).encode()),
        connection.transaction,
        driver,
    )


@asynccontextmanager
async def psycopg_plain(site: Site) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(site.url) as connection:
        yield of_driver(connection)


@asynccontextmanager
async def psycopg_transaction(site: Site) -> AsyncIterator[Caller]:
    connecting = psycopg.AsyncConnection.connect(site.url, autocommit=True)
    async with await connecting as connection, connection.transaction():
        yield of_driver(connection)


Idiom = Callable[[Site], AbstractAsyncContextManager[Caller]]
OF_ANY_TASK: tuple[Idiom, ...] = (
    session_begin,
    session_autobegin,
    session_unflushed,
    engine_begin,
    engine_connect,
    psycopg_plain,
    psycopg_transaction,
)
every_idiom = pytest.mark.parametrize("idiom", [*OF_ANY_TASK, scoped])


@every_idiom
@pytest.mark.parametrize("first", ["row", "item"])
def test_the_callers_commit_lands_both(site: Site, idiom: Idiom, first: str) -> None:
    async def main() -> None:
        async with aio.connect(site.url) as px:
            async with idiom(site) as caller:
                if first == "row":
                    await caller.insert(1)
                await caller.write(px, site.name, 1)
                if first == "item":
                    await caller.insert(1)
                assert site.landed() == site.both()
            assert site.landed() == site.both(1)

    run(main())


@every_idiom
@pytest.mark.parametrize("first", ["row", "item"])
def test_the_callers_rollback_lands_neither(site: Site, idiom: Idiom, first: str) -> None:
    async def main() -> None:
        async with aio.connect(site.url) as px:
            with pytest.raises(ChangedMindError):
                async with idiom(site) as caller:
                    if first == "row":
                        await caller.insert(1)
                    await caller.write(px, site.name, 1)
                    if first == "item":
                        await caller.insert(1)
                    raise ChangedMindError
            assert site.landed() == site.both()

    run(main())


@every_idiom
def test_a_savepoint_rolled_back_takes_both_along(site: Site, idiom: Idiom) -> None:
    async def main() -> None:
        async with aio.connect(site.url) as px, idiom(site) as caller:
            await caller.write(px, site.name, 1)
            await caller.insert(1)
            with pytest.raises(ChangedMindError):
                async with caller.nested():
                    await caller.write(px, site.name, 2)
                    await caller.insert(2)
                    raise ChangedMindError
            async with caller.nested():
                await caller.write(px, site.name, 3)
                await caller.insert(3)
        assert site.landed() == site.both(1, 3)

    run(main())


@every_idiom
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_that_is_lost_lands_neither(site: Site, idiom: Idiom, when: str) -> None:
    async def main() -> None:
        async with aio.connect(site.url) as px:
            with pytest.raises(Exception) as caught:  # noqa: PT011 - the driver's own, or ours
                async with idiom(site) as caller:
                    await caller.insert(1)
                    if when == "after":
                        await caller.write(px, site.name, 1)
                    site.cut(await caller.driver())
                    if when == "before":
                        await caller.write(px, site.name, 1)
            assert not isinstance(caught.value, AssertionError)
            assert site.landed() == site.both()

    run(main())


@pytest.mark.parametrize("idiom", OF_ANY_TASK)
def test_a_task_cancelled_meanwhile_writes_nothing_later(site: Site, idiom: Idiom) -> None:
    """What was cancelled is over when the task goes on: it can't land with what comes next."""

    async def main() -> None:
        async with aio.connect(site.url) as px:
            for turns in range(12):
                with pytest.raises(ChangedMindError):
                    async with idiom(site) as caller:
                        task = asyncio.create_task(
                            px.put(site.name, "1", connection=caller.connection)
                        )
                        for _ in range(turns):
                            await asyncio.sleep(0)
                        task.cancel()
                        await asyncio.wait([task])
                        raise ChangedMindError
                async with idiom(site) as caller:
                    await caller.insert(turns)
            assert site.landed() == [list(range(12)), [], []]

    run(main())


def test_without_a_transaction_there_is_nothing_to_join(site: Site) -> None:
    async def main() -> None:
        async with (
            aio.connect(site.url) as px,
            await psycopg.AsyncConnection.connect(site.url, autocommit=True) as connection,
        ):
            with pytest.raises(InvalidRequest, match="open one first"):
                await px.put(site.name, "1", connection=connection)
            async with connection.transaction():
                with pytest.raises(InvalidRequest, match="join="):
                    async with px.transaction(commits=connection) as tx:
                        await tx.put(site.name, "1")
            assert site.landed() == site.both()

    run(main())
