"""Processes that append to one partition take turns. A handle of its own stands for a process."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

from pxrs.stores.jetstream import turns
from pxrs.stores.jetstream.failures import WRONG_SEQUENCE
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.stores.jetstream.streams import Streams
from pxrs.stores.jetstream.wire import ApiError
from pxrs.testing.conformance.tools import append, batch, values_in
from pxrs.types import Append, Appended, LogPartition
from support.child import PATIENCE
from support.jetstream import opened
from support.proxy import Proxy

pytestmark = pytest.mark.engine("nats")

HERE = LogPartition("t-1", 0)


def test_a_slow_writer_gets_its_turn_beside_a_busy_one(
    log: JetStreamLog, url: str, nats_url: str
) -> None:
    """The end that it appends behind is passed by others while its batch is on the way."""
    append(log, HERE, batch(b"first"))
    stop = threading.Event()

    def keep_appending() -> int:
        count = 0
        while not stop.is_set():
            append(log, HERE, batch(b"%d" % count))
            count += 1
        return count

    with Proxy(int(nats_url.rpartition(":")[2])) as proxy, ThreadPoolExecutor(2) as pool:
        proxy.slow(200_000)
        slow = opened(f"nats://{proxy.address}/{url.rpartition('/')[2]}?timeout=5")
        busy = pool.submit(keep_appending)
        try:
            large = secrets.token_bytes(10_000)
            outcomes = [slow.append([Append(HERE, batch(large))])[0] for _ in range(2)]
        finally:
            stop.set()
        assert [type(outcome) for outcome in outcomes] == [Appended, Appended]
        count = busy.result(PATIENCE)
        slow.close()
    assert list(values_in(log, HERE).values()).count(large) == 2
    assert log.bounds("t-1")[0].end == 1 + count + 2


class Publishes:
    """Counts the batches that went to the server, and those that came too late for their place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = self.refused = 0
        lock = threading.Lock()
        publish = Streams.publish

        async def counted(streams: Streams, subject: str, *rest: Any) -> int:
            if ".b." not in subject:
                return await publish(streams, subject, *rest)
            with lock:
                self.sent += 1
            try:
                return await publish(streams, subject, *rest)
            except ApiError as error:
                with lock:
                    self.refused += error.err_code in WRONG_SEQUENCE
                raise

        monkeypatch.setattr(Streams, "publish", counted)


def keep_appending(logs: Sequence[JetStreamLog], rounds: int) -> list[int]:
    """Append to each of these without a pause, at the same time; the offsets of all batches."""
    together = threading.Barrier(len(logs))

    def append_all(log: JetStreamLog) -> list[int]:
        together.wait(PATIENCE)
        return [append(log, HERE, batch(b"x"))[0] for _ in range(rounds)]

    with ThreadPoolExecutor(len(logs)) as pool:
        return sorted(chain(*pool.map(append_all, logs)))


def test_many_writers_do_not_get_in_each_others_way(
    log: JetStreamLog, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without turns each batch that is stored comes before several others: 2 to 5 are refused."""
    handles = [opened(url) for _ in range(16)]
    publishes = Publishes(monkeypatch)
    offsets = keep_appending(handles, 20)
    assert offsets == list(range(len(handles) * 20))
    assert publishes.refused < len(offsets)
    for handle in handles:
        handle.close()


def test_threads_of_one_handle_stand_in_line_before_they_ask_the_server(
    log: JetStreamLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishes = Publishes(monkeypatch)
    offsets = keep_appending([log] * 8, 20)
    assert offsets == list(range(8 * 20))
    assert (publishes.sent, publishes.refused) == (len(offsets), 0)


class Heard(logging.Handler):
    """Keeps what is logged of crowds."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.any = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.any.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard, logger = Heard(), logging.getLogger("pxrs.nats")
    logger.addHandler(heard)
    yield heard
    logger.removeHandler(heard)


def test_a_crowd_is_warned_of_once(
    log: JetStreamLog, url: str, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    monkeypatch.setattr(turns, "_CROWD", 3)
    monkeypatch.setattr(turns, "_SAMPLE", 2)
    handles = [opened(url) for _ in range(6)]
    stop = threading.Event()

    def append_until_then(handle: JetStreamLog) -> None:
        while not stop.is_set():
            append(handle, HERE, batch(b"x"))

    with ThreadPoolExecutor(len(handles)) as pool:
        running = [pool.submit(append_until_then, handle) for handle in handles]
        try:
            assert heard.any.wait(PATIENCE)
        finally:
            stop.set()
        for each in running:
            each.result()
    keep_appending(handles, 20)
    # A handle stands for a process.
    assert len(heard.texts) <= len(handles)
    assert "3 or more others were waiting to append to partition 0 of topic 't-1'" in heard.texts[0]
    for handle in handles:
        handle.close()


def test_two_writers_are_no_crowd(
    log: JetStreamLog, url: str, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    monkeypatch.setattr(turns, "_SAMPLE", 1)
    other = opened(url)
    keep_appending([log, other], 40)
    assert heard.texts == []
    other.close()


@pytest.mark.parametrize(
    "word",
    [b"turn ghost 0 400", b"wait ghost 999999999 400", b"turn ghost 99999999999999999999 -1", b""],
)
def test_a_word_that_nobody_keeps_up_stops_no_one(log: JetStreamLog, url: str, word: bytes) -> None:
    """One died in its turn, or another program speaks there."""
    append(log, HERE, batch(b"listens from now on"))
    other = opened(url)

    async def say() -> None:
        other._wire.tell(f"{other._topics.hint_prefix('t-1')}.0.turn", word)

    other._run(say())
    append(other, HERE, batch(b"a"))
    append(log, HERE, batch(b"b"))
    assert list(values_in(log, HERE).values())[1:] == [b"a", b"b"]
    other.close()
