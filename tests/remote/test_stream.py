"""One stream and its threads: what is sent, by which thread, and what its caller is told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest

from pxrs.client.frames import WOKEN
from pxrs.client.stream import Pending, Stream
from pxrs.config import parse_url, remote_settings
from pxrs.errors import PxrsError, StoreUnavailable
from pxrs.stores.api import Stores
from pxrs.stores.open import open_stores
from pxrs.stores.remote.stores import RemoteStores
from pxrs.types import Holder, NewItem, Put, QueueChange, Versioned
from support.child import PATIENCE
from support.node import looks
from support.remote_lab import ServedStores

pytestmark = pytest.mark.engine("memory")


class SlowLink:
    """Keeps the next frame of a client until it is let go, and counts frames."""

    def __init__(self, stores: RemoteStores) -> None:
        assert stores._link._stream is not None
        self._connection = stores._link._stream._connection
        self._send = self._connection.send
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.frames = 0
        self._connection.send = self._sent  # type: ignore[method-assign]

    def _sent(self, frame: bytes) -> None:
        self.frames += 1
        self.entered.set()
        assert self.go_on.wait(PATIENCE)
        self._send(frame)


@pytest.fixture
def served() -> Iterator[ServedStores]:
    with closing(ServedStores(open_stores("memory://"))) as served:
        yield served


@pytest.fixture
def client(served: ServedStores) -> Iterator[RemoteStores]:
    url = f"pxrs://127.0.0.1:{served.port}?timeout={PATIENCE:g}"
    with closing(RemoteStores(remote_settings(parse_url(url)))) as client:
        yield client


@pytest.fixture
def slow(client: RemoteStores) -> Iterator[SlowLink]:
    """A thread is sending: what others send has to wait."""
    client.queues.create("inbox")
    assert client._link._stream is not None
    slow = SlowLink(client)

    def send() -> None:
        with suppress(PxrsError):
            client.coord.get("a")

    sending = threading.Thread(target=send)
    sending.start()
    assert slow.entered.wait(PATIENCE)
    yield slow
    slow.go_on.set()
    sending.join(PATIENCE)


def test_a_write_that_was_not_sent_in_time_never_is(client: RemoteStores, slow: SlowLink) -> None:
    """Its caller is told that nothing was done, and puts again: there is one item, not two."""
    holder = Holder("", "")
    put = QueueChange(holder, put=(NewItem(queue="inbox", body=b"x"),))
    client._link.retry.timeout = 0.05
    with pytest.raises(StoreUnavailable) as raised:
        client.queues.apply(put)
    assert raised.value.retryable
    client._link.retry.timeout = PATIENCE
    slow.go_on.set()
    client.queues.apply(put)
    assert client.queues.stats("inbox").ready == 1


def test_calls_that_wait_travel_in_one_frame(client: RemoteStores, slow: SlowLink) -> None:
    threads = [threading.Thread(target=client.coord.get, args=(f"k{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    stream = client._link.stream
    assert stream is not None
    for _ in looks():
        if len(stream._outgoing) == len(threads):
            break
    assert slow.frames == 1
    slow.go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert slow.frames == 2


def test_a_thread_that_has_its_answer_does_not_send_for_others(client: RemoteStores) -> None:
    """Those who come while it sends the calls of others send their own."""
    stream = client._link.stream
    assert stream is not None
    send = stream._connection.send
    gate = threading.Semaphore(0)
    senders: list[str] = []

    def gated(frame: bytes) -> None:
        senders.append(threading.current_thread().name)
        assert gate.acquire(timeout=PATIENCE)
        send(frame)

    stream._connection.send = gated  # type: ignore[method-assign]
    take_answer, answers_come = stream._take_answer, threading.Event()

    def late(number: int, kind: int, body: object) -> None:
        if kind != WOKEN:
            assert answers_come.wait(PATIENCE)
        take_answer(number, kind, body)

    stream._take_answer = late  # type: ignore[method-assign]
    threads = []
    firsts: list[Pending] = []

    def begin(name: str, seen: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=client.coord.get, args=(name,), name=name))
        threads[-1].start()
        for _ in looks():
            if seen():
                break

    begin("a", lambda: senders == ["a"])
    firsts += stream._pending.values()
    begin("b", lambda: len(stream._outgoing) == 1)
    gate.release()
    for _ in looks():
        if senders == ["a", "a"]:
            break
    answers_come.set()
    for _ in looks():
        if firsts[0].is_over:
            break
    begin("c", lambda: len(stream._outgoing) == 1)
    begin("d", lambda: len(stream._outgoing) == 2)
    for _ in range(2):
        gate.release()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert senders == ["a", "a", "c"]


def test_a_turn_to_send_is_passed_on_by_who_gives_up(client: RemoteStores) -> None:
    stream = client._link.stream
    assert stream is not None
    method = client._link.methods["coord.get"]
    first, second = (
        Pending(client._link.pool.next_number(), method, method.encode([key])) for key in "ab"
    )
    first.is_awaited = second.is_awaited = True
    with stream._sending:
        stream.send(first)
        stream.send(second)
        assert stream._pass_on()
        assert (first.has_turn, second.has_turn) == (True, False)
        stream.forget(first)
        assert (first.has_turn, second.has_turn) == (False, True)
    stream._send_all(second)
    while not second.is_over:
        assert second.wait(PATIENCE)
    assert (first.was_sent, second.was_sent) == (False, True)


# Who reads


class SlowKey:
    """A node's answer about the key "slow", kept until it is let go."""

    def __init__(self, stores: Stores) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self._get = stores.coord.get
        stores.coord.get = self._got  # type: ignore[method-assign]

    def _got(self, key: str) -> Versioned | None:
        if key == "slow":
            self.asked.set()
            assert self.go_on.wait(PATIENCE)
        return self._get(key)


