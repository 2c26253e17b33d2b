"""Processes that append to one partition take turns. A handle of its own stands for a process."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest

from pxrs.stores.jetstream.log import JetStreamLog
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


def test_many_writers_are_all_served(log: JetStreamLog, url: str) -> None:
    handles = [opened(url) for _ in range(6)]
    rounds = 10

    def keep_appending(number: int) -> list[int]:
        return [append(handles[number], HERE, batch(b"%d" % number))[0] for _ in range(rounds)]

    with ThreadPoolExecutor(len(handles)) as pool:
        offsets = list(pool.map(keep_appending, range(len(handles))))
    assert sorted(chain(*offsets)) == list(range(len(handles) * rounds))
    for handle in handles:
        handle.close()


@pytest.mark.parametrize(
    "word",
    [b"turn ghost 0 400", b"wait ghost 999999999 400", b"turn ghost 99999999999999999999 -1", b""],
)
def test_a_word_that_nobody_keeps_up_stops_no_one(log: JetStreamLog, url: str, word: bytes) -> None:
    """One died in its turn, or another program speaks there."""
    append(log, HERE, batch(b"listens from now on"))
    other = opened(url)

    async def say() -> None:
        other._wire.tell(f"{other._topics.bell('t-1')}.0.turn", word)

    other._run(say())
    append(other, HERE, batch(b"a"))
    append(log, HERE, batch(b"b"))
    assert list(values_in(log, HERE).values())[1:] == [b"a", b"b"]
    other.close()
