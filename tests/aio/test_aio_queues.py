"""Units of work from an event loop: all or nothing, and a cancelled task leaves nothing behind."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import pxrs
from pxrs import Item, aio
from pxrs.aio.threads import Threads
from pxrs.app import Pxrs
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.types import Taken
from support.loops import PATIENCE, elsewhere, run

pytestmark = pytest.mark.engine("sqlite")


class ChangedMindError(Exception):
    """Raised by somebody who wants nothing of the block to be kept."""


@asynccontextmanager
async def opened(folder: Path, *items: str) -> AsyncIterator[aio.Pxrs]:
    """A store with a table, and with items in its inbox."""
    async with aio.connect(f"sqlite:///{folder}/store.db") as px:
        with sqlite3.connect(folder / "store.db") as mine:
            mine.execute("CREATE TABLE done (value)")
        mine.close()
        for item in items:
            await px.put("inbox", item)
        yield px


async def there(px: aio.Pxrs, queue: str, *states: str) -> list[str]:
    return [str(item.value) for item in await px.queues.peek(queue, 100, states=states)]


def rows(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "store.db") as mine:
        found = [row[0] for row in mine.execute("SELECT value FROM done")]
    mine.close()
    return found


def require_free(folder: Path) -> None:
    """Whoever writes now, from elsewhere, does not have to wait."""
    with pxrs.connect(f"sqlite:///{folder}/store.db?busy_timeout=0") as other:
        other.queues.create("free")
        other.queues.delete("free")


def listening_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pxrs-aio-queue"]


async def no_listening_thread() -> None:
    """They end soon after the last one has left."""
    for thread in listening_threads():
        await asyncio.to_thread(thread.join, PATIENCE)
    assert not listening_threads()


class SlowStore:
    """A SQLite store whose `take` can be held up after it has taken."""

    def __init__(self, folder: Path) -> None:
        self.stores = SqliteStores(str(folder / "store.db"))
        self.took = threading.Semaphore(0)
        self.may_return = threading.Event()
        self._take = self.stores.queues.take
        setattr(self.stores.queues, "take", self._held_up)  # noqa: B010

    def open(self) -> aio.Pxrs:
        return aio.Pxrs(Pxrs(self.stores), Threads())

    def _held_up(self, *args: Any, **options: Any) -> Taken:
        taken = self._take(*args, **options)
        if taken.items:
            self.took.release()
            assert self.may_return.wait(PATIENCE)
        return taken


def test_taken_and_put_in_one_commit(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "one", "two") as px:
            await px.topics.create("news", 1)
            async with px.transaction() as tx:
                item = await tx.take("inbox", timeout=PATIENCE)
                assert item is not None
                await tx.put("outbox", f"{item.value!s} done")
                await tx.send("news", item.value)
                assert await there(px, "inbox", "held") == ["one"]
                with pytest.raises(pxrs.QueueNotFound):
                    await px.queues.describe("outbox")
            assert await there(px, "inbox") == ["two"]
            assert await there(px, "outbox") == ["one done"]
            assert (await px.topics.describe("news")).messages == 1
            with pytest.raises(pxrs.InvalidRequest):
                await tx.take("inbox")
            with pytest.raises(pxrs.InvalidRequest):
                await tx.put("outbox", "too late")

    run(main())


def test_an_exception_rolls_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "one") as px:
            with pytest.raises(ChangedMindError):
                async with px.transaction() as tx:
                    assert await tx.take_many("inbox", 10)
                    await tx.put("outbox", "never")
                    raise ChangedMindError("no")
            assert await there(px, "inbox", "ready") == ["one"]
            (item,) = await px.queues.peek("inbox")
            assert item.error == "ChangedMindError: no"
            assert [queue.name for queue in await px.queues.list()] == ["inbox"]

    run(main())


def test_what_was_begun_has_to_be_committed(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "one") as px:
            async with px.begin() as tx:
                assert await tx.take("inbox")
            assert await there(px, "inbox", "ready") == ["one"]
            tx = await px.begin()
            assert await tx.take("inbox")
            await tx.extend(60.0)
            await tx.rollback("not today")
            await tx.finish()
            assert await there(px, "inbox", "ready") == ["one"]
            tx = await px.begin()
            assert await tx.take("inbox")
            await tx.commit()
            assert await there(px, "inbox") == []
            with pytest.raises(pxrs.InvalidRequest):
                await tx.commit()
            with pytest.raises(pxrs.InvalidRequest, match="async with"):
                await px.begin().take("inbox")

    run(main())


def test_sql_and_items_land_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "one", "two") as px:
            async with px.transaction() as tx:
                item = await tx.take("inbox")
                assert item is not None
                with pytest.raises(pxrs.InvalidRequest, match="execute"):
                    _ = tx.connection
                await tx.execute("INSERT INTO done VALUES (?)", (item.value,))
                assert tx.connection.in_transaction
                with pytest.raises(pxrs.InsideTransaction):
                    await tx.take("inbox")
                await tx.put("outbox", "done")
                assert rows(tmp_path) == []
            assert (rows(tmp_path), await there(px, "inbox")) == (["one"], ["two"])
            assert await there(px, "outbox") == ["done"]
            with pytest.raises(ChangedMindError):
                async with px.transaction() as tx:
                    assert await tx.take("inbox")
                    await tx.execute("INSERT INTO done VALUES ('never')")
                    raise ChangedMindError
            assert (rows(tmp_path), await there(px, "inbox")) == (["one"], ["two"])
            require_free(tmp_path)

    run(main())


def test_a_session_of_the_callers(tmp_path: Path) -> None:
    async def main() -> None:
        engine = create_engine(f"sqlite:///{tmp_path}/store.db")
        async with opened(tmp_path) as px:
            with Session(engine) as session:
                session.execute(text("INSERT INTO done VALUES ('one')"))
                async with px.transaction(join=session) as tx:
                    await tx.put("inbox", "one")
                assert await px.queues.list() == []
                session.commit()
            assert (rows(tmp_path), await there(px, "inbox")) == (["one"], ["one"])
        engine.dispose()

    run(main())


def test_waiting_takes_share_a_thread(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as px:
            found: list[str] = []

            async def take() -> None:
                async with px.transaction() as tx:
                    item = await tx.take("inbox", timeout=PATIENCE)
                    assert item is not None
                    found.append(str(item.value))

            before = set(threading.enumerate())
            takers = [asyncio.create_task(take()) for _ in range(40)]
            while not listening_threads():
                await asyncio.sleep(0)
            for number in range(40):
                await px.put("inbox", str(number))
                assert len(listening_threads()) <= 1
                new = {each.name for each in set(threading.enumerate()) - before}
                assert "pxrs-aio-wait" not in new
            await asyncio.gather(*takers)
            assert sorted(map(int, found)) == list(range(40))
            await no_listening_thread()

    run(main())


def test_a_delayed_item_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as px:
            await px.put("inbox", "later", delay=0.2)
            async with px.transaction() as tx:
                assert await tx.take("inbox", timeout=0) is None
                item = await tx.take("inbox", timeout=PATIENCE)
            assert item is not None
            assert await there(px, "inbox") == []
            async with px.transaction(strict=True) as tx:
                assert await tx.take("inbox", timeout=0.01) is None
                with pytest.raises(pxrs.QueueNotFound):
                    await tx.take("nowhere")

    run(main())


def test_a_take_cancelled_while_it_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as px:

            async def take() -> None:
                async with px.transaction() as tx:
                    await tx.take("inbox")

            task = asyncio.create_task(take())
            while not listening_threads():
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await no_listening_thread()
            await px.put("inbox", "one")
            assert await there(px, "inbox", "ready") == ["one"]

    run(main())


def test_an_item_that_came_after_the_cancellation_goes_back(tmp_path: Path) -> None:
    async def main() -> None:
        store = SlowStore(tmp_path)
        async with store.open() as px:
            await px.put("inbox", "one")

            async def take() -> None:
                async with px.transaction() as tx:
                    await tx.take("inbox")

            task = asyncio.create_task(take())
            await elsewhere(store.took.acquire)
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
            assert await there(px, "inbox", "held") == ["one"]
            store.may_return.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            (item,) = await px.queues.peek("inbox")
            assert (item.state, item.error) == ("ready", "")

    run(main())


def test_a_transaction_goes_on_without_an_item_that_nobody_saw(tmp_path: Path) -> None:
    """It catches the cancellation and commits: the item it does not know of must not be gone."""

    async def main() -> None:
        store = SlowStore(tmp_path)
        async with store.open() as px:
            await px.put("inbox", "one")
            async with px.transaction() as tx:
                taking = asyncio.ensure_future(tx.take("inbox"))
                await elsewhere(store.took.acquire)
                taking.cancel()
                store.may_return.set()
                with pytest.raises(asyncio.CancelledError):
                    await taking
                assert await there(px, "inbox", "ready") == ["one"]
                assert (tx.is_open, tx.in_hand) == (True, 0)
                await tx.put("outbox", "anyway")
            assert await there(px, "inbox", "ready") == ["one"]
            assert await there(px, "outbox") == ["anyway"]
            async with px.transaction() as tx:
                item = await tx.take("inbox", timeout=PATIENCE)
            assert item is not None
            assert await there(px, "inbox") == []

    run(main())


def test_another_task_commits_while_an_item_is_on_its_way(tmp_path: Path) -> None:
    """Nobody has seen the item when the commit is done: it is not part of it."""

    async def main() -> None:
        store = SlowStore(tmp_path)
        async with store.open() as px:
            await px.put("inbox", "one")
            tx = await px.begin()
            taking = asyncio.ensure_future(tx.take("inbox"))
            await elsewhere(store.took.acquire)
            taking.cancel()
            committing = asyncio.ensure_future(tx.commit())
            store.may_return.set()
            await committing
            with pytest.raises(asyncio.CancelledError):
                await taking
            assert await there(px, "inbox", "ready") == ["one"]

    run(main())


@pytest.mark.parametrize("sql", [False, True])
def test_a_task_cancelled_inside_leaves_nothing_locked(tmp_path: Path, sql: bool) -> None:
    async def main() -> None:
        async with opened(tmp_path, "one") as px:
            inside = asyncio.Event()

            async def hang() -> None:
                async with px.transaction() as tx:
                    assert await tx.take("inbox")
                    await tx.put("outbox", "never")
                    if sql:
                        await tx.execute("INSERT INTO done VALUES ('never')")
                    inside.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(hang())
            await inside.wait()
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()  # again, while it rolls back
            with pytest.raises(asyncio.CancelledError):
                await task
            require_free(tmp_path)
            assert await there(px, "inbox", "ready") == ["one"]
            assert rows(tmp_path) == []

    run(main())


def test_a_task_cancelled_while_it_commits_is_over_when_it_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "one") as px:
            leaving = asyncio.Event()

            async def commit() -> None:
                async with px.transaction() as tx:
                    assert await tx.take("inbox")
                    await tx.put("outbox", "one")
                    other.execute("BEGIN IMMEDIATE")  # the commit waits for it
                    leaving.set()

            task = asyncio.create_task(commit())
            with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
                await leaving.wait()
                task.cancel()
                other.execute("ROLLBACK")
            with pytest.raises(asyncio.CancelledError):
                await task
            require_free(tmp_path)
            left, put = await there(px, "inbox", "ready"), await px.queues.list()
            assert (left, len(put)) in [(["one"], 1), ([], 2)]

    run(main())


def test_closing_wakes_those_who_take(tmp_path: Path) -> None:
    async def main() -> None:
        px = await aio.connect(f"sqlite:///{tmp_path}/store.db")

        async def take() -> None:
            async with px.transaction() as tx:
                await tx.take("inbox")

        task = asyncio.create_task(take())
        while not listening_threads():
            await asyncio.sleep(0)
        await px.close()
        with pytest.raises(pxrs.Closed):
            await task
        await no_listening_thread()

    run(main())


def test_a_transaction_nobody_ended_gives_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "one") as px:

            async def forget() -> None:
                tx = await px.begin()
                assert await tx.take("inbox")

            await forget()
            async with px.transaction() as tx:
                assert await tx.take("inbox", timeout=PATIENCE)

    run(main())


def test_looking_after_queues(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "one", "two") as px:
            assert (await px.queues.create("strict", fifo=True)).fifo
            assert [queue.name for queue in await px.queues.list()] == ["inbox", "strict"]
            async with px.begin() as tx:
                assert await tx.take("inbox", retry=pxrs.Backoff(attempts=1))
                await tx.rollback("KeyError: total")
            (dead,) = await px.queues.dead("inbox", error="KeyError")
            assert (dead.value, dead.deliveries) == ("one", 1)
            assert await px.queues.redrive("inbox", ids=[dead.id]) == 1
            assert await px.queues.drop("inbox") == 0
            rates = await px.queues.rates("inbox", 0.01)
            assert (rates.put, rates.done) == (0.0, 0.0)
            assert await px.queues.purge("inbox") == 2
            await px.queues.delete("strict")
            assert (await px.queues.describe("inbox")).depth == 0

    run(main())


def test_values_through_a_serde(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as px:
            await px.put(
                "inbox", {"total": 12}, serde=pxrs.JSON(), key="ada", headers=[("a", b"1")]
            )
            async with px.transaction(serde=pxrs.JSON()) as tx:
                item = await tx.take("inbox")
            assert isinstance(item, Item)
            assert (item.value, item.key, item.headers) == ({"total": 12}, "ada", (("a", b"1"),))

    run(main())


def test_an_item_goes_back_beside_an_open_database_transaction(tmp_path: Path) -> None:
    """The transaction's own thread holds the writer: whoever releases has to wait for it."""

    async def main() -> None:
        store = SlowStore(tmp_path)
        async with store.open() as px:
            await px.put("inbox", "one")
            async with px.transaction() as tx:
                taking = asyncio.ensure_future(tx.take("inbox"))
                await elsewhere(store.took.acquire)
                running = asyncio.ensure_future(tx.execute("CREATE TABLE mine (value)"))
                await asyncio.sleep(0)
                taking.cancel()
                store.may_return.set()
                await running
                with pytest.raises(asyncio.CancelledError):
                    await taking
                await tx.put("outbox", "anyway")
            assert await there(px, "outbox") == ["anyway"]
            async with px.transaction() as tx:
                assert await tx.take("inbox", timeout=PATIENCE)

    run(main())