@pytest.fixture
def slow_key(served: ServedStores, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowKey]:
    """And callers read the answers to their calls themselves for as long as it takes."""
    monkeypatch.setattr("pxrs.client.stream._SHORT", PATIENCE)
    monkeypatch.setattr("pxrs.client.stream._REST", PATIENCE)
    slow = SlowKey(served._stores)
    yield slow
    slow.go_on.set()


def current(client: RemoteStores) -> Stream:
    stream = client._link.stream
    assert stream is not None
    return stream


def let_callers_read(client: RemoteStores) -> Stream:
    """Makes calls until the stream's own thread rests."""
    stream = current(client)
    read = stream._read_by_callers
    for _ in looks():
        call_often(client)
        if stream._read_by_callers > read:
            break
    return stream


def call_often(client: RemoteStores) -> None:
    """One call at once after the other: if they stop, the stream's own thread reads again."""
    for _ in range(10):
        assert client.coord.get("a") is None


@contextmanager
def on_signal(handler: Callable[[], None], stream: Stream) -> Iterator[None]:
    """Calls the handler in the main thread once that waits for what its next call gets."""
    main = threading.main_thread().ident
    assert main is not None
    handled, reads = threading.Event(), threading.Event()
    comes = stream._connection.comes

    def noted(until: float) -> bool:
        reads.set()
        return comes(until)

    stream._connection.comes = noted  # type: ignore[method-assign]

    def handle(number: int, frame: object) -> None:
        if not handled.is_set():
            handled.set()
            handler()

    def tell() -> None:
        assert reads.wait(PATIENCE)
        # One that comes just before the thread begins to wait is handled when that is over.
        for _ in looks():
            signal.pthread_kill(main, signal.SIGUSR1)
            if handled.is_set():
                break

    before = signal.signal(signal.SIGUSR1, handle)
    telling = threading.Thread(target=tell)
    telling.start()
    try:
        yield
    finally:
        telling.join(PATIENCE)
        signal.signal(signal.SIGUSR1, before)


