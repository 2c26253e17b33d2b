"""What the suite for all logs can't know: answers that are lost, producers by the dozen, limits."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.config import nats_settings, parse_url
from pxrs.errors import (
    Closed,
    ConfigError,
    MessageTooLarge,
    MissingExtra,
    OutcomeUnknown,
    SequenceGap,
    StoreUnavailable,
)
from pxrs.stores.jetstream import streams
from pxrs.stores.jetstream.appending import put_aside
from pxrs.stores.jetstream.entries import INLINE, Producers
from pxrs.stores.jetstream.log import JetStreamLog
from pxrs.stores.open import open_stores
from pxrs.testing.conformance.tools import append, batch, stored_in, values_in
from pxrs.types import Append, Appended, Bounds, LogPartition
from support.child import PATIENCE
from support.engine_fixtures import NewEngine
from support.jetstream import opened
from support.proxy import Proxy

pytestmark = pytest.mark.engine("nats")

HERE = LogPartition("t-1", 0)
A_LOT = 1 << 30


@pytest.fixture
def proxy(nats_url: str) -> Iterator[Proxy]:
    with Proxy(int(nats_url.rpartition(":")[2])) as proxy:
        yield proxy


def through(proxy: Proxy, url: str, options: str = "") -> JetStreamLog:
    """Another handle on the same streams, by way of the proxy."""
    return opened(f"nats://{proxy.address}/{url.rpartition('/')[2]}{options}")


@pytest.mark.parametrize("producer", [(-1, -1, -1), (7, 0, 0)], ids=["nobody", "a producer"])
@pytest.mark.parametrize("followed", [False, True], ids=["last", "followed"])
def test_a_batch_whose_answer_was_lost_is_found(
    log: JetStreamLog, proxy: Proxy, url: str, producer: tuple[int, int, int], followed: bool
) -> None:
    """It was stored, the answer never came: it is neither doubled nor taken for lost."""
    cut_off = through(proxy, url)
    append(cut_off, HERE, batch(b"before"))
    watch = log.watch(HERE)
    with ThreadPoolExecutor(1) as pool:
        proxy.hold_answers()
        outcome = pool.submit(cut_off.append, [Append(HERE, batch(b"a", producer=producer))])
        while log.bounds("t-1")[0].end < 2:
            assert watch.wait(PATIENCE)
        if followed:
            append(log, HERE, batch(b"after"))
        proxy.refuse()
        proxy.heal()
        assert outcome.result(PATIENCE)[0] in (Appended(1), Appended(1, duplicate=True))
    watch.close()
    expected = [b"before", b"a", b"after"] if followed else [b"before", b"a"]
    assert list(values_in(log, HERE).values()) == expected
    cut_off.close()


def test_what_nobody_can_tell_is_said(log: JetStreamLog, proxy: Proxy, url: str) -> None:
    """The answer is lost and the server can't be asked: neither success nor failure."""
    cut_off = through(proxy, url, "?timeout=3")
    append(cut_off, HERE, batch(b"before"))
    watch = log.watch(HERE)
    with ThreadPoolExecutor(1) as pool:
        proxy.hold_answers()
        outcome = pool.submit(cut_off.append, [Append(HERE, batch(b"a"))])
        while log.bounds("t-1")[0].end < 2:
            assert watch.wait(PATIENCE)
        proxy.refuse()
        (unknown,) = outcome.result(PATIENCE)
        assert isinstance(unknown, OutcomeUnknown)
    (unsent,) = cut_off.append([Append(HERE, batch(b"never sent"))])
    assert isinstance(unsent, StoreUnavailable)
    watch.close()
    cut_off.close()
    assert list(values_in(log, HERE).values()) == [b"before", b"a"]


def test_more_producers_than_travel_with_a_batch(log: JetStreamLog, url: str) -> None:
    """States that were put aside are as good as those at hand, through any handle."""
    many = 3 * INLINE
    other = opened(url)
    for sequence in range(3):
        for producer in range(many):
            sent = batch(b"%d" % producer, producer=(producer, 0, sequence))
            (base,) = append((log, other)[producer % 2], HERE, sent)
            assert base == sequence * many + producer
    for producer in range(many):
        repeat = batch(b"%d" % producer, producer=(producer, 0, 1))
        gap = batch(b"x", producer=(producer, 0, 7))
        repeated, refused = other.append([Append(HERE, repeat), Append(HERE, gap)])
        assert repeated == Appended(many + producer, duplicate=True)
        assert isinstance(refused, SequenceGap)
    assert log.bounds("t-1") == {0: Bounds(0, 3 * many)}
    other.close()


