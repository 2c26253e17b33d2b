"""`aio`'s `listen`: coroutine functions as handlers, stopping and cancelling."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs import Backoff, Item, aio
from pxrs.testing.conformance.queue_tools import Worker
from support.handlers import kill_beside_the_innocent_awaited, pass_on
from support.loops import PATIENCE, run

pytestmark = pytest.mark.engine("sqlite")

TWICE = Backoff(first=0.0, attempts=2)


def store(folder: Path) -> str:
    return f"sqlite:///{folder}/store.db"


async def emptied(px: aio.Pxrs, queue: str) -> pxrs.QueueInfo:
    """Look again whenever the queue changes, until there is nothing to handle any more."""
    with closing(px._blocking.stores.queues.watch(queue)) as watch:
        while (info := await px.queues.describe(queue)).depth:
            assert await asyncio.to_thread(watch.wait, PATIENCE), "nothing happens any more"
    return info


def test_a_coroutine_function_handles_in_its_transaction(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            with sqlite3.connect(tmp_path / "store.db") as mine:
                mine.execute("CREATE TABLE done (value)")
            mine.close()
            for number in range(20):
                await px.put("inbox", str(number))
            await px.put("rates", "1.1")

            async def handle(item: Item, tx: aio.UnitOfWork) -> None:
                await asyncio.sleep(0)
                if item.value == "0":
                    assert await tx.take("rates", timeout=PATIENCE)
                await tx.put("outbox", item.value)
                await tx.execute("INSERT INTO done VALUES (?)", (item.value,))
                assert tx.connection.in_transaction

            async with px.listen("inbox", handle, workers=3) as listener:
                assert (await emptied(px, "inbox")).dead == 0
            assert (listener.handled, listener.failed) == (20, 0)
            assert (await px.queues.describe("outbox")).ready == 20
            assert (await px.queues.describe("rates")).depth == 0
            async with px.transaction() as tx:
                found = await tx.execute("SELECT count(*) FROM done")
                assert found.fetchone() == (20,)

    run(main())


def test_as_many_are_awaited_as_there_are_workers(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            together = asyncio.Barrier(8)

            async def handle(item: Item, tx: aio.UnitOfWork) -> None:
                await together.wait()
                # Its lock may be needed by the one that extends it: so a thread puts.
                await tx.put("outbox", item.value)

            for number in range(8):
                await px.put("inbox", str(number))
            async with px.listen("inbox", handle, workers=8, deadline=5.0):
                await emptied(px, "inbox")
            assert (await px.queues.describe("outbox")).ready == 8

    run(main())


def test_a_handler_that_raises_goes_through_the_policy(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            errors = {
                "a": ValueError("no"),
                "b": asyncio.CancelledError(),
                "c": pxrs.Fenced("mine"),
            }

            async def handle(item: Item, tx: aio.UnitOfWork) -> None:
                await tx.put("outbox", "never")
                raise errors[item.value]

            for value in errors:
                await px.put("inbox", value)
            async with px.listen("inbox", handle, workers=2, retry=TWICE) as listener:
                await emptied(px, "inbox")
            assert (listener.handled, listener.failed) == (0, 6)
            dead = await px.queues.dead("inbox")
            assert {item.value: item.error.split(":")[0] for item in dead} == {
                "a": "ValueError", "b": "CancelledError", "c": "Fenced",
            }  # fmt: skip
            assert [queue.name for queue in await px.queues.list()] == ["inbox"]

    run(main())


def test_a_plain_function_is_called_by_threads(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            for number in range(5):
                await px.put("inbox", str(number))

            def handle(item: Item, tx: pxrs.UnitOfWork) -> None:
                tx.put("outbox", item.value)

            listener = px.listen("inbox", handle)
            await emptied(px, "inbox")
            listener.stop()
            assert await listener.join()
            assert (await px.queues.describe("outbox")).ready == 5
            await px.put("inbox", "one more")
            again = px.listen("inbox", handle)
            await emptied(px, "inbox")
            assert not await again.join(timeout=0.01)

    run(main())


def test_leaving_waits_and_a_cancellation_ends_the_handlers(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            began, leaving, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def handle(item: Item, tx: aio.UnitOfWork) -> None:
                began.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    # What it does on its way out is still part of its transaction.
                    await tx.put("outbox", "never")
                    ended.set()

            async def listen() -> None:
                async with px.listen("inbox", handle):
                    await began.wait()
                    leaving.set()

            await px.put("inbox", "one")
            task = asyncio.create_task(listen())
            await leaving.wait()
            await asyncio.sleep(0)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended.is_set()
            (item,) = await px.queues.peek("inbox")
            assert (item.state, item.error) == ("delayed", "CancelledError: ")
            assert [queue.name for queue in await px.queues.list()] == ["inbox"]

    run(main())


def test_a_transaction_can_not_be_used_after_its_handler(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            kept: list[aio.UnitOfWork] = []

            async def handle(item: Item, tx: aio.UnitOfWork) -> None:
                kept.append(tx)

            await px.put("inbox", "one")
            async with px.listen("inbox", handle):
                await emptied(px, "inbox")
            with pytest.raises(pxrs.InvalidRequest):
                await kept[0].put("outbox", "too late")

    run(main())


def test_closing_the_store_stops_listeners(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            began, may_end = asyncio.Event(), asyncio.Event()

            async def handle(item: Item, tx: aio.UnitOfWork) -> None:
                began.set()
                await may_end.wait()

            await px.put("inbox", "one")
            px.listen("inbox", handle)
            await began.wait()
            closing = asyncio.create_task(px.close())
            await asyncio.sleep(0)
            may_end.set()
            await closing
        with pxrs.connect(store(tmp_path)) as later:
            assert later.queues.describe("inbox").done == 1

    run(main())


def test_a_loop_that_has_stopped_and_is_closed_later_keeps_no_worker(tmp_path: Path) -> None:
    """It takes what is to be awaited, and never begins it."""

    async def handle(item: Item, tx: aio.UnitOfWork) -> None:
        raise AssertionError

    async def begin() -> tuple[pxrs.Pxrs, pxrs.Running]:
        px = await aio.connect(store(tmp_path))
        return px._blocking, px.listen("inbox", handle, retry=TWICE)._blocking

    loop = asyncio.new_event_loop()
    px, running = loop.run_until_complete(begin())
    with px:
        px.put("inbox", "x")
        with closing(px.stores.queues.watch("inbox")) as watch:
            while not px.queues.describe("inbox").held:
                assert watch.wait(PATIENCE)
        loop.close()
        assert running.join(PATIENCE)
        assert px.queues.describe("inbox").held == 0


@pytest.mark.long
def test_worker_processes_have_loops_of_their_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            for number in range(10):
                await px.put("inbox", str(number))
            async with px.listen("inbox", pass_on, processes=2) as listener:
                await emptied(px, "inbox")
                assert listener.handled is None
            assert (await px.queues.describe("outbox")).ready == 10

    run(main())


@pytest.mark.long
def test_the_killers_neighbour_does_not_die_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            for value in ("killer", "innocent"):
                await px.put("inbox", value)
            async with px.listen(
                "inbox", kill_beside_the_innocent_awaited, processes=1, workers=2, retry=TWICE
            ):
                info = await emptied(px, "inbox")
            assert (info.done, info.dead) == (1, 1)

    run(main())


def test_a_suspect_is_awaited_alone(tmp_path: Path) -> None:
    """Coroutines of one loop are in hand of one process, whichever threads took their items."""

    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            with pxrs.connect(store(tmp_path)) as mortal:
                worker = Worker(mortal.stores)
                for number in range(3):
                    await px.put("q", f"suspect {number}")
                    worker.take_one()
                worker.session.close()
                mortal.stores.queues.reap()
            await px.put("q", "behind")
            at_work: set[str] = set()
            most: list[int] = []

            async def handle(item: Item, tx: aio.UnitOfWork) -> None:
                at_work.add(item.value)
                # For as long as another one would need that is not held back.
                for _ in range(10):
                    await px.queues.describe("q")
                most.append(len(at_work))
                at_work.remove(item.value)

            async with px.listen("q", handle, workers=4):
                assert (await emptied(px, "q")).dead == 0
            assert most == [1, 1, 1, 1]

    run(main())


def test_the_blocking_listen_refuses_coroutine_functions() -> None:
    async def handle(item: Item, tx: pxrs.UnitOfWork) -> None:
        pass

    with pxrs.connect("memory://") as px, pytest.raises(pxrs.InvalidRequest, match="aio"):
        px.listen("inbox", handle)


def test_a_handler_may_close_the_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            await px.put("q", "x")
            closed = asyncio.Event()

            async def close(item: Item, tx: aio.UnitOfWork) -> None:
                await px.close()
                closed.set()

            listener = px.listen("q", close)
            await closed.wait()
            assert await listener.join(PATIENCE)
            assert (listener.handled, listener.failed) == (0, 1)

    run(main())


def test_a_handler_can_not_wait_for_its_own_listener(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            await px.put("q", "x")

            async def handle(item: Item, tx: aio.UnitOfWork) -> None:
                with pytest.raises(pxrs.InvalidRequest, match="only stop"):
                    await listener.join()
                listener.stop()

            listener = px.listen("q", handle)
            assert await listener.join(PATIENCE)
            assert listener.handled == 1

    run(main())


def test_handlers_that_close_the_store_while_somebody_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.connect(store(tmp_path)) as px:
            for _ in range(3):
                await px.put("q", "x")
            at_work, closed = asyncio.Barrier(4), []

            async def close(item: Item, tx: aio.UnitOfWork) -> None:
                await at_work.wait()
                await px.close()
                closed.append(item.id)

            listener = px.listen("q", close, workers=3)
            await at_work.wait()
            await px.close()
            assert await listener.join(PATIENCE)
            assert len(closed) == 3

    run(main())