def test_a_call_in_a_signal_handler_has_its_answer(client: RemoteStores, slow_key: SlowKey) -> None:
    """Though the thread that reads is the one that the handler has interrupted."""
    stream = let_callers_read(client)
    answers: list[object] = []

    def call() -> None:
        assert stream._reading == threading.get_ident()
        answers.append(client.coord.get("other"))
        slow_key.go_on.set()

    with on_signal(call, stream):
        assert client.coord.get("slow") is None
    assert answers == [None]
    assert stream._reading != threading.get_ident()
    assert current(client) is stream


def test_an_interrupt_of_a_thread_that_reads_harms_nobody(
    client: RemoteStores, slow_key: SlowKey
) -> None:
    stream = let_callers_read(client)
    others: list[object] = []
    other = threading.Thread(target=lambda: others.append(client.coord.get("b")))

    def interrupt() -> None:
        assert stream._reading == threading.get_ident()
        raise KeyboardInterrupt

    with on_signal(interrupt, stream), pytest.raises(KeyboardInterrupt):
        client.coord.get("slow")
    other.start()
    other.join(PATIENCE)
    assert others == [None]
    assert current(client) is stream
    assert not stream.is_broken


def test_an_interrupt_that_loses_a_frame_breaks_the_stream(
    client: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the call whose answer was in it would wait for as long as it may."""
    stream = let_callers_read(client)
    receive = stream._connection.receive

    def interrupted(until: float | None = None) -> list[bytes] | None:
        received = receive(until)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return received

    monkeypatch.setattr(stream._connection, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in looks():
            call_often(client)
    assert stream.is_broken
    assert client.coord.get("a") is None


def test_a_node_that_sends_byte_by_byte_keeps_no_caller(
    client: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is always something for it to read; the stream's own thread does that then."""
    stream = let_callers_read(client)
    connection = stream._connection
    receive, was_asked = connection.receive, threading.Event()

    def received(until: float | None = None) -> list[bytes] | None:
        if threading.current_thread() is not threading.main_thread():
            return receive(until)
        was_asked.set()
        return None

    monkeypatch.setattr(connection, "comes", lambda until: True)
    monkeypatch.setattr(connection, "receive", received)
    for _ in looks():
        call_often(client)
        if was_asked.is_set():
            break
    assert current(client) is stream


def test_a_thread_that_was_interrupted_on_its_way_out_stops_nobody(
    client: RemoteStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It seems to read and does not: the stream is broken after a while, and calls go on."""
    monkeypatch.setattr("pxrs.client.stream._STUCK", 3)
    stream = let_callers_read(client)
    for _ in looks():
        with stream._lock:
            if stream._reading is None:
                stream._reading = -1
                break
    assert client.coord.get("a") is None
    assert stream.is_broken


def test_a_watch_hears_of_changes_while_nobody_calls(
    client: RemoteStores, served: ServedStores
) -> None:
    watch = client.coord.watch("k")
    for value in b"123":
        let_callers_read(client)
        served._stores.coord.commit((), (Put("k", bytes([value])),))
        assert watch.wait(PATIENCE)
    let_callers_read(client)
    served._stores.coord.commit((), (Put("k", b"4"),))
    # A look that does not wait has the stream's own thread read, too.
    for _ in looks():
        if watch.wait(0):
            break


def test_calls_of_many_threads_beside_a_slow_one(client: RemoteStores, slow_key: SlowKey) -> None:
    """Whoever reads hands the others their answers, and somebody reads on when it stops."""
    slow = threading.Thread(target=client.coord.get, args=("slow",))
    slow.start()
    assert slow_key.asked.wait(PATIENCE)

    def call(name: int) -> None:
        for number in range(100):
            assert client.coord.get(f"{name}/{number}") is None

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    slow_key.go_on.set()
    slow.join(PATIENCE)
    assert not slow.is_alive()