def test_a_producer_on_two_handles(log: JetStreamLog, url: str) -> None:
    """A handle that knows only an older end asks again before it refuses a batch."""
    other = opened(url)
    for sequence in range(6):
        sent = batch(b"x", producer=(7, 0, sequence))
        assert append((log, other)[sequence % 2], HERE, sent) == [sequence]
    other.close()


def test_a_state_put_aside_too_early_is_replaced(log: JetStreamLog) -> None:
    """Somebody put a producer aside for a batch that came too late; it went on, and is put
    aside again: the newer state counts."""
    append(log, HERE, batch(b"x", producer=(99, 0, 0)))
    part = log._run(log._topics.find("t-1")).parts[0]
    assert part.tail is not None
    known = Producers.of(part.tail).get(99)
    assert known is not None
    log._run(put_aside(log._appending._streams, part, 99, known))
    append(log, HERE, batch(b"y", producer=(99, 0, 1)))
    for producer in range(INLINE):
        append(log, HERE, batch(b"z", producer=(producer, 0, 0)))
    assert part.tail is not None
    assert Producers.of(part.tail).get(99) is None
    # And the other way round: the older one does not come back over the newer.
    log._run(put_aside(log._appending._streams, part, 99, known))
    repeat = Append(HERE, batch(b"y", producer=(99, 0, 1)))
    following = Append(HERE, batch(b"w", producer=(99, 0, 2)))
    assert log.append([repeat, following]) == [Appended(1, duplicate=True), Appended(2 + INLINE)]


class EightDaysAhead:
    """The clock of a host that is wrong."""

    monotonic = staticmethod(SYSTEM_CLOCK.monotonic)

    def wall_ms(self) -> int:
        return SYSTEM_CLOCK.wall_ms() + 8 * 24 * 3600 * 1000


def test_a_host_whose_clock_is_ahead_makes_nobody_forgotten(log: JetStreamLog, url: str) -> None:
    """Producers are forgotten by the server's time."""
    ahead = JetStreamLog(nats_settings(parse_url(url)), EightDaysAhead())
    many = 2 * INLINE
    for producer in range(many):
        append(log, HERE, batch(b"x", producer=(producer, 0, 0)))
    append(ahead, HERE, batch(b"y", producer=(99, 0, 0)))
    for other in (log, ahead):
        for producer in range(many):
            again = Append(HERE, batch(b"x", producer=(producer, 0, 0)))
            assert other.append([again]) == [Appended(producer, duplicate=True)]
    ahead.close()


def test_states_survive_a_trim_of_everything(log: JetStreamLog, url: str) -> None:
    for producer in range(2 * INLINE):
        append(log, HERE, batch(b"x", producer=(producer, 0, 0)))
    assert log.trim(HERE, A_LOT) == 2 * INLINE
    other = opened(url)
    for producer in range(2 * INLINE):
        again = Append(HERE, batch(b"x", producer=(producer, 0, 0)))
        assert other.append([again]) == [Appended(producer, duplicate=True)]
    other.close()


def test_a_trim_beside_appends_loses_none_of_them(log: JetStreamLog, url: str) -> None:
    """What is appended while everything before it is trimmed stays."""
    other = opened(url)
    stop = threading.Event()
    starts: list[int] = []

    def trim() -> None:
        while not stop.is_set():
            starts.append(other.trim(HERE, A_LOT))

    trimming = threading.Thread(target=trim)
    trimming.start()
    for number in range(200):
        assert append(log, HERE, batch(b"%d" % number)) == [number]
    stop.set()
    trimming.join()
    assert starts == sorted(starts)
    last = log.trim(HERE, 0)
    assert append(log, HERE, batch(b"200")) == [200]
    assert sorted(values_in(log, HERE)) == list(range(last, 201))
    other.close()


def test_a_topic_made_again_elsewhere_is_another_one(log: JetStreamLog, url: str) -> None:
    append(log, HERE, batch(b"old"), batch(b"old"), batch(b"old"))
    assert log.fetch(HERE, 3, A_LOT).batches == []
    other = opened(url)
    other.drop("t-1")
    other.create("t-1", 1)
    append(other, HERE, batch(b"new"))
    assert log.bounds("t-1") == {0: Bounds(0, 1)}
    assert values_in(log, HERE) == {0: b"new"}
    assert append(log, HERE, batch(b"newer")) == [1]
    other.close()


