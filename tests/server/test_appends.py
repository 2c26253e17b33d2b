"""Batches that clients encoded: those that wait share a commit, in order, up to a limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pxrs import aio
from pxrs.codec.batches import encode
from pxrs.core.sequences import WINDOW
from pxrs.errors import BufferFull, OutcomeUnknown, PxrsError, SequenceGap
from pxrs.server.appends import Appends
from pxrs.types import Append, Appended, Batch, LogPartition
from support.child import PATIENCE
from support.loops import elsewhere, run
from support.node import Client, LocalNode

pytestmark = pytest.mark.engine("sqlite")
ROOM = 2**20


class SeenLog:
    """The log of a real store: its commits are counted, can be held up, and can fail."""

    def __init__(self, log: Any) -> None:
        self._append = log.append
        self.commits: list[list[Append]] = []
        self.began = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()
        self.fail: BaseException | None = None
        self.left_out = 0

    def append(self, appends: Sequence[Append]) -> list[Appended | PxrsError]:
        self.commits.append(list(appends))
        self.began.release()
        assert self.go_on.wait(PATIENCE)
        if self.fail is not None:
            raise self.fail
        results: list[Appended | PxrsError] = self._append(appends)
        return results[: len(results) - self.left_out]

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.commits]


class Place:
    """Appends to a topic of two partitions."""

    def __init__(self, px: aio.Pxrs, topic_id: str, most_waiting: int) -> None:
        self.log = SeenLog(px._blocking.stores.log)
        self.appends = Appends(self.log, px._threads, most_waiting)  # type: ignore[arg-type]
        self._topic_id = topic_id
        self.tasks: list[asyncio.Task[Appended]] = []

    def append(self, batch: Batch, partition: int = 0) -> asyncio.Task[Appended]:
        where = LogPartition(self._topic_id, partition)
        task = asyncio.create_task(self.appends.append(Append(where, batch)))
        self.tasks.append(task)
        return task

    async def hold_up(self, batch: Batch) -> None:
        """Begin a commit of one batch, and let it wait."""
        self.log.go_on.clear()
        self.append(batch)
        await elsewhere(self.log.began.acquire)

    async def results(self) -> list[Appended | BaseException]:
        """Let the commits go on; what each batch was answered."""
        # All that were begun are waiting before the first commit ends.
        await asyncio.sleep(0)
        self.log.go_on.set()
        async with asyncio.timeout(PATIENCE):
            return await asyncio.gather(*self.tasks, return_exceptions=True)


@asynccontextmanager
async def opened(folder: Path, most_waiting: int = ROOM) -> AsyncIterator[Place]:
    async with aio.connect(f"sqlite:///{folder}/store.db") as px:
        topic = await px.topics.create("orders", 2)
        yield Place(px, topic.id, most_waiting)


def numbered(sequence: int) -> Batch:
    """One message of the producer 7."""
    return encode(
        [(None, b"%d" % sequence, [], 0)], producer_id=7, producer_epoch=0, base_sequence=sequence
    )


def unnumbered(value: bytes) -> Batch:
    return encode([(None, value, [], 0)])


def bases(results: Sequence[Appended | BaseException]) -> list[int]:
    found = []
    for each in results:
        assert isinstance(each, Appended), each
        found.append(each.base)
    return found


def test_batches_that_wait_share_the_next_commit(tmp_path: Path) -> None:
    async def play() -> None:
        async with opened(tmp_path) as place:
            await place.hold_up(unnumbered(b"first"))
            for number in range(4):
                place.append(unnumbered(b"%d" % number))
            assert bases(await place.results()) == [0, 1, 2, 3, 4]
            assert place.log.sizes == [1, 4]

    run(play())


def test_a_commit_has_no_more_batches_of_a_partition_than_the_log_remembers(tmp_path: Path) -> None:
    """Those that are left keep their order, and hold up no other partition."""

    async def play() -> None:
        async with opened(tmp_path) as place:
            await place.hold_up(numbered(0))
            for sequence in range(1, 2 * WINDOW + 2):
                place.append(numbered(sequence))
            place.append(numbered(0), partition=1)
            expected = [*range(2 * WINDOW + 2), 0]
            assert bases(await place.results()) == expected
            assert place.log.sizes == [1, WINDOW + 1, WINDOW, 1]
            assert place.log.commits[1][-1].where.partition == 1
            # All of them are sent again: the log knows the last ones.
            for sequence in range(WINDOW + 2, 2 * WINDOW + 2):
                place.append(numbered(sequence))
            again = await place.results()
            assert bases(again) == [*expected, *range(WINDOW + 2, 2 * WINDOW + 2)]
            assert all(isinstance(it, Appended) and it.duplicate for it in again[len(expected) :])

    run(play())


def test_a_batch_that_does_not_fit_is_not_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with opened(tmp_path) as place:
            small, large = unnumbered(b"s"), unnumbered(b"l" * 1000)
            monkeypatch.setattr("pxrs.server.appends._MOST_BYTES", 2 * len(small.data))
            await place.hold_up(small)
            for batch in (small, large, small):
                place.append(batch)
            assert bases(await place.results()) == [0, 1, 2, 3]
            assert place.log.sizes == [1, 1, 1, 1]
            monkeypatch.setattr("pxrs.server.appends._MOST_BYTES", ROOM)
            monkeypatch.setattr("pxrs.server.appends._MOST_BATCHES", 2)
            await place.hold_up(small)
            for _ in range(3):
                place.append(small)
            await place.results()
            assert place.log.sizes[4:] == [1, 2, 1]

    run(play())


def test_an_error_of_a_batch_is_its_own(tmp_path: Path) -> None:
    async def play() -> None:
        async with opened(tmp_path) as place:
            await place.hold_up(numbered(0))
            place.append(numbered(5))
            place.append(unnumbered(b"other"))
            first, gap, other = await place.results()
            assert bases([first, other]) == [0, 1]
            assert isinstance(gap, SequenceGap)

    run(play())


@pytest.mark.parametrize("failure", [OutcomeUnknown("the store is gone"), RuntimeError("a bug")])
def test_a_commit_that_fails_is_told_to_all_who_wait_for_it(
    tmp_path: Path, failure: Exception
) -> None:
    """The room that they had is free again, and those that come later are appended."""

    async def play() -> None:
        batch = unnumbered(b"x" * 100)
        async with opened(tmp_path, most_waiting=3 * len(batch.data)) as place:
            place.log.fail = failure
            for _ in range(3):
                await place.hold_up(batch)
                for _ in range(2):
                    place.append(batch)
                assert await place.results() == [failure] * 3
                place.tasks.clear()
                await elsewhere(place.log.began.acquire)
            place.log.fail = None
            place.append(batch)
            assert bases(await place.results()) == [0]

    run(play())


def test_a_log_that_answers_too_few_leaves_all_in_doubt(tmp_path: Path) -> None:
    async def play() -> None:
        async with opened(tmp_path) as place:
            await place.hold_up(unnumbered(b"a"))
            for _ in range(2):
                place.append(unnumbered(b"b"))
            place.log.left_out = 1
            results = await place.results()
            assert [type(each) for each in results] == [OutcomeUnknown] * 3

    run(play())


def test_who_gives_up_leaves_the_others_alone(tmp_path: Path) -> None:
    async def play() -> None:
        async with opened(tmp_path) as place:
            await place.hold_up(unnumbered(b"a"))
            gone = place.append(unnumbered(b"b"))
            place.append(unnumbered(b"c"))
            await asyncio.sleep(0)
            gone.cancel()
            first, cancelled, last = await place.results()
            # Its batch was on its way: it is appended all the same.
            assert bases([first, last]) == [0, 2]
            assert isinstance(cancelled, asyncio.CancelledError)

    run(play())


def test_more_bytes_than_may_wait_are_refused(tmp_path: Path) -> None:
    async def play() -> None:
        batch = unnumbered(b"x" * 100)
        async with opened(tmp_path, most_waiting=2 * len(batch.data)) as place:
            await place.hold_up(batch)
            place.append(batch)
            place.append(batch)
            *appended, refused = await place.results()
            assert bases(appended) == [0, 1]
            assert isinstance(refused, BufferFull)
            # One batch of any size has room.
            place.tasks.clear()
            place.append(unnumbered(b"x" * 10_000))
            assert bases(await place.results()) == [2]

    run(play())


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


def test_a_client_that_is_refused_so_is_told_to_come_again(
    node: LocalNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    path = "/v1/topics/orders/partitions/0/messages"

    def body(sequence: int) -> dict[str, Any]:
        producer = {"id": 7, "epoch": 0, "sequence": sequence}
        return {"messages": [{"value": "a"}], "producer": producer}

    log = SeenLog(node.px.stores.log)
    appends = node._node.messages._appends
    monkeypatch.setattr(appends, "_log", log)
    monkeypatch.setattr(appends, "_most_waiting", 100)
    log.go_on.clear()
    first = node.client()
    first.send("POST", path, body(0))
    assert log.began.acquire(timeout=PATIENCE)
    full = client.post(path, body(1))
    assert (full.status, full.json["code"], full.json["retryable"]) == (503, "buffer_full", True)
    assert "retry-after" in full.headers
    log.go_on.set()
    assert first.receive().json["offset"] == 0
    first.close()
    assert client.post(path, body(1)).json["offset"] == 1
