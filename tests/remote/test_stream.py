"""One stream and its threads: what is sent, by which thread, and what its caller is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from pxrs.client.frames import WOKEN
from pxrs.client.stream import Pending
from pxrs.config import parse_url, remote_settings
from pxrs.errors import PxrsError, StoreUnavailable
from pxrs.stores.open import open_stores
from pxrs.stores.remote.stores import RemoteStores
from pxrs.types import Holder, NewItem, QueueChange
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
def client() -> Iterator[RemoteStores]:
    with ExitStack() as stack:
        served = stack.enter_context(closing(ServedStores(open_stores("memory://"))))
        url = f"pxrs://127.0.0.1:{served.port}?timeout={PATIENCE:g}"
        yield stack.enter_context(closing(RemoteStores(remote_settings(parse_url(url)))))


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