def test_an_offset_is_found_without_reading_what_lies_before(
    log: JetStreamLog, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        append(log, HERE, *(batch(b"a", b"b", b"c") for _ in range(50)))
    reads = 0
    read = streams.Streams.read

    async def counted(self: streams.Streams, *args: object) -> object:
        nonlocal reads
        reads += 1
        return await read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(streams.Streams, "read", counted)
    other = opened(url)
    for offset in (1, 1499, 1500, 2998):
        fetched = other.fetch(HERE, offset, 0)
        assert fetched.batches[0].base <= offset < fetched.batches[0].next
        assert (fetched.start, fetched.end) == (0, 3000)
    assert reads <= 4 * 12
    reads, offset = 0, 0
    while batches := other.fetch(HERE, offset, A_LOT).batches:
        offset = batches[-1].next
    assert offset == 3000
    assert reads <= 6
    other.close()


def test_a_batch_over_the_servers_limit_fails_alone(log: JetStreamLog) -> None:
    huge, small = batch(b"x" * 2**20), batch(b"y")
    refused, appended = log.append([Append(HERE, huge), Append(HERE, small)])
    assert isinstance(refused, MessageTooLarge)
    assert "max_payload" in str(refused)
    assert appended == Appended(0)


def test_a_message_removed_by_hand_is_reported(log: JetStreamLog, url: str) -> None:
    """A hole is an error that says where to go on, never silence."""
    append(log, HERE, batch(b"a"), batch(b"b"), batch(b"c"))
    other = opened(url)
    part = other._run(other._topics.find("t-1")).parts[0]
    # The stream forbids deleting single messages; purging the first two leaves the floor at 0.
    other._run(other._reading._streams.purge(part.stream, part.batches, 4))
    with pytest.raises(pxrs.DamagedBatch) as caught:
        other.fetch(HERE, 0, A_LOT)
    assert caught.value.next_offset == 2
    assert values_in_from(other, 2) == [b"c"]
    other.close()


def values_in_from(log: JetStreamLog, offset: int) -> list[bytes]:
    return [bytes(stored.data[-2:-1]) for stored in log.fetch(HERE, offset, A_LOT).batches]


def test_closing_wakes_and_refuses(url: str) -> None:
    log = opened(url)
    log.create("t-1", 1)
    watch = log.watch(HERE)
    asleep = threading.Thread(target=watch.wait)
    asleep.start()
    log.drop("t-1")
    log.close()
    log.close()
    asleep.join(PATIENCE)
    assert not asleep.is_alive()
    with pytest.raises(Closed):
        log.bounds("t-1")
    watch.close()


def test_closing_ends_calls_that_wait(log: JetStreamLog, proxy: Proxy, url: str) -> None:
    """A call that can't be answered now does not hold up close, and says why it ended."""
    cut_off = through(proxy, url)
    append(cut_off, HERE, batch(b"a"))
    proxy.refuse()
    entered = threading.Event()

    def wait() -> None:
        entered.set()
        cut_off.bounds("t-1")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert entered.wait(PATIENCE)
        cut_off.close()
        with pytest.raises(Closed):
            waiting.result(PATIENCE)


def test_a_forked_child_can_not_use_it(log: JetStreamLog) -> None:
    append(log, HERE, batch(b"a"))
    child = os.fork()
    if child == 0:
        try:
            log.bounds("t-1")
        except Closed:
            log.close()
            os._exit(17)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert append(log, HERE, batch(b"b")) == [1]
    assert len(stored_in(log, HERE)) == 2


def test_odd_topic_ids(url: str) -> None:
    log = opened(url)
    for topic in ("a.b", "a*b", "a b", "ä>", "A", "a"):
        log.create(topic, 1)
        append(log, LogPartition(topic, 0), batch(topic.encode()))
    for topic in ("a.b", "a*b", "a b", "ä>", "A", "a"):
        assert values_in(log, LogPartition(topic, 0)) == {0: topic.encode()}
        log.drop(topic)
    log.close()


def test_nobody_there_is_told_at_once() -> None:
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
        open_stores("memory://", log="nats://127.0.0.1:1")


def test_messages_only(nats_url: str) -> None:
    with pytest.raises(ConfigError, match="coord="):
        pxrs.connect(nats_url)


def test_more_replicas_than_servers(url: str) -> None:
    log = opened(f"{url}?replicas=3")
    with pytest.raises(ConfigError, match="replicas"):
        log.create("t-1", 1)
    log.close()


def test_a_server_without_jetstream(new_engine: NewEngine) -> None:
    engine = new_engine("nats", settings={"jetstream": None})
    log = opened(f"{engine.url}?timeout=1")
    with pytest.raises((StoreUnavailable, ConfigError), match="JetStream"):
        log.create("t-1", 1)
    log.close()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pxrs.stores.jetstream")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pxrs\[nats\]'"):
        open_stores("memory://", log="nats://127.0.0.1:1")
